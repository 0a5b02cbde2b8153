"""Reads downloaded files, and unpacks archives.

Members are looked up by the names that the catalog records, and written to names that the
catalog chooses. So a name inside an archive never becomes a path. Sizes are checked while a
member is unpacked, and its CRC at the end.
"""

import gzip
import stat
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from penstock.catalog.download import ByteProgress
from penstock.catalog.entries import EntryFile, Packing
from penstock.errors import FetchError

_BLOCK_BYTES = 1 << 20
# Text becomes 3 to 5 times smaller when it is compressed. A file that becomes 100 times smaller is
# a decompression bomb.
_MAX_EXPANSION = 100
# The exceptions that zipfile, gzip and zlib raise for a damaged archive.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, gzip.BadGzipFile)


def unpacked(
    path: Path, packing: Packing, file: EntryFile, progress: ByteProgress
) -> Iterator[bytes]:
    """Yield the contents of `file`; `path` is the file itself, or the archive that contains it.

    Raises:
        FetchError: the file is missing in the archive, damaged, or longer than it may be.
    """
    size, done = path.stat().st_size, 0
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(path.open("rb"))
            stream: IO[bytes] | gzip.GzipFile = raw
            limit = sys.maxsize
            if packing == "zip":
                opened = stack.enter_context(zipfile.ZipFile(raw))
                member = _member(opened, path, file)
                stream = stack.enter_context(opened.open(member))
                # `_member` checked the size in the header. A longer body would bypass that check.
                size = limit = member.file_size
            elif packing == "gzip":
                stream = stack.enter_context(gzip.GzipFile(fileobj=raw))
                limit = _limit(file, size)
            while piece := stream.read(_BLOCK_BYTES):
                done += len(piece)
                if done > limit:
                    raise FetchError(
                        f"{path}: {file.member or file.name} unpacks to more than {limit:,} bytes. "
                        "Delete the archive and fetch it again."
                    )
                # The unpacked size of a .gz is not known: progress counts bytes of the archive.
                progress(raw.tell() if packing == "gzip" else done, size)
                yield piece
    except _DAMAGED as error:
        raise FetchError(
            f"{path} is damaged: {file.member or file.name} cannot be unpacked ({error}). Delete "
            "the archive and fetch it again."
        ) from error


def _limit(file: EntryFile, packed_bytes: int) -> int:
    # Small files may be compressed more, so 16 MiB are always allowed.
    return file.num_bytes or max(1 << 24, _MAX_EXPANSION * packed_bytes)


def _member(opened: zipfile.ZipFile, archive: Path, file: EntryFile) -> zipfile.ZipInfo:
    # A .zip may hold a name twice, and tools differ in which one they take; so that is refused.
    found = [each for each in opened.infolist() if each.filename == file.member]
    if len(found) != 1:
        names = ", ".join(sorted(opened.namelist())[:5])
        raise FetchError(
            f"{archive} must hold {file.member} once, but holds it {len(found)} times. It holds "
            f"{names}."
        )
    member, limit = found[0], _limit(file, found[0].compress_size)
    # The upper 16 bits of external_attr are the Unix mode; bit 0 of flag_bits is encryption.
    if member.is_dir() or stat.S_ISLNK(member.external_attr >> 16) or member.flag_bits & 1:
        raise FetchError(f"{archive}: {file.member} is a link, a directory or encrypted.")
    if member.file_size > limit:
        raise FetchError(
            f"{archive}: {file.member} would unpack to {member.file_size:,} bytes, but at most "
            f"{limit:,} are allowed. Delete the archive and fetch it again."
        )
    return member
