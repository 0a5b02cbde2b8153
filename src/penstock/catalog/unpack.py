"""Read downloaded files: plain, or out of archives.

Members are looked up by the names that the catalog records, and written to names that the
catalog chooses. So a name inside an archive never becomes a path. Sizes are checked while a
member is unpacked, and its CRC at the end.
"""

import gzip
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from penstock.catalog.download import ByteProgress
from penstock.catalog.entries import EntryFile
from penstock.errors import FetchError

_BLOCK_BYTES = 1 << 20
# Text becomes 3 to 5 times smaller when it is compressed. A file that becomes 100 times smaller is
# a decompression bomb.
_MAX_EXPANSION = 100
# The exceptions that zipfile, gzip and zlib raise for a damaged archive.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, gzip.BadGzipFile)


def copied(path: Path, file: EntryFile, progress: ByteProgress) -> Iterator[bytes]:
    """Yield the contents of a file that is not packed."""
    size, done = path.stat().st_size, 0
    with path.open("rb") as stream:
        while piece := stream.read(_BLOCK_BYTES):
            done += len(piece)
            progress(done, size)
            yield piece


def unzipped(archive: Path, file: EntryFile, progress: ByteProgress) -> Iterator[bytes]:
    """Yield the contents of one member of a .zip archive.

    Raises:
        FetchError: the member is missing, damaged, or not a regular file of the right size.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            member = _member(opened, archive, file)
            with opened.open(member) as stream:
                done = 0
                while piece := stream.read(_BLOCK_BYTES):
                    done += len(piece)
                    # Only the size in the header was checked; a longer body would bypass that
                    # check.
                    if done > member.file_size:
                        raise FetchError(
                            f"{archive}: {file.member} is longer than its header says."
                        )
                    progress(done, member.file_size)
                    yield piece
    except _DAMAGED as error:
        raise _damaged(archive, file.member, error) from error


def gunzipped(archive: Path, file: EntryFile, progress: ByteProgress) -> Iterator[bytes]:
    """Yield the contents of a .gz file, with all its members.

    Raises:
        FetchError: it is truncated, damaged, or longer than the expected size.
    """
    size = archive.stat().st_size
    # Small files may be compressed more, so 16 MiB are always allowed.
    limit = file.num_bytes or max(1 << 24, _MAX_EXPANSION * size)
    done = 0
    try:
        with archive.open("rb") as raw, gzip.GzipFile(fileobj=raw) as stream:
            while piece := stream.read(_BLOCK_BYTES):
                done += len(piece)
                if done > limit:
                    raise FetchError(f"{archive} unpacks to more than {limit:,} bytes.")
                # The unpacked size is not known, so progress counts the bytes of the archive.
                progress(raw.tell(), size)
                yield piece
    except _DAMAGED as error:
        raise _damaged(archive, file.name, error) from error


def _member(opened: zipfile.ZipFile, archive: Path, file: EntryFile) -> zipfile.ZipInfo:
    # A .zip may hold a name twice, and tools differ in which one they take; so that is refused.
    found = [each for each in opened.infolist() if each.filename == file.member]
    if len(found) != 1:
        names = ", ".join(sorted(opened.namelist())[:5])
        raise FetchError(
            f"{archive} must hold {file.member} once, but holds it {len(found)} times. It holds "
            f"{names}."
        )
    member = found[0]
    limit = file.num_bytes or max(1 << 24, _MAX_EXPANSION * member.compress_size)
    # The upper 16 bits of external_attr are the Unix mode; bit 0 of flag_bits is encryption.
    if member.is_dir() or stat.S_ISLNK(member.external_attr >> 16) or member.flag_bits & 1:
        raise FetchError(f"{archive}: {file.member} is a link, a directory or encrypted.")
    if member.file_size > limit:
        raise FetchError(
            f"{archive}: {file.member} would unpack to {member.file_size:,} bytes, but at most "
            f"{limit:,} are allowed."
        )
    return member


def _damaged(archive: Path, name: str, error: Exception) -> FetchError:
    return FetchError(
        f"{archive} is damaged: {name} cannot be unpacked ({error}). Delete the archive and fetch "
        "it again."
    )
