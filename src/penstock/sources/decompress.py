"""Decompression of input files.

Every frame or member of a file is read, not only the first. A stream that is cut off or followed
by other data raises an error with the position, and so does a file that ends before its size.
"""

import bz2
import lzma
from collections.abc import Callable
from typing import Any, BinaryIO

import pyarrow as pa

from penstock.errors import SourceError
from penstock.sources.files import MAGIC, InputFile, open_file


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
        self._peeked = self.read(num_bytes)
        return self._peeked

    def read(self, num_bytes: int) -> bytes:
        """The next `num_bytes` bytes, fewer only at the end."""
        # Peeked bytes come first. `position` has counted them already.
        if self._peeked:
            data, self._peeked = self._peeked[:num_bytes], self._peeked[num_bytes:]
            return data if len(data) == num_bytes else data + self.read(num_bytes - len(data))
        pieces = []
        missing = num_bytes
        while missing:
            piece = self._read_some(missing)
            if not piece:
                self._refuse_early_end()
                break
            pieces.append(piece)
            missing -= len(piece)
            self.position += len(piece)
        # Usually there is one piece, which is returned without a copy.
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_some(self, num_bytes: int) -> bytes:
        try:
            return bytes(self._stream.read(num_bytes))
        except (OSError, EOFError, lzma.LZMAError, pa.ArrowException) as error:
            if self._file.compression is None:
                raise
            self._refuse_other_kind()
            raise SourceError(
                f"{self._file.name} cannot be decompressed past byte {self.position:,} of its text "
                f"({self._file.compression}: {error}). It was cut off or damaged, or something "
                "follows the compressed data. Download or write it again."
            ) from error

    def _refuse_early_end(self) -> None:
        """Raise if the stream has ended and the file has not.

        A cut between two members is not visible in the compressed data. Some network mounts end a
        file early when they lose their server, and the rest of the documents would be missing.
        """
        size = self._file.size
        if size and (place := self._raw.tell()) < size:
            raise SourceError(
                f"{self._file.name} ended after {place:,} bytes, but it had {size:,} when it was "
                "listed. It was cut off, or the disk or server that it is on did not deliver all "
                "of it. Restore it, and run this again."
            )

    def _refuse_other_kind(self) -> None:
        """Raise if the file does not begin as its suffix says."""
        kind = self._file.compression or ""
        if self.position:
            return
        with open_file(self._file) as stream:
            first = stream.read(16)
        # A file that was cut off may have fewer bytes than the mark.
        if not MAGIC[kind].startswith(first[: len(MAGIC[kind])]):
            raise SourceError(
                f"{self._file.name} is not a {kind} file, though its name says so: it begins with "
                f"{first!r}. Give it the suffix of its contents."
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
        return _Streams(raw, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), padding=b"\0")
    if compression == "bz2":
        return _Streams(raw, bz2.BZ2Decompressor, padding=b"")
    # Arrow's streams continue after the end of a frame or member, and fail if one is cut off.
    return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)


class _Streams:
    """All streams of an .xz or .bz2 file; any other data after them is an error.

    Python's own readers ignore such data, and Arrow's reader fails on an empty .bz2 stream.
    """

    def __init__(self, raw: BinaryIO, decoder: Callable[[], Any], *, padding: bytes) -> None:
        self._raw = raw
        self._next_decoder = decoder
        self._padding = padding
        self._decoder = decoder()
        self._waiting = b""

    def read(self, num_bytes: int) -> bytes:
        """At most `num_bytes` bytes; `b""` means the end of the file."""
        while True:
            if self._decoder.eof:
                self._waiting = self._next_stream()
                if not self._waiting:
                    return b""
                self._decoder = self._next_decoder()
            # A decoder that was given a length limit may have output left and need no input.
            if self._decoder.needs_input and not self._waiting:
                self._waiting = self._raw.read(1 << 16)
                if not self._waiting:
                    raise EOFError("the stream ends before its end mark")
            data = bytes(self._decoder.decompress(self._waiting, num_bytes))
            self._waiting = b""
            if data:
                return data

    def _next_stream(self) -> bytes:
        """The first bytes of the next stream; in .xz files, zero bytes may separate streams."""
        # `unused_data` is the input after the end of the decoder's stream.
        rest = bytes(self._decoder.unused_data.lstrip(self._padding))
        while not rest:
            more = self._raw.read(1 << 16)
            if not more:
                return b""
            rest = more.lstrip(self._padding)
        return rest
