"""One input file: what is known of it, how it is opened and decompressed, and whether it changed.

Every frame or member of a compressed file is read, not only the first. A file that was cut off or
is followed by other data raises an error with the position, and so does a file that ends before
its size. Files on other machines are opened through fsspec. Some HTTP servers and proxies ignore
what they are asked for, so each response is checked: a part of the file is the part that was asked
for, and it is not compressed. No message shows a user, a password or a query.
"""

import bz2
import io
import lzma
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from penstock.disk import NamedFile
from penstock.errors import MissingExtraError, SourceError
from penstock.paths import redacted, without_secrets
from penstock.sources.settings import Texts

BOM = b"\xef\xbb\xbf"
_FOREIGN_BOMS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_MAGIC = {
    "gzip": b"\x1f\x8b\x08",
    "zstd": b"\x28\xb5\x2f\xfd",
    "bz2": b"BZh",
    "xz": b"\xfd7zXZ\x00",
}
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "penstock[s3]"),
    **dict.fromkeys(("http", "https"), "fsspec[http]"),
    **dict.fromkeys(("gs", "gcs"), "fsspec[gcs]"),
    **dict.fromkeys(("az", "abfs", "abfss"), "fsspec[abfs]"),
}


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
        return cast(
            BinaryIO,
            _RemoteFile(file.name, file.path) if file.remote else NamedFile(file.path),
        )
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
    if "://" not in path:
        state = Path(path).stat()
        return state.st_size, str(state.st_mtime_ns)
    with remote_errors(redacted(path)):
        info = file_system(path).info(path)
    # Each file system calls it differently. The first one that is there decides.
    keys = ("ETag", "etag", "Content-MD5", "LastModified", "Last-Modified", "mtime", "created")
    stamp = next((str(info[key]) for key in keys if info.get(key) is not None), "")
    # A file is read in many requests, and without any of these it may be replaced between two.
    if info.get("size") is None or (not stamp and path.startswith("http")):
        missing = "the length of the file" if info.get("size") is None else "ETag or Last-Modified"
        raise SourceError(
            f"{redacted(path)}: the server does not give {missing}, so a file that is incomplete "
            "or replaced while it is read could not be detected. Download it first."
        )
    return int(info["size"]), stamp


def byte_order_mark(block: bytes, file: InputFile) -> int:
    """The length of a UTF-8 byte order mark at the start of a file; 0 if there is none.

    Raises:
        SourceError: the mark is that of another encoding, or of a compressed file.
    """
    if block.startswith(BOM):
        return len(BOM)
    for kind, mark in _MAGIC.items():
        # "BZh" can be text, so the mark of the first block must follow.
        if block.startswith(mark) and (kind != "bz2" or block[4:10] == b"1AY&SY"):
            raise SourceError(
                f"{file.name} begins like a {kind} file and not like text. Decompress it first, or "
                "give it the suffix of such files."
            )
    for mark, encoding in _FOREIGN_BOMS.items():
        if block.startswith(mark):
            suffix = Path(file.name).suffix or ".txt"  # it decides how the converted file is read
            raise SourceError(
                f"{file.name} begins with the byte order mark of {encoding}, and penstock reads "
                f"UTF-8. Convert it: iconv -f {encoding} -t UTF-8 {file.name} > converted{suffix}"
            )
    return 0


class Expanded:
    """The decompressed bytes of one file, read in order."""

    def __init__(self, file: InputFile) -> None:
        if file.size == 0 and file.compression:
            raise SourceError(
                f"{file.name} is empty, and a {file.compression} file never is: it was cut off. "
                "Download or write it again."
            )
        self._file = file
        self._raw = open_file(file)
        self._stream = _decompressor(self._raw, file.compression)
        self._peeked = b""
        self.position = 0
        self._taken = 0

    def peek(self, num_bytes: int) -> bytes:
        """The next `num_bytes` bytes, fewer only at the end; `read` returns them again."""
        if len(self._peeked) < num_bytes:
            self._peeked = self.read(num_bytes)
        return self._peeked[:num_bytes]

    def read(self, num_bytes: int) -> bytes:
        """The next `num_bytes` bytes, fewer only at the end."""
        # Usually there is one piece, which is returned without a copy.
        pieces = [self._peeked[:num_bytes]] if self._peeked else []
        self._peeked = self._peeked[num_bytes:]
        missing = num_bytes - sum(map(len, pieces))
        while missing:
            piece = self._read_some(missing)
            if not piece:
                self._refuse_early_end()
                break
            pieces.append(piece)
            missing -= len(piece)
            self.position += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_some(self, num_bytes: int) -> bytes:
        kind = self._file.compression
        try:
            return bytes(self._stream.read(num_bytes))
        except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
            if kind is None:
                raise
            with open_file(self._file) as stream:
                first = stream.read(16)
            # A file that was cut off may have fewer bytes than the mark.
            if not self.position and not _MAGIC[kind].startswith(first[: len(_MAGIC[kind])]):
                raise SourceError(
                    f"{self._file.name} is not a {kind} file, though its name says so: it begins "
                    f"with {first!r}. Give it the suffix of its contents."
                ) from None
            raise SourceError(
                f"{self._file.name} cannot be decompressed past byte {self.position:,} of its "
                f"text ({kind}: {error}). It was cut off or damaged, or something follows the "
                "compressed data. Download or write it again."
            ) from error

    def _refuse_early_end(self) -> None:
        """Raise if the stream has ended and the file has not.

        A cut between two members is not visible in the compressed data. Some network mounts end a
        file early when they lose their server, and the rest of the documents would be missing.
        """
        if self._file.size and (place := self._raw.tell()) < self._file.size:
            raise SourceError(
                f"{self._file.name} ended after {place:,} bytes, but it had {self._file.size:,} "
                "when it was listed. It was cut off, or the disk or server that it is on did not "
                "deliver all of it. Restore it, and run this again."
            )

    def take_disk_bytes(self) -> int:
        """How many bytes of the file on disk were read since the last call."""
        before, self._taken = self._taken, self._raw.tell()
        return self._taken - before

    def close(self) -> None:
        """Close the file."""
        self._raw.close()


def _decompressor(raw: BinaryIO, compression: str | None) -> Any:
    if compression is None:
        return raw
    if compression == "xz":
        return _Members(raw, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), padding=b"\0")
    if compression == "bz2":
        return _Members(raw, bz2.BZ2Decompressor, padding=b"")
    import pyarrow as pa

    # Arrow's streams continue after the end of a frame or member, and fail if one is cut off.
    return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)


class _Members:
    """All members of an .xz or .bz2 file; any other data after them is an error.

    Python's own readers ignore such data, and Arrow's reader fails on an empty .bz2 stream.
    """

    def __init__(self, raw: BinaryIO, decoder: Callable[[], Any], *, padding: bytes) -> None:
        self._raw = raw
        self._next_decoder = decoder
        self._padding = padding
        self._decoder = decoder()

    def read(self, num_bytes: int) -> bytes:
        """At most `num_bytes` bytes; `b""` means the end of the file."""
        waiting = data = b""
        while not data:
            if self._decoder.eof:
                # `unused_data` is what follows a member. In .xz files, zero bytes may.
                waiting = self._decoder.unused_data.lstrip(self._padding)
                while not waiting:
                    more = self._raw.read(1 << 16)
                    if not more:
                        return b""
                    waiting = more.lstrip(self._padding)
                self._decoder = self._next_decoder()
            # A decoder that was given a length limit may have output left and need no input.
            if self._decoder.needs_input and not waiting:
                waiting = self._raw.read(1 << 16)
                if not waiting:
                    raise EOFError("the stream ends before its end mark")
            data, waiting = bytes(self._decoder.decompress(waiting, num_bytes)), b""
        return data


class _RemoteFile(io.RawIOBase):
    """A file that is read through fsspec; every error is a SourceError that names the file."""

    def __init__(self, name: str, path: str) -> None:
        self._name = name
        with remote_errors(name):
            self._stream = file_system(path).open(path, "rb")

    def readable(self) -> bool:
        """Always true."""
        return True

    def seekable(self) -> bool:
        """Whether the server can send the file from any position."""
        return bool(self._stream.seekable())

    def read(self, size: int | None = -1, /) -> bytes:
        """At most `size` bytes from the current position; all that follow if it is negative."""
        with remote_errors(self._name):
            return bytes(self._stream.read(-1 if size is None else size))

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Change the position, and return it."""
        with remote_errors(self._name):
            return int(self._stream.seek(offset, whence))

    def tell(self) -> int:
        """The current position."""
        return int(self._stream.tell())

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._stream.close()
        super().close()


@contextmanager
def remote_errors(name: str) -> Iterator[None]:
    """Turn the errors of fsspec and of its packages into a SourceError without secrets.

    Raises:
        FileNotFoundError: the server says that there is no such file.
    """
    try:
        yield
    except (SourceError, MissingExtraError):
        raise
    except Exception as error:  # noqa: BLE001  (of aiohttp, botocore and others, by protocol)
        # fsspec reports every failure of an HTTP request as a missing file.
        reason = error.__cause__ if isinstance(error, FileNotFoundError) else error
        if reason is None or getattr(reason, "status", None) == 404:
            raise FileNotFoundError(name) from None
        # Not chained: the messages of those packages contain whole addresses.
        raise SourceError(
            f"{name} cannot be read: {without_secrets(reason)}. Check the address and the network, "
            "or download the file and name the copy."
        ) from None


def file_system(path: str) -> Any:
    """The file system of fsspec that opens `path`."""
    import fsspec

    protocol = path.partition("://")[0]
    options: dict[str, Any] = {}
    if protocol in ("http", "https"):
        # What the user has configured in fsspec, such as a timeout, takes precedence.
        configured = fsspec.config.conf.get(protocol, {}).get("client_kwargs", {})
        # A range of a compressed response would not be a range of the file.
        headers = {"Accept-Encoding": "identity"} | configured.get("headers", {})
        checks = {"raise_for_status": _check_response, **configured, "headers": headers}
        options["client_kwargs"] = checks
    try:
        return fsspec.core.url_to_fs(path, **options)[0]
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        advice = f' Install it with: pip install "{package}"' if package else ""
        raise MissingExtraError(
            f"Reading {redacted(path)} needs a package that is not installed: {error}.{advice}"
        ) from error


async def _check_response(response: Any) -> None:
    """Raise if an HTTP response is not what was asked for; aiohttp calls this for each response."""
    if response.status >= 400:
        return  # fsspec raises
    encoding = response.headers.get("Content-Encoding") or "identity"
    if encoding.lower() != "identity":
        raise OSError(f"the server sent it as {encoding:.20}, though it was asked not to")
    asked = re.fullmatch(r"bytes=(\d+)-\d+", response.request_info.headers.get("Range", ""))
    if asked is None:
        return
    sent = response.headers.get("Content-Range", "")
    # 200 means that the server sends the file from its beginning.
    is_right = response.status == 200 and asked[1] == "0"
    if response.status == 206:
        is_right = re.fullmatch(rf"bytes {asked[1]}-\d+/(\d+|\*)", sent) is not None
    if not is_right:
        raise OSError(
            f"the server answered {response.status} with {sent or 'the whole file'!r:.60} when it "
            f"was asked for the bytes from {int(asked[1]):,}"
        )
