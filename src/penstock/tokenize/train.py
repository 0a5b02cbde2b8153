"""Trains a new byte-level BPE tokenizer on the user's text.

The alphabet is the 256 bytes, so any text can be encoded and is decoded to the same bytes. Words
are split as GPT-2 splits them, which gigatoken supports. `tokenizers` learns the merges; its result
depends on the counts of words alone, so the same text gives the same file, whatever the order and
the number of cores. Memory grows with the number of distinct words and not with the text: 30 MB of
text take 9 s and 250 MB of memory.

A special token must not occur in ordinary text. If merges can build it too, as they can build
"the", it would end documents in the middle of a sentence, so it is refused.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from penstock.errors import SourceError, TokenizerError
from penstock.paths import expand_user
from penstock.sources.document import Batch, Reject, allowed_rejects
from penstock.sources.files import InputFile
from penstock.sources.listing import list_files
from penstock.sources.read import read_slice
from penstock.sources.settings import ReadSettings
from penstock.sources.slices import cut

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
    progress: Callable[[int, int], None] | None = None,
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
        max_bytes: Stop reading after the document in which this much text is reached.
        max_bad: How many rejected records to allow: below 1 a share of all records (but ten of at
            least 1,000), else a number.
        overwrite: Replace the file if it exists and has other contents.
        progress: Called with the bytes of text read and the bytes of all inputs on disk (or
            `max_bytes`, if that is less).

    Raises:
        TokenizerError: the vocabulary is too small for the bytes and special tokens, or larger
            than the text can fill; a special token has fewer than two characters, is given twice,
            or is also learned as a token of ordinary text; or `path` is a directory, or a
            file with other contents.
        SourceError: an input cannot be read, or too many records are rejected.
    """
    path = expand_user(path)
    if Path(path).is_dir():
        file = Path(path) / "tokenizer.json"
        raise TokenizerError(f"{path} is a directory; name the file to write, such as {file}.")
    _refuse_special(special_tokens)
    least = _NUM_BYTES + len(special_tokens)
    if vocab_size < least:
        raise TokenizerError(
            f"vocab_size={vocab_size:,} has no room for the {_NUM_BYTES} bytes and "
            f"{len(special_tokens)} special tokens, which are {least:,}. Use a few thousand more."
        )
    if max_bytes is not None and max_bytes < 1:
        raise SourceError(f"max_bytes={max_bytes} leaves no text to learn from. Use at least 1.")
    # The separators that documents="auto" looks for. "</s>" is not among them: it also is an HTML
    # tag, so text may contain it.
    separators = dict.fromkeys(["<|endoftext|>", *special_tokens])
    separators.pop("</s>", None)
    reading = replace(reading or ReadSettings(), separators=tuple(separators))
    files = list_files(inputs, reading)
    reader = _Reader(files, reading, max_bytes, max_bad, progress)
    # `tokenizers` reads documents from an iterator, so the text is never held in memory. The reader
    # counts the documents that it yields.
    tokenizer = _learn(reader.texts(), vocab_size, special_tokens)
    if (found := tokenizer.get_vocab_size()) != vocab_size:
        raise TokenizerError(
            f"{reader.num_bytes:,} bytes of text fill a vocabulary of {found:,} tokens, not "
            f"{vocab_size:,}: no other pair of tokens occurs {_MIN_FREQUENCY} times. Give more "
            f"text, or vocab_size={found}."
        )
    text = tokenizer.to_str()
    # Merges must not turn ordinary text into a special token.
    merged = {"".join(pair) for pair in json.loads(text)["model"]["merges"]}
    if made := [token for token in special_tokens if token in merged]:
        raise TokenizerError(
            f"The special token {made[0]!r} is also the token of the text {made[0]!r}, so a "
            "document with this text would contain it. Choose one like '<|endoftext|>'."
        )
    if not overwrite and Path(path).exists() and Path(path).read_bytes() != text.encode():
        raise TokenizerError(
            f"{path} exists already and has other contents. Name another file, or replace it with "
            "overwrite=True (--overwrite)."
        )
    _write(Path(path), text.encode())
    return TrainedTokenizer(
        path=os.fspath(path),
        vocab_size=vocab_size,
        num_documents=reader.num_documents,
        num_bytes=reader.num_bytes,
        num_rejects=reader.num_rejects,
    )


@dataclass(slots=True)
class _Reader:
    """Reads the texts of all documents and counts them."""

    files: list[InputFile]
    reading: ReadSettings
    max_bytes: int | None
    max_bad: float
    progress: Callable[[int, int], None] | None
    num_documents: int = 0
    num_bytes: int = 0
    num_rejects: int = 0
    first_rejects: list[Reject] = field(default_factory=list)

    def texts(self) -> Iterator[list[str]]:
        """Yield lists of documents.

        Raises:
            SourceError: there are no documents, or more rejected records than allowed.
        """
        size = sum(file.size for file in self.files)
        # Every cut that is tried is safe: GPT-2's pattern ends a word at each of them.
        slices = cut(self.files, self.reading, is_cut_safe=lambda left, right: True)
        for piece in slices:
            for batch in read_slice(self.files, piece, self.reading):
                if texts := self._counted(batch):
                    yield texts
                if self.progress:
                    self.progress(self.num_bytes, min(size, self.max_bytes or size))
                if self.max_bytes is not None and self.num_bytes >= self.max_bytes:
                    return
            self._refuse_bad(ended=False)
        if not self.num_documents:
            raise SourceError(f"The inputs hold no document to learn from.{self._shown()}")
        self._refuse_bad(ended=True)

    def _counted(self, batch: Batch) -> list[str]:
        """The first texts of `batch`, up to `max_bytes` overall; adds them to the counts."""
        self.num_rejects += len(batch.rejects)
        self.first_rejects = [*self.first_rejects, *batch.rejects][:5]
        texts = []
        for text in batch.texts.to_pylist():
            if self.max_bytes is not None and self.num_bytes >= self.max_bytes:
                break
            texts.append(text.decode())
            self.num_bytes += len(text)
        # If `batch.edges` is set, the last document of the batch may continue in the next batch.
        # The tally counts each document once.
        self.num_documents += len(texts) if batch.edges is None else batch.tally.documents
        return texts

    def _refuse_bad(self, *, ended: bool) -> None:
        records = self.num_documents + self.num_rejects
        limit = allowed_rejects(self.max_bad, records, ended=ended)
        if self.num_rejects > limit:
            raise SourceError(
                f"{self.num_rejects:,} of {records:,} records were rejected, more than the "
                f"{int(limit):,} that max_bad={self.max_bad:g} allows. Repair the input, set the "
                "right field or format, or raise max_bad (--max-bad). The first rejected records:"
                f"{self._shown()}"
            )

    def _shown(self) -> str:
        return "".join(
            f"\n  {self.files[each.file].name}, offset {each.offset:,}: {each.reason}, "
            f"{each.detail}"
            for each in self.first_rejects
        )


def _learn(
    texts: Iterator[list[str]], vocab_size: int, special_tokens: Sequence[str]
) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=_MIN_FREQUENCY,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


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
