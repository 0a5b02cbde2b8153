"""Trains a new byte-level BPE tokenizer on the user's text.

The alphabet is the 256 bytes, so any text can be encoded and is decoded to the same bytes. Words
are split as GPT-2 splits them, which gigatoken supports. The merges are those that `tokenizers`
would learn; they depend on the counts of words alone, so the same text gives the same file,
whatever the order and the number of cores.

    files ── batches of documents, read in order ── words, counted by threads ── merges ──► file

Memory grows with the number of different words and not with the text: below 0.4 kB for each word.
`bpe` counts the words and learns the merges.

A special token must not occur in ordinary text. If merges can build it too, as they can build
"the", it would end documents in the middle of a sentence, so it is refused.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.disk import write_file
from penstock.errors import SourceError, TokenizerError
from penstock.options import ReadSettings, num_cores
from penstock.paths import expand_user
from penstock.sources.batch import Batch, Reject, allowed_rejects, text_offsets
from penstock.sources.files import InputFile
from penstock.sources.listing import list_files
from penstock.sources.read import read_slice
from penstock.sources.slices import cut
from penstock.tokenize.bpe import (
    WordCounts,
    add_counts,
    count_pieces,
    count_words,
    is_cut_safe,
    learn_merges,
)
from penstock.tokenize.definition import byte_alphabet
from penstock.tokenize.engines import ArrowTexts

_NUM_BYTES = 256
# A pair that occurs only once in the whole text says nothing about the language.
_MIN_FREQUENCY = 2
# Batches of documents that a thread counts together; a batch of text has 4 MB.
_GROUP = 16
# Counts of a group are added to those of the corpus when they have this many words, or as many as
# the corpus.
_MANY_WORDS = 2_000_000


@dataclass(frozen=True, slots=True)
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
        path: The file to write, or a directory, for `tokenizer.json` in it.
        vocab_size: The number of tokens: the 256 bytes, `special_tokens`, and merges for the rest.
        special_tokens: They get the first ids. `load_tokenizer` recognises a common name, such as
            `<|endoftext|>`, as the token that ends documents.
        reading: How to read documents, with the same settings as `build`.
        max_bytes: Stop reading after the document in which this much text is reached, or after the
            block of 4 MB if a document is longer.
        max_bad: How many rejected records to allow: below 1 a share of all records (but ten of at
            least 1,000), else a number.
        overwrite: Replace the file if it exists and has other contents.
        threads: How many threads count words; by default one per core. It does not change the
            result.
        progress: Called with "reading", the bytes of text read and the bytes of all inputs on disk
            (or `max_bytes`, if that is less); then with "learning", the number of tokens and
            `vocab_size`.

    Raises:
        TokenizerError: the vocabulary is too small for the bytes and special tokens, or larger
            than the text can fill; the special tokens are not a list, or one is also learned as
            a token of ordinary text; or `path` is a file with other contents.
        SourceError: an input cannot be read, or too many records are rejected.
    """
    path = expand_user(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    is_string = isinstance(special_tokens, str)
    if is_string or any(special_tokens.count(each) > 1 or len(each) < 2 for each in special_tokens):
        raise TokenizerError(
            f"special_tokens={special_tokens!r} is not a list of different strings of at least two "
            "characters, such as ['<|endoftext|>']. Texts contain every single character."
        )
    least = _NUM_BYTES + len(special_tokens)
    if vocab_size < least:
        raise TokenizerError(
            f"vocab_size={vocab_size:,} has no room for the {_NUM_BYTES} bytes and "
            f"{len(special_tokens)} special tokens, which are {least:,}. Use a few thousand more."
        )
    # The separators that documents="auto" looks for. "</s>" is not among them: it also is an HTML
    # tag, so text may contain it.
    separators = dict.fromkeys(["<|endoftext|>", *special_tokens])
    separators.pop("</s>", None)
    reading = replace(reading or ReadSettings(), separators=tuple(separators))
    report = progress or (lambda stage, done, total: None)
    limit = math.inf if max_bytes is None else max_bytes
    corpus = _Corpus(list_files(inputs, reading), reading, limit, max_bad)
    words = corpus.count(threads or num_cores(), partial(report, "reading"))
    tokens = [*special_tokens, *sorted(byte_alphabet())]
    pairs = []
    for first, second in learn_merges(words, tokens, vocab_size, min_count=_MIN_FREQUENCY):
        pairs.append((tokens[first], tokens[second]))
        report("learning", len(tokens), vocab_size)
    if len(tokens) != vocab_size:
        raise TokenizerError(
            f"{corpus.num_bytes:,} bytes of text fill a vocabulary of {len(tokens):,} "
            f"tokens, not {vocab_size:,}: no other pair of tokens occurs {_MIN_FREQUENCY} times. "
            f"Give more text, or vocab_size={len(tokens)}."
        )
    learned = {first + second for first, second in pairs}
    if found := next((token for token in special_tokens if token in learned), None):
        raise TokenizerError(
            f"The special token {found!r} is also the token of the text {found!r}, so a document "
            "with this text would contain it. Choose one like '<|endoftext|>'."
        )
    data = _definition(tokens, pairs, special_tokens).encode()
    if not overwrite and path.exists() and path.read_bytes() != data:
        raise TokenizerError(
            f"{path} exists already and has other contents. Name another file, or replace it with "
            "overwrite=True (--overwrite)."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, [data])
    counts = corpus.num_documents, corpus.num_bytes, corpus.num_rejects
    return TrainedTokenizer(os.fspath(path), vocab_size, *counts)


@dataclass
class _Corpus:
    """The documents to learn from, and how many of them were read."""

    files: list[InputFile]
    reading: ReadSettings
    max_bytes: float
    max_bad: float
    num_documents: int = 0
    num_bytes: int = 0
    num_rejects: int = 0
    first_rejects: list[Reject] = field(default_factory=list)

    def count(self, num_threads: int, progress: Callable[[int, int], None]) -> WordCounts:
        """The different words of the corpus.

        One thread reads the documents in order, so which documents are counted does not depend on
        the number of threads. Counting takes nearly all of the time.

        Raises:
            SourceError: there are no documents, or more rejected records than allowed.
        """
        size = min(sum(file.size for file in self.files), self.max_bytes)
        tables = [add_counts([])]
        texts = self._texts()
        running: deque[Future[WordCounts]] = deque()
        with ThreadPoolExecutor(num_threads, "count-words") as pool:
            while group := list(islice(texts, _GROUP)):
                running.append(pool.submit(_count, group))
                # One more than threads: none of them waits until this one has added up counts.
                if len(running) > num_threads:
                    tables.append(running.popleft().result())
                    # To add tables takes a pass over all words, so small ones wait.
                    known, *new = (len(table.counts) for table in tables)
                    if sum(new) >= max(_MANY_WORDS, known):
                        tables = [add_counts(tables)]
                progress(self.num_bytes, int(size))
            tables += [each.result() for each in running]
        if not self.num_documents:
            raise SourceError(f"The inputs hold no document to learn from.{self._shown()}")
        return add_counts(tables)

    def _texts(self) -> Iterator[ArrowTexts]:
        """The documents, up to the one in which the limit is reached."""
        for piece in cut(self.files, self.reading, is_cut_safe=is_cut_safe):
            for batch in read_slice(self.files, piece, self.reading, is_cut_safe):
                yield self._taken(batch)
                self._refuse_bad(ended=False)
                if self.num_bytes >= self.max_bytes:
                    return
        self._refuse_bad(ended=True)

    def _taken(self, batch: Batch) -> ArrowTexts:
        """The documents of a batch that begin before the limit; they are then counted as read."""
        edges = text_offsets(batch.texts) - text_offsets(batch.texts)[0]
        num_texts = int(np.searchsorted(edges[:-1] + self.num_bytes, self.max_bytes))
        # If `batch.edges` is set, the last document of the batch may continue in the next batch.
        # The tally counts each document once.
        self.num_documents += num_texts if batch.edges is None else batch.tally.documents
        self.num_bytes += int(edges[num_texts])
        self.num_rejects += len(batch.rejects)
        self.first_rejects = [*self.first_rejects, *batch.rejects][:5]
        return batch.texts.slice(0, num_texts)

    def _refuse_bad(self, *, ended: bool) -> None:
        records = self.num_documents + self.num_rejects
        limit = allowed_rejects(self.max_bad, records, ended=ended)
        if self.num_rejects > limit:
            raise SourceError(
                f"{self.num_rejects:,} of {records:,} records were rejected, more than the "
                f"{int(limit):,} that max_bad={self.max_bad:g} allows. Repair the input, set the "
                f"right field or format, or raise max_bad (--max-bad). The first:{self._shown()}"
            )

    def _shown(self) -> str:
        return "".join(
            f"\n  {self.files[each.file].name}, offset {each.offset:,}: {each.reason}, "
            f"{each.detail}"
            for each in self.first_rejects
        )


def _count(texts: list[ArrowTexts]) -> WordCounts:
    return count_words([count_pieces(each) for each in texts])


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
