"""Random numbers computed from a key and a column.

The random number for (key, column) is a function value, not the next item of a sequence: the
finaliser of SplitMix64 applied to key + (column + 1) x golden ratio, modulo 2^64. So each row
can be drawn alone, in any order and on any machine, with the same result. Large calls take
about 4 ns per number; they work in blocks that fit in the CPU cache.

    seed, rows ── derive_key ──► key ── row_keys (epoch, sample) ──► one key per row
                                            │
                                            ├── subkeys (number) ──► one key per random choice
                                            └── random_bits (column) ──► 64 bits per token

Golden numbers in the tests pin all of this: any change here changes every run.
"""

import numpy as np
import numpy.typing as npt

from penstock.digest import GOLDEN, Unsigned, constant, derive_key, mix64
from penstock.errors import PlanError

Integers = npt.NDArray[np.int64]

# Numbers per block: 128 KiB, and as much scratch space, so that both fit in the L2 cache.
_BLOCK = 16_384


_SUBKEY_SALT = constant(0xA0761D6478BD642F)  # arbitrary; keeps subkeys different from draws
_LARGEST = constant(2**64 - 1)
_0, _1, _11 = constant(0), constant(1), constant(11)


def row_keys(seed: int, source: str, *numbers: npt.ArrayLike) -> Unsigned:
    """Return one key per row, from a seed, a name for the source, and numbers of the rows.

    `Transformed` passes epochs and samples. Callers that only have positions pass those: each
    position occurs once in a run, so rows still change in every epoch.

    >>> row_keys(17, "web", [0, 0, 1], [5, 6, 5])
    array([14511193235820563360,  4703712641486040596, 10166709111080204519],
          dtype=uint64)
    """
    arrays = [np.asarray(each, np.int64).astype(np.uint64) for each in numbers]
    keys = np.full(len(arrays[0]), derive_key("transform", source, seed), np.uint64)
    for each in arrays:
        keys = mix64(keys + each * GOLDEN)
    return keys


def subkeys(keys: Unsigned, numbers: npt.ArrayLike) -> Unsigned:
    """Return a new key for each (key, number), one for each random choice made for a row."""
    return mix64(mix64(keys ^ _SUBKEY_SALT) + np.asarray(numbers).astype(np.uint64) * GOLDEN)


def random_bits(keys: Unsigned, columns: npt.ArrayLike) -> Unsigned:
    """Return 64 random bits for each (key, column); shapes are broadcast."""
    return mix64(keys + (np.asarray(columns).astype(np.uint64) + _1) * GOLDEN)


def bernoulli(keys: Unsigned, columns: npt.ArrayLike, rate: float) -> npt.NDArray[np.bool_]:
    """Return True with probability `rate` for each (key, column); shapes are broadcast."""
    return np.asarray((random_bits(keys, columns) >> _11) < _threshold(rate))


def bernoulli_table(keys: Unsigned, num_columns: int, rate: float) -> npt.NDArray[np.bool_]:
    """Return `bernoulli` of every key and the columns 0 to `num_columns` - 1, as (keys, columns).

    Equal to `bernoulli(keys[:, None], range(num_columns), rate)`, in a fraction of the memory.
    """
    found = np.empty((len(keys), num_columns), np.bool_)
    threshold = _threshold(rate)
    steps = np.arange(1, num_columns + 1, dtype=np.uint64) * GOLDEN
    rows_per_block = max(1, _BLOCK // max(1, num_columns))
    for start in range(0, len(keys), rows_per_block):
        rows = slice(start, start + rows_per_block)
        numbers = keys[rows, np.newaxis] + steps
        mix64(numbers, out=numbers)
        np.right_shift(numbers, _11, numbers)
        np.less(numbers, threshold, found[rows])
    return found


def integers_below(keys: Unsigned, columns: npt.ArrayLike, limits: npt.ArrayLike) -> Integers:
    """Return a uniform integer in [0, limit) for each (key, column, limit).

    2^64 is usually not a multiple of the limit, so `bits % limit` alone would favour small
    results. Draws from the incomplete last interval are rejected and drawn again.
    """
    limits = np.asarray(limits).astype(np.uint64)
    numbers, columns, keys, limits = np.broadcast_arrays(
        random_bits(keys, columns), np.asarray(columns), keys, limits
    )
    numbers = numbers.copy()
    # The last (2^64 mod limit) of all 2^64 numbers are rejected: for a limit of 10, the last 6.
    # In uint64, 0 - limit is 2^64 - limit, and (2^64 - limit) mod limit = 2^64 mod limit.
    largest = _LARGEST - (_0 - limits) % limits
    rejected = np.nonzero(numbers > largest)
    attempt = 1
    while len(rejected[0]):
        numbers[rejected] = random_bits(subkeys(keys[rejected], attempt), columns[rejected])
        rejected = tuple(each[numbers[rejected] > largest[rejected]] for each in rejected)
        attempt += 1
    remainders: Integers = (numbers % limits).astype(np.int64)
    return remainders


def check_probability(name: str, value: float) -> None:
    """Raise PlanError unless `value` is from 0 to 1."""
    if not isinstance(value, int | float | np.number) or not 0 <= value <= 1:
        raise PlanError(f"{name} must be a probability from 0 to 1; got {value!r}.")


def _threshold(rate: float) -> Unsigned:
    """Return the number that 53 random bits must be below; exact for rates of 2^-53 or more."""
    check_probability("A rate", rate)
    return constant(round(rate * 2.0**53))
