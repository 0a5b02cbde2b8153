"""Texts out of archives.

Members are looked up by the names that the catalog records, and written under names that
the catalog chooses: a name inside an archive never becomes a path. Sizes are checked while
a member grows, CRCs at its end.
"""

import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.catalog.entries import Text
from penstock.errors import FetchError
from penstock.sources.expand import Expanded
from penstock.sources.listing import list_files
from penstock.sources.reading import Reading

__all__ = ["gunzipped", "unzipped"]

_BLOCK_BYTES = 1 << 20
# Text shrinks three to five times; a hundred is a bomb.
_MAX_EXPANSION = 100

Progress = Callable[[int, int | None], None]


def unzipped(archive: Path, text: Text, progress: Progress) -> Iterator[bytes]:
    """The contents of one member of a .zip.

    Raises:
        FetchError: it is not there, or not what a text can be.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            member = _member(opened, archive, text)
            with opened.open(member) as stream:
                done = 0
                while piece := stream.read(_BLOCK_BYTES):
                    done += len(piece)
                    if done > member.file_size:
                        raise FetchError(f"{archive}: {text.member} is longer than it says.")
                    progress(done, member.file_size)
                    yield piece
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise FetchError(
            f"{archive} cannot be unpacked at {text.member} ({error}). Remove it and fetch again."
        ) from error


def _member(opened: zipfile.ZipFile, archive: Path, text: Text) -> zipfile.ZipInfo:
    found = [each for each in opened.infolist() if each.filename == text.member]
    if len(found) != 1:
        names = ", ".join(sorted(opened.namelist())[:5])
        raise FetchError(
            f"{archive} holds {text.member} {len(found)} times, and once is right. "
            f"It holds {names}."
        )
    member = found[0]
    mode = member.external_attr >> 16
    limit = text.num_bytes or max(1 << 24, _MAX_EXPANSION * member.compress_size)
    if member.is_dir() or stat.S_ISLNK(mode) or member.flag_bits & 1:
        raise FetchError(f"{archive}: {text.member} is a link, a directory or encrypted.")
    if member.file_size > limit:
        raise FetchError(
            f"{archive}: {text.member} would grow to {member.file_size:,} bytes, and {limit:,} is "
            "the most that is taken."
        )
    return member


def gunzipped(archive: Path, text: Text, progress: Progress) -> Iterator[bytes]:
    """The contents of a .gz, all members of it.

    Raises:
        SourceError: it is cut, damaged or a bomb.
    """
    (file,) = list_files(archive, Reading(format="text"))
    stream = Expanded(file, _MAX_EXPANSION)
    try:
        while piece := stream.read(_BLOCK_BYTES):
            if text.num_bytes is not None and stream.position > text.num_bytes:
                raise FetchError(
                    f"{archive} holds more text than the {text.num_bytes:,} bytes that are right."
                )
            progress(stream.disk_position, file.size)
            yield piece
    finally:
        stream.close()
