"""One input file: what is known of it, how it is opened, and whether it changed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from penstock.disk import NamedFile, redacted
from penstock.errors import SourceError
from penstock.sources.remote import RemoteStream, file_system, remote_errors
from penstock.sources.settings import Texts

BOM = b"\xef\xbb\xbf"
_FOREIGN_BOMS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
MAGIC = {
    "gzip": b"\x1f\x8b\x08",
    "zstd": b"\x28\xb5\x2f\xfd",
    "bz2": b"BZh",
    "xz": b"\xfd7zXZ\x00",
}
"""The first bytes of each kind of compressed file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file to read, with its state at the time it was listed."""

    name: str
    """As the user wrote it, without credentials."""
    path: str
    """What to open."""
    size: int
    """Bytes on disk, before decompression."""
    stamp: str
    """Modification time or ETag, to detect a file that changed after it was listed."""
    format: str
    compression: str | None = None
    texts: Texts | None = None
    """The documents, if they are in memory and not in a file."""

    @property
    def remote(self) -> bool:
        """Whether the file is opened through fsspec."""
        return "://" in self.path

    def describe(self) -> dict[str, str | int | None]:
        """The file as JSON, for the manifest."""
        return {
            "name": self.name,
            "bytes": self.size,
            "format": self.format,
            "compression": self.compression,
        }


def open_file(file: InputFile) -> BinaryIO:
    """`file` opened for reading; a compressed file is not decompressed.

    Raises:
        SourceError: the file was removed after it was listed.
    """
    try:
        if file.remote:
            return cast(BinaryIO, RemoteStream(file.name, file.path))
        return cast(BinaryIO, NamedFile(file.path))
    except FileNotFoundError:
        raise _gone(file) from None


def read_fully(stream: BinaryIO, num_bytes: int) -> bytes:
    """The next `num_bytes` of `stream`, fewer only at its end; one `read` may return less."""
    # An unbuffered file returns what one system call gives: on Linux at most 2 GiB.
    data = stream.read(num_bytes)
    while len(data) < num_bytes and (more := stream.read(num_bytes - len(data))):
        data += more
    return data


def _gone(file: InputFile) -> SourceError:
    return SourceError(f"{file.name} was removed while it was read. Restore it and build again.")


def refuse_changed(file: InputFile) -> None:
    """Raise if `file` changed after it was listed.

    Raises:
        SourceError: the size, modification time or ETag differ.
    """
    if file.texts is not None:
        return
    try:
        size, stamp = file_state(file.path)
    except FileNotFoundError:
        raise _gone(file) from None
    if (size, stamp) != (file.size, file.stamp):
        raise SourceError(
            f"{file.name} changed while it was read ({file.size:,} bytes when the build began, "
            f"{size:,} now, or another modification time). Its documents would be a mixture of "
            "two versions. Run the build again when nothing writes to the file."
        )


def file_state(path: str) -> tuple[int, str]:
    """The size of a file, and its modification time or ETag."""
    if "://" in path:
        with remote_errors(redacted(path)):
            return _remote_state(file_system(path).info(path))
    state = Path(path).stat()
    return state.st_size, str(state.st_mtime_ns)


def _remote_state(info: dict[str, Any]) -> tuple[int, str]:
    if info.get("size") is None:
        raise SourceError(
            f"{redacted(str(info.get('name')))}: the server does not give the length of the file, "
            "so an incomplete download could not be detected. Download it first."
        )
    # Each file system calls it differently. The first one that is there decides.
    keys = ("ETag", "etag", "Content-MD5", "LastModified", "Last-Modified", "mtime", "created")
    stamp = next((str(info[key]) for key in keys if info.get(key) is not None), "")
    # A file is read in many requests, and without any of these it may be replaced between two.
    if not stamp and str(info.get("name")).startswith(("http://", "https://")):
        raise SourceError(
            f"{redacted(str(info['name']))}: the server gives neither ETag nor Last-Modified, so "
            "a file that is replaced while it is read could not be detected. Download it first."
        )
    return int(info["size"]), stamp


def byte_order_mark(block: bytes, file: InputFile) -> int:
    """The length of a UTF-8 byte order mark at the start of a file; 0 if there is none.

    Raises:
        SourceError: the mark is that of another encoding, or of a compressed file.
    """
    if block.startswith(BOM):
        return len(BOM)
    for name, mark in MAGIC.items():
        # "BZh" can be text, so the mark of the first block must follow.
        if block.startswith(mark) and (name != "bz2" or block[4:10] == b"1AY&SY"):
            advice = "Decompress it first, or give it the suffix of such files."
            raise SourceError(f"{file.name} begins like a {name} file and not like text. {advice}")
    for mark, name in _FOREIGN_BOMS.items():
        if block.startswith(mark):
            suffix = Path(file.name).suffix or ".txt"  # it decides how the converted file is read
            raise SourceError(
                f"{file.name} begins with the byte order mark of {name}, and penstock reads UTF-8. "
                f"Convert it: iconv -f {name} -t UTF-8 {file.name} > converted{suffix}"
            )
    return 0
