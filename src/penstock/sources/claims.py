"""The memory that a compressed Arrow stream asks for, read from it without decompressing.

Arrow allocates the length that a compressed buffer claims before it decompresses the buffer, and
pyarrow does not say which buffers are compressed. So the metadata of each message is read here. It
is a flatbuffer: a table refers to a list of the places of its fields.

    message   header (field 2) of kind (field 1): 2 = dictionary batch, 3 = record batch
    dictionary batch   record batch (field 1)
    record batch       buffers (field 2), compression (field 3)
    a compressed buffer begins with the length of its contents, or -1 if they are not compressed
"""

import struct
from typing import Any

import pyarrow as pa

_DICTIONARY, _RECORDS = 2, 3


def arrow_claims(source: Any) -> int:
    """The sum of the lengths that the compressed buffers of an Arrow stream claim.

    `source` is a file of Arrow. If it is a memory map, only the metadata is read.

    Raises:
        pa.ArrowInvalid: the stream is damaged.
    """
    claimed = 0
    try:
        for message in pa.ipc.MessageReader.open_stream(source):
            claimed += _message_claims(memoryview(message.metadata), memoryview(message.body))
    except (struct.error, IndexError, TypeError) as error:
        raise pa.ArrowInvalid(f"the metadata of a message is damaged ({error})") from None
    return claimed


def _message_claims(data: memoryview, body: memoryview) -> int:
    message = struct.unpack_from("<I", data, 0)[0]
    kind = data[_field(data, message, 1)]
    if kind not in (_DICTIONARY, _RECORDS):
        return 0
    batch = _follow(data, _field(data, message, 2))
    if kind == _DICTIONARY:
        batch = _follow(data, _field(data, batch, 1))
    if not _field(data, batch, 3):
        return 0
    buffers = _follow(data, _field(data, batch, 2))
    claimed = 0
    for number in range(struct.unpack_from("<I", data, buffers)[0]):
        place, length = struct.unpack_from("<qq", data, buffers + 4 + 16 * number)
        if length:  # an empty buffer has no length before it
            claimed += max(0, struct.unpack_from("<q", body, place)[0])
    return claimed


def _follow(data: memoryview, place: int) -> int:
    """The place that the reference at `place` leads to."""
    return int(place + struct.unpack_from("<I", data, place)[0])


def _field(data: memoryview, table: int, number: int) -> int:
    """The place of a field of a table; 0 if the table does not have it."""
    places = table - struct.unpack_from("<i", data, table)[0]
    size = struct.unpack_from("<H", data, places)[0]
    if 4 + 2 * number >= size:
        return 0
    offset = struct.unpack_from("<H", data, places + 4 + 2 * number)[0]
    return int(table + offset) if offset else 0
