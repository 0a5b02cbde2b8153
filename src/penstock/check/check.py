"""The user's own files, looked at before a training run.

A run that fails after an hour because line 40 million is Latin-1 could have failed at once.
`check` reads a sample of each file (from its beginning, middle and end where the file can be
read anywhere), builds a small store of it in a temporary directory, and reads batches back:
the same code that a real run goes through. Six findings come out, each with its figures.
The time is bounded by the size of the sample, not of the files.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from penstock.check.sample import LookedAt, hint, sample, text_bytes
from penstock.errors import PenstockError
from penstock.sources.listing import InputFile, list_files
from penstock.sources.settings import ReadSettings
from penstock.sources.texts import Texts

__all__ = ["CHECKS", "Finding", "Report", "Trial", "check"]

CHECKS = (
    "File Existence",
    "Single Dataset",
    "DataLoader",
    "Tokenization Quality",
    "Performance",
    "Preprocessing",
)
MIN_TOKENS_PER_SECOND = 100_000
_ROUND_TRIPS = 1_000
_LONGEST_BYTES = 1 << 28
_MEASURED_SECONDS = 1.0
# GPT-2's tokenizer reaches 4.3 on English; on scripts that it was not made for, 1 to 2.5.
_FEW_BYTES = 2.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """How the files would be trained on."""

    reading: ReadSettings = field(default_factory=ReadSettings)
    tokenizer: Any = "gpt2"
    length: int = 1024
    """Tokens a row; shorter where the sample is."""
    batch_size: int = 32
    sample_bytes: int = 16_000_000
    """Text that is looked at, of all files together."""
    directory: Path = Path()
    """Where stores would be built: whose free space counts."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One verdict."""

    name: str
    passed: bool
    told: str
    """Figures, or the reason why not."""


@dataclass(frozen=True, slots=True)
class Report:
    """All verdicts."""

    files: list[LookedAt]
    findings: list[Finding]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.passed for finding in self.findings)


class _Wrong(Exception):  # noqa: N818  (a verdict, not an error)
    """Why a check fails."""


def check(files: Sequence[str | PathLike[str]], trial: Trial | None = None) -> Report:
    """Look at `files` as a training run would, and say what is wrong.

    Nothing is written but to a temporary directory. Errors of ours become findings.
    """
    begun = time.monotonic()
    run = _Run([fspath(each) for each in files], trial or Trial())
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="penstock-check-") as folder:
        run.folder = Path(folder)
        for name, step in zip(CHECKS, run.steps, strict=True):
            findings.append(_finding(name, step, findings))
    return Report(run.files, findings, time.monotonic() - begun)


def _finding(name: str, step: Callable[[], str], before: list[Finding]) -> Finding:
    """What a step says; the later ones need the store that the third builds."""
    broken = [each.name for each in before[:3] if not each.passed]
    if broken:
        return Finding(name, False, f"not tried, because {broken[0]} failed")
    try:
        return Finding(name, True, step())
    except (_Wrong, PenstockError, OSError) as error:
        return Finding(name, False, " ".join(str(error).split()))


class _Run:
    """The steps, and what they hand on to each other."""

    folder: Path

    def __init__(self, names: list[str], trial: Trial) -> None:
        self._names = names
        self._trial = trial
        self._inputs: dict[str, InputFile] = {}
        self.files = [LookedAt(name) for name in names]
        self.steps = (
            self._existence,
            self._documents,
            self._batches,
            self._quality,
            self._speed,
            self._building,
        )

    def _existence(self) -> str:
        if not self._names:
            raise _Wrong("no file was named")
        for file in self.files:
            try:
                file.error = self._look(file)
            except (PenstockError, OSError) as error:
                file.error = str(error)
        wrong = [file.error for file in self.files if file.error]
        if wrong:
            raise _Wrong("; ".join(wrong))
        total = sum(file.num_bytes for file in self.files)
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return f"{files}, {total:,} bytes"

    def _look(self, file: LookedAt) -> str | None:
        """Fill in what the directory and the first bytes say; returns what is wrong."""
        path = Path(file.name)
        if "://" not in file.name and not path.exists():
            return f"{file.name} does not exist (looked from {Path.cwd()})"
        if path.is_dir():
            return f"{file.name} is a directory; name the files in it"
        (listed,) = list_files(file.name, self._trial.reading)
        self._inputs[file.name] = listed
        file.num_bytes, file.format = listed.size, listed.format
        file.compression = listed.compression
        return f"{file.name} is empty" if listed.size == 0 else None

    def _documents(self) -> str:
        from penstock.store.job import separators_of
        from penstock.tokenize.tokenizer import load_tokenizer

        self._tokenizer = load_tokenizer(self._trial.tokenizer)
        budget = self._trial.sample_bytes // len(self.files)
        reading = self._trial.reading
        # A longer document is a wrong separator, and would make the sample as long as the file.
        longest = min(reading.max_document_bytes, _LONGEST_BYTES)
        reading = replace(
            reading, max_document_bytes=longest, separators=separators_of(self._tokenizer)
        )
        for file in self.files:
            sample(file, self._inputs[file.name], reading, max(1, budget))
            hint(file)
            self._judge(file)
        documents = sum(len(file.texts) for file in self.files)
        sampled = sum(file.sample_bytes for file in self.files)
        part = "all of it" if all(file.whole for file in self.files) else "a sample"
        return f"{documents:,} documents in {sampled:,} bytes of text, {part}"

    def _judge(self, file: LookedAt) -> None:
        if file.rejects:
            first = file.rejects[0]
            number = len(file.rejects)
            file.error = (
                f"{file.name}: {number:,} of {number + len(file.texts):,} records are bad; the "
                f"first, {first.reason} ({first.detail}), is at offset {first.offset:,}"
            )
            raise _Wrong(file.error)
        if not file.texts:
            file.error = f"{file.name} holds no document: nothing but blank records"
            raise _Wrong(file.error)

    def _batches(self) -> str:
        from penstock.loader.loader import Loader
        from penstock.rows.windows import Windows
        from penstock.store.build import build

        texts = [text.decode() for file in self.files for text in file.texts]
        begun = time.monotonic()
        self.store = build(Texts(texts), self.folder / "store", tokenizer=self._tokenizer)
        self._build_seconds = time.monotonic() - begun
        length = min(self._trial.length, self.store.num_tokens - 1)
        self._rows = Windows(self.store, length)
        batch = next(iter(Loader(self._rows, self._trial.batch_size)))
        inputs, targets = batch["inputs"], batch["targets"]
        if not bool((inputs[:, 1:] == targets[:, :-1]).all()):
            raise _Wrong("targets are not the inputs shifted by one")
        shape = f"({', '.join(str(size) for size in inputs.shape)})"
        kind = str(inputs.dtype).removeprefix("torch.")
        short = "" if length == self._trial.length else f", rows cut to {length:,} tokens"
        return f"inputs and targets {shape} {kind}, labels shifted by the loader{short}"

    def _quality(self) -> str:
        tokenizer = self._tokenizer
        texts = [text for file in self.files for text in file.texts]
        step = max(1, len(texts) // _ROUND_TRIPS)
        tried = texts[::step][:_ROUND_TRIPS]
        for number, text in enumerate(tried):
            if tokenizer.decode(tokenizer.encode(text)) != text:
                raise _Wrong(
                    f"document {number * step:,} of the sample is not the same after encoding and "
                    f"decoding with {tokenizer.name}: {text[:60]!r}"
                )
        num_bytes = sum(map(len, texts))
        per_token = num_bytes / self.store.num_tokens
        if per_token < _FEW_BYTES and tokenizer.vocab_size > 1_000:
            self.files[0].hints.append(
                f"{per_token:.2f} bytes a token are few: {tokenizer.name} was made for other text. "
                "A tokenizer of its own may halve the tokens: penstock tokenizer train"
            )
        return (
            f"{len(tried):,} documents the same after a round trip; {per_token:.2f} bytes a token "
            f"({1 / per_token:.2f} tokens/byte) with {tokenizer.name}"
        )

    def _speed(self) -> str:
        from penstock.sources.arrow import binary_array

        texts = binary_array([text for file in self.files for text in file.texts])
        begun = time.monotonic()
        encoded = len(self._tokenizer.encode_documents(texts)[0])
        tokenized = encoded / (time.monotonic() - begun)
        rate = self._loaded_rate()
        told = f"{rate:,.0f} tokens/s loaded, {tokenized:,.0f} tokens/s tokenized"
        if rate < MIN_TOKENS_PER_SECOND:
            raise _Wrong(f"{told}; {MIN_TOKENS_PER_SECOND:,} are the least")
        return told

    def _loaded_rate(self) -> float:
        """Tokens a second of a loader of full rows, over the sample as often as it takes."""
        from penstock.loader.loader import Loader
        from penstock.rows.windows import Windows
        from penstock.store.build import build

        trial, store = self._trial, self.store
        copies = -(-(trial.length * trial.batch_size + 1) // store.num_tokens)
        if copies > 1:
            texts = [text.decode() for file in self.files for text in file.texts]
            again = Texts(texts * copies)
            store = build(again, self.folder / "again", tokenizer=self._tokenizer)
        batches = iter(Loader(Windows(store, trial.length), trial.batch_size))
        next(batches)
        done, begun = 0, time.monotonic()
        for batch in batches:
            done += batch["inputs"].numel()
            if time.monotonic() - begun >= _MEASURED_SECONDS:
                break
        return done / (time.monotonic() - begun)

    def _building(self) -> str:
        from penstock.store.verify import verify

        verify(self.store.path)
        held = sum(path.stat().st_size for path in self.store.path.iterdir())
        sampled = sum(len(text) for file in self.files for text in file.texts)
        # Text per byte on disk: more than one where files are compressed.
        needed = sum(text_bytes(file) for file in self.files) / sampled * held
        free = shutil.disk_usage(_existing(self._trial.directory)).free
        told = f"the sample built and verified in {self._build_seconds:.1f} s; all of it needs "
        told += f"about {needed:,.0f} bytes of disk, {free:,} are free"
        if needed > free:
            raise _Wrong(told)
        return told


def _existing(directory: Path) -> Path:
    """The nearest directory above that is there."""
    path = directory.absolute()
    while not path.exists():
        path = path.parent
    return path
