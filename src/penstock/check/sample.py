"""A sample of one file, and what it looks like."""

from dataclasses import dataclass, field, replace
from typing import BinaryIO

from penstock.errors import SourceError
from penstock.sources.decompress import Expanded
from penstock.sources.document import Reject
from penstock.sources.listing import InputFile, open_file
from penstock.sources.read import byte_order_mark, read_slice
from penstock.sources.settings import ReadSettings
from penstock.sources.slices import cut
from penstock.sources.splitters import splitter_for
from penstock.sources.whole import file_rule

__all__ = ["LookedAt", "hint", "sample", "text_bytes"]

_SHOWN_DOCUMENTS = 3
_PLACES = 3


@dataclass(slots=True)
class LookedAt:
    """What was found in one file."""

    name: str
    num_bytes: int = 0
    format: str = ""
    compression: str | None = None
    texts: list[bytes] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    sample_bytes: int = 0
    """Of the sample, as text."""
    documents: str | None = None
    """What a document is in a text file, as `documents=` has it; never "auto"."""
    whole: bool = False
    """Whether the sample is all of the file."""
    error: str | None = None
    hints: list[str] = field(default_factory=list)

    @property
    def shown(self) -> list[str]:
        """The first documents, as text."""
        return [text.decode(errors="replace") for text in self.texts[:_SHOWN_DOCUMENTS]]


def sample(file: LookedAt, listed: InputFile, reading: ReadSettings, budget: int) -> None:
    """Read documents of one file, about `budget` bytes of it."""
    if reading.documents == "auto" and listed.format == "text":
        reading = replace(reading, documents=file_rule(listed, reading))
    file.documents = reading.documents if listed.format == "text" else None
    if reading.documents == "file" and listed.format == "text":
        file.texts, file.whole = _parts(listed, reading, budget)
        file.sample_bytes = sum(map(len, file.texts))
        return
    is_text = listed.format == "text" and splitter_for(reading.documents).cuts_anywhere
    ranged = listed.compression is None and (is_text or listed.format == "jsonl")
    spread = ranged and listed.size > budget
    slice_bytes = -(-listed.size // _PLACES) if spread else budget
    file.whole = True
    for piece in cut([listed], reading, slice_bytes=slice_bytes):
        taken = 0
        for batch in read_slice([listed], piece, reading):
            file.texts += batch.texts.to_pylist()
            file.rejects += batch.rejects
            taken += batch.tally.total_bytes
            if taken > (budget // _PLACES if spread else budget - file.sample_bytes):
                file.whole = False
                break
        file.sample_bytes += taken
        if not spread and file.sample_bytes >= budget:
            file.whole = file.whole and ranged
            return


def _parts(listed: InputFile, reading: ReadSettings, budget: int) -> tuple[list[bytes], bool]:
    """Of a file that is one document, its beginning, middle and end in one text.

    Of a compressed file only the beginning, since the rest cannot be read without it.
    """
    whole = listed.compression is None and listed.size <= budget
    if listed.compression or whole:
        expanded = Expanded(listed, reading.max_expansion)
        try:
            data = expanded.read(budget)
            whole = not expanded.read(1)
        finally:
            expanded.close()
        found = [(0, data)]
    else:
        size = budget // _PLACES
        places = [number * (listed.size - size) // (_PLACES - 1) for number in range(_PLACES)]
        with open_file(listed) as stream:
            found = [(place, _read_at(stream, place, size)) for place in places]
    text = b"".join(_decoded(listed, place, data, reading) for place, data in found)
    return [text] if text.strip() else [], whole


def _read_at(stream: BinaryIO, place: int, size: int) -> bytes:
    stream.seek(place)
    data = b""
    while len(data) < size and (more := stream.read(size - len(data))):
        data += more
    return data


def _decoded(listed: InputFile, place: int, data: bytes, reading: ReadSettings) -> bytes:
    """A part of a text, without the halves of characters at its ends and a byte order mark."""
    lead = byte_order_mark(data, listed) if place == 0 else 0
    while place and lead < min(3, len(data)) and data[lead] & 0xC0 == 0x80:
        lead += 1
    data = data[lead:]
    is_cut = listed.compression is not None or place + lead + len(data) < listed.size
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if is_cut and error.reason == "unexpected end of data":
            return data[: error.start]
        if reading.errors == "strict":
            where = place + lead + error.start
            raise SourceError(f"{listed.name} is not UTF-8 at byte {where:,}") from None
        data = data.decode(errors="replace").encode()
    return data


def hint(file: LookedAt) -> None:
    """What the documents look like that they are not read as."""
    sample = file.texts[:100]
    if not sample or file.format != "text":
        return
    separator = b"<|endoftext|>"
    if file.documents != separator.decode() and any(separator in text for text in sample):
        file.hints.append(
            "<|endoftext|> stands in the text; if it separates documents, say "
            "--documents '<|endoftext|>'"
        )
    if all(text.startswith(b"{") and text.rstrip().endswith(b"}") for text in sample):
        file.hints.append("the lines look like JSON; if they are, say --format jsonl")


def text_bytes(file: LookedAt) -> float:
    """About how much text a file holds."""
    if file.whole:
        return sum(map(len, file.texts))
    return file.num_bytes * (4 if file.compression or file.format in ("parquet", "arrow") else 1)
