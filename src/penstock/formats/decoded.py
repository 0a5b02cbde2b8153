"""Files that cannot be mapped are decoded once, into the cache.

    ~/.cache/penstock/tokens/KEY.raw        (or $PENSTOCK_CACHE/tokens)
    ~/.cache/penstock/tokens/KEY.json       what was decoded, written last

The key is computed from the size, the time and 17 blocks of the original file, so a changed file is
decoded again. A file is written under a temporary name and renamed, so one with the final name was
whole. It may have been truncated later, so a copy of another size than was written is decoded
again. The cache can be deleted at any time.
"""

import errno
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.digest import digest_json
from penstock.errors import StoreError
from penstock.formats.index_file import looks_like, read_index
from penstock.formats.mapped import MappedArray, size_of
from penstock.formats.sample import spread_blocks
from penstock.paths import naming
from penstock.store.files import cache_directory, sync_directory, write_file

_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
_AT_ONCE = 1 << 20
# Token ids compress 2 to 10 times. A few hundred times is padding, and more is an attack.
_MOST_EXPANSION = 1000
# A small file may always expand to this: it fits into any memory.
_FREE_BYTES = 16 << 20


def cache_key(source: Path, *settings: object) -> str:
    """Return a name for what is decoded from a file with these settings."""
    blocks = spread_blocks(MappedArray(source, np.dtype("u1")).array())
    sampled = [hashlib.sha256(np.ascontiguousarray(each).data).hexdigest() for each in blocks]
    state = source.stat()
    return digest_json(["decoded", 1, state.st_size, state.st_mtime_ns, sampled, *settings])[:32]


def cached(
    name: str, pieces: Callable[[Path], Iterable[Any]], is_whole: Callable[[Path], bool]
) -> Path:
    """Return the path of a file in the cache; it is written from `pieces` if it is not whole.

    Several processes may call this at once: one of them writes.

    Args:
        name: The name of the file.
        pieces: Called with the directory; may write other files before this one.
        is_whole: Called with the path; whether the file, and what belongs to it, can be used.

    Raises:
        StoreError: the cache cannot be written.
    """
    path = cache_directory() / "tokens" / name
    if is_whole(path):
        return path
    # Imported here: stores need no decoded copies.
    from filelock import FileLock

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # fallback_to_soft: without flock, a killed process would leave a marker file for ever.
        lock = FileLock(path.parent / ".lock", thread_local=False, fallback_to_soft=False)
        with lock:
            if not is_whole(path):
                write_file(path, pieces(path.parent))
                sync_directory(path.parent)
    except OSError as error:
        # A file system such as /proc makes no directories, and says that they do not exist.
        no_directory = error.errno == errno.ENOENT and not path.parent.is_dir()
        if error.errno not in _NOT_WRITABLE and not no_directory:
            raise
        raise StoreError(
            f"{path.parent} cannot be written ({error.strerror}), and this file has to be decoded "
            "there before it can be mapped. Set PENSTOCK_CACHE to a directory that can be written."
        ) from error
    return path


def expansion_limit(source: Path) -> int:
    """Return how many bytes the contents of a compressed file may have."""
    return max(_FREE_BYTES, size_of(source) * _MOST_EXPANSION)


def refuse_expansion(source: Path) -> StoreError:
    """Return the error for a file that expands to more than its limit."""
    return StoreError(
        f"{source} ({size_of(source):,} bytes) expands to more than {expansion_limit(source):,} "
        "bytes. Token ids do not compress so well: it is damaged, or a decompression bomb. If you "
        "trust it, decompress it with the tool that wrote it."
    )


def decompressed(source: Path) -> Path:
    """Return the path of the contents of a zstd file, in the cache.

    Raises:
        StoreError: it is damaged, or expands to more than its limit.
    """
    key = cache_key(source)
    done = cached(f"{key}.json", lambda folder: _decompress(folder / key, source), _is_whole)
    return done.with_suffix(".raw")


def _is_whole(done: Path) -> bool:
    """Return whether a decompressed copy has as many bytes as were written."""
    raw = done.with_suffix(".raw")
    is_there = looks_like(done, "bytes") and raw.is_file()
    return is_there and read_index(done)["bytes"] == size_of(raw)


def _decompress(target: Path, source: Path) -> Iterator[bytes]:
    """Write the contents of a zstd file to `KEY.raw`; yield the contents of `KEY.json`."""
    size, _ = write_file(target.with_suffix(".raw"), _expanded(source))
    yield json.dumps({"bytes": size}).encode()


def _expanded(source: Path) -> Iterator[bytes]:
    import pyarrow as pa

    limit, done = expansion_limit(source), 0
    try:
        with naming(source), pa.CompressedInputStream(pa.OSFile(str(source)), "zstd") as stream:
            # Block by block: the limit stops a bomb before it fills memory or disk.
            while block := stream.read(_AT_ONCE):
                done += len(block)
                if done > limit:
                    raise refuse_expansion(source)
                yield block
    except (pa.ArrowException, OSError) as error:
        # The caller's own errors of writing do not pass here: they are raised in `write_file`.
        raise StoreError(f"{source} cannot be decompressed as zstd: {error}.") from error
