"""The tokens of a store or of token files, read from first to last.

    parts       [ part 0      ][ part 1    ][ part 2 ]
    ids         [ piece ][ piece ][ piece ][ piece ]       mapped, of at most 4 million ids
    ends          3      7        12     17        20      of documents, from the first token on
    groups      [ documents 0, 1 ][ documents 2, 3, 4 ]    as many as fit a file

Every id is checked when its part is first read: against the checksums of a store, and against the
vocabulary. Memory holds one piece, or one group of documents.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from penstock.errors import StoreError
from penstock.formats.member import Array, Ids, Integers
from penstock.formats.token_files import TokenFiles
from penstock.formats.verify import check_all, check_mask
from penstock.store.reader import TokenStore

Report = Callable[[int, int], None]
"""Called with the number of tokens that are done, and the number of all tokens."""
_PIECE = 1 << 22


class TokenSource:
    """Reads the tokens of a store or of token files, part by part."""

    def __init__(self, member: TokenStore | TokenFiles, report: Report | None = None) -> None:
        self.member = member
        self._report = report
        self._starts: Integers = np.append(0, np.cumsum(member.part_tokens)).astype(np.int64)
        self._next = 0  # the number of tokens at which progress is reported again
        self._checked = -1  # the part whose ids were all checked

    @property
    def num_tokens(self) -> int:
        """The number of all ids."""
        return int(self._starts[-1])

    @property
    def vocab_size(self) -> int | None:
        """The number of ids of the vocabulary; None if it is not known."""
        return self.member.vocab_size

    @property
    def is_narrow(self) -> bool:
        """Whether all ids fit uint16: by the vocabulary, or by the dtype if that is not known."""
        if self.vocab_size is None:
            return self.member.dtype.itemsize <= 2  # negative ids are refused
        return self.vocab_size <= 1 << 16

    def num_documents(self) -> int:
        """Count the documents; one that is stored in pieces counts once."""
        return sum(len(ends) for ends in self.ends())

    def ids(self, start: int, stop: int, dtype: str) -> Iterator[Array]:
        """Yield the ids `[start, stop)` of all documents concatenated, in pieces.

        Raises:
            StoreError: an id does not fit `dtype`, or is damaged.
        """
        for number, begin, end in self._spans(start, stop):
            yield self._as_dtype(self._read(number, begin, end), np.dtype(dtype))
            self._show(int(self._starts[number]) + end)

    def _show(self, done: int) -> None:
        """Report progress, but not for every one of many short documents."""
        if self._report is not None and (done >= self._next or done == self.num_tokens):
            self._next = done + _PIECE
            self._report(done, self.num_tokens)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts that hold the tokens `[start, stop)`, and the range within each."""
        # "right": the offset at which a part ends is that of the first token of the next part.
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            first, last = int(self._starts[number]), int(self._starts[number + 1])
            upto = min(stop, last, start + _PIECE)
            if upto > start:  # a part may have no tokens
                yield number, start - first, upto - first
            start, number = max(start, upto), number + (upto == last)

    def _read(self, number: int, begin: int, end: int) -> Array:
        """Return ids of one part, after all ids of the part were checked once."""
        if self._checked != number:
            self._checked = number
            if isinstance(self.member, TokenFiles):
                self.member.check_part(number)
            # Also of a store: its checksums say that these ids were written, and not that a model
            # has rows for them.
            check_all(self._ids(number), self.member.path, self.vocab_size)
        return self._ids(number)[begin:end]

    def _ids(self, number: int) -> Ids:
        if isinstance(self.member, TokenStore):
            return self.member.part_array(number, "tokens")  # compared with its checksums
        return self.member.part_ids(number)

    def _as_dtype(self, piece: Array, dtype: np.dtype[Any]) -> Array:
        largest = np.iinfo(dtype).max
        if np.iinfo(piece.dtype).max > largest and len(piece) and int(piece.max()) > largest:
            raise StoreError(
                f"{self.member.path} has the token id {int(piece.max()):,}, which does not fit the "
                f"{dtype.name} ids of this format. Choose another format."
            )
        return np.ascontiguousarray(piece, dtype.newbyteorder("<"))

    def all_ids(self, dtype: str) -> Iterator[Array]:
        """Yield all ids, in pieces."""
        return self.ids(0, self.num_tokens, dtype)

    def ends(self) -> Iterator[Array]:
        """Yield the offsets at which documents end, an array for each part.

        Token files without documents count as one document for each file.
        """
        for number, first in enumerate(self._starts[:-1].tolist()):
            if not self.member.has_documents:
                yield self._starts[number + 1 : number + 2].astype(np.int64)
                continue
            bounds = self.member.part_bounds(number).astype(np.int64) + first
            # The last piece is not the end of a document that continues in the next part.
            yield bounds[:-1] if self.member.part_continues(number) else bounds

    def groups(self, room: int, id_bytes: int, per_document: int) -> Iterator[Integers]:
        """Yield the ends of consecutive documents that fit `room` bytes together.

        A document that does not fit alone is a group of its own.

        Args:
            room: The most bytes of a group.
            id_bytes: The bytes of an id.
            per_document: The bytes that a document needs besides its ids.
        """
        pending: list[Integers] = []
        used = last = 0
        for ends in self.ends():
            costs = np.cumsum(np.diff(ends, prepend=last) * id_bytes + per_document)
            done = paid = 0
            last = int(ends[-1]) if len(ends) else last
            while done < len(ends):
                # Up to the first document whose end is beyond the room.
                stop = int(np.searchsorted(costs, paid + room - used, side="right"))
                if stop == done and not pending:
                    stop += 1
                if stop > done:
                    pending.append(ends[done:stop])
                    used += int(costs[stop - 1]) - paid
                    done, paid = stop, int(costs[stop - 1])
                if done < len(ends):
                    yield np.concatenate(pending)
                    pending, used = [], 0
        if pending:
            yield np.concatenate(pending)

    def masks(self, start: int, stop: int) -> Iterator[Array]:
        """Yield the loss mask of the tokens `[start, stop)`, in pieces: 1 if it is trained on."""
        for number, begin, end in self._spans(start, stop):
            mask = self._mask(number)
            if mask is None:
                yield np.ones(end - begin, np.uint8)
                continue
            piece = np.ascontiguousarray(mask[begin:end], np.uint8)
            check_mask(piece, self.member.path)
            yield piece

    def _mask(self, number: int) -> Array | None:
        mask = self.member.part_loss(number)
        if mask is None or isinstance(self.member, TokenFiles):
            return mask
        return self.member.part_array(number, "loss")  # compared with its checksums
