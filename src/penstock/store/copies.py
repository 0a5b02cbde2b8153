"""Copies of files that are written once and never changed."""

import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from penstock.errors import MissingStoreError, StoreError
from penstock.paths import NamedFile, StoreUrl, store_path
from penstock.store.files import remove_file, write_file
from penstock.store.folders import open_to_read
from penstock.store.parts import REPAIR_ADVICE
from penstock.store.verify import file_problem

_BLOCK_BYTES = 1 << 20


def on_this_machine(path: str | os.PathLike[str] | StoreUrl) -> Path:
    """`path` as a path; raises if it is the URL of a remote store."""
    place = store_path(path)
    if isinstance(place, StoreUrl):
        raise StoreError(
            f"{place} is a URL, and this needs a directory of this machine. `penstock copy` (in "
            "Python, penstock.copy) copies stores from and to object storage."
        )
    return place


def copy_file(source: Path, target: Path, size: int, digest: str) -> None:
    """Copy a file and compare what was read with the record; a copy that is there already is kept.

    Raises:
        StoreError: the file has another size or other contents than recorded.
    """
    if target.is_symlink() or file_problem(target, size, digest) is not None:
        with _existing(source, size):
            written = write_file(target, _blocks(source))
        if written != (size, digest):
            remove_file(target)
            raise _damaged(source, written[1], digest)


def read_recorded(path: Path, size: int, digest: str) -> bytes:
    """The contents of a file, which must have the recorded size and digest."""
    with _existing(path, size) as stream:
        data = stream.read()
    # The bytes that are returned, and not the file: it may be replaced in between.
    if (found := xxhash.xxh3_128(data).hexdigest()) != digest:
        raise _damaged(path, found, digest)
    return data


def _existing(path: Path, size: int) -> NamedFile:
    """Open a file that must have the recorded size."""
    try:
        stream = open_to_read(path)
    except FileNotFoundError:
        raise MissingStoreError(f"{path} is missing. {REPAIR_ADVICE}") from None
    found = os.fstat(stream.fileno()).st_size
    if found != size:
        stream.close()
        raise StoreError(
            f"{path} has {found:,} bytes, but the manifest says {size:,}. {REPAIR_ADVICE}"
        )
    return stream


def _blocks(path: Path) -> Iterator[bytes]:
    with open_to_read(path) as stream:
        while block := stream.read(_BLOCK_BYTES):
            yield block


def _damaged(path: Path, found: str, digest: str) -> StoreError:
    return StoreError(
        f"{path} is damaged: its XXH3-128 is {found[:8]}…, but the manifest says {digest[:8]}…. "
        f"{REPAIR_ADVICE}"
    )
