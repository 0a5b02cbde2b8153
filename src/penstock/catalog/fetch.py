"""Fetch a dataset of the catalog into a directory.

    data/tinyshakespeare/
    ├── tinyshakespeare.txt   the downloaded file
    ├── train.txt             the first 90 % of its characters
    ├── val.txt               the rest
    └── train/  val/          stores, written by `build_stores`

A fetch holds the directory's lock. A second fetch of the same dataset waits for the first, and
then finds its files complete.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from penstock.catalog.download import ByteProgress, DownloadLimits, download
from penstock.catalog.entries import Entry, EntryFile, Packing, RemoteFile, find_entry
from penstock.catalog.receipt import Receipt, sha256_of, wait_for_lock
from penstock.catalog.unpack import unpacked
from penstock.errors import FetchError, MissingInputError, SourceError
from penstock.paths import expand_user

if TYPE_CHECKING:
    from penstock.store.job import BuildProgress
    from penstock.store.reader import TokenStore


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """The progress of a fetch, passed to its callback."""

    action: str
    """"downloading", "copying", "unpacking" or "waiting"."""
    name: str
    done_bytes: int
    total_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """The result of a fetch."""

    entry: Entry
    directory: Path
    files: dict[str, Path]
    """The file of each split: "train", "val", and "test" if there is one."""
    raw: Path | None
    """The whole text, if `fetch` has split it; None if upstream has separate files."""
    received_bytes: int
    """Bytes received over the network by this call: 0 if all files existed already."""
    seconds: float


def fetch(
    name: str,
    directory: str | PathLike[str] | None = None,
    *,
    source: str | PathLike[str] | None = None,
    split: float | None = None,
    limits: DownloadLimits | None = None,
    progress: Callable[[FetchProgress], None] | None = None,
) -> Fetched:
    """Fetch the dataset `name` into `directory` and return where its files are.

    Existing files with the right contents are not requested again. A file of the user that has the
    name of a file of the dataset is not overwritten; an error is raised.

    Args:
        name: The name of a catalog entry.
        directory: The target directory; `data/NAME` by default.
        source: A directory, file or URL to take the files from instead of the upstream server:
            a mirror, or a copy.
        split: The share of characters used for training, if the dataset is a single text file.
        limits: When a download retries and when it gives up.
        progress: Callback; called often, from this thread.

    Raises:
        FetchError: a file cannot be fetched, or is not the right one.
        SourceError: the catalog has no such entry, or it cannot be split.
        DiskFullError: there is not enough space; run again after freeing some.
    """
    begun = time.monotonic()
    entry = find_entry(name)
    ratio = _train_ratio(entry, split)
    place = None if source is None else _find_source(entry, source)
    target = expand_user(directory) if directory is not None else Path("data") / entry.name
    # Arguments were checked first, so that a typo leaves no empty directory.
    target.mkdir(parents=True, exist_ok=True)
    report = progress or (lambda now: None)

    def waiting(num_bytes: int) -> None:
        report(FetchProgress("waiting", str(target), num_bytes, None))

    with wait_for_lock(target, waiting):
        # The receipt is read under the lock: another process may have added files just before.
        run = _Fetch(entry, target, place, limits or DownloadLimits(), report, Receipt(target))
        for remote in entry.remotes:
            run.fetch_remote(remote)
        if ratio:
            files = run.split_text(ratio)
        else:
            files = {str(file.split): target / file.name for file in entry.files}
    return Fetched(
        entry=entry,
        directory=target,
        files=files,
        raw=target / entry.files[0].name if ratio else None,
        received_bytes=run.received,
        seconds=time.monotonic() - begun,
    )


def build_stores(
    fetched: Fetched,
    *,
    tokenizer: Any = "gpt2",
    progress: "Callable[[BuildProgress], None] | bool | None" = None,
) -> "dict[str, TokenStore]":
    """Build one store per split beside the files, and return them by split.

    Raises:
        SourceError: the entry is a question set, which has a reader instead.
    """
    from penstock.store.build import build

    entry = fetched.entry
    if entry.reader:
        raise SourceError(
            f"{entry.name} is a question set. Read it with penstock.catalog.{entry.reader}."
        )
    settings: dict[str, Any] = {"format": "text", "documents": entry.documents, "eos": entry.eos}
    settings |= {"tokenizer": tokenizer, "progress": progress}
    return {
        split: build(path, fetched.directory / split, **settings)
        for split, path in fetched.files.items()
    }


def _train_ratio(entry: Entry, split: float | None) -> float | None:
    if split is None:
        return entry.train_ratio
    if entry.train_ratio is None:
        splits = ", ".join(entry.splits)
        raise SourceError(f"{entry.name} comes split into {splits}. Leave out --split (split=).")
    # This form of the test also refuses NaN.
    if not 0 < split < 1:
        raise SourceError(f"split must be between 0 and 1, such as 0.9; got {split:g}.")
    return split


def _find_source(entry: Entry, source: str | PathLike[str]) -> str | Path:
    """Return what `source` names: a URL (str), or a file or directory (Path)."""
    text = fspath(source)
    # Only with "://": C:\data is a path, though it looks like a URL with the scheme "c".
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme in ("http", "https"):
        return text
    if scheme not in ("", "file"):
        raise FetchError(f"{scheme}:// is not supported. Name a path or an http(s):// URL.")
    path = Path(unquote(urlsplit(text).path)) if scheme else expand_user(text)
    if not path.exists():
        raise MissingInputError(f"{path} does not exist (working directory: {Path.cwd()}).")
    if path.is_file() and len(entry.remotes) > 1:
        names = ", ".join(remote.name for remote in entry.remotes)
        raise FetchError(
            f"{path} is one file, but {entry.name} has several: {names}. Name their directory."
        )
    return path


@dataclass
class _Fetch:
    """One fetch, under the lock of its directory."""

    entry: Entry
    directory: Path
    source: str | Path | None
    limits: DownloadLimits
    progress: Callable[[FetchProgress], None]
    receipt: Receipt
    received: int = 0

    def report(self, action: str, name: str) -> ByteProgress:
        """Return a callback that reports the bytes of one action on one file."""
        return lambda done, total: self.progress(FetchProgress(action, name, done, total))

    def fetch_remote(self, remote: RemoteFile) -> None:
        """Write all files of `remote` that are missing."""
        missing = [file for file in remote.files if not self.receipt.has(file)]
        if not missing:
            return
        if isinstance(self.source, Path):
            self._take_local(remote, missing, self.source)
            return
        try:
            if remote.packing == "plain":
                (file,) = missing
                # A temporary name: the user may have another file with the final name.
                path = self.receipt.temporary(file.name)
                path.unlink(missing_ok=True)  # of a fetch that was killed before the rename
                self._download(remote, path)
                self.receipt.move(file.name, sha256_of(path))
            else:
                archive = self.directory / remote.name
                self._download(remote, archive)
                self._unpack(remote.packing, missing, archive)
                archive.unlink()  # only now: after a kill, the archive need not be fetched again
        except FetchError as error:
            error.add_note(
                "Run the same command to try again. Without a network, copy "
                f"{remote.name} ({remote.urls[0]}) to this machine and name its directory: "
                f"penstock fetch {self.entry.name} --from DIRECTORY"
            )
            raise

    def _download(self, remote: RemoteFile, path: Path) -> None:
        # An archive that a killed fetch did not unpack, or that the user put here.
        if path.exists():
            if remote.sha256 and sha256_of(path) != remote.sha256:
                raise FetchError(
                    f"{path} does not have the SHA-256 {remote.sha256}. Delete it and try again."
                )
            return
        try:
            self.received += download(
                _urls(remote, self.source),
                path,
                num_bytes=remote.num_bytes,
                sha256=remote.sha256,
                limits=self.limits,
                progress=self.report("downloading", remote.name),
            )
        except KeyboardInterrupt as error:
            # A download resumes if its SHA-256 is known, and the Hub reports it for its files.
            if remote.sha256 or self.source is None:
                error.add_note("Received bytes are kept: run the same command to resume.")
            raise

    def _take_local(self, remote: RemoteFile, missing: list[EntryFile], source: Path) -> None:
        """Write missing files from a copy on disk: packed as upstream, or already unpacked."""
        # The file as upstream has it is preferred, because its SHA-256 is known more often.
        packed = source if source.is_file() else source / remote.name
        if packed.is_file():
            self._unpack(remote.packing, missing, packed)
            return
        # The copy may have the folders of the archive, or the files without folders, or the files
        # under the names that a fetch writes.
        names = [remote.name]
        copies = []
        for file in missing:
            known = [each for each in (file.member, Path(file.member).name, file.name) if each]
            names += known
            copies += [source / each for each in known if (source / each).is_file()][:1]
        if len(copies) < len(missing):
            found = sorted(path.name for path in source.glob("[!.]*"))
            raise FetchError(
                f"{source} does not hold {remote.name} or the files in it; looked for "
                f"{', '.join(dict.fromkeys(names))}. It holds {', '.join(found[:5]) or 'nothing'}."
            )
        for file, path in zip(missing, copies, strict=True):
            self._unpack("plain", [file], path)

    def _unpack(self, packing: Packing, missing: list[EntryFile], path: Path) -> None:
        action = "copying" if packing == "plain" else "unpacking"
        for file in missing:
            pieces = unpacked(path, packing, file, self.report(action, file.name))
            within = "" if packing == "plain" else f", {file.member or file.name}"
            self.receipt.write(file, pieces, f"{path}{within}")

    def split_text(self, ratio: float) -> dict[str, Path]:
        """Write train.txt and val.txt, cut between two characters; return their paths."""
        (file,) = self.entry.files
        text = (self.directory / file.name).read_bytes().decode()
        # Characters are counted, because a cut inside a character is not valid UTF-8.
        border = int(len(text) * ratio)
        paths = {}
        for split, part in (("train", text[:border]), ("val", text[border:])):
            paths[split] = self.receipt.write(EntryFile(name=f"{split}.txt"), [part.encode()])
        return paths


def _urls(remote: RemoteFile, mirror: Any) -> tuple[str, ...]:
    """Return the URLs to try for `remote`, in order."""
    if mirror is None:
        return remote.urls
    parts = urlsplit(mirror)
    # `mirror` may name the file itself, or its directory. A query is kept: it may be a signature.
    if parts.path.endswith(f"/{remote.name}"):
        return (mirror,)
    path = f"{parts.path.rstrip('/')}/{quote(remote.name)}"
    return (urlunsplit(parts._replace(path=path)),)
