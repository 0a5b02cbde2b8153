"""`fetch`: a dataset of the catalog into a directory.

    data/tinyshakespeare/
    ├── tinyshakespeare.txt   as it lies upstream
    ├── train.txt             the first nine tenths of its characters
    ├── val.txt               the rest
    └── train/  val/          stores, from `build_stores`

Everything happens under the directory's lock. A second fetch of the same waits for the
first and then finds its files good.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.catalog.download import Patience, Wanted, download
from penstock.catalog.entries import Entry, Remote, Text, find_entry
from penstock.catalog.origin import Origin, find_origin
from penstock.catalog.place import Receipt, copied, occupied, place
from penstock.catalog.unpack import gunzipped, unzipped
from penstock.errors import FetchError, SourceError, StoreBusyError
from penstock.store.files import digest_file
from penstock.store.lock import locked

if TYPE_CHECKING:
    from penstock.store.job import Progress as BuildProgress
    from penstock.store.reader import TokenStore

__all__ = ["FetchProgress", "Fetched", "build_stores", "fetch"]

_BUSY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How far a fetch is; what its callback is given."""

    action: str
    """"downloading", "copying", "unpacking", "splitting" or "waiting"."""
    name: str
    done_bytes: int
    total_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """What a fetch left in its directory."""

    entry: Entry
    directory: Path
    files: dict[str, Path]
    """The text of each side: "train", "val", and "test" where there is one."""
    raw: Path | None
    """The text before it was split, where it was."""
    received_bytes: int
    """That came over the network in this call: 0 if everything was there."""
    seconds: float


def fetch(
    name: str,
    directory: str | os.PathLike[str] | None = None,
    *,
    source: str | os.PathLike[str] | None = None,
    split: float | None = None,
    patience: Patience | None = None,
    progress: Callable[[FetchProgress], None] | None = None,
) -> Fetched:
    """Bring the dataset `name` into `directory`, and say where its files are.

    Files that are there and right are not requested again. One that is there and is
    something else is not overwritten: that is an error.

    Args:
        name: Of an entry of the catalog.
        directory: Where to; `data/NAME` if not given.
        source: A directory, file or URL to take the files from instead: a mirror, or a copy
            that somebody carried here.
        split: How much of a text that comes as one file is for training.
        patience: With servers.
        progress: Called often, from this thread.

    Raises:
        FetchError: a file cannot be had, or is not the one that is meant.
        SourceError: the catalog has no such entry, or it cannot be split so.
        DiskFullError: there is no room; run again when there is.
    """
    begun = time.monotonic()
    entry = find_entry(name)
    share = _share(entry, split)
    origin = find_origin(entry, source)
    target = Path(directory) if directory is not None else Path("data") / entry.name
    target.mkdir(parents=True, exist_ok=True)
    job = _Job(entry, target, origin, patience or Patience(), progress or _tell_nobody)
    with _alone(target, job.tell):
        _sweep(target)
        job.receipt = Receipt(target)
        for remote in entry.remotes:
            job.bring(remote)
        files = job.split(share) if share else {each.side: job.path(each) for each in entry.texts}
    return Fetched(
        entry=entry,
        directory=target,
        files={str(side): path for side, path in files.items()},
        raw=job.path(entry.texts[0]) if share else None,
        received_bytes=job.received,
        seconds=time.monotonic() - begun,
    )


def build_stores(
    fetched: Fetched,
    *,
    tokenizer: Any = "gpt2",
    progress: "Callable[[BuildProgress], None] | None" = None,
) -> "dict[str, TokenStore]":
    """Build a store a side beside the texts, with the documents that the entry records.

    Raises:
        SourceError: the entry is a set of questions, which has readers of its own.
    """
    from penstock.store.build import build

    entry = fetched.entry
    if entry.reader:
        raise SourceError(
            f"{entry.name} is a set of questions, not of texts, so no store is built of it. Read "
            f"it with penstock.catalog.{entry.reader}."
        )
    return {
        side: build(
            path,
            fetched.directory / side,
            tokenizer=tokenizer,
            format="text",
            documents=entry.documents,
            eos=entry.eos,
            progress=progress,
        )
        for side, path in fetched.files.items()
    }


def _tell_nobody(now: FetchProgress) -> None:
    pass


def _share(entry: Entry, split: float | None) -> float | None:
    if split is None:
        return entry.split
    if entry.split is None:
        sides = ", ".join(entry.sides)
        raise SourceError(f"{entry.name} comes split into {sides}. Leave split={split:g} out.")
    if not 0 < split < 1:
        raise SourceError(f"split={split:g} leaves one side empty; it is a share such as 0.9.")
    return split


class _Job:
    """One fetch, under the lock of its directory."""

    receipt: Receipt

    def __init__(
        self,
        entry: Entry,
        directory: Path,
        origin: Origin,
        patience: Patience,
        progress: Callable[[FetchProgress], None],
    ) -> None:
        self._entry = entry
        self._directory = directory
        self._origin = origin
        self._patience = patience
        self._progress = progress
        self.received = 0

    def path(self, text: Text) -> Path:
        """Where a text lies once it is fetched."""
        return self._directory / text.name

    def tell(self, action: str, name: str) -> Callable[[int, int | None], None]:
        """A callback for bytes of one action on one file."""
        return lambda done, total: self._progress(FetchProgress(action, name, done, total))

    def bring(self, remote: Remote) -> None:
        """Make all texts of `remote` good."""
        missing = [text for text in remote.texts if not self._good(text)]
        if not missing:
            return
        loose = self._origin.loose(remote)
        if loose:
            for text in missing:
                self._copy(loose[text.name], text)
            return
        try:
            self._unpack(remote, missing)
        except FetchError as error:
            self._advise(error, remote)
            raise

    def _good(self, text: Text) -> bool:
        """Whether a text is there and right.

        Raises:
            FetchError: something else has its name.
        """
        path = self.path(text)
        if not path.exists():
            return False
        right = text.sha256 or self.receipt.digests.get(text.name)
        if text.num_bytes is not None and path.stat().st_size != text.num_bytes:
            raise occupied(path)
        if right is None:
            # A size of eleven digits is no accident; without even that, it is not known yet.
            return text.num_bytes is not None
        if digest_file(path) == right:
            return True
        raise occupied(path)

    def _copy(self, held: Path, text: Text) -> None:
        pieces = copied(held, self.tell("copying", text.name))
        right = {"num_bytes": text.num_bytes, "sha256": text.sha256}
        place(self.path(text), pieces, self.receipt, origin=str(held), **right)  # type: ignore[arg-type]

    def _unpack(self, remote: Remote, missing: list[Text]) -> None:
        """Bring the file as upstream has it, and out of it what is missing."""
        held = self._origin.held(remote)
        archive = held or self._directory / remote.name
        if remote.packing == "plain":
            (text,) = missing
            if held:
                self._copy(held, text)
            else:
                self._download(remote, self.path(text))
                self.receipt.add(self.path(text), digest_file(self.path(text)))
            return
        if not archive.exists():
            self._download(remote, archive)
        elif remote.sha256 and digest_file(archive) != remote.sha256:
            raise FetchError(
                f"{archive} is not the file that is meant: its SHA-256 is not {remote.sha256}. "
                "Remove it and run this again."
            )
        unpacked = unzipped if remote.packing == "zip" else gunzipped
        for text in missing:
            pieces = unpacked(archive, text, self.tell("unpacking", text.name))
            place(
                self.path(text),
                pieces,
                self.receipt,
                num_bytes=text.num_bytes,
                sha256=text.sha256,
                origin=f"{archive}, {text.member or text.name}",
            )
        if not held:
            archive.unlink()

    def _download(self, remote: Remote, path: Path) -> None:
        wanted = Wanted(path=path, num_bytes=remote.num_bytes, sha256=remote.sha256)
        tell = self.tell("downloading", remote.name)
        urls = self._origin.urls(remote)
        try:
            self.received += download(urls, wanted, patience=self._patience, progress=tell)
        except KeyboardInterrupt as error:
            error.add_note("What has come is kept: the same command goes on where it stopped.")
            raise

    def _advise(self, error: FetchError, remote: Remote) -> None:
        if not self._origin.network:
            return
        error.add_note(
            f"The same command goes on where it stopped. Without a network, bring {remote.name} "
            f"({remote.urls[0]}) here by other means, and name its directory: "
            f"penstock fetch {self._entry.name} --from DIRECTORY"
        )

    def split(self, share: float) -> dict[str | None, Path]:
        """Write the two sides of a text, cut between characters."""
        (text,) = self._entry.texts
        whole = self.path(text).read_bytes().decode()
        border = int(len(whole) * share)
        files: dict[str | None, Path] = {}
        for side, part in (("train", whole[:border]), ("val", whole[border:])):
            files[side] = self._directory / f"{side}.txt"
            place(files[side], [part.encode()], self.receipt)
        return files


@contextmanager
def _alone(
    directory: Path, tell: Callable[[str, str], Callable[[int, int | None], None]]
) -> Iterator[None]:
    """Hold the directory's lock; while another process fetches into it, wait for that.

    Raises:
        StoreBusyError: whoever holds it has written nothing for a minute.
    """
    seen, since = _sizes(directory), time.monotonic()
    while True:
        lock = locked(directory)
        try:
            lock.__enter__()
            break
        except StoreBusyError:
            now = _sizes(directory)
            if now != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > _BUSY_SECONDS:
                raise
            tell("waiting", str(directory))(sum(now.values()), None)
            time.sleep(0.1)
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def _sizes(directory: Path) -> dict[str, int]:
    """What a working process would change."""
    sizes = {}
    for path in directory.iterdir():
        with suppress(FileNotFoundError):  # renamed while we look
            sizes[path.name] = path.stat().st_size
    return sizes


def _sweep(directory: Path) -> None:
    """Remove what fetches that were killed left behind.

    Temporary names of hidden files begin with two dots. The directory may be anybody's, so
    nothing else that is called temporary is touched.
    """
    for path in directory.glob("..*.tmp"):
        path.unlink(missing_ok=True)
