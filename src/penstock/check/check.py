"""Checks the user's own files before a training run.

A run that fails after an hour because line 40 million is Latin-1 could have failed at once. `check`
reads a sample of each file (from its beginning, middle and end if the format allows it), builds a
small store from it in a temporary directory, and reads batches back, with the same code as a real
run. The result is six findings, each with its figures. The time depends on the size of the sample
and not on the size of the files.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from glob import has_magic
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.check.directory import directory_problem, nearest_existing
from penstock.check.sample import FileSample, add_hints, read_sample, text_bytes
from penstock.cli.units import number_of
from penstock.errors import PenstockError
from penstock.options import ReadSettings
from penstock.paths import expand_user
from penstock.sources.files import InputFile
from penstock.sources.listing import list_files
from penstock.sources.settings import Texts

if TYPE_CHECKING:
    from penstock.loader.batch_format import TargetBatch
    from penstock.store.reader import TokenStore

# The limit of the script that `penstock check` replaces.
MIN_TOKENS_PER_SECOND = 100_000
_MAX_ROUND_TRIPS = 1_000
_MEASURED_SECONDS = 1.0
# GPT-2's tokenizer has 4.3 bytes a token on English, and 1 to 2.5 on scripts it was not made for.
_FEW_BYTES = 2.5
# Each file has a table in the report, so only the first files of a directory are read.
_MOST_FILES = 16
_ADVICE = {
    "missing_field": "; name the field that holds the text with field= (--field)",
    "invalid_utf8": '; errors="replace" (--errors replace) puts U+FFFD in place of such bytes',
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckSettings:
    """The settings with which the files would be read and trained on."""

    reading: ReadSettings = field(default_factory=ReadSettings)
    tokenizer: object = "gpt2"
    length: int = 1024
    """Tokens in a row; fewer if the sample has fewer."""
    batch_size: int = 32
    sample_bytes: int = 16_000_000
    """Bytes of text to read, of all files together."""
    directory: Path | None = None
    """The directory of the store to build. It must be writable, have enough free space, and hold
    nothing else. If it is not given, only the free space of the working directory counts."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    passed: bool
    message: str
    """The figures, or the reason for the failure."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The results of all checks."""

    files: list[FileSample]
    findings: list[Finding]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(finding.passed for finding in self.findings)


class _CheckFailedError(Exception):
    """Raised by a check; its message becomes the finding."""


def check(
    files: Sequence[str | PathLike[str]], settings: CheckSettings | None = None
) -> CheckReport:
    """Read a sample of `files` as a training run would, and report what is wrong.

    Only a temporary directory is written to, and an unnamed file where the store would be. Errors
    of penstock and of the operating system become findings.
    """
    begun = time.monotonic()
    settings = settings or CheckSettings()
    run = _Run([fspath(each) for each in files], settings)
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="penstock-check-") as folder:
        run.folder = Path(folder)
        for name, step in _STEPS.items():
            # Later checks need the store that the first three checks make.
            failed = [each.name for each in findings[:3] if not each.passed]
            try:
                if failed:
                    raise _CheckFailedError(f"not tried, because {failed[0]} failed")
                findings.append(Finding(name, True, step(run)))
            except (_CheckFailedError, PenstockError, OSError) as error:
                # A finding is one line, and messages of penstock may have several.
                findings.append(Finding(name, False, " ".join(str(error).split())))
    return CheckReport(run.files, findings, time.monotonic() - begun)


def _samples(name: str, settings: CheckSettings) -> list[FileSample]:
    """The files that `name` stands for; a directory or a glob may stand for several."""
    name = str(expand_user(name)) if name.startswith("~") else name
    is_several = Path(name).is_dir() or (has_magic(name) and not Path(name).exists())
    if "://" in name or not is_several:
        return [FileSample(name)]
    try:
        listed = [file.name for file in list_files(name, settings.reading)]
    except PenstockError:  # the first check lists it again, and reports this
        return [FileSample(name)]
    samples = [FileSample(each) for each in listed[:_MOST_FILES]]
    if len(listed) > _MOST_FILES:
        samples[-1].hints.append(
            f"{len(listed) - _MOST_FILES:,} more files of {name} were not read"
        )
    return samples


class _Run:
    """The six checks. Each returns a message, and keeps the results that later checks need."""

    folder: Path

    def __init__(self, names: list[str], settings: CheckSettings) -> None:
        self._names = names
        self.files = [sample for name in names for sample in _samples(name, settings)]
        self._settings = settings
        self._inputs: list[InputFile] = []

    @property
    def _texts(self) -> list[bytes]:
        return [text for file in self.files for text in file.texts]

    def check_existence(self) -> str:
        """Check that all files exist and are not empty."""
        if not self.files:
            raise _CheckFailedError("no file was named")
        errors = []
        for file in self.files:
            try:
                self._inputs.append(self._list(file))
            except (_CheckFailedError, PenstockError, OSError) as error:
                errors.append(str(error))
        if errors:
            raise _CheckFailedError("; ".join(errors))
        total = sum(file.num_bytes for file in self.files)
        return f"{number_of(len(self.files), 'file')}, {total:,} bytes"

    def _list(self, file: FileSample) -> InputFile:
        """Fill in the size and the format of a file."""
        path = Path(file.name)
        if "://" not in file.name and not path.exists() and not has_magic(file.name):
            raise _CheckFailedError(f"{file.name} does not exist (working directory: {Path.cwd()})")
        # The name of one file lists exactly one file. `_samples` has listed directories and globs;
        # those that are left raise an error here.
        (listed,) = list_files(file.name, self._settings.reading)
        file.num_bytes, file.format = listed.size, listed.format
        file.compression = listed.compression
        if listed.size == 0:
            raise _CheckFailedError(f"{file.name} is empty")
        return listed

    def check_documents(self) -> str:
        """Read the sample, and check that its documents are valid."""
        # Imported here: a missing file should not cost the import of torch and the tokenizers.
        from penstock.store.job import separators_of
        from penstock.tokenize.tokenizer import load_tokenizer

        self._tokenizer = load_tokenizer(self._settings.tokenizer)
        reading = self._settings.reading
        reading = replace(reading, separators=separators_of(self._tokenizer))
        budget = max(1, self._settings.sample_bytes // len(self.files))
        for file, listed in zip(self.files, self._inputs, strict=True):
            read_sample(file, listed, reading, budget)
            add_hints(file)
            if file.rejects:
                first, number = file.rejects[0], len(file.rejects)
                raise _CheckFailedError(
                    f"{file.name}: {number:,} of {number + len(file.texts):,} records are bad; the "
                    f"first, {first.reason} ({first.detail}), is at offset {first.offset:,}"
                    f"{_ADVICE.get(first.reason, '')}"
                )
            if not file.texts:
                raise _CheckFailedError(f"{file.name} holds no document, only blank records")
        sampled = sum(file.sample_bytes for file in self.files)
        part = "all of it" if all(file.whole for file in self.files) else "a sample"
        return f"{_documents(self._texts)} in {sampled:,} bytes of input, {part}"

    def _build(self, name: str, copies: int = 1) -> "TokenStore":
        from penstock.store.build import build

        # The sample is already cut into documents, so the store is built from texts in memory.
        texts = Texts([text.decode() for text in self._texts] * copies)
        return build(texts, self.folder / name, tokenizer=self._tokenizer)

    def _batches(self, store: "TokenStore", length: int) -> "Iterator[TargetBatch]":
        from penstock.loader.loader import Loader
        from penstock.rows.windows import Windows

        return iter(Loader(Windows(store, length), self._settings.batch_size))

    def check_batches(self) -> str:
        """Build a store and batches from the sample, and check that targets are the next inputs."""
        begun = time.monotonic()
        self.store = self._build("store")
        self._build_seconds = time.monotonic() - begun
        # A row needs one token more than its length, for the last target.
        length = min(self._settings.length, self.store.num_tokens - 1)
        batch = next(self._batches(self.store, length))
        inputs, targets = batch["inputs"], batch["targets"]
        # Every target but the last of a row is the next input.
        if not bool((inputs[:, 1:] == targets[:, :-1]).all()):
            raise _CheckFailedError("targets are not the inputs shifted by one")
        shape = f"({', '.join(str(size) for size in inputs.shape)})"
        kind = str(inputs.dtype).removeprefix("torch.")
        short = "" if length == self._settings.length else f", rows cut to {length:,} tokens"
        return f"inputs and targets {shape} {kind}, labels shifted by the loader{short}"

    def check_quality(self) -> str:
        """Check that documents are the same after encoding and decoding."""
        tokenizer, texts = self._tokenizer, self._texts
        # At most 1,000 documents, spread over the sample.
        step = max(1, len(texts) // _MAX_ROUND_TRIPS)
        tried = texts[::step][:_MAX_ROUND_TRIPS]
        for number, text in enumerate(tried):
            if tokenizer.decode_bytes(tokenizer.encode(text)) != text:
                raise _CheckFailedError(
                    f"document {number * step:,} of the sample is not the same after encoding and "
                    f"decoding with {tokenizer.name}: {text[:60]!r}"
                )
        per_token = sum(map(len, texts)) / self.store.num_tokens
        # A small vocabulary, such as bytes, has short tokens on any text.
        if per_token < _FEW_BYTES and tokenizer.vocab_size > 1_000:
            self.files[0].hints.append(
                f"{per_token:.2f} bytes a token are few: {tokenizer.name} was made for other text. "
                "A tokenizer trained on this text may halve the tokens: penstock tokenizer train"
            )
        return (
            f"{_documents(tried)} the same after a round trip; {per_token:.2f} bytes a token "
            f"({1 / per_token:.2f} tokens/byte) with {tokenizer.name}"
        )

    def check_speed(self) -> str:
        """Check that tokens are loaded fast enough."""
        from penstock.sources.batch import binary_array

        texts = binary_array(self._texts)
        # The tokenizer was loaded and warmed up by the build, so only encoding is measured.
        begun = time.monotonic()
        num_tokens = len(self._tokenizer.encode_documents(texts)[0])
        tokenized = num_tokens / (time.monotonic() - begun)
        loaded = self._loaded_per_second()
        figures = f"{loaded:,.0f} tokens/s loaded, {tokenized:,.0f} tokens/s tokenized"
        if loaded < MIN_TOKENS_PER_SECOND:
            raise _CheckFailedError(
                f"{figures}; training needs at least {MIN_TOKENS_PER_SECOND:,} tokens/s loaded"
            )
        return figures

    def _loaded_per_second(self) -> float:
        """The tokens per second that a loader reads with full rows; a small sample is repeated."""
        length, store = self._settings.length, self.store
        # Enough copies for one full batch and the last target.
        copies = -(-(length * self._settings.batch_size + 1) // store.num_tokens)
        if copies > 1:
            store = self._build("repeated", copies)
        batches = self._batches(store, length)
        next(batches)  # starting the loader is not measured
        done, begun = 0, time.monotonic()
        for batch in batches:
            done += batch["inputs"].numel()
            if time.monotonic() - begun >= _MEASURED_SECONDS:
                break
        return done / (time.monotonic() - begun)

    def check_building(self) -> str:
        """Check that the store is intact, and that the disk has room for a store of all files."""
        from penstock.store.job import separators_of
        from penstock.store.verify import verify

        built = self.folder / "store"
        verify(built)
        stored = sum(path.stat().st_size for path in built.iterdir())
        sampled = sum(map(len, self._texts))
        # The store of the sample, scaled to all text.
        needed = sum(text_bytes(file) for file in self.files) / sampled * stored
        directory = self._settings.directory
        if directory is not None:
            reading = replace(self._settings.reading, separators=separators_of(self._tokenizer))
            # All files, as a build lists them: of a directory, only the first were sampled.
            listed = list_files(self._names, reading)
            if problem := directory_problem(directory, listed, self._tokenizer, reading):
                raise _CheckFailedError(f"{problem}; choose another directory (-o)")
        free = shutil.disk_usage(nearest_existing(directory or Path())).free
        figures = (
            f"the sample built and verified in {self._build_seconds:.1f} s; all of it needs "
            f"about {needed:,.0f} bytes of disk, {free:,} are free"
        )
        if needed > free:
            raise _CheckFailedError(figures)
        return figures


# In the order of the lines that `penstock check` prints.
_STEPS: dict[str, Callable[[_Run], str]] = {
    "File Existence": _Run.check_existence,
    "Single Dataset": _Run.check_documents,
    "DataLoader": _Run.check_batches,
    "Tokenization Quality": _Run.check_quality,
    "Performance": _Run.check_speed,
    "Preprocessing": _Run.check_building,
}
CHECKS = tuple(_STEPS)


def _documents(texts: Sequence[object]) -> str:
    """How many documents there are, in words."""
    return f"{len(texts):,} document{'s' * (len(texts) != 1)}"
