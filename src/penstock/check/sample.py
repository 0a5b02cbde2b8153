"""Reads a sample of one file, and records what is found in it."""

from codecs import getincrementaldecoder
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from penstock.cli.units import number_of
from penstock.errors import SourceError
from penstock.options import ReadSettings
from penstock.sources.batch import Reject
from penstock.sources.files import Expanded, InputFile, byte_order_mark, open_file
from penstock.sources.read import read_slice
from penstock.sources.slices import cut
from penstock.sources.text import file_rule, splitter_for

_SHOWN_DOCUMENTS = 3
_NUM_PARTS = 3


@dataclass(slots=True)
class FileSample:
    """The sample of one file and what was found in it."""

    name: str
    num_bytes: int = 0
    format: str = ""
    compression: str | None = None
    texts: list[bytes] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    sample_bytes: int = 0
    """Bytes of the file in the sample, with the syntax of its records."""
    rule: str | None = None
    """The document rule of a text file, as in `documents=`; never "auto"."""
    whole: bool = False
    """Whether the sample is the whole file."""
    hints: list[str] = field(default_factory=list)

    @property
    def shown(self) -> list[str]:
        """The first documents, as text."""
        return [text.decode(errors="replace") for text in self.texts[:_SHOWN_DOCUMENTS]]


def read_sample(file: FileSample, listed: InputFile, reading: ReadSettings, budget: int) -> None:
    """Read documents of one file, about `budget` bytes of it, into `file`."""
    is_text = listed.format == "text"
    if is_text and reading.documents == "auto":
        rule = file_rule(listed, reading)
        reading = replace(reading, documents=rule if rule == "file" else f"sep:{rule}")
    file.rule = reading.documents if is_text else None
    if is_text and reading.documents == "file":
        file.texts, file.whole = _document_parts(listed, reading, budget)
        file.sample_bytes = sum(map(len, file.texts))
        return
    can_cut = is_text and splitter_for(reading.documents).cuts_anywhere
    can_seek = listed.compression is None and (can_cut or listed.format == "jsonl")
    # A file that can be read from any position is sampled in three parts. Other files can only
    # be read from the beginning.
    is_spread = can_seek and listed.size > budget
    slice_bytes = -(-listed.size // _NUM_PARTS) if is_spread else budget
    file.whole = True
    for piece in cut([listed], reading, slice_bytes=slice_bytes, ramp=()):
        taken = 0
        for batch in read_slice([listed], piece, reading):
            file.texts += batch.texts.to_pylist()
            file.rejects += batch.rejects
            # Bytes of rejected records count too: a file full of them must not be read to its end.
            taken += batch.tally.total_bytes
            if taken > (budget // _NUM_PARTS if is_spread else budget - file.sample_bytes):
                file.whole = False
                break
        file.sample_bytes += taken
        # The budget is used up. For a file that cannot be cut, it is not known whether more text
        # follows.
        if not is_spread and file.sample_bytes >= budget:
            file.whole = file.whole and can_seek
            return


def _document_parts(
    listed: InputFile, reading: ReadSettings, budget: int
) -> tuple[list[bytes], bool]:
    """The beginning, middle and end of a file that is one document; whether that is all of it.

    Of a compressed file only the beginning is read, since the rest cannot be read without it.
    """
    # A compressed file has to be read in order, and a small file may be read at once.
    whole = listed.compression is None and listed.size <= budget
    if listed.compression or whole:
        with closing(Expanded(listed)) as expanded:
            found = [(0, expanded.read(budget))]
            whole = not expanded.read(1)  # one more byte shows whether the budget was enough
    else:
        # Three parts of equal size: the first at 0, the last at the end of the file.
        size = budget // _NUM_PARTS
        last = listed.size - size
        starts = [number * last // (_NUM_PARTS - 1) for number in range(_NUM_PARTS)]
        with open_file(listed) as stream:
            found = [(start, _read_at(stream, start, size)) for start in starts]
    text = b"".join(_decoded(listed, start, data, reading) for start, data in found)
    return [text] if text.strip() else [], whole


def _read_at(stream: BinaryIO, start: int, size: int) -> bytes:
    stream.seek(start)
    # Remote files may return less than was asked for.
    data = b""
    while more := stream.read(size - len(data)):
        data += more
    return data


def _decoded(listed: InputFile, start: int, data: bytes, reading: ReadSettings) -> bytes:
    """A part of a text, without a byte order mark and without incomplete characters at its ends."""
    lead = byte_order_mark(data, listed) if start == 0 else 0
    # 0b10xxxxxx continues a character that began before this part.
    while start and lead < min(3, len(data)) and data[lead] & 0xC0 == 0x80:
        lead += 1
    # A part may be cut inside a character, which is no error of the file: the decoder keeps an
    # incomplete character at the end for itself.
    at_end = listed.compression is None and start + len(data) == listed.size
    decoder = getincrementaldecoder("utf-8")(reading.errors)
    try:
        return decoder.decode(data[lead:], final=at_end).encode()
    except UnicodeDecodeError as error:
        at = start + lead + error.start
        raise SourceError(
            f'{listed.name} is not UTF-8 at byte {at:,}; errors="replace" (--errors replace) puts '
            "U+FFFD in place of such bytes"
        ) from None


def add_hints(file: FileSample) -> None:
    """Add a hint if the documents look as if they should be read in another way."""
    # The first documents are enough for a hint, and keep this fast.
    sample = file.texts[:100]
    # A document that is a line ends before its "\n".
    with_crlf = sum(b"\r\n" in text or text.endswith(b"\r") for text in sample)
    if with_crlf:
        file.hints.append(
            f"{with_crlf} of the first {number_of(len(sample), 'document')} "
            f"{'has' if with_crlf == 1 else 'have'} Windows line ends (CRLF), which become tokens; "
            "convert the file first if you want line feeds"
        )
    if not sample or file.format != "text":
        return
    # GPT-2's end token separates documents in many public files, such as TinyStories.
    found = any(b"<|endoftext|>" in text for text in sample)
    if found and file.rule != "<|endoftext|>":
        file.hints.append(
            "the text contains <|endoftext|>; if it separates documents, use "
            "--documents '<|endoftext|>'"
        )
    if all(text.startswith(b"{") and text.rstrip().endswith(b"}") for text in sample):
        file.hints.append("the lines look like JSON; if they are, use --format jsonl")


def text_bytes(file: FileSample) -> float:
    """About how many bytes of text a file contains.

    Compressed files and tables are assumed to expand four times.
    """
    if file.whole:
        return sum(map(len, file.texts))
    return file.num_bytes * (4 if file.compression or file.format in ("parquet", "arrow") else 1)
