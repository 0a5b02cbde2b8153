"""Random numbers as arithmetic.

The number for (key, place) is a function, not the next of a sequence: the finaliser of
SplitMix64 on key + (place + 1) x golden ratio, all modulo 2^64. So any row can be drawn
for alone, in any order, on any machine, and gives what it gives among a million others.
About 4 ns a number in large calls, made in pieces that stay in the cache.

    seed, rows ── derive_key ──► key ── row_keys (epoch, sample) ──► a key a row
                                            │
                                            ├── subkeys (number) ──► a key for each use of it
                                            └── draws (place) ──► 64 bits a token

Golden numbers in the tests pin all of it: a change here changes every run.
"""

import numpy as np
import numpy.typing as npt

from penstock.digest import derive_key
from penstock.errors import PlanError

__all__ = ["Integers", "Unsigned", "below", "chosen", "draws", "happens", "row_keys", "subkeys"]

Integers = npt.NDArray[np.int64]
Unsigned = npt.NDArray[np.uint64]

_CHUNK = 16_384  # numbers at a time: with their scratch they fit in the L2 cache


def _constant(value: int) -> Unsigned:
    return np.array(value, dtype=np.uint64)  # an array: those wrap around in silence


_GOLDEN = _constant(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: odd, so a full cycle
_MIX_1 = _constant(0xBF58476D1CE4E5B9)  # the two multipliers of SplitMix64
_MIX_2 = _constant(0x94D049BB133111EB)
_SUBKEY_SALT = _constant(0xA0761D6478BD642F)  # no meaning: it parts subkeys from draws
_LARGEST = _constant(2**64 - 1)
_0, _1, _11, _27, _30, _31 = (_constant(number) for number in (0, 1, 11, 27, 30, 31))


def row_keys(seed: int, source: str, *numbers: npt.ArrayLike) -> Unsigned:
    """A key for each row, of the seed, a name for where rows come from, and their numbers.

    `Transformed` gives epochs and samples. Whoever has only positions gives those: no two
    rows of a run share one, so they too are fresh in every epoch.

    >>> row_keys(17, "web", [0, 0, 1], [5, 6, 5])
    array([14511193235820563360,  4703712641486040596, 10166709111080204519],
          dtype=uint64)
    """
    arrays = [np.asarray(each, np.int64).astype(np.uint64) for each in numbers]
    keys = np.full(len(arrays[0]), derive_key("transform", source, seed), np.uint64)
    for each in arrays:
        keys = _mix(keys + each * _GOLDEN)
    return keys


def subkeys(keys: Unsigned, numbers: npt.ArrayLike) -> Unsigned:
    """A key for each pair of a key and a number, for the uses that one row makes of chance."""
    return _mix(_mix(keys ^ _SUBKEY_SALT) + np.asarray(numbers).astype(np.uint64) * _GOLDEN)


def draws(keys: Unsigned, places: npt.ArrayLike) -> Unsigned:
    """64 random bits for each pair of a key and a place; shapes are broadcast."""
    return _mix(keys + (np.asarray(places).astype(np.uint64) + _1) * _GOLDEN)


def happens(keys: Unsigned, places: npt.ArrayLike, rate: float) -> npt.NDArray[np.bool_]:
    """Whether what comes to pass with probability `rate` does, at each key and place."""
    return np.asarray((draws(keys, places) >> _11) < _threshold(rate))


def chosen(keys: Unsigned, num_places: int, rate: float) -> npt.NDArray[np.bool_]:
    """`happens` for every key and the places 0 to `num_places` - 1: (keys, places) booleans."""
    found = np.empty((len(keys), num_places), np.bool_)
    threshold = _threshold(rate)
    steps = np.arange(1, num_places + 1, dtype=np.uint64) * _GOLDEN
    at_once = max(1, _CHUNK // max(1, num_places))
    for start in range(0, len(keys), at_once):
        rows = slice(start, start + at_once)
        numbers = keys[rows, np.newaxis] + steps
        _mix_in_place(numbers)
        np.right_shift(numbers, _11, numbers)
        np.less(numbers, threshold, found[rows])
    return found


def below(keys: Unsigned, places: npt.ArrayLike, limits: npt.ArrayLike) -> Integers:
    """A number from 0 to before each of `limits`, every one equally likely.

    2^64 is not a multiple of most limits; draws from the incomplete last stretch are
    thrown away and made again with another key.
    """
    limits = np.asarray(limits).astype(np.uint64)
    numbers, places, keys, limits = np.broadcast_arrays(
        draws(keys, places), np.asarray(places), keys, limits
    )
    numbers = numbers.copy()
    largest = _LARGEST - (_0 - limits) % limits  # 0 - limit is 2^64 - limit
    again = np.nonzero(numbers > largest)
    attempt = 1
    while len(again[0]):
        numbers[again] = draws(subkeys(keys[again], attempt), places[again])
        again = tuple(each[numbers[again] > largest[again]] for each in again)
        attempt += 1
    remainders: Integers = (numbers % limits).astype(np.int64)
    return remainders


def _threshold(rate: float) -> Unsigned:
    """What 53 random bits must be below; exact for every rate of 2^-53 or more."""
    if not 0 <= rate <= 1:
        raise PlanError(f"A rate is a probability, from 0 to 1, not {rate}.")
    return _constant(round(rate * 2.0**53))


def _mix(numbers: Unsigned) -> Unsigned:
    """The finaliser of SplitMix64: a bijection whose output passes for noise."""
    numbers = (numbers ^ (numbers >> _30)) * _MIX_1
    numbers = (numbers ^ (numbers >> _27)) * _MIX_2
    return numbers ^ (numbers >> _31)


def _mix_in_place(numbers: Unsigned) -> None:
    shifted = np.right_shift(numbers, _30)
    np.bitwise_xor(numbers, shifted, numbers)
    np.multiply(numbers, _MIX_1, numbers)
    np.right_shift(numbers, _27, shifted)
    np.bitwise_xor(numbers, shifted, numbers)
    np.multiply(numbers, _MIX_2, numbers)
    np.right_shift(numbers, _31, shifted)
    np.bitwise_xor(numbers, shifted, numbers)
