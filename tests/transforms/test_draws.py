import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.transforms import row_keys
from penstock.transforms.draws import (
    bernoulli,
    bernoulli_table,
    integers_below,
    random_bits,
    subkeys,
)

KEYS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5)
RATES = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 0.15, 2.0**-53]))


def as_keys(keys):
    return np.array(keys, np.uint64)


def test_the_generator_equals_its_golden_numbers():
    """A change here changes the rows of every run that transforms them."""
    keys = row_keys(17, "web", [0, 3], [5, 2**62])

    assert keys.tolist() == [14511193235820563360, 11444537438539003114]
    assert subkeys(keys, 2).tolist() == [5966922334548013746, 4214333763877174204]
    assert random_bits(keys, [0, 1023]).tolist() == [13614434263659258531, 15839391765521413784]
    assert integers_below(keys, 7, 50_257).tolist() == [7648, 29071]


@given(KEYS, st.integers(0, 2**40), st.integers(-5, 5), RATES)
def test_numbers_equal_those_of_plain_integers(slow, keys, place, seed, rate):
    assert subkeys(as_keys(keys), place).tolist() == [slow.subkey(key, place) for key in keys]
    assert random_bits(as_keys(keys), place).tolist() == [slow.draw(key, place) for key in keys]
    found = bernoulli(as_keys(keys), place, rate).tolist()
    assert found == [slow.happens(key, place, rate) for key in keys]
    numbers = np.arange(len(keys))
    expected = [slow.row_key(seed, "é", place, number) for number in numbers.tolist()]
    assert row_keys(seed, "é", np.full(len(keys), place), numbers).tolist() == expected


@given(KEYS, st.integers(0, 40), RATES)
def test_a_table_equals_its_single_columns(keys, num_places, rate):
    expected = bernoulli(as_keys(keys)[:, None], np.arange(num_places), rate)

    assert np.array_equal(bernoulli_table(as_keys(keys), num_places, rate), expected)


def test_rows_that_take_several_blocks_equal_single_rows():
    keys = row_keys(1, "rows", np.arange(50))

    assert np.array_equal(
        bernoulli_table(keys, 1_000, 0.3)[33:35], bernoulli_table(keys[33:35], 1_000, 0.3)
    )
    assert np.array_equal(
        bernoulli_table(keys[:1], 40_000, 0.3)[:, :7], bernoulli_table(keys[:1], 7, 0.3)
    )


@given(KEYS, st.one_of(st.integers(1, 300), st.integers(2**62, 2**63)), st.integers(0, 9))
def test_numbers_below_a_limit_equal_those_of_plain_integers(slow, keys, limit, place):
    expected = [slow.below(key, place, limit) for key in keys]

    assert integers_below(as_keys(keys), place, limit).tolist() == expected


def test_a_draw_from_the_incomplete_interval_is_repeated(slow):
    """2^64 is 2 2/3 times this limit: without repeating, some numbers would be more likely."""
    keys = row_keys(0, "limits", np.arange(2_000))
    limit = np.uint64(2**63 - 2**61)
    numbers = integers_below(keys, 0, limit)

    rejected = sum(slow.draw(key, 0) >= 2**64 // int(limit) * int(limit) for key in keys.tolist())
    assert 300 < rejected < 700
    assert numbers.tolist() == [slow.below(key, 0, int(limit)) for key in keys.tolist()]
    assert abs((numbers < int(limit) // 2).mean() - 0.5) < 4 * 0.5 / 2_000**0.5


def test_numbers_below_a_limit_are_uniform():
    numbers = integers_below(row_keys(3, "uniform", np.arange(1_000))[:, None], np.arange(100), 10)
    counts = np.bincount(numbers.reshape(-1), minlength=10)

    assert ((counts - 10_000) ** 2 / 10_000).sum() < 27.9  # chi squared, 9 degrees, p = 0.001


def test_neighbouring_rows_places_and_bits_are_not_alike():
    keys = row_keys(0, "independence", np.repeat(np.arange(8), 500), np.tile(np.arange(500), 8))
    bits = np.unpackbits(random_bits(keys[:, None], np.arange(50)).view(np.uint8), axis=1)
    half = 4 * 0.5 / bits.shape[0] ** 0.5  # four sigma of a mean of one column
    shares = bits.mean(axis=0)
    agree = [(bits[1:] == bits[:-1]).mean(), (bits[:, 64:] == bits[:, :-64]).mean()]

    assert np.abs(shares - 0.5).max() < half * 1.1
    assert np.abs(np.array(agree) - 0.5).max() < 4 * 0.5 / bits.size**0.5


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
def test_a_rate_that_is_no_probability_is_refused(rate):
    with pytest.raises(PlanError, match="A rate must be a probability from 0 to 1; got"):
        bernoulli_table(as_keys([1]), 1, rate)


def test_rates_of_none_and_all_are_exact():
    keys = row_keys(0, "ends", np.arange(100))

    assert not bernoulli_table(keys, 100, 0).any()
    assert bernoulli_table(keys, 100, 1).all()
