"""Shuffling as arithmetic.

A shuffled order of n samples is usually an array of n integers. Here it is a
function: give it a position, get back a sample, in constant time and no memory. So
resuming is free, because position 8,000,000 is answered without the 7,999,999
before it, and every rank computes the same order without speaking to the others.

Up to 4,096 samples the order is an exact shuffle: the samples sorted by 64-bit
numbers that a bijective mixer draws, so that no two tie. Above, it is a Feistel
network of 8 rounds on pairs (high, low), low below a power of two near the square
root of n, high below the number b of such stretches in n. There are fewer than
sqrt(n) pairs too many; an answer at or past n is fed back in until it falls below.
The cost is flat in n: about 15 ns a row in large calls, 30 µs for 32 rows.

Only sums, products, shifts and comparisons of unsigned 64-bit integers take part,
which every platform computes alike. Golden vectors in the tests pin the result: a
change here would change the order of every run.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.digest import GOLDEN, Unsigned, constant, mix64
from penstock.errors import PlanError
from penstock.order.integers import END, Indices, Integers, as_unsigned

__all__ = [
    "EXACT_ROWS",
    "derive_subkeys",
    "permute",
    "permute_each",
    "unpermute",
    "unpermute_each",
]

EXACT_ROWS = 4096
"""The largest n that is shuffled exactly, by a table of 8 KiB."""

_ROUNDS = 8
_CHUNK_ROWS = 16_384  # a chunk's arrays fit in the L2 cache: twice as fast as 65,536 rows
_CROWD_ROWS = 512  # from here on, one call for an order beats gathering numbers row by row


_MIX_1 = constant(0xBF58476D1CE4E5B9)  # the two multipliers of SplitMix64
_MIX_2 = constant(0x94D049BB133111EB)
_TABLE_SALT = constant(0x7C3B8A1F5D92E604)  # no meaning: they part the uses of one key
_SUBKEY_SALT = constant(0xD6E8FEB86659FD93)
_1, _32, _64 = constant(1), constant(32), constant(64)


class _Network(NamedTuple):
    """The numbers of one network as 0-d arrays, or of many as arrays of equal length."""

    n: Unsigned
    low_bits: Unsigned
    low_mask: Unsigned
    low_shift: Unsigned  # from 64 bits of noise to `low_bits`
    high: Unsigned  # how many high halves there are
    keys: tuple[Unsigned, ...]  # one a round

    def take(self, rows: Indices | slice) -> "_Network":
        """The networks of these rows; of one network, itself."""
        return self if self.n.ndim == 0 else self.apply(lambda numbers: numbers[rows])

    def apply(self, change: Callable[[Unsigned], Unsigned]) -> "_Network":
        """The same change made to every array."""
        n, low_bits, low_mask, low_shift, high, keys = self
        return _Network(
            n=change(n),
            low_bits=change(low_bits),
            low_mask=change(low_mask),
            low_shift=change(low_shift),
            high=change(high),
            keys=tuple(change(key) for key in keys),
        )


def permute(positions: npt.ArrayLike, n: int, key: int) -> Integers:
    """The samples that lie at `positions` of an order of `range(n)` chosen by `key`.

    A bijection of `range(n)` for every key: all positions together give every sample
    once. Each row is answered on its own, whatever else is asked.

    Args:
        positions: Integers from 0 to n - 1, in any order.
        n: From 1 to 2^62.
        key: From 0 to 2^64 - 1; see `penstock.digest.derive_key`.

    >>> permute([0, 1, 2, 3, 4], n=5, key=17)
    array([3, 2, 4, 0, 1])
    >>> permute([0, 1, 2], n=10**15, key=17)
    array([915709099343695, 328808710727967, 297590627842522])
    """
    return _map(positions, n, key, forward=True)


def unpermute(samples: npt.ArrayLike, n: int, key: int) -> Integers:
    """The positions at which `samples` lie: the inverse of `permute`, at the same cost.

    >>> unpermute(permute([0, 1, 2], n=10**15, key=17), n=10**15, key=17)
    array([0, 1, 2])
    """
    return _map(samples, n, key, forward=False)


def permute_each(positions: Integers, which: Indices, sizes: Integers, keys: Unsigned) -> Integers:
    """`permute` for several orders at once: row i by the order numbered `which[i]`.

    Equal to one call of `permute` for each order, without the overhead of so many
    calls: 64 large sources cost little more than one.

    >>> permute_each(
    ...     np.array([0, 0, 1]),
    ...     np.array([0, 1, 0]),
    ...     sizes=np.array([5, 10**15]),
    ...     keys=np.array([17, 17], dtype=np.uint64),
    ... )
    array([              3, 915709099343695,               2])
    """
    return _map_each(positions, which, sizes, keys, forward=True)


def unpermute_each(samples: Integers, which: Indices, sizes: Integers, keys: Unsigned) -> Integers:
    """`unpermute` for several orders at once: the inverse of `permute_each`."""
    return _map_each(samples, which, sizes, keys, forward=False)


def derive_subkeys(keys: Unsigned, numbers: Integers) -> Unsigned:
    """A key for each pair of a key and a number, for the parts of one order.

    Nanoseconds each, where `penstock.digest.derive_key` takes microseconds. One key
    with different numbers never gives the same result twice.
    """
    return mix64(mix64(keys ^ _SUBKEY_SALT) + numbers.astype(np.uint64) * GOLDEN)


def _map(values: npt.ArrayLike, n: int, key: int, *, forward: bool) -> Integers:
    if not 1 <= n <= END:
        raise PlanError(f"An order of {n:,} rows cannot be; it has 1 to {END:,} (2^62).")
    numbers = as_unsigned(values, n)
    if n <= EXACT_ROWS:
        return _table(n, key, forward=forward)[numbers].astype(np.int64)
    return _walk(numbers, _network(n, key), forward=forward)


def _map_each(
    values: Integers, which: Indices, sizes: Integers, keys: Unsigned, *, forward: bool
) -> Integers:
    if len(sizes) == 1:
        return _map(values, int(sizes[0]), int(keys[0]), forward=forward)
    mapped = np.empty(len(values), dtype=np.int64)
    counts = np.bincount(which, minlength=len(sizes))
    sparse = (sizes > EXACT_ROWS) & (counts < _CROWD_ROWS)
    if sparse.any():
        rows = np.flatnonzero(sparse[which])
        networks = _networks(sizes, keys).take(which[rows])
        mapped[rows] = _walk(values[rows].astype(np.uint64), networks, forward=forward)
    for order, rows in _rows_of_each(np.flatnonzero(~sparse & (counts > 0)), which, counts):
        mapped[rows] = _map(values[rows], int(sizes[order]), int(keys[order]), forward=forward)
    return mapped


def _rows_of_each(
    orders: Indices, which: Indices, counts: Indices
) -> Iterator[tuple[int, Indices]]:
    """Each of `orders` with the rows that belong to it."""
    if orders.size == 0:
        return
    # Sorting 16-bit integers is a radix sort, ten times as fast as one of 64 bits.
    narrow = np.uint16 if len(counts) <= 2**16 else np.int64
    by_order = np.argsort(which.astype(narrow), kind="stable")
    ends = np.cumsum(counts)
    for order in orders.tolist():
        yield order, by_order[ends[order] - counts[order] : ends[order]]


@lru_cache(maxsize=1024)  # 8 MiB at most
def _table(n: int, key: int, *, forward: bool) -> npt.NDArray[np.uint16]:
    """All of a small order, or of its inverse."""
    start = mix64(_key(key) ^ _TABLE_SALT)
    draws = mix64(start + np.arange(n, dtype=np.uint64) * GOLDEN)
    table = np.argsort(draws)  # no ties, so every way of sorting gives this
    return (table if forward else np.argsort(table)).astype(np.uint16)


@lru_cache(maxsize=1024)
def _network(n: int, key: int) -> _Network:
    return _networks(np.array([n], dtype=np.int64), _key(key)).apply(
        lambda numbers: numbers.reshape(())
    )


def _networks(sizes: Integers, keys: Unsigned) -> _Network:
    """The network of each size and key."""
    n = sizes.astype(np.uint64)
    low_bits = np.array([(size - 1).bit_length() // 2 for size in sizes.tolist()], dtype=np.uint64)
    low_mask = (_1 << low_bits) - _1
    rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, np.newaxis] * GOLDEN
    return _Network(
        n=n,
        low_bits=low_bits,
        low_mask=low_mask,
        low_shift=_64 - low_bits,
        high=(n + low_mask) >> low_bits,
        keys=tuple(mix64(keys + rounds)),
    )


def _key(key: int) -> Unsigned:
    if not 0 <= key < 2**64:
        raise PlanError(f"A key is a number from 0 to 2^64 - 1, not {key}; see derive_key.")
    # One element, not none: arrays wrap around in silence, scalars warn.
    return np.array([key], dtype=np.uint64)


def _walk(numbers: Unsigned, network: _Network, *, forward: bool) -> Integers:
    """Run numbers below n through the network until they are below n again, in place."""
    run = _encrypt if forward else _decrypt
    for start in range(0, numbers.size, _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        chunk, networks = numbers[rows], network.take(rows)
        run(chunk, networks)
        astray = np.flatnonzero(chunk >= networks.n)
        while astray.size:
            strays, their_networks = chunk[astray], networks.take(astray)
            run(strays, their_networks)
            chunk[astray] = strays
            astray = astray[strays >= their_networks.n]
    return numbers.view(np.int64)


def _encrypt(numbers: Unsigned, network: _Network) -> None:
    """One pass of the network over `numbers`, in place."""
    low, high = numbers & network.low_mask, numbers >> network.low_bits
    noise, shifted = np.empty_like(low), np.empty_like(low)
    for round_number in range(0, _ROUNDS, 2):
        _stir_low(low, high, network, round_number, (noise, shifted))
        _noise_high(low, network, round_number + 1, (noise, shifted))
        np.add(high, noise, high)
        # Modulo without a division: below 0, an unsigned number is a huge one.
        np.subtract(high, network.high, noise)
        np.minimum(high, noise, out=high)
    np.left_shift(high, network.low_bits, high)
    np.bitwise_or(high, low, numbers)


def _decrypt(numbers: Unsigned, network: _Network) -> None:
    """The rounds of `_encrypt` undone, last one first."""
    low, high = numbers & network.low_mask, numbers >> network.low_bits
    noise, shifted = np.empty_like(low), np.empty_like(low)
    for round_number in reversed(range(0, _ROUNDS, 2)):
        _noise_high(low, network, round_number + 1, (noise, shifted))
        np.subtract(high, noise, high)
        np.add(high, network.high, noise)
        np.minimum(high, noise, out=high)
        _stir_low(low, high, network, round_number, (noise, shifted))
    np.left_shift(high, network.low_bits, high)
    np.bitwise_or(high, low, numbers)


def _stir_low(
    low: Unsigned, high: Unsigned, network: _Network, number: int, space: tuple[Unsigned, Unsigned]
) -> None:
    """A round on the low halves, which is its own inverse."""
    noise, shifted = space
    _fill_noise(high, network.keys[number], noise, shifted)
    np.right_shift(noise, network.low_shift, noise)
    np.bitwise_xor(low, noise, low)


def _noise_high(
    low: Unsigned, network: _Network, number: int, space: tuple[Unsigned, Unsigned]
) -> None:
    """Fill the first array of `space` with noise below the number of high halves."""
    noise, shifted = space
    _fill_noise(low, network.keys[number], noise, shifted)
    # The top 32 bits as a fraction of 2^32, times the range.
    np.right_shift(noise, _32, noise)
    np.multiply(noise, network.high, noise)
    np.right_shift(noise, _32, noise)


def _fill_noise(half: Unsigned, key: Unsigned, noise: Unsigned, shifted: Unsigned) -> None:
    """Noise that depends on all bits of `half` and `key`; the top bits are the best."""
    np.bitwise_xor(half, key, noise)
    np.multiply(noise, _MIX_1, noise)
    np.right_shift(noise, _32, shifted)
    np.bitwise_xor(noise, shifted, noise)
    np.multiply(noise, _MIX_2, noise)
