"""Files put under their names, without ever losing one that is somebody else's.

A receipt in the directory, `.fetched.json`, lists what a fetch wrote there with its SHA-256.
A file of the same contents is left alone, so that its modification time stays and stores
built from it stay good; one that the receipt lists may be replaced; any other is refused.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from penstock.errors import FetchError
from penstock.store.files import digest_file, sync_directory, write_file

__all__ = ["Receipt", "copied", "occupied", "place"]

_BLOCK_BYTES = 1 << 20


class Receipt:
    """What was fetched into a directory: SHA-256 by name."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / ".fetched.json"
        self.digests: dict[str, str] = {}
        try:
            held = json.loads(self._path.read_bytes())["files"]
            self.digests = {str(name): str(digest) for name, digest in held.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # none yet, or damaged: then nothing is known to be ours

    def add(self, path: Path, sha256: str) -> None:
        """Record a file, on disk before this returns."""
        if self.digests.get(path.name) == sha256:
            return
        self.digests[path.name] = sha256
        held: dict[str, Any] = {"files": dict(sorted(self.digests.items()))}
        write_file(self._path, [json.dumps(held, indent=1).encode()])
        sync_directory(path.parent)


def place(
    path: Path,
    pieces: Iterable[bytes],
    receipt: Receipt,
    *,
    num_bytes: int | None = None,
    sha256: str | None = None,
    origin: str = "",
) -> str:
    """Write `pieces` to `path`, where that harms nothing, and record it; returns its SHA-256.

    Args:
        path: The name it is to have.
        pieces: Its contents.
        receipt: Of its directory.
        num_bytes: The length that is right, where known.
        sha256: The digest that is right, where known.
        origin: Where the pieces come from, for messages.

    Raises:
        FetchError: the contents are not those that are right, or another file has the name.
    """
    fresh = path.with_name(f".{path.name}.new")
    size, found = write_file(fresh, pieces)
    try:
        if num_bytes is not None and size != num_bytes:
            raise FetchError(f"{origin} has {size:,} bytes of text, and {num_bytes:,} are right.")
        if sha256 is not None and found != sha256:
            raise FetchError(f"{origin} has SHA-256 {found}, and {sha256} is right.")
        held = digest_file(path) if path.exists() else None
        if held == found:
            fresh.unlink()
        elif held in (None, receipt.digests.get(path.name)):
            fresh.replace(path)
            sync_directory(path.parent)
        else:
            raise occupied(path)
    finally:
        fresh.unlink(missing_ok=True)
    receipt.add(path, found)
    return found


def occupied(path: Path) -> FetchError:
    """The refusal to overwrite a file that no fetch wrote."""
    return FetchError(
        f"{path} is there already with other contents, and no fetch wrote it; it is left as it is. "
        "Move it away, or name another directory with --output."
    )


def copied(path: Path, progress: Callable[[int, int | None], None]) -> Iterator[bytes]:
    """The bytes of a file, in blocks, telling how far they are."""
    total, done = path.stat().st_size, 0
    with path.open("rb") as stream:
        while piece := stream.read(_BLOCK_BYTES):
            yield piece
            done += len(piece)
            progress(done, total)
