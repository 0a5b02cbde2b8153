from collections import Counter
from itertools import pairwise
from math import factorial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.order.permute import (
    derive_subkeys,
    permute,
    permute_each,
)

KEYS = st.integers(0, 2**64 - 1)
SIZES = st.one_of(st.integers(1, 10_000), st.integers(1, 2**62))
MASK = 2**64 - 1


def naive_mix(number):
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def naive_permute(position, n, key):
    """The specification, in Python's integers."""
    if n <= 4096:
        start = naive_mix(key ^ 0x7C3B8A1F5D92E604)
        draws = [naive_mix((start + i * 0x9E3779B97F4A7C15) & MASK) for i in range(n)]
        return sorted(range(n), key=draws.__getitem__)[position]
    bits = (n - 1).bit_length() // 2
    num_high = -(-n // 2**bits)
    high, low = divmod(position, 2**bits)
    for number in range(8):
        half = low if number % 2 else high
        round_key = naive_mix((key + (number + 1) * 0x9E3779B97F4A7C15) & MASK)
        noise = ((half ^ round_key) * 0xBF58476D1CE4E5B9) & MASK
        noise = ((noise ^ (noise >> 32)) * 0x94D049BB133111EB) & MASK
        if number % 2:
            high = (high + ((noise >> 32) * num_high >> 32)) % num_high
        else:
            low ^= noise >> (64 - bits)
    answer = high * 2**bits + low
    return answer if answer < n else naive_permute(answer, n, key)


def test_golden_vectors():
    """The order of every run hangs on these: they change with ORDER_FORMAT or never."""
    golden = {
        (10, 0): [2, 5, 0, 8, 1, 7, 9, 6],
        (4096, 1): [3751, 1372, 1380, 509, 2312, 3325, 3196, 2018],
        (4097, 1): [2758, 0, 2953, 2397, 1009, 1125, 1657, 3824],
        (10**6, 2): [393294, 550048, 846410, 182743, 979767, 17982, 644402, 376705],
        (10**9, 3): [
            352073544,
            319559589,
            208268403,
            487921750,
            832273630,
            312546387,
            377933532,
            739552550,
        ],
        (10**12, 2**64 - 1): [
            308288500907,
            783253706666,
            419045852707,
            371145000527,
            730713220520,
            503339559240,
            723623195669,
            817514324111,
        ],
        (2**62, 17): [
            130997997641572912,
            3284191440445146782,
            31669084315605655,
            815594281823596193,
            2952926946593122814,
            2972070622824031526,
            2197426712522514426,
            3761680578314543956,
        ],
    }

    for (n, key), expected in golden.items():
        assert permute(range(min(n, 8)), n, key).tolist() == expected


@given(SIZES, KEYS, st.data())
def test_equals_the_naive_permutation(n, key, data):
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))

    assert permute(positions, n, key).tolist() == [naive_permute(p, n, key) for p in positions]


def test_is_a_bijection_for_every_small_n():
    for n in range(1, 3001):
        assert np.array_equal(np.sort(permute(np.arange(n), n, key=n)), np.arange(n))


@pytest.mark.parametrize(
    "n", [4095, 4096, 4097, 4098, 4160, 4161, 8191, 8192, 8193, 10_000, 16_385, 65_537, 300_001]
)
def test_is_a_bijection_where_the_method_or_the_halves_change(n):
    assert np.array_equal(np.sort(permute(np.arange(n), n, key=n)), np.arange(n))


@given(SIZES, KEYS, st.data())
def test_the_inverse_undoes_permute(n, key, data):
    numbers = data.draw(st.lists(st.integers(0, n - 1), max_size=20))

    assert permute(permute(numbers, n, key), n, key, inverse=True).tolist() == numbers
    assert permute(permute(numbers, n, key, inverse=True), n, key).tolist() == numbers


@given(SIZES, KEYS, st.data())
def test_each_position_is_answered_on_its_own(n, key, data):
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    alone = [int(permute([position], n, key)[0]) for position in positions]

    assert permute(positions, n, key).tolist() == alone


def test_answers_across_chunks_are_the_same_as_in_one():
    n, positions = 10**9, np.arange(40_000)
    pieces = [permute(piece, n, 5) for piece in np.array_split(positions, 7)]

    assert np.array_equal(permute(positions, n, 5), np.concatenate(pieces))


@pytest.mark.parametrize("n", [30, 4096, 4097, 10**6, 10**15])
def test_other_keys_give_other_orders(n):
    orders = {tuple(permute(range(16), n, key).tolist()) for key in range(1000)}

    assert len(orders) == 1000


ORDER = st.tuples(SIZES, KEYS)


@given(st.lists(ORDER, min_size=1, max_size=5), st.data())
def test_many_orders_at_once_equal_each_alone(orders, data):
    which = data.draw(st.lists(st.integers(0, len(orders) - 1), max_size=20))
    positions = [data.draw(st.integers(0, orders[order][0] - 1)) for order in which]
    sizes = np.array([n for n, _ in orders])
    keys = np.array([key for _, key in orders], dtype=np.uint64)
    rows = np.array(positions, dtype=np.int64), np.array(which, dtype=np.intp)

    mapped = permute_each(*rows, sizes, keys)

    alone = [permute([p], *orders[w])[0] for p, w in zip(positions, which, strict=True)]
    assert mapped.tolist() == alone
    assert permute_each(mapped, rows[1], sizes, keys, inverse=True).tolist() == positions


def test_crowded_orders_equal_sparse_ones():
    sizes, keys = np.array([10**6, 3000, 10**9, 7]), np.array([1, 2, 3, 4], dtype=np.uint64)
    which = np.array([0] * 2000 + [1] * 2000 + [2] * 100 + [3] * 7)
    positions = np.concatenate([np.arange(count) for count in (2000, 2000, 100, 7)])

    mapped = permute_each(positions, which, sizes, keys)

    for order in range(4):
        alone = permute(positions[which == order], int(sizes[order]), int(keys[order]))
        assert np.array_equal(mapped[which == order], alone)


def test_more_orders_than_sixteen_bits_can_number():
    num_orders = 2**16 + 5
    which, keys = np.arange(num_orders), np.arange(num_orders, dtype=np.uint64)
    sizes = np.full(num_orders, 2)
    sizes[:-5] = 10**6  # five small orders at the end, the others networks

    mapped = permute_each(np.ones(num_orders, dtype=np.int64), which, sizes, keys)

    assert mapped[-5:].tolist() == [permute([1], 2, int(key))[0] for key in keys[-5:]]
    assert mapped[0] == permute([1], 10**6, 0)[0]


def test_subkeys_of_a_key_are_all_different():
    keys = np.full(10_000, 17, dtype=np.uint64)

    assert len(np.unique(derive_subkeys(keys, np.arange(10_000)))) == 10_000


class TestQuality:
    """An order that is a bijection may still be a poor shuffle; these tell.

    Each statistic is how many standard deviations chance would have to stray; the keys
    are fixed, so that the tests are too.
    """

    @staticmethod
    def surprise(counts, expected, freedom):
        chi_square = ((counts - expected) ** 2 / expected).sum()
        return abs(chi_square - freedom) / np.sqrt(2 * freedom)

    @pytest.mark.parametrize("n", [2, 3, 4, 5])
    def test_all_orders_of_few_rows_are_equally_likely(self, n):
        orders = Counter(tuple(permute(range(n), n, key).tolist()) for key in range(12_000))
        counts = np.array(list(orders.values()))

        assert len(counts) == factorial(n)
        assert self.surprise(counts, 12_000 / factorial(n), factorial(n) - 1) < 4

    @pytest.mark.parametrize("n", [2, 7, 64, 1000, 4096, 4097, 5000, 10_000])
    def test_every_sample_comes_at_every_position_equally_often(self, n):
        bins, num_keys = min(n, 16), min(20_000, max(40, 400_000 // n))
        place = np.arange(n) * bins // n
        table = np.zeros((bins, bins))
        for key in range(num_keys):
            np.add.at(table, (place, place[permute(np.arange(n), n, key)]), 1)
        sizes = np.bincount(place)
        expected = np.outer(sizes, sizes) * num_keys / n

        assert self.surprise(table, expected, (bins - 1) ** 2) < 4

    @pytest.mark.parametrize("n", [100, 1000, 4096, 4097, 5000, 10_000, 10**6, 10**12, 2**62])
    def test_neighbours_are_not_correlated(self, n):
        length = min(n, 2000)
        for lag in (1, 2, 3, 16, 64, 65):
            total, pairs = 0.0, 0
            for key in range(60):
                start = key * 7919 % (n - length + 1)
                samples = permute(np.arange(start, start + length), n, key) / n - 0.5
                total += (samples[:-lag] * samples[lag:]).sum() * 12
                pairs += length - lag
            # Of a whole order, what one place has the others lack: -1 / n on average.
            expected = -pairs / n if n == length else 0

            assert abs(total - expected) < 4.5 * np.sqrt(pairs)

    @pytest.mark.parametrize("n", [1000, 4096, 4097, 10_000, 10**6, 10**12, 2**62])
    def test_distances_of_pairs_are_those_of_chance(self, n):
        length, edges = min(n, 2000), np.linspace(0, 1, 17)
        counts = np.zeros(16)
        for key in range(100):
            samples = permute(np.arange(length), n, key) / n
            counts += np.histogram(np.abs(np.diff(samples)), edges)[0]
        expected = np.diff(2 * edges - edges**2) * counts.sum()

        assert self.surprise(counts, expected, 15) < 4

    @pytest.mark.parametrize("n", [4097, 10**6, 10**12, 2**62])
    def test_nearby_keys_give_unrelated_orders(self, n):
        samples = [permute(np.arange(4000), n, key) / n - 0.5 for key in range(40)]
        products = [(a * b).sum() * 12 for a, b in pairwise(samples)]

        assert abs(sum(products)) < 4.5 * np.sqrt(39 * 4000)

    @pytest.mark.parametrize("n", [10**6, 10**12, 2**62])
    def test_low_digits_are_spread_as_well_as_high_ones(self, n):
        samples = permute(np.arange(200_000), n, key=5)

        for digits in (samples % 256, samples * 1.0 // (n / 256)):
            counts = np.bincount(digits.astype(int), minlength=256)
            assert self.surprise(counts, 200_000 / 256, 255) < 4

    @pytest.mark.torture
    def test_every_sample_comes_at_every_position_equally_often_over_many_keys(self):
        for n in (4097, 4100, 5000, 8192, 8193, 10_000, 65_536, 65_537):
            place, table = np.arange(n) * 64 // n, np.zeros((64, 64))
            num_keys = 40_000_000 // n
            for key in range(num_keys):
                np.add.at(table, (place, place[permute(np.arange(n), n, key)]), 1)
            sizes = np.bincount(place)

            assert self.surprise(table, np.outer(sizes, sizes) * num_keys / n, 63**2) < 4


@pytest.mark.parametrize(
    ("positions", "n", "key", "message"),
    [
        ([0], 0, 0, "An order must have from 1 to 4,611,686,018,427,387,904 (2^62) rows; got 0."),
        (
            [0],
            2**62 + 1,
            0,
            "An order must have from 1 to 4,611,686,018,427,387,904 (2^62) rows; got 4,",
        ),
        ([0, 5], 5, 0, "5 is out of range: this order has rows 0 to 4."),
        ([-1], 10**9, 0, "-1 is out of range: this order has rows 0 to 999,999,999."),
        ([0.5], 5, 0, "Positions and samples must be integers; got float64."),
        ([0], 5, -1, "A key must be from 0 to 2^64 - 1; got -1. Use derive_key."),
        ([0], 10**9, 2**64, "A key must be from 0 to 2^64 - 1; got 18446744073709551616"),
    ],
)
def test_refuses_what_is_outside(positions, n, key, message):
    with pytest.raises(PlanError) as caught:
        permute(positions, n, key)

    assert str(caught.value).startswith(message)


def test_no_positions_give_no_samples():
    assert permute([], 5, 0).tolist() == []
    assert permute(np.array([], dtype=np.int64), 10**9, 0).dtype == np.int64
