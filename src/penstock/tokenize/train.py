"""Trains a new byte-level BPE tokenizer on the user's text.

The alphabet is the 256 bytes, so any text can be encoded and is decoded to the same bytes. Words
are split as GPT-2 splits them, which gigatoken supports. The merges are those that `tokenizers`
would learn; they depend on the counts of words alone, so the same text gives the same file,
whatever the order and the number of cores.

    files ── corpus: words of each slice, counted by threads ── merges: from the counts ──► tokens

Memory grows with the number of different words and not with the text: below 0.4 kB for each word.

A special token must not occur in ordinary text. If merges can build it too, as they can build
"the", it would end documents in the middle of a sentence, so it is refused.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.errors import SourceError, TokenizerError
from penstock.paths import expand_user
from penstock.sources.listing import list_files
from penstock.sources.settings import ReadSettings, num_cores
from penstock.tokenize.corpus import Corpus
from penstock.tokenize.gpt2 import byte_alphabet
from penstock.tokenize.merges import learn_merges

_NUM_BYTES = 256
# A pair that occurs only once in the whole text says nothing about the language.
_MIN_FREQUENCY = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedTokenizer:
    """The result of training a tokenizer, and how much text it was trained on."""

    path: str
    vocab_size: int
    num_documents: int
    num_bytes: int
    """The number of bytes of text that the tokenizer was trained on."""
    num_rejects: int
    """The number of rejected records: those that are not valid documents, as in `build`."""


def train_tokenizer(  # noqa: PLR0913  (flat keywords, as in `build`)
    inputs: Any,
    path: str | os.PathLike[str],
    *,
    vocab_size: int,
    special_tokens: Sequence[str] = ("<|endoftext|>",),
    reading: ReadSettings | None = None,
    max_bytes: int | None = None,
    max_bad: float = 0.001,
    overwrite: bool = False,
    threads: int | None = None,
    progress: Callable[[Literal["reading", "learning"], int, int], None] | None = None,
) -> TrainedTokenizer:
    """Train a tokenizer on `inputs` and write it to `path`, a `tokenizer.json`.

    The file appears when it is complete. `load_tokenizer(path)` loads it.

    Args:
        inputs: The same inputs as for `build`.
        path: The file to write.
        vocab_size: The number of tokens: the 256 bytes, `special_tokens`, and merges for the rest.
        special_tokens: They get the first ids. `load_tokenizer` recognises a common name, such as
            `<|endoftext|>`, as the token that ends documents.
        reading: How to read documents, with the same settings as `build`.
        max_bytes: Stop reading after the document in which this much text is reached, or after the
            block of 4 MB if a document is longer.
        max_bad: How many rejected records to allow: below 1 a share of all records (but ten of at
            least 1,000), else a number.
        overwrite: Replace the file if it exists and has other contents.
        threads: How many slices of the text are counted at once; by default one per core. It does
            not change the result.
        progress: Called with "reading", the bytes of text read and the bytes of all inputs on disk
            (or `max_bytes`, if that is less); then with "learning", the number of tokens and
            `vocab_size`.

    Raises:
        TokenizerError: the vocabulary is too small for the bytes and special tokens, or larger
            than the text can fill; a special token has fewer than two characters, is given twice,
            or is also learned as a token of ordinary text; or `path` is a directory, or a
            file with other contents.
        SourceError: an input cannot be read, or too many records are rejected.
    """
    path = expand_user(path)
    _refuse_path(path)
    _refuse_special(special_tokens)
    _refuse_numbers(vocab_size, len(special_tokens), max_bytes, threads)
    # The separators that documents="auto" looks for. "</s>" is not among them: it also is an HTML
    # tag, so text may contain it.
    separators = dict.fromkeys(["<|endoftext|>", *special_tokens])
    separators.pop("</s>", None)
    reading = replace(reading or ReadSettings(), separators=tuple(separators))
    report = progress or (lambda stage, done, total: None)
    corpus = Corpus(
        files=list_files(inputs, reading),
        reading=reading,
        max_bytes=max_bytes,
        max_bad=max_bad,
        num_threads=threads or num_cores(),
        progress=lambda done, total: report("reading", done, total),
    )
    words = corpus.count()
    letters = byte_alphabet()
    tokens = [*special_tokens, *sorted(letters)]
    merges = learn_merges(
        words,
        tokens,
        sorted(letters, key=letters.__getitem__),
        vocab_size,
        min_count=_MIN_FREQUENCY,
        progress=lambda done: report("learning", done, vocab_size),
    )
    if len(tokens) != vocab_size:
        raise TokenizerError(
            f"{corpus.total.num_bytes:,} bytes of text fill a vocabulary of {len(tokens):,} "
            f"tokens, not {vocab_size:,}: no other pair of tokens occurs {_MIN_FREQUENCY} times. "
            f"Give more text, or vocab_size={len(tokens)}."
        )
    pairs = [(tokens[first], tokens[second]) for first, second in merges]
    _refuse_made(special_tokens, {first + second for first, second in pairs})
    text = _definition(tokens, pairs, special_tokens)
    if not overwrite and Path(path).exists() and Path(path).read_bytes() != text.encode():
        raise TokenizerError(
            f"{path} exists already and has other contents. Name another file, or replace it with "
            "overwrite=True (--overwrite)."
        )
    _write(Path(path), text.encode())
    return TrainedTokenizer(
        path=os.fspath(path),
        vocab_size=vocab_size,
        num_documents=corpus.total.num_documents,
        num_bytes=corpus.total.num_bytes,
        num_rejects=corpus.total.num_rejects,
    )


def _definition(
    tokens: list[str], merges: list[tuple[str, str]], special_tokens: Sequence[str]
) -> str:
    """The text of a tokenizer.json."""
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*special_tokens])
    return tokenizer.to_str()


def _refuse_made(special_tokens: Sequence[str], made: set[str]) -> None:
    """Raise if merges turn ordinary text into a special token."""
    for token in special_tokens:
        if token in made:
            raise TokenizerError(
                f"The special token {token!r} is also the token of the text {token!r}, so a "
                "document with this text would contain it. Choose one like '<|endoftext|>'."
            )


def _refuse_path(path: str | os.PathLike[str]) -> None:
    if Path(path).is_dir():
        file = Path(path) / "tokenizer.json"
        raise TokenizerError(f"{path} is a directory; name the file to write, such as {file}.")


def _refuse_numbers(
    vocab_size: int, num_special: int, max_bytes: int | None, threads: int | None
) -> None:
    least = _NUM_BYTES + num_special
    if vocab_size < least:
        raise TokenizerError(
            f"vocab_size={vocab_size:,} has no room for the {_NUM_BYTES} bytes and "
            f"{num_special} special tokens, which are {least:,}. Use a few thousand more."
        )
    if max_bytes is not None and max_bytes < 1:
        raise SourceError(f"max_bytes={max_bytes} leaves no text to learn from. Use at least 1.")
    if threads is not None and threads < 1:
        raise TokenizerError(f"threads={threads} (--threads) must be at least 1.")


def _refuse_special(special_tokens: Sequence[str]) -> None:
    if isinstance(special_tokens, str):
        raise TokenizerError(f"special_tokens={special_tokens!r} is one string; give a list.")
    for number, token in enumerate(special_tokens):
        if len(token) < 2:
            raise TokenizerError(
                f"The special token {token!r} is shorter than two characters, so texts contain it. "
                "Choose one like '<|endoftext|>'."
            )
        if token in special_tokens[:number]:
            raise TokenizerError(f"The special token {token!r} is given twice.")


def _write(path: Path, data: bytes) -> None:
    """Write `data` to `path`, completely or not at all.

    The data is forced to disk before the rename. Otherwise a power failure could leave an empty
    file under the final name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
