"""Shuffling as arithmetic.

A shuffled order of n samples is usually an array of n integers. Here it is a function: give it a
position, get back a sample, in constant time and without memory. So resuming is free, because
position 8,000,000 is computed without the 7,999,999 before it. And every rank computes the same
order without communication.

Up to 4,096 samples the order is an exact shuffle: the samples are sorted by 64-bit numbers that a
bijective mixer computes, so there are no ties. Above that, it is a Feistel network of 8 rounds on
pairs (high, low). `low` is below a power of two near the square root of n, and `high` is below the
number of such stretches in n. The number of pairs exceeds n by less than sqrt(n). If the network
returns n or more, it is applied again to its result until the result is below n ("cycle walking").
The cost does not depend on n: about 15 ns per row in large calls, and 30 µs for 32 rows.

Only sums, products, shifts and comparisons of unsigned 64-bit integers are used. Every platform
computes these alike. Golden vectors in the tests pin the result: a change here would change the
order of every run.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from penstock.digest import GOLDEN, Unsigned, constant, mix64
from penstock.errors import PlanError
from penstock.order.integers import END, Indices, Integers, as_unsigned
from penstock.ranges import group_rows

EXACT_ROWS = 4096
"""The largest n that is shuffled exactly, with a table of 8 KiB."""

_ROUNDS = 8
_CHUNK_ROWS = 16_384  # the arrays of a chunk fit in the L2 cache: twice as fast as 65,536 rows
# From this many rows of one order on, a separate call for it is faster than an array that repeats
# the parameters of its network for each row.
_CROWD_ROWS = 512

_MIX_1 = constant(0xBF58476D1CE4E5B9)  # the two multipliers of SplitMix64
_MIX_2 = constant(0x94D049BB133111EB)
_TABLE_SALT = constant(0x7C3B8A1F5D92E604)  # arbitrary; they separate two uses of one key
_SUBKEY_SALT = constant(0xD6E8FEB86659FD93)
_1, _32, _64 = constant(1), constant(32), constant(64)


_Network = tuple[Unsigned, ...]
"""The parameters of one network as 0-d arrays, or of several as 1-d arrays:

    n, low_bits, low_mask,
    low_shift             shifts 64 random bits down to `low_bits`
    high_size             the number of values of `high`
    key, key, …           one per round
"""


def permute(values: npt.ArrayLike, n: int, key: int, *, inverse: bool = False) -> Integers:
    """Return the samples at these positions of a shuffled order of `range(n)` chosen by `key`.

    This is a bijection of `range(n)` for every key: all positions together give every sample
    once. A result does not depend on the other positions of the call.

    Args:
        values: Positions from 0 to n - 1, in any order; samples if `inverse`.
        n: From 1 to 2^62.
        key: From 0 to 2^64 - 1; see `penstock.digest.derive_key`.
        inverse: Return the positions of samples instead, at the same cost.

    >>> permute([0, 1, 2, 3, 4], n=5, key=17)
    array([3, 2, 4, 0, 1])
    >>> permute([3, 2, 4, 0, 1], n=5, key=17, inverse=True)
    array([0, 1, 2, 3, 4])
    >>> permute([0, 1, 2], n=10**15, key=17)
    array([915709099343695, 328808710727967, 297590627842522])
    """
    if not 1 <= n <= END:
        raise PlanError(f"An order must have from 1 to {END:,} (2^62) rows; got {n:,}.")
    numbers = as_unsigned(values, n)
    if n <= EXACT_ROWS:
        return _table(n, key, inverse=inverse)[numbers].astype(np.int64)
    return _walk(numbers, _network(n, key), inverse=inverse)


def permute_each(
    values: Integers, which: Indices, sizes: Integers, keys: Unsigned, *, inverse: bool = False
) -> Integers:
    """Return `permute` for several orders at once: row i uses the order `which[i]`.

    Equal to one call of `permute` per order, without the overhead of so many calls: 64 large
    sources cost little more than one.

    >>> permute_each(
    ...     np.array([0, 0, 1]),
    ...     np.array([0, 1, 0]),
    ...     sizes=np.array([5, 10**15]),
    ...     keys=np.array([17, 17], dtype=np.uint64),
    ... )
    array([              3, 915709099343695,               2])
    """
    if len(sizes) == 1:
        return permute(values, int(sizes[0]), int(keys[0]), inverse=inverse)
    mapped = np.empty(len(values), dtype=np.int64)
    # Large orders with few rows each are computed together, each row with its own parameters.
    counts = np.bincount(which, minlength=len(sizes))
    sparse = (sizes > EXACT_ROWS) & (counts < _CROWD_ROWS)
    if sparse.any():
        rows = np.flatnonzero(sparse[which])
        networks = _take(_networks(sizes, keys), which[rows])
        mapped[rows] = _walk(values[rows].astype(np.uint64), networks, inverse=inverse)
    dense = np.flatnonzero(~sparse[which])
    for order, found in group_rows(which[dense]):
        rows = dense[found]
        mapped[rows] = permute(values[rows], int(sizes[order]), int(keys[order]), inverse=inverse)
    return mapped


def derive_subkeys(keys: Unsigned, numbers: Integers) -> Unsigned:
    """Return a key for each pair of a key and a number, for the parts of one order.

    A subkey takes nanoseconds to compute; `penstock.digest.derive_key` takes microseconds. One key
    never gives the same subkey for two numbers.
    """
    return mix64(mix64(keys ^ _SUBKEY_SALT) + numbers.astype(np.uint64) * GOLDEN)


@lru_cache(maxsize=1024)  # 8 MiB at most
def _table(n: int, key: int, *, inverse: bool) -> npt.NDArray[np.uint16]:
    """Return all of a small order, or of its inverse."""
    start = mix64(_key(key) ^ _TABLE_SALT)
    draws = mix64(start + np.arange(n, dtype=np.uint64) * GOLDEN)
    table = np.argsort(draws)  # no ties, so every sorting algorithm gives the same result
    return (np.argsort(table) if inverse else table).astype(np.uint16)


@lru_cache(maxsize=1024)
def _network(n: int, key: int) -> _Network:
    networks = _networks(np.array([n], dtype=np.int64), _key(key))
    return tuple(each.reshape(()) for each in networks)  # a third faster than one element each


def _networks(sizes: Integers, keys: Unsigned) -> _Network:
    """Return the network of each size and key."""
    n = sizes.astype(np.uint64)
    # n = 10: 4 bits count to n - 1, so low has 2 bits (0 to 3) and high is 0, 1 or 2.
    low_bits = np.array([(size - 1).bit_length() // 2 for size in sizes.tolist()], dtype=np.uint64)
    low_mask = (_1 << low_bits) - _1
    rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, np.newaxis] * GOLDEN
    high_size = (n + low_mask) >> low_bits
    return n, low_bits, low_mask, _64 - low_bits, high_size, *mix64(keys + rounds)


def _take(network: _Network, rows: Indices | slice) -> _Network:
    """Return the parameters for some rows; a single network is the same for all rows."""
    return network if network[0].ndim == 0 else tuple(each[rows] for each in network)


def _key(key: int) -> Unsigned:
    if not 0 <= key < 2**64:
        raise PlanError(f"A key must be from 0 to 2^64 - 1; got {key}. Use derive_key.")
    # An array with one element, because NumPy scalars warn when they wrap around.
    return np.array([key], dtype=np.uint64)


def _walk(numbers: Unsigned, network: _Network, *, inverse: bool) -> Integers:
    """Replace numbers by their image under the network, walking cycles until it is below n."""
    for start in range(0, numbers.size, _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        chunk, networks = numbers[rows], _take(network, rows)
        _run(chunk, networks, inverse=inverse)
        outside = np.flatnonzero(chunk >= networks[0])
        while outside.size:
            again, their_networks = chunk[outside], _take(networks, outside)
            _run(again, their_networks, inverse=inverse)
            chunk[outside] = again
            outside = outside[again >= their_networks[0]]
    return numbers.view(np.int64)


def _run(numbers: Unsigned, network: _Network, *, inverse: bool) -> None:
    """Apply all rounds of the Feistel network to `numbers`, in place; if `inverse`, undo them."""
    _, low_bits, low_mask, low_shift, high_size, *keys = network
    low, high = numbers & low_mask, numbers >> low_bits
    noise, spare = np.empty_like(low), np.empty_like(low)
    # Even rounds change the low halves and odd rounds the high ones. To undo them, the last round
    # comes first.
    for number in reversed(range(_ROUNDS)) if inverse else range(_ROUNDS):
        _fill_noise(low if number % 2 else high, keys[number], noise, spare)
        if number % 2 == 0:
            # The same operation undoes this round.
            np.right_shift(noise, low_shift, noise)
            np.bitwise_xor(low, noise, low)
            continue
        # A random number below `high_size`: the top 32 bits are a fraction of 2^32; times the
        # range, and rounded down.
        np.right_shift(noise, _32, noise)
        np.multiply(noise, high_size, noise)
        np.right_shift(noise, _32, noise)
        # (high + noise) mod high_size without a division. Both are below high_size, so the sum
        # needs at most one subtraction. If it needs none, subtracting gives a huge unsigned
        # number, and the minimum is the sum itself. To undo it: a negative difference is a huge
        # number, and adding high_size corrects it.
        change, correct = (np.subtract, np.add) if inverse else (np.add, np.subtract)
        change(high, noise, high)
        correct(high, high_size, noise)
        np.minimum(high, noise, out=high)
    np.left_shift(high, low_bits, high)
    np.bitwise_or(high, low, numbers)


def _fill_noise(half: Unsigned, key: Unsigned, noise: Unsigned, spare: Unsigned) -> None:
    """Fill `noise` with a hash of `half` and `key`; its low bits depend on fewer of their bits."""
    np.bitwise_xor(half, key, noise)
    np.multiply(noise, _MIX_1, noise)
    np.right_shift(noise, _32, spare)
    np.bitwise_xor(noise, spare, noise)
    np.multiply(noise, _MIX_2, noise)
