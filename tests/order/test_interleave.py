from fractions import Fraction
from math import floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.order.interleave import Mix, _split

WEIGHTS = st.lists(
    st.one_of(st.just(0), st.integers(1, 100), st.floats(1e-9, 1), st.sampled_from([1e-9, 1 / 3])),
    min_size=1,
    max_size=12,
).filter(any)
BOUND = 2


def shares_of(mix):
    return [Fraction(weight, sum(mix.weights)) for weight in mix.weights]


def worst_deviation(mix, num_rows):
    """The largest distance from the weights over all prefixes of `num_rows`, and all sources.

    Between two of its rows a source falls behind steadily, so the extremes lie right
    before and right after a row, and at the end.
    """
    sources, ordinals = mix.at(np.arange(num_rows))
    shares = np.array([float(share) for share in shares_of(mix)])
    before = np.abs(ordinals - np.arange(num_rows) * shares[sources]).max()
    after = np.abs(ordinals + 1 - np.arange(1, num_rows + 1) * shares[sources]).max()
    counts = np.bincount(sources, minlength=len(shares))
    return max(before, after, np.abs(counts - num_rows * shares).max())


def naive_at(weights, num_rows):
    """Deal rows one by one down a Huffman tree, counting at every node."""
    nodes = [(Fraction(w), number, [number]) for number, w in enumerate(weights) if w]
    splits, half = [], Fraction(1, 2)
    while len(nodes) > 1:
        small, large = sorted(nodes)[:2]
        joined = (small[0] + large[0], len(weights) + len(splits), small[2] + large[2])
        nodes = [node for node in nodes if node not in (small, large)] + [joined]
        share = Fraction(floor(small[0] / joined[0] * 2**64 + half), 2**64)
        splits.append((small[2], large[2], share))
    dealt, drawn, seen = [0] * len(splits), [], [0] * len(weights)
    for _ in range(num_rows):
        leaves = nodes[0][2]
        while len(leaves) > 1:
            number = next(i for i, split in enumerate(splits) if split[0] + split[1] == leaves)
            small, large, share = splits[number]
            rows = dealt[number]
            taken = floor((rows + 1) * share + half) > floor(rows * share + half)
            dealt[number] += 1
            leaves = small if taken else large
        drawn.append((leaves[0], seen[leaves[0]]))
        seen[leaves[0]] += 1
    return drawn


def test_golden_vector():
    sources, ordinals = Mix([0.6, 0.3, 0.1]).at(range(16))

    assert sources.tolist() == [0, 1, 0, 2, 0, 0, 1, 0, 1, 0, 0, 1, 0, 2, 0, 0]
    assert ordinals.tolist() == [0, 0, 1, 0, 2, 3, 1, 4, 2, 5, 6, 3, 7, 1, 8, 9]


def test_golden_vector_far_out():
    sources, ordinals = Mix([0.6, 0.3, 0.1]).at(range(10**17, 10**17 + 6))

    assert list(zip(sources.tolist(), ordinals.tolist(), strict=True)) == [
        (0, 59999999999999999),
        (0, 60000000000000000),
        (1, 30000000000000000),
        (0, 60000000000000001),
        (1, 30000000000000001),
        (0, 60000000000000002),
    ]


@given(WEIGHTS)
@settings(max_examples=60)
def test_equals_rows_dealt_one_by_one(weights):
    sources, ordinals = Mix(weights).at(range(60))

    assert list(zip(sources.tolist(), ordinals.tolist(), strict=True)) == naive_at(weights, 60)


@given(st.integers(0, 2**62 - 1), st.integers(0, 2**63))
def test_splits_are_exact_products_of_128_bits(counter, share):
    small, before = _split(*(np.array([n], dtype=np.uint64) for n in (counter, share)))

    counts = [(rows * share + 2**63) >> 64 for rows in (counter, counter + 1)]
    assert before.tolist() == counts[:1]
    assert small.tolist() == [counts[1] > counts[0]]


def test_one_share_less_than_a_whole_does_not_carry():
    for share in range(2**62 + 1, 2**62 + 400, 2):
        counter = (-1 - share - 2**63) * pow(share, -1, 2**64) % 2**64
        if counter < 2**62:
            small, _ = _split(*(np.array([n], dtype=np.uint64) for n in (counter, share)))
            assert ((counter + 1) * share + 2**63) % 2**64 == 2**64 - 1
            assert not small[0]


@given(WEIGHTS, st.integers(1, 3000))
def test_every_prefix_is_within_two_rows_of_the_weights(weights, num_rows):
    assert worst_deviation(Mix(weights), num_rows) < BOUND


def skewed_weights(num_sources):
    numbers = np.arange(1, num_sources + 1)
    draws = np.random.default_rng(num_sources)
    yield "flat", np.ones(num_sources)
    yield "zipf", 1 / numbers**1.2
    yield "half and rest", np.array([0.5] + [0.5 / num_sources] * (num_sources - 1))
    yield "geometric down to 1e-9", np.maximum(0.7**numbers, 1e-9)
    yield "mostly 1e-9", np.array([0.6, 0.4] + [1e-9] * (num_sources - 2))
    yield "dirichlet 0.1", np.maximum(draws.dirichlet(np.full(num_sources, 0.1)), 1e-9)
    yield "dirichlet 3", draws.dirichlet(np.full(num_sources, 3.0))


@pytest.mark.parametrize("num_sources", [2, 3, 5, 10, 40, 200, 1000])
def test_every_prefix_of_hard_mixtures_is_within_two_rows(num_sources):
    for name, weights in skewed_weights(num_sources):
        assert worst_deviation(Mix(weights.tolist()), 100_000) < BOUND, name


def test_the_hardest_mixture_found_comes_near_the_bound_but_not_to_it():
    """A search for bad weights ended here: 1.48 rows, where 1.68 is proved to be the most."""
    weights = [0.04779593, 0.00065032, 0.04881867, 0.07690823, 0.10715163, 0.10695004]
    weights += [0.11363855, 0.11378746, 0.11373721, 0.13523733, 0.13532464]

    assert 1.4 < worst_deviation(Mix(weights), 1_000_000) < 1.68


def test_the_deepest_tree_is_within_two_rows():
    """Fibonacci weights make Huffman's tree a chain."""
    fibonacci = [1, 1]
    while len(fibonacci) < 30:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])

    assert worst_deviation(Mix(fibonacci), 1_000_000) < BOUND


@pytest.mark.parametrize("start", [2**32 - 500, 2**44, 2**53, 2**61, 2**62 - 3000])
@pytest.mark.parametrize("weights", [[0.7, 0.3], [1 / 3, 1 / 3, 1 / 3], [1, 2, 3, 5, 8, 13, 21]])
def test_prefixes_far_out_are_within_two_rows(start, weights):
    mix = Mix(weights)
    shares = shares_of(mix)
    sources, ordinals = mix.at(np.arange(start, start + 3000))

    for position, (source, ordinal) in enumerate(
        zip(sources.tolist(), ordinals.tolist(), strict=True), start
    ):
        assert abs(ordinal - position * shares[source]) < BOUND
        assert abs(ordinal + 1 - (position + 1) * shares[source]) < BOUND


@pytest.mark.parametrize("num_rows", [2**44 + 1, 2**61 + 12345, 2**62])
def test_counts_far_out_are_within_two_rows(num_rows):
    for _, weights in skewed_weights(1000):
        mix = Mix(weights.tolist())
        counts = mix.counts(num_rows)

        assert sum(counts) == num_rows
        for count, share in zip(counts, shares_of(mix), strict=True):
            assert abs(count - num_rows * share) < BOUND


@pytest.mark.torture
def test_every_prefix_of_ten_thousand_mixtures_is_within_two_rows():
    draws = np.random.default_rng(0)
    worst = 0.0
    for _ in range(10_000):
        num_sources = int(draws.integers(2, 60))
        weights = draws.dirichlet(np.full(num_sources, draws.choice([0.03, 0.1, 0.3, 1, 5])))
        worst = max(worst, worst_deviation(Mix(np.maximum(weights, 1e-9).tolist()), 5000))

    assert worst < 1.68


@given(WEIGHTS, st.integers(0, 2**62 - 50))
def test_positions_undo_at(weights, start):
    mix = Mix(weights)
    sources, ordinals = mix.at(range(start, start + 50))

    for source in set(sources.tolist()):
        here = np.flatnonzero(sources == source)
        found = [mix.position(source, ordinal) for ordinal in ordinals[here].tolist()]
        assert found == (here + start).tolist()


@given(WEIGHTS, st.data())
def test_at_undoes_positions(weights, data):
    mix = Mix(weights)
    source = data.draw(
        st.sampled_from([i for i, w in enumerate(weights) if w > 1e-5 * max(weights)])
    )
    wanted = data.draw(st.lists(st.integers(0, 10**12), min_size=1, max_size=10))

    sources, ordinals = mix.at([mix.position(source, ordinal) for ordinal in wanted])

    assert set(sources.tolist()) == {source}
    assert ordinals.tolist() == wanted


@given(WEIGHTS, st.integers(0, 2**62 - 100))
def test_counts_are_what_at_has_dealt(weights, num_rows):
    mix = Mix(weights)
    sources, _ = mix.at(range(num_rows, num_rows + 100))
    dealt = np.bincount(sources, minlength=len(weights))

    assert mix.counts(num_rows + 100) == (np.array(mix.counts(num_rows)) + dealt).tolist()


@given(WEIGHTS)
def test_ordinals_number_the_rows_of_each_source(weights):
    sources, ordinals = Mix(weights).at(range(500))

    for source in set(sources.tolist()):
        rows = ordinals[sources == source]
        assert rows.tolist() == list(range(len(rows)))


@given(WEIGHTS, st.sampled_from([2, 3, 0.5, 1024, Fraction(1, 7)]))
def test_only_the_ratios_count(weights, factor):
    exact = [Fraction(weight) for weight in weights]
    scaled = [weight * Fraction(factor) for weight in exact]

    assert np.array_equal(Mix(exact).at(range(300)), Mix(scaled).at(range(300)))


def test_answers_across_chunks_are_the_same_as_in_one():
    mix = Mix([5, 3, 2, 1, 1, 1])
    pieces = [mix.at(piece) for piece in np.array_split(np.arange(20_000), 7)]

    assert np.array_equal(mix.at(np.arange(20_000)), np.concatenate(pieces, axis=1))


def test_sources_of_weight_zero_are_never_drawn():
    mix = Mix([0, 1, 0, 2, 0])
    sources, _ = mix.at(range(10_000))

    assert set(sources.tolist()) == {1, 3}
    assert mix.counts(9000) == [0, 3000, 0, 6000, 0]
    assert mix.position(0, 0) is None


def test_one_source_takes_every_row():
    sources, ordinals = Mix([0, 0.3]).at([0, 5, 2**62 - 1])

    assert sources.tolist() == [1, 1, 1]
    assert ordinals.tolist() == [0, 5, 2**62 - 1]


def test_a_weight_of_one_in_a_billion_comes_once_in_a_billion_rows():
    mix = Mix([1 - 1e-9, 1e-9])

    assert mix.counts(10**12) == [10**12 - 1000, 1000]
    assert abs(mix.position(1, 1000) - 1000.5e9) < 1e3


def test_weights_too_far_apart_for_any_run_leave_the_small_one_out():
    mix = Mix([1, 1e-300])

    assert mix.counts(2**62) == [2**62, 0]
    assert mix.position(1, 0) is None


def test_a_thousand_sources_that_halve_each_time_are_kept_apart():
    mix = Mix([Fraction(1, 2**number) for number in range(1000)])

    assert mix.counts(2**20)[:3] == [2**19, 2**18, 2**17]
    assert worst_deviation(mix, 10_000) < BOUND


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Mix([]), "There are no weights; a mixture needs at least one source."),
        (lambda: Mix([1]).at([-1]), "-1 is out of range: this order has rows 0 to"),
        (lambda: Mix([1, 2]).at([2**62]), "4,611,686,018,427,387,904 is out of range"),
    ],
)
def test_refuses_what_is_outside(call, message):
    with pytest.raises(PlanError) as caught:
        call()

    assert str(caught.value).startswith(message)


def test_nothing_asked_is_nothing_answered():
    mix = Mix([1, 2])

    assert [numbers.tolist() for numbers in mix.at([])] == [[], []]
