"""The directory of a fetch: its lock, its files, and a receipt of what was fetched.

The receipt, `.fetched.json`, lists every file that a fetch wrote, with its SHA-256. A fetch
never overwrites a file with the same contents: its modification time stays, so stores built
from it stay valid. It may replace a file that a fetch wrote and nobody has changed. Any other file
belongs to the user, and a fetch refuses to overwrite it.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from penstock.catalog.entries import EntryFile
from penstock.disk import locked, read_file, rename, sync_directory, write_file
from penstock.errors import FetchError, StoreBusyError

# A fetch has a timeout of 30 s, so it writes something at least that often. A fetch that writes
# nothing for twice that time hangs.
_BUSY_SECONDS = 60.0


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's contents, which is what the publishers of datasets record."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class Receipt:
    """The files that were fetched into a directory: SHA-256 by name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / ".fetched.json"
        self._digests: dict[str, str] = {}
        # Without a readable receipt, every file counts as the user's and nothing is replaced.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            files = json.loads(read_file(self._path))["files"]
            self._digests = {str(name): str(digest) for name, digest in files.items()}

    def has(self, file: EntryFile) -> bool:
        """Return whether the right file is in the directory.

        Raises:
            FetchError: a different file has its name.
        """
        path = self._directory / file.name
        if not path.exists():
            return False
        # The size first: it costs nothing, while a digest reads the whole file.
        if file.num_bytes is not None and path.stat().st_size != file.num_bytes:
            raise _occupied(path)
        expected = file.sha256 or self._digests.get(file.name)
        if expected is None:
            # There is no SHA-256 to compare, so the size decides. If the size is unknown too, the
            # file is fetched again and compared.
            return file.num_bytes is not None
        if sha256_of(path) != expected:
            raise _occupied(path)
        return True

    def write(self, file: EntryFile, pieces: Iterable[bytes], source: str = "") -> Path:
        """Write `pieces` to `file` and record it; return its path.

        Error messages name `source` as the origin of the pieces.

        Raises:
            FetchError: the contents are not the right ones, or the name belongs to a file of
                the user.
        """
        # The file is written and checked under another name, so a wrong file never has the right
        # name.
        new = self.temporary(file.name)
        size, _ = write_file(new, pieces)
        found = sha256_of(new)
        try:
            if size != (file.num_bytes or size):
                raise FetchError(
                    f"{source} has {size:,} bytes, but {file.num_bytes:,} are expected."
                )
            if found != (file.sha256 or found):
                raise FetchError(f"{source} has SHA-256 {found}, but {file.sha256} is expected.")
            return self.move(file.name, found)
        finally:
            new.unlink(missing_ok=True)

    def temporary(self, name: str) -> Path:
        """Return the path where the file `name` is written before it gets its name."""
        return self._directory / f".{name}.new"

    def move(self, name: str, sha256: str) -> Path:
        """Give the temporary file its name, and record it on disk; return its path.

        Raises:
            FetchError: the name belongs to a file of the user.
        """
        path, new = self._directory / name, self.temporary(name)
        existing = sha256_of(path) if path.exists() else None
        # The name may be free, or belong to the same contents, or to a file that a fetch wrote and
        # nobody edited.
        if existing not in (None, sha256, self._digests.get(name)):
            raise _occupied(path)
        if existing == sha256:
            new.unlink()
        else:
            rename(new, path)
        if self._digests.get(name) != sha256:
            self._digests[name] = sha256
            # The entry is added after the rename. A kill in between leaves a file without an entry,
            # and the next fetch recognises it by its checksum.
            receipt = {"files": dict(sorted(self._digests.items()))}
            write_file(self._path, [json.dumps(receipt, indent=1).encode()])
            sync_directory(self._directory)
        return path


def _occupied(path: Path) -> FetchError:
    return FetchError(
        f"{path} already exists with other contents than the dataset's, so it is not "
        "overwritten. Move it away, or choose another directory."
    )


@contextmanager
def wait_for_lock(directory: Path, waiting: Callable[[int], None]) -> Iterator[None]:
    """Hold the directory's lock; wait while another process fetches into the directory.

    `waiting` is called every 0.1 s with the bytes in the directory.

    Raises:
        StoreBusyError: the process that holds the lock wrote nothing for a minute.
    """
    seen, since = _sizes(directory), time.monotonic()
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(directory))
                break
            except StoreBusyError:
                sizes = _sizes(directory)
                if sizes != seen:
                    seen, since = sizes, time.monotonic()
                if time.monotonic() - since > _BUSY_SECONDS:
                    raise
                waiting(sum(sizes.values()))
                time.sleep(0.1)
        # Killed fetches leave temporary files of `write_file` behind, which are removed here.
        # `write_file` puts a dot before the name, and the names of `.new` files begin with one
        # already, so theirs begin with two. Other temporary files may belong to the user.
        for path in directory.glob("..*.tmp"):
            path.unlink(missing_ok=True)
        yield


def _sizes(directory: Path) -> dict[str, int]:
    """Return the size of each file. Sizes change while another process is fetching."""
    sizes = {}
    for path in directory.iterdir():
        with suppress(FileNotFoundError):  # renamed after it was listed
            sizes[path.name] = path.stat().st_size
    return sizes
