"""The four ways to arrange the rows of one epoch.

    "full"    all rows are shuffled
    "block"   blocks of rows are shuffled, and then the rows inside each group of blocks; a block is
              256 rows, or with Block(rows="part") a whole part of the store
    "part"    parts stay in order, and the rows inside each part are shuffled
    "none"    rows stay in the order of the store

Memory and NVMe disks read single rows as fast as long stretches; hard disks and object stores do
not. With "block", a run reads all rows of one group before it begins the next group, so only the
blocks of one group have to fit in the page cache. With "part", a run can
begin while later parts of the store are still being written.

Each mode maps the positions of an epoch to rows, and back. A call may contain rows of several
epochs and sources: `Orders` says which row belongs to which.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, final

import numpy as np

from penstock.digest import Unsigned, derive_key
from penstock.errors import PlanError
from penstock.order.integers import END, Indices, Integers, label_pairs
from penstock.order.permute import derive_subkeys, permute_each
from penstock.ranges import group_rows

Mode = Literal["full", "none", "block", "part"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The sizes of `shuffle="block"`.

    The defaults suit rows of 1,024 tokens of two bytes: one read is 512 KiB, and 32 MiB of the
    store are in use at a time. For remote stores, whose parts are downloaded as a whole,
    `REMOTE_BLOCK` is the default.
    """

    rows: int | Literal["part"] = 256
    """The number of consecutive rows in a block: the length of one read. "part" makes each part of
    the store a block."""

    group: int = 64
    """How many blocks are shuffled together. More blocks shuffle better and use more memory."""

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("group", self.group)):
            if name == "rows" and isinstance(value, str):
                if value != "part":
                    raise PlanError(f'Block(rows=…) must be a number or "part"; got {value!r}.')
            elif isinstance(value, str) or not 1 <= value <= 2**30:
                raise PlanError(f"Block({name}=…) must be from 1 to 2^30; got {value:,}.")


REMOTE_BLOCK = Block(rows="part", group=4)
"""The order of a plan over remote stores, unless another one is given: the first batch needs four
parts, and 120 MiB of a store whose parts are made of 64 MiB of text are in use at a time."""


class Domain(NamedTuple):
    """The rows to arrange: how many there are, and how many each part has."""

    num_rows: int
    part_rows: Sequence[int] = ()


class Sources(NamedTuple):
    """The sources of a plan, and how their rows are shuffled."""

    names: Sequence[str]
    domains: Sequence[Domain]
    shuffle: Mode | Block
    seed: int


class Orders(NamedTuple):
    """The orders that one call uses: an order is one epoch of one domain."""

    which: Indices
    """The order of each row of the call, as an index into the arrays below."""
    domains: Indices
    """The domain of each order."""
    keys: Unsigned
    """The key of each order."""


@lru_cache(maxsize=4096)
def epoch_key(seed: int, names: tuple[str, ...], epoch: int) -> int:
    """Return the key of one epoch of the sources called `names`.

    It depends on nothing else. So adding another source to a plan, or listing the sources in
    another order, does not change their orders.
    """
    return derive_key("shuffle", seed, *names, epoch)


class Arrangement:
    """Maps the positions of an epoch to its rows, and back, for each `Domain` of a list.

    This class leaves rows in the order of the store; its subclasses shuffle them.
    """

    def __init__(self, domains: Sequence[Domain]) -> None:
        self._sizes = np.array([domain.num_rows for domain in domains], dtype=np.int64)

    def map(self, numbers: Integers, orders: Orders, *, inverse: bool = False) -> Integers:
        """Return the rows at these positions; if `inverse`, the positions of these rows."""
        return numbers


def arrange(mode: Mode | Block, domains: Sequence[Domain]) -> Arrangement:
    """Return the object that maps positions of an epoch to rows, for a way to shuffle.

    In the example, parts of 2 and 3 rows stay in order, and rows are shuffled inside each part.

    >>> parts = arrange("part", [Domain(5, part_rows=[2, 3])])
    >>> one_order = Orders(np.zeros(5, int), np.array([0]), np.array([17], dtype=np.uint64))
    >>> parts.map(np.arange(5), one_order)
    array([1, 0, 2, 4, 3])
    """
    if needs_parts(mode) and isinstance(mode, Block):
        return _PartBlock(domains, mode.group)
    if mode == "block" or isinstance(mode, Block):
        return _Block(domains, Block() if mode == "block" else mode)
    kinds = {"full": _Full, "none": Arrangement, "part": _Part}
    if mode not in kinds:
        advice = f' Use "{"full" if mode else "none"}".' if isinstance(mode, bool) else ""
        raise PlanError(
            'shuffle must be "full", "block" (or Block(rows=…, group=…)), "part" or "none"; got '
            f"{mode!r}.{advice}"
        )
    return kinds[mode](domains)


def needs_parts(mode: Mode | Block) -> bool:
    """Return whether an order depends on how many rows each part has."""
    return mode == "part" or (isinstance(mode, Block) and mode.rows == "part")


def mode_to_json(mode: Mode | Block) -> dict[str, Any]:
    """Return a mode as JSON, with the sizes of blocks.

    >>> mode_to_json("block")
    {'mode': 'block', 'rows': 256, 'group': 64}
    """
    if mode == "block":
        mode = Block()
    if isinstance(mode, Block):
        return {"mode": "block", "rows": mode.rows, "group": mode.group}
    return {"mode": mode}


@final
class _Full(Arrangement):
    def map(self, numbers: Integers, orders: Orders, *, inverse: bool = False) -> Integers:
        sizes = self._sizes[orders.domains]
        return permute_each(numbers, orders.which, sizes, orders.keys, inverse=inverse)


@final
class _Part(Arrangement):
    """Shuffles each part separately; the parts stay in order.

    The parts of all domains are concatenated, so that one search finds the parts of all rows.
    """

    def __init__(self, domains: Sequence[Domain]) -> None:
        super().__init__(domains)
        # Domains with parts 2 3 | 4: sizes 2 3 4, ends 2 5 9, first parts 0 2, first rows 0 5.
        parts = [rows for domain in domains for rows in domain.part_rows]
        self._part_sizes = np.array(parts, dtype=np.int64)
        self._ends = np.cumsum(self._part_sizes)
        num_parts = np.array([len(domain.part_rows) for domain in domains], dtype=np.int64)
        self._first_part = np.cumsum(num_parts) - num_parts
        self._first_row = np.cumsum(self._sizes) - self._sizes

    def map(self, numbers: Integers, orders: Orders, *, inverse: bool = False) -> Integers:
        # A part has the same range of numbers as positions and as rows, so both directions find
        # it in the same way.
        first_row = self._first_row[orders.domains][orders.which]
        parts = np.searchsorted(self._ends, numbers + first_row, side="right")
        starts = self._ends[parts] - self._part_sizes[parts] - first_row  # within the domain
        # Each (order, part) is shuffled by a separate order, with a subkey for the part.
        which, order_of, part_of = label_pairs(orders.which, parts)
        part_numbers = part_of - self._first_part[orders.domains[order_of]]
        keys = derive_subkeys(orders.keys[order_of], part_numbers)
        sizes = self._part_sizes[part_of]
        return permute_each(numbers - starts, which, sizes, keys, inverse=inverse) + starts


@final
class _Block(Arrangement):
    """Shuffles the blocks, and then the rows inside each group of consecutive blocks.

        rows, beginning at a random row          |--0--|--1--|--2--|--3--|-4|
        blocks shuffled, the short one last      |--2--|--0--|--3--|--1--|-4|
        rows shuffled inside groups of two       |5 0 4 1 …  |7 2 6 3 …  |8 |

    Each epoch begins at another row, and the rows before it come last. That moves the borders of
    the blocks: the rows that share a block change, and no row is always in the short block.
    """

    def __init__(self, domains: Sequence[Domain], block: Block) -> None:
        super().__init__(domains)
        assert isinstance(block.rows, int)  # blocks that are parts have their own class
        self._block = block.rows
        self._group = block.rows * block.group

    def map(self, numbers: Integers, orders: Orders, *, inverse: bool = False) -> Integers:
        changes = [self._shuffle_groups, self._move_blocks, self._rotate]
        for change in reversed(changes) if inverse else changes:
            numbers = change(numbers, orders, inverse=inverse)
        return numbers

    def _shuffle_groups(self, numbers: Integers, orders: Orders, *, inverse: bool) -> Integers:
        groups = numbers // self._group
        starts = groups * self._group
        which, order_of, group_of = label_pairs(orders.which, groups)
        rest = self._sizes[orders.domains[order_of]] - group_of * self._group
        sizes = np.minimum(rest, self._group)  # the last group may be smaller
        keys = derive_subkeys(orders.keys[order_of], group_of)
        return permute_each(numbers - starts, which, sizes, keys, inverse=inverse) + starts

    def _move_blocks(self, numbers: Integers, orders: Orders, *, inverse: bool) -> Integers:
        """Return rows moved together with their blocks; the short block at the end stays."""
        num_blocks = self._sizes[orders.domains] // self._block
        blocks = numbers // self._block
        whole = np.flatnonzero(blocks < num_blocks[orders.which])
        if not whole.size:
            return numbers
        # A domain without a complete block has no rows here, but an order needs a size of 1.
        sizes, keys = np.maximum(num_blocks, 1), self._subkeys(orders, END)
        moved = permute_each(blocks[whole], orders.which[whole], sizes, keys, inverse=inverse)
        # Rows keep their offset within the block: they move by whole blocks.
        numbers = numbers.copy()
        numbers[whole] += (moved - blocks[whole]) * self._block
        return numbers

    def _rotate(self, rows: Integers, orders: Orders, *, inverse: bool) -> Integers:
        """Rotate row numbers so that an epoch begins at a random row; if `inverse`, rotate back."""
        sizes = self._sizes[orders.domains]
        draws = self._subkeys(orders, END + 1) % sizes.astype(np.uint64)
        shifts = draws.astype(np.int64)
        if inverse:
            shifts = sizes - shifts  # the remaining rows complete the circle, which undoes it
        sizes = sizes[orders.which]
        # A shift is at most the size, so subtracting the size once is enough.
        rotated = rows + shifts[orders.which]
        return np.where(rotated >= sizes, rotated - sizes, rotated)

    def _subkeys(self, orders: Orders, number: int) -> Unsigned:
        # Groups have the subkeys 0, 1, … below END; blocks use END, the first row END + 1.
        return derive_subkeys(orders.keys, np.full(len(orders.keys), number, dtype=np.int64))


@final
class _PartBlock(Arrangement):
    """Shuffles the parts, and then the rows inside each group of consecutive parts.

        parts of 3, 2, 4 and 2 rows              |--0--|-1-|---2---|-3-|
        parts shuffled                           |-3-|---2---|-1-|--0--|
        rows shuffled inside groups of two       |6 9 5 7 10 8|3 0 1 4 2|

    Where the parts of an order are stored as arrays, which takes 24 bytes for each part; the arrays
    of the last orders are kept.
    """

    def __init__(self, domains: Sequence[Domain], group: int) -> None:
        super().__init__(domains)
        self._group = group
        self._parts = [np.array(domain.part_rows, dtype=np.int64) for domain in domains]
        self._laid_out = lru_cache(maxsize=16)(self._lay_out)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_laid_out"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._laid_out = lru_cache(maxsize=16)(self._lay_out)

    def _lay_out(self, domain: int, key: int) -> tuple[Integers, Integers, Integers, Integers]:
        """The parts of an order: which comes at which place, and where its rows begin.

        Returns:
            The part at each place; the rows before each place, and in all; the first row of each
            part in the store, and the number of rows; the place of each part.
        """
        sizes = self._parts[domain]
        places = np.arange(len(sizes), dtype=np.int64)
        order = Orders(np.zeros_like(places), np.zeros(1, np.int64), np.array([key], np.uint64))
        # As in `_Block`, the key of the blocks is a subkey, and groups have those below END.
        keys = derive_subkeys(order.keys, np.array([END], dtype=np.int64))
        part_at = permute_each(places, order.which, np.array([len(sizes)]), keys)
        place_of = np.empty_like(part_at)
        place_of[part_at] = places
        starts = np.concatenate(([0], np.cumsum(sizes[part_at])))
        first_rows = np.concatenate(([0], np.cumsum(sizes)))
        return part_at, starts, first_rows, place_of

    def map(self, numbers: Integers, orders: Orders, *, inverse: bool = False) -> Integers:
        mapped = np.empty_like(numbers)
        for order, rows in group_rows(orders.which):
            domain, key = int(orders.domains[order]), orders.keys[order]
            part_at, starts, first_rows, place_of = self._laid_out(domain, int(key))
            inside = numbers[rows]
            if inverse:
                parts = np.searchsorted(first_rows, inside, side="right") - 1
                inside = inside - first_rows[parts] + starts[place_of[parts]]
            inside = self._shuffle_groups(inside, key, starts, inverse=inverse)
            if not inverse:
                # The place of a position, and the part there; parts without rows have no position.
                places = np.searchsorted(starts, inside, side="right") - 1
                inside = inside - starts[places] + first_rows[part_at[places]]
            mapped[rows] = inside
        return mapped

    def _shuffle_groups(
        self, numbers: Integers, key: np.uint64, starts: Integers, *, inverse: bool
    ) -> Integers:
        """Return positions that are shuffled inside each group of parts."""
        borders = np.append(starts[: -1 : self._group], starts[-1])
        groups = np.searchsorted(borders, numbers, side="right") - 1
        which, _, group_of = label_pairs(np.zeros_like(groups), groups)
        keys = derive_subkeys(np.full(len(group_of), key, np.uint64), group_of)
        sizes, before = borders[group_of + 1] - borders[group_of], borders[groups]
        shuffled = permute_each(numbers - before, which, sizes, keys, inverse=inverse)
        return np.asarray(shuffled + before)
