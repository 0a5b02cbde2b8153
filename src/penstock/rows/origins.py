"""From the tokens of a row back to the documents, the input files and the text.

    row            a a a b b b b c c         tokens of the stream
    documents      │  7  │   8   │ 9 …       each with the span of its tokens that the row holds

Nothing is searched for: the store records where each document ends, and the file and the offset
that it was read from.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.store.decoder import decoder_of
from penstock.store.reader import TokenStore, record_unit

if TYPE_CHECKING:
    from penstock.rows.tokens import Stream


class RowOrigin(NamedTuple):
    """A document, or a piece of one, in a row, and where it was read from."""

    store: TokenStore
    document: int
    """Its number in the store: `store[document]` has its tokens."""
    span: tuple[int, int]
    """The tokens `[start, stop)` of the document that the row holds."""
    file: str
    """The input file, as it was given to the build."""
    offset: int
    """Byte offset in the decompressed file; the number of the row in Parquet and Arrow files, of
    the item in JSON arrays and texts from memory, or of the document in imported token files."""

    def text(self, tokenizer: object = None) -> str:
        """Return the text of the span; see `TokenStore.decode`."""
        tokens = self.store.document(self.document)[slice(*self.span)]
        return decoder_of(self.store.manifest, tokenizer).decode(tokens)

    def __str__(self) -> str:
        start, stop = self.span
        return (
            f"document {self.document:,} of {self.store.path}, tokens {start:,} to {stop:,} "
            f"({self.file}, {record_unit(self.store, self.file)} {self.offset:,})"
        )


def find_origins(stream: "Stream", start: int, stop: int) -> Iterator[RowOrigin]:
    """Yield the documents of tokens `[start, stop)` of a stream; none of bare token files."""
    number = int(np.searchsorted(stream.ends, start, side="right"))
    # Tokens may reach into the next pieces, which are parts of stores or files.
    while number < len(stream.ends) and stream.starts[number] < stop:
        if (found := stream.store_part(number)) is not None:
            store, part = found
            before = store.first_document(part)
            low = max(0, start - int(stream.starts[number]))
            high = min(stop, int(stream.ends[number])) - int(stream.starts[number])
            bounds = stream.bounds(number)
            # Document d is at [bounds[d - 1], bounds[d]). Unsigned like the bounds: otherwise
            # NumPy would convert all of them to floats. Empty documents are in no span.
            document = int(np.searchsorted(bounds, np.uint64(low), side="right"))
            while low < high:
                begin = int(bounds[document - 1]) if document else 0
                end = min(high, int(bounds[document]))
                if end > low:
                    at = store.origin(before + document)
                    span = (low - begin, end - begin)
                    yield RowOrigin(store, before + document, span, at.file, at.offset)
                low, document = end, document + 1
        number += 1
