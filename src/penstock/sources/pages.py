"""The memory that the pages of a Parquet file ask for, read from it without decompressing.

Arrow allocates the length that the header of a page claims, up to 2 GiB, and fills it if the page
expands to that length. The totals in the footer may claim less, and pyarrow does not show the
headers of pages. So they are read here. Footer and headers are structs of Thrift's compact
protocol:

    footer   row groups (field 4): columns (1): metadata (3):
             names (3), values (5), size (7), first page of data (9), dictionary (11)
    header   kind (field 1), length of the page (2), length as it is stored (3); the page follows
    field    one byte: distance from the number of the field before, and kind; then the value

A file must not mean one thing here and another in Arrow. So a field counts only if it has the kind
that Arrow expects, and a struct that has a field twice is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa

_TRUE, _FALSE, _BYTE, _INT16, _INT32, _INT64, _DOUBLE, _BINARY = range(1, 9)
_LIST, _SET, _MAP, _STRUCT = range(9, 13)
_BITS = {_INT16: 16, _INT32: 32, _INT64: 64}
_DATA_PAGES = {0: 5, 3: 8}
"""The field that describes a page of values, by the kind of the page (field 1 of its header)."""
_DICTIONARY_PAGE = 2
_HEADER_BYTES = 1 << 12
_LONGEST_FOOTER = 1 << 18
_MOST_LEVELS = 32  # of structs and lists inside of each other
_DAMAGES = (ValueError, IndexError, KeyError, TypeError, AttributeError)

Fields = dict[tuple[int, int], Any]
"""The values of a struct, by number and kind."""


def page_claims(data: bytes | memoryview) -> int:
    """The sum of the lengths that the headers of all pages of a Parquet file claim.

    `data` are the bytes of the file. If they are a memory map, only footer and headers are read.

    Raises:
        pa.ArrowInvalid: the file is damaged.
    """
    return _sums(data)[0]


def page_values(data: bytes | memoryview) -> int:
    """The sum of the numbers of values that the headers of all pages claim.

    A run of equal values has a few bytes, however long it is. So this says more about the memory
    that a column of numbers needs than the lengths of its pages.

    Raises:
        pa.ArrowInvalid: the file is damaged.
    """
    return _sums(data)[1]


def _sums(data: bytes | memoryview) -> tuple[int, int]:
    """The lengths and the numbers of values that the headers of all pages claim."""
    view = memoryview(data)
    try:
        footer = len(view) - 8 - int.from_bytes(view[-8:-4], "little")
        if footer < 0:
            raise ValueError("the footer is longer than the file")
        claimed = walked = values = 0
        for group in _CompactReader(view, footer).fields()[4, _LIST]:
            for column in group.get((1, _LIST), []):
                start, stop = _range(column[3, _STRUCT])
                # Pages of two columns never overlap. If they did, a small file could stand for
                # any number of pages.
                walked += max(0, stop - start)
                if start < 0 or walked > len(view):
                    raise ValueError("its columns are longer than the file")
                found = _column_claims(view, start, stop, column[3, _STRUCT][5, _INT64])
                claimed, values = claimed + found[0], values + found[1]
    except _DAMAGES as error:
        raise pa.ArrowInvalid(f"the header of a page is damaged ({error})") from None
    return claimed, values


@dataclass(frozen=True, slots=True)
class ColumnPages:
    """Where the pages of a column are, in one row group."""

    start: int
    stop: int
    num_values: int

    def longest_dictionary(self, stream: BinaryIO) -> int:
        """The length of the dictionary, as the header of its page claims it; 0 if there is none.

        Raises:
            pa.ArrowInvalid: a header is damaged, or longer than 4 KiB.
        """
        longest = seen = 0
        start = self.start
        try:
            while start < self.stop and seen < self.num_values:
                stream.seek(start)
                reader = _CompactReader(memoryview(stream.read(_HEADER_BYTES)), 0)
                header = reader.fields()
                if (length := header[3, _INT32]) < 0:
                    raise ValueError(f"a page of {length} bytes")
                if header[1, _INT32] == _DICTIONARY_PAGE:
                    longest = max(longest, header[2, _INT32])
                seen += _num_values(header)
                start += reader.place + length
        except _DAMAGES as error:
            raise pa.ArrowInvalid(f"the header of a page is damaged ({error})") from None
        return longest


def column_pages(stream: BinaryIO, size: int, names: Sequence[str]) -> tuple[ColumnPages, ...]:
    """The pages of a column in each row group; `names` lead to the column.

    Raises:
        pa.ArrowInvalid: the file is damaged, or its footer is so long that it takes longer to parse
            it here than to do without.
    """
    try:
        stream.seek(max(0, size - 8))
        length = int.from_bytes(stream.read(4), "little")
        if length > min(size - 8, _LONGEST_FOOTER):
            raise ValueError(f"the footer has {length} bytes")
        stream.seek(size - 8 - length)
        footer = _CompactReader(memoryview(stream.read(length)), 0).fields()
        wanted, found = [name.encode() for name in names], []
        for group in footer[4, _LIST]:
            columns = [column[3, _STRUCT] for column in group.get((1, _LIST), [])]
            # Raises if the column is missing, or if two have the same name.
            (metadata,) = (each for each in columns if each[3, _LIST] == wanted)
            found.append(ColumnPages(*_range(metadata), metadata[5, _INT64]))
        return tuple(found)
    except _DAMAGES as error:
        raise pa.ArrowInvalid(f"the footer is damaged ({error})") from None


def _num_values(header: Fields) -> int:
    """The number of values that the header of a page claims; 0 if it has no values."""
    field = _DATA_PAGES.get(header[1, _INT32])
    return max(0, header[field, _STRUCT][1, _INT32]) if field else 0


def _range(metadata: Fields) -> tuple[int, int]:
    """The bytes of a column, as Arrow computes them."""
    start = metadata[9, _INT64]
    if 0 < (first := metadata.get((11, _INT64), 0)) < start:
        start = first
    return start, start + metadata[7, _INT64]


def _column_claims(view: memoryview, start: int, stop: int, num_values: int) -> tuple[int, int]:
    """The lengths and the numbers of values that the pages of a column claim."""
    claimed = seen = 0
    # As Arrow, which reads pages until it has seen all values: an empty column may have none.
    while start < stop and seen < num_values:
        reader = _CompactReader(view, start)
        header = reader.fields()
        if (length := header[3, _INT32]) < 0:
            raise ValueError(f"a page of {length} bytes")
        claimed += max(0, header[2, _INT32])
        seen += _num_values(header)
        start = reader.place + length
    return claimed, seen


class _CompactReader:
    """Reads values of Thrift's compact protocol from `place` on."""

    def __init__(self, view: memoryview, place: int) -> None:
        self._view = view
        self.place = place

    def fields(self, levels: int = _MOST_LEVELS) -> Fields:
        """The next struct."""
        found: Fields = {}
        number, numbers = 0, set[int]()
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer(16)
            if number in numbers:
                raise ValueError(f"field {number} is there twice")
            numbers.add(number)
            kind = head & 15
            # A boolean is in the kind of its field.
            found[number, kind] = None if kind <= _FALSE else self._value(kind, levels - 1)
        return found

    def _value(self, kind: int, levels: int) -> Any:
        if not levels:
            raise ValueError("too many levels")
        if kind in _BITS:
            return self._integer(_BITS[kind])
        if kind == _STRUCT:
            return self.fields(levels)
        if kind in (_LIST, _SET):
            head = self._byte()
            length = head >> 4 if head >> 4 < 15 else self._varint()
            return [self._value(head & 15, levels - 1) for _ in range(self._checked(length))]
        if kind == _MAP:
            pairs = self._checked(self._varint())
            kinds = self._byte() if pairs else 0
            for _ in range(pairs):
                self._value(kinds >> 4, levels - 1)
                self._value(kinds & 15, levels - 1)
            return None
        sizes = {_TRUE: 1, _FALSE: 1, _BYTE: 1, _DOUBLE: 8}
        if kind not in sizes and kind != _BINARY:
            raise ValueError(f"a value of kind {kind}")
        length = self._checked(self._varint() if kind == _BINARY else sizes[kind])
        self.place += length
        return self._view[self.place - length : self.place] if kind == _BINARY else None

    def _checked(self, length: int) -> int:
        """`length`, if so many bytes follow; every item of a list has at least one."""
        if length > len(self._view) - self.place:
            raise ValueError(f"{length} bytes or items are more than the file has")
        return length

    def _byte(self) -> int:
        self.place += 1
        return self._view[self.place - 1]

    def _varint(self) -> int:
        """An integer of 7 bits in each byte; the highest bit says that more bytes follow."""
        value = shift = 0
        while (byte := self._byte()) & 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
            if shift > 63:
                raise ValueError("an integer of more than 10 bytes")
        return value | byte << shift

    def _integer(self, bits: int) -> int:
        """A signed integer: 0, -1, 1, -2 … are stored as 0, 1, 2, 3 …, as many bits as fit."""
        value = self._varint() & ((1 << bits) - 1)
        return value >> 1 ^ -(value & 1)
