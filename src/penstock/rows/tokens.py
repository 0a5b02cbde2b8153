"""The tokens of stores and token files, as one stream.

A stream is a list of pieces. A piece is an array of ids that is mapped into memory when it is
first read: a part of a store, or a token file. Several stores or files are concatenated. Rows are
cut from the stream, and a row of `Windows` may span several pieces.

A store that is still being written is read as a snapshot: a store over the parts that are sealed.
"""

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np

from penstock.digest import digest_json
from penstock.errors import StoreError, UnknownLengthError
from penstock.formats.mapped import Ids
from penstock.formats.open import is_pattern, token_files_at
from penstock.formats.token_files import Member, TokenFiles
from penstock.paths import expand_user, is_remote
from penstock.ranges import Indices, group_rows, ranges
from penstock.rows.array_file import ArrayFile as ArrayFile
from penstock.rows.blocks import BlockChecks, load_ahead
from penstock.rows.origins import RowOrigin, find_origins
from penstock.rows.protocol import Array, Integers, Rows, Settings
from penstock.store.reader import TokenStore


@runtime_checkable
class HasSnapshot(Protocol):
    """A store that is being written, as `ps.stream` returns it."""

    def snapshot(self) -> TokenStore:
        """Return a store over the parts that can be read now."""
        ...


StreamLike = str | os.PathLike[str] | TokenStore | TokenFiles | HasSnapshot


class Stream:
    """The ids of one or more stores and files, concatenated."""

    def __init__(self, members: Sequence[Member]) -> None:
        if not members:
            raise StoreError("No store was given to read rows from. Pass at least one.")
        self.members = tuple(members)
        _refuse_mixed(self.members)
        self.sealed = all(member.sealed for member in self.members)
        """Whether all tokens are available; False for a snapshot of an unfinished store."""
        if not self.sealed and len(self.members) > 1:
            raise StoreError(
                "A store that is still being written cannot be combined with other stores, because "
                "the offset of the next store is not known yet. Pass all inputs to ps.stream, or "
                "build this store first."
            )
        # The widest dtype: ids of a narrower member fit it, and none is truncated.
        self.dtype: np.dtype[Any] = np.result_type(*(member.dtype for member in self.members))
        self.is_uniform = all(
            each.dtype == self.dtype
            and (isinstance(each, TokenStore) or (isinstance(each, TokenFiles) and each.is_uniform))
            for each in self.members
        )
        """Whether all pieces are known to have this dtype: token files may have another order."""
        # A piece for each part of a store. Arrays: a list of 10^6 parts would take 100 MB.
        lengths = [each.part_tokens for each in self.members]
        # The number of the first piece of each member.
        self._firsts = [0, *np.cumsum([len(each) for each in lengths])[:-1].tolist()]
        joined = np.concatenate(lengths)
        self.ends: Integers = np.cumsum(joined)
        """The offset after each piece."""
        self.starts: Integers = self.ends - joined
        self._checked: dict[str, BlockChecks] = {}
        self.fetches_parts = any(member.fetches_parts for member in self.members)
        """Whether files of a member are downloaded when they are first used."""

    def __str__(self) -> str:
        more = f" and {len(self.members) - 1:,} more" if len(self.members) > 1 else ""
        return f"{str(self.members[0].path)!r}{more}"

    @property
    def num_tokens(self) -> int:
        """Ids in all pieces."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def digest(self) -> str:
        """A digest of the members' digests, in order."""
        return digest_json([member.digest for member in self.members])

    @property
    def short_digest(self) -> str:
        """The first 16 digits of the digest; empty while the store is being written."""
        return self.digest[:16] if self.sealed else ""

    @property
    def tokenizer_digest(self) -> str | None:
        """The digest of the first tokenizer that is known."""
        for member in self.members:
            if (tokenizer := member.tokenizer_record) is not None:
                return str(tokenizer["digest"] or tokenizer["canary"])
        return None

    @property
    def has_documents(self) -> bool:
        """Whether every member records where its documents end."""
        return all(member.has_documents for member in self.members)

    def __getstate__(self) -> Settings:
        # Every process checks the blocks that it reads.
        return {**self.__dict__, "_checked": {}}

    def check(self, kind: str, numbers: Integers, starts: Integers, sizes: Integers | int) -> None:
        """Check the tokens, or the loss mask, from `starts` on, in pieces `numbers`.

        Each block is compared with its checksum once per process, when it is first read.
        """
        self._checks(kind).check(numbers, starts, sizes)

    def _checks(self, kind: str) -> BlockChecks:
        if kind not in self._checked:  # two threads may make it, which only costs time
            stores = [each if isinstance(each, TokenStore) else None for each in self.members]
            self._checked[kind] = BlockChecks(stores, self._firsts, self.starts, kind)
        return self._checked[kind]

    def _find(self, number: int) -> tuple[Member, int]:
        """Return the member of a piece, and the part of it."""
        # From the right: a store without parts has the first piece of the member after it.
        member = bisect_right(self._firsts, number) - 1
        return self.members[member], number - self._firsts[member]

    def piece(self, number: int) -> Ids:
        """Return the ids of one piece, mapped into memory; `check` checks those that are used."""
        source, part = self._find(number)
        return source.part_ids(part)

    def pieces(self, numbers: Integers) -> tuple[list[Ids], Integers]:
        """Return the pieces `numbers`, which ascend, and where each begins in memory.

        The address of a piece that is not one array is 0.
        """
        arrays: list[Ids] = []
        addresses: list[int] = []
        groups: Iterable[tuple[int, Indices | slice]] = [(0, slice(None))]
        if len(self.members) > 1:
            # From the right, as in `_find`.
            groups = group_rows(np.searchsorted(self._firsts, numbers, side="right") - 1)
        for member, chosen in groups:
            source = self.members[member]
            parts = (numbers[chosen] - self._firsts[member]).tolist()
            if isinstance(source, TokenStore):
                found = source.files.files(parts, "tokens")
                arrays += [each.array for each in found]
                addresses += [each.address for each in found]
                continue
            if isinstance(source, TokenFiles):
                located = [source.part_located(part) for part in parts]
            else:
                located = [_located(source.part_ids(part)) for part in parts]
            for ids, address in located:
                arrays.append(ids)
                addresses.append(address)
        return arrays, np.array(addresses, np.int64)

    def bounds(self, number: int) -> Array:
        """Return the offsets, within one piece, at which its documents end."""
        source, part = self._find(number)
        return source.part_bounds(part)

    def continues(self, number: int) -> bool:
        """Return whether the last document of one piece continues in the next piece."""
        source, part = self._find(number)
        return source.part_continues(part)

    @cached_property
    def has_loss(self) -> bool:
        """Whether a member has loss masks, which exclude some tokens from training."""
        return any(member.has_loss for member in self.members)

    def loss(self, number: int) -> Array | None:
        """Return the loss mask of one piece, 1 where a token is trained on; None if all are."""
        source, part = self._find(number)
        return source.part_loss(part)

    def tokens(self, start: int, stop: int) -> Array:
        """Return ids `[start, stop)` of the stream; a view if they are in one piece."""
        number = int(np.searchsorted(self.ends, start, side="right"))
        joined, done = np.empty(stop - start, self.dtype), 0
        while done < len(joined):
            first, upto = start + done, min(stop, int(self.ends[number]))
            self.check("tokens", np.array([number]), np.array([first]), upto - first)
            before = int(self.starts[number])
            piece = self.piece(number)[first - before : upto - before]
            if len(piece) == len(joined):
                return piece
            joined[done : upto - start] = piece  # a view of each would keep all files open
            done, number = upto - start, number + 1
        return joined

    def origins(self, spans: Sequence[tuple[int, int]]) -> list[RowOrigin]:
        """Return the documents at some offsets of the stream, each with its size, in order."""
        return [each for start, size in spans for each in find_origins(self, start, start + size)]

    def store_part(self, number: int) -> tuple[TokenStore, int] | None:
        """Return the store of a piece and the part of it; None for a token file."""
        source, part = self._find(number)
        return (source, part) if isinstance(source, TokenStore) else None

    def read_ahead(
        self,
        starts: Integers,
        sizes: Integers | int,
        kinds: Sequence[str] = ("tokens", "loss"),
    ) -> int:
        """Begin to load `sizes` ids from each of `starts`; return without waiting.

        The kernel is asked to load them. Files that are not on this machine are downloaded.

        Args:
            starts: The offset of each row.
            sizes: The number of ids in each row.
            kinds: The files that rows need.

        Returns:
            The bytes of the files that are downloaded.
        """
        numbers = np.searchsorted(self.ends, starts, side="right")
        if not self.fetches_parts:
            longest = int(np.max(sizes, initial=0))
            within = starts - self.starts[numbers]
            new = self._checks("tokens").are_new(numbers, starts, longest)
            load_ahead(self.piece, numbers, within, longest, new)
            return 0
        # The last row may end before its length.
        last = np.minimum(starts + sizes, self.num_tokens) - 1
        lasts = np.searchsorted(self.ends, last, side="right")
        if (lasts != numbers).any():
            numbers = ranges(numbers, lasts - numbers + 1)
        # The first row that needs a piece decides about its place.
        present, first_rows = np.unique(numbers, return_index=True)
        ordered = present[np.argsort(first_rows)]
        asked = 0
        for member, chosen in group_rows(np.searchsorted(self._firsts, ordered, side="right") - 1):
            parts = (ordered[chosen] - self._firsts[member]).tolist()
            asked += self.members[member].want(parts, kinds)
        return asked


StreamSource = StreamLike | ArrayFile | Stream | Sequence[StreamLike | ArrayFile]


def open_stream(source: StreamSource) -> Stream:
    """Return a stream over a store, a token file, or a list of them."""
    if isinstance(source, Stream):
        return source
    # A str is a sequence too, so single members are recognised first.
    if isinstance(source, str | os.PathLike | TokenStore | ArrayFile | TokenFiles | HasSnapshot):
        return Stream([_open(source)])
    return Stream([_open(each) for each in source])


def _open(source: StreamLike | ArrayFile) -> Member:
    if isinstance(source, TokenStore | ArrayFile | TokenFiles):
        return source
    if isinstance(source, HasSnapshot):
        return source.snapshot()
    if not isinstance(source, str | os.PathLike):
        raise StoreError(
            f"{type(source).__name__} is neither a path nor a store. Ids in memory are opened "
            "first: Windows(open_tokens(array), length)."
        )
    if is_remote(source):
        return TokenStore(source)
    path = expand_user(source)
    if path.suffix == ".npy" and not path.is_dir() and not is_pattern(path):
        return ArrayFile(path)  # its digest is in the states of earlier versions
    files = token_files_at(path)
    return TokenStore(path) if files is None else files


def _refuse_mixed(members: Sequence[Member]) -> None:
    """Raise if two members were made by different tokenizers, as far as these are known."""
    known = [(each.path, each.tokenizer_record) for each in members]
    known = [(path, record) for path, record in known if record is not None]
    for path, other in known[1:]:
        one, first = known[0]
        assert first is not None and other is not None  # noqa: PT018
        if first["canary"] != other["canary"] or first["digest"] != other["digest"]:
            digests = [(each["digest"] or each["canary"])[:8] for each in (other, first)]
            raise StoreError(
                f"{path} was tokenized with {other['name']!r} (digest {digests[0]}), "
                f"{one} with {first['name']!r} (digest {digests[1]}). The same id would "
                "mean different text, so they cannot share a row. Build them with one tokenizer."
            )


class StreamRows(Rows):
    """Rows that are cut from a stream: the base of `Windows`, `Packs` and `Documents`."""

    stream: Stream
    part_rows: Integers
    gives_loss = True
    num_readable = 0
    """The number of rows whose tokens are all available; less than all rows only in a snapshot."""

    def __init__(self, store: StreamSource) -> None:
        self.stream = open_stream(store)
        self.tokenizer_digest = self.stream.tokenizer_digest
        self.fetches_parts = self.stream.fetches_parts

    def __len__(self) -> int:
        if not self.stream.sealed:
            raise UnknownLengthError(
                "These rows were made while the store was still being written, so their number is "
                'not known. Pass them to a Loader, alone and with shuffle="part" or without '
                "shuffle=: it reads parts as they become ready. For a mixture, another order or a "
                "length, make new rows once the store is finished."
            )
        return self.num_readable


def _located(ids: Ids) -> tuple[Ids, int]:
    """Return ids, and where they begin in memory; 0 if they are not one array."""
    return ids, int(ids.ctypes.data) if isinstance(ids, np.ndarray) else 0
