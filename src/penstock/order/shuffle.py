"""The four ways to arrange one epoch.

    "full"    every row anywhere
    "block"   blocks of rows anywhere, then rows anywhere inside a group of blocks
    "part"    parts in order, rows anywhere inside their part
    "none"    rows as they lie

Memory and NVMe serve single rows as fast as long reads; disks and object stores do not.
With "block", the blocks of one group are all that is read, or lies in the page cache, for
as many positions as the group has rows. With "part", no row of a later part is needed, so
a run can begin while the store is being written.

Each mode maps the positions of an epoch to rows and back. A call answers for several
epochs and sources at once: `Orders` says which row of it belongs to which.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, final

import numpy as np

from penstock.digest import Unsigned, derive_key
from penstock.errors import PlanError
from penstock.order.integers import END, Indices, Integers, label_pairs
from penstock.order.permute import derive_subkeys, permute_each, unpermute_each

__all__ = [
    "Arrangement",
    "Block",
    "Domain",
    "Mode",
    "Orders",
    "arrange",
    "epoch_key",
    "mode_to_json",
]

Mode = Literal["full", "none", "block", "part"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The sizes of `shuffle="block"`.

    The defaults suit rows of 1,024 tokens of two bytes: reads of 512 KiB, and 32 MiB
    of the store in use at a time.
    """

    rows: int = 256
    """Consecutive rows in a block: the length of one read."""

    group: int = 64
    """Blocks whose rows are shuffled together. More shuffle better and hold more."""

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("group", self.group)):
            if not 1 <= value <= 2**30:
                raise PlanError(f"Block({name}={value:,}) cannot be; it is 1 to 2^30.")


class Domain(NamedTuple):
    """What is arranged: a number of rows, and how they lie in parts."""

    num_rows: int
    part_rows: Sequence[int] = ()


class Orders(NamedTuple):
    """The orders that take part in one call."""

    which: Indices
    """The order of each row."""
    domains: Indices
    """The domain of each order."""
    keys: Unsigned
    """The key of each order."""


@lru_cache(maxsize=4096)
def epoch_key(seed: int, names: tuple[str, ...], epoch: int) -> int:
    """The key of one epoch of the sources called `names`.

    It depends on nothing else, so another source beside them changes no order of
    theirs, nor does another place in the list.
    """
    return derive_key("shuffle", seed, *names, epoch)


class Arrangement(Protocol):
    """Positions of an epoch to its rows, and back, for several domains."""

    def rows(self, positions: Integers, orders: Orders) -> Integers:
        """The rows at these positions."""
        ...

    def positions(self, rows: Integers, orders: Orders) -> Integers:
        """The positions of these rows: the inverse of `rows`."""
        ...


def arrange(mode: Mode | Block, domains: Sequence[Domain]) -> Arrangement:
    """The arrangement of `domains` that `mode` names.

    >>> parts = arrange("part", [Domain(5, part_rows=[2, 3])])
    >>> one_order = Orders(np.zeros(5, int), np.array([0]), np.array([17], dtype=np.uint64))
    >>> parts.rows(np.arange(5), one_order)
    array([1, 0, 2, 4, 3])
    """
    if mode == "full":
        return _Full(domains)
    if mode == "none":
        return _None()
    if mode == "part":
        return _Part(domains)
    if mode == "block" or isinstance(mode, Block):
        return _Block(domains, Block() if mode == "block" else mode)
    raise PlanError(
        f'shuffle={mode!r} is not a way to arrange rows; these are: "full", "block" '
        '(or Block(rows=…, group=…)), "part", "none".'
    )


def mode_to_json(mode: Mode | Block) -> dict[str, Any]:
    """A mode as JSON.

    >>> mode_to_json("block")
    {'mode': 'block', 'rows': 256, 'group': 64}
    """
    if mode == "block":
        mode = Block()
    if isinstance(mode, Block):
        return {"mode": "block", "rows": mode.rows, "group": mode.group}
    return {"mode": mode}


@final
class _None:
    def rows(self, positions: Integers, orders: Orders) -> Integers:
        return positions

    def positions(self, rows: Integers, orders: Orders) -> Integers:
        return rows


@final
class _Full:
    def __init__(self, domains: Sequence[Domain]) -> None:
        self._sizes = np.array([domain.num_rows for domain in domains], dtype=np.int64)

    def rows(self, positions: Integers, orders: Orders) -> Integers:
        return permute_each(positions, orders.which, self._sizes[orders.domains], orders.keys)

    def positions(self, rows: Integers, orders: Orders) -> Integers:
        return unpermute_each(rows, orders.which, self._sizes[orders.domains], orders.keys)


@final
class _Part:
    """Parts of all domains laid end to end, so that one search finds any of them."""

    def __init__(self, domains: Sequence[Domain]) -> None:
        self._sizes = np.array(
            [rows for domain in domains for rows in domain.part_rows], dtype=np.int64
        )
        self._ends = np.cumsum(self._sizes)
        num_parts = np.array([len(domain.part_rows) for domain in domains], dtype=np.int64)
        self._first_part = np.cumsum(num_parts) - num_parts
        num_rows = np.array([domain.num_rows for domain in domains], dtype=np.int64)
        self._first_row = np.cumsum(num_rows) - num_rows

    def rows(self, positions: Integers, orders: Orders) -> Integers:
        starts, which, sizes, keys = self._find(positions, orders)
        return permute_each(positions - starts, which, sizes, keys) + starts

    def positions(self, rows: Integers, orders: Orders) -> Integers:
        # A part holds the same numbers as positions and as rows, so the search is the same.
        starts, which, sizes, keys = self._find(rows, orders)
        return unpermute_each(rows - starts, which, sizes, keys) + starts

    def _find(
        self, numbers: Integers, orders: Orders
    ) -> tuple[Integers, Indices, Integers, Unsigned]:
        """Where the part of each number starts; and the order of each part."""
        first_row = self._first_row[orders.domains][orders.which]
        parts = np.searchsorted(self._ends, numbers + first_row, side="right")
        starts = self._ends[parts] - self._sizes[parts] - first_row
        which, order_of, part_of = label_pairs(orders.which, parts)
        part_numbers = part_of - self._first_part[orders.domains[order_of]]
        keys = derive_subkeys(orders.keys[order_of], part_numbers)
        return starts, which, self._sizes[part_of], keys


@final
class _Block:
    """Blocks permuted, then rows inside each group of consecutive blocks.

        rows, from another one on each epoch     |--0--|--1--|--2--|--3--|-4|
        blocks permuted, the short one last      |--2--|--0--|--3--|--1--|-4|
        rows shuffled inside groups of two       |5 0 4 1 …  |7 2 6 3 …  |8 |

    Beginning each epoch at another row moves the borders of the blocks, so that which
    rows share a block changes, and no row is always in the short one.
    """

    def __init__(self, domains: Sequence[Domain], block: Block) -> None:
        self._sizes = np.array([domain.num_rows for domain in domains], dtype=np.int64)
        self._block = block.rows
        self._group = block.rows * block.group

    def rows(self, positions: Integers, orders: Orders) -> Integers:
        starts, which, sizes_of, keys = self._groups(positions, orders)
        places = permute_each(positions - starts, which, sizes_of, keys) + starts
        rows = self._move_blocks(places, orders, forward=True)
        sizes, first_rows = self._sizes_and_first_rows(orders)
        rows += first_rows[orders.which]
        return np.where(rows >= sizes[orders.which], rows - sizes[orders.which], rows)

    def positions(self, rows: Integers, orders: Orders) -> Integers:
        sizes, first_rows = self._sizes_and_first_rows(orders)
        turned = rows - first_rows[orders.which]
        turned = np.where(turned < 0, turned + sizes[orders.which], turned)
        places = self._move_blocks(turned, orders, forward=False)
        starts, which, sizes_of, keys = self._groups(places, orders)
        return unpermute_each(places - starts, which, sizes_of, keys) + starts

    def _groups(
        self, numbers: Integers, orders: Orders
    ) -> tuple[Integers, Indices, Integers, Unsigned]:
        """Where the group of each number starts; and the order of each group."""
        groups = numbers // self._group
        starts = groups * self._group
        which, order_of, group_of = label_pairs(orders.which, groups)
        rest = self._sizes[orders.domains[order_of]] - group_of * self._group
        keys = derive_subkeys(orders.keys[order_of], group_of)
        return starts, which, np.minimum(rest, self._group), keys

    def _move_blocks(self, numbers: Integers, orders: Orders, *, forward: bool) -> Integers:
        """Rows moved with their blocks; the short block at the end stays."""
        num_blocks = self._sizes[orders.domains] // self._block
        blocks = numbers // self._block
        whole = np.flatnonzero(blocks < num_blocks[orders.which])
        if whole.size:
            keys = derive_subkeys(orders.keys, np.full(len(orders.keys), END, dtype=np.int64))
            move = permute_each if forward else unpermute_each
            # A domain without a whole block has none among these, and is given one unused.
            sizes = np.maximum(num_blocks, 1)
            moved = move(blocks[whole], orders.which[whole], sizes, keys)
            numbers = numbers.copy()
            numbers[whole] += (moved - blocks[whole]) * self._block
        return numbers

    def _sizes_and_first_rows(self, orders: Orders) -> tuple[Integers, Integers]:
        sizes = self._sizes[orders.domains]
        draws = derive_subkeys(orders.keys, np.full(len(orders.keys), END + 1, dtype=np.int64))
        return sizes, (draws % sizes.astype(np.uint64)).astype(np.int64)
