"""The four ways to arrange the rows of one epoch.

    "full"    all rows are shuffled
    "block"   blocks of rows are shuffled, and then the rows inside each group of blocks
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

Mode = Literal["full", "none", "block", "part"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The sizes of `shuffle="block"`.

    The defaults suit rows of 1,024 tokens of two bytes: one read is 512 KiB, and 32 MiB of the
    store are in use at a time.
    """

    rows: int = 256
    """The number of consecutive rows in a block: the length of one read."""

    group: int = 64
    """How many blocks are shuffled together. More blocks shuffle better and use more memory."""

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("group", self.group)):
            if not 1 <= value <= 2**30:
                raise PlanError(f"Block({name}=…) must be from 1 to 2^30; got {value:,}.")


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
    if mode == "block" or isinstance(mode, Block):
        return _Block(domains, Block() if mode == "block" else mode)
    kinds = {"full": _Full, "none": Arrangement, "part": _Part}
    if mode not in kinds:
        raise PlanError(
            'shuffle must be "full", "block" (or Block(rows=…, group=…)), "part" or "none"; got '
            f"{mode!r}."
        )
    return kinds[mode](domains)


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
