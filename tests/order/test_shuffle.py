import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.digest import derive_key
from penstock.errors import PlanError
from penstock.order.permute import derive_subkeys, permute
from penstock.order.shuffle import Block, Domain, Orders, arrange, epoch_key

PARTS = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)
MODES = st.one_of(
    st.sampled_from(["full", "none", "part", "block"]),
    st.builds(Block, rows=st.integers(1, 20) | st.just("part"), group=st.integers(1, 5)),
)


def one_order(num_rows, key=17):
    which = np.zeros(num_rows, dtype=np.intp)
    return Orders(which, np.array([0]), np.array([key], dtype=np.uint64))


def whole_order(mode, part_rows, key=17):
    num_rows = sum(part_rows)
    arrangement = arrange(mode, [Domain(num_rows, part_rows)])
    return arrangement.map(np.arange(num_rows), one_order(num_rows, key))


@given(MODES, PARTS, st.integers(0, 2**64 - 1))
def test_every_mode_is_a_bijection_with_an_inverse(mode, part_rows, key):
    num_rows = sum(part_rows)
    arrangement = arrange(mode, [Domain(num_rows, part_rows)])
    rows = arrangement.map(np.arange(num_rows), one_order(num_rows, key))

    assert sorted(rows.tolist()) == list(range(num_rows))
    back = arrangement.map(rows, one_order(num_rows, key), inverse=True)
    assert back.tolist() == list(range(num_rows))


@given(MODES, st.lists(PARTS, min_size=1, max_size=3), st.data())
def test_several_orders_in_one_call_equal_each_alone(mode, domains, data):
    keys = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4))
    domain_of = [data.draw(st.integers(0, len(domains) - 1)) for _ in keys]
    which = data.draw(st.lists(st.integers(0, len(keys) - 1), max_size=30))
    positions = [data.draw(st.integers(0, sum(domains[domain_of[w]]) - 1)) for w in which]
    arrangement = arrange(mode, [Domain(sum(parts), parts) for parts in domains])
    orders = Orders(
        np.array(which, dtype=np.intp), np.array(domain_of), np.array(keys, dtype=np.uint64)
    )

    rows = arrangement.map(np.array(positions, dtype=np.int64), orders)

    for row, position, order in zip(rows.tolist(), positions, which, strict=True):
        assert row == whole_order(mode, domains[domain_of[order]], keys[order])[position]
    assert arrangement.map(rows, orders, inverse=True).tolist() == positions


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("full", [11, 19, 14, 5, 3, 34, 7, 16, 31, 40, 20, 30, 38, 13, 36, 32]),
        (Block(rows=4, group=2), [35, 10, 9, 34, 33, 8, 11, 36, 25, 28, 17, 27, 26, 18, 16, 19]),
        (Block(rows="part", group=2), [36, 32, 38, 39, 8, 31, 0, 4, 35, 1, 34, 3, 7, 30, 6, 33]),
        ("part", [6, 2, 8, 9, 1, 5, 4, 0, 3, 7, 27, 20, 10, 13, 22, 29]),
        ("none", list(range(16))),
    ],
)
def test_golden_vectors(mode, expected):
    assert whole_order(mode, [10, 20, 11])[:16].tolist() == expected


def test_the_full_mode_is_the_permutation():
    assert np.array_equal(whole_order("full", [5000], key=3), permute(np.arange(5000), 5000, 3))


@given(PARTS, st.integers(0, 2**64 - 1))
def test_the_part_mode_keeps_the_parts_in_order(part_rows, key):
    order, start = whole_order("part", part_rows, key), 0
    for num_rows in part_rows:
        assert set(order[start : start + num_rows].tolist()) == set(range(start, start + num_rows))
        start += num_rows


@given(PARTS, PARTS, st.integers(0, 2**64 - 1))
def test_the_part_mode_needs_no_later_part(part_rows, later, key):
    known = whole_order("part", part_rows, key)

    assert np.array_equal(whole_order("part", part_rows + later, key)[: len(known)], known)


def test_the_order_of_parts_does_not_depend_on_the_sources_before():
    parts, later = [30, 40], [50, 60]
    arrangement = arrange("part", [Domain(70, parts), Domain(110, later)])
    second = Orders(np.zeros(110, int), np.array([1]), np.array([17], dtype=np.uint64))

    assert np.array_equal(arrangement.map(np.arange(110), second), whole_order("part", later))


def test_parts_of_equal_size_are_shuffled_differently():
    order = whole_order("part", [100] * 20).reshape(20, 100) % 100

    assert len({tuple(part.tolist()) for part in order}) == 20


@given(
    st.integers(1, 2000),
    st.builds(Block, rows=st.integers(1, 30), group=st.integers(1, 5)),
    st.integers(0, 2**64 - 1),
)
def test_the_block_mode_reads_few_places_at_a_time(num_rows, block, key):
    """Of a group's rows, runs of neighbours: a block each, one of them perhaps at both ends."""
    order = whole_order(block, [num_rows], key)
    size = block.rows * block.group
    for start in range(0, num_rows, size):
        rows = np.sort(order[start : start + size])
        runs = 1 + int((np.diff(rows) > 1).sum())
        assert runs <= block.group + 2


def test_the_block_mode_moves_the_borders_of_blocks_each_epoch():
    block = Block(rows=10, group=1)
    first_rows = {int(whole_order(block, [1000], key)[:10].min()) % 10 for key in range(200)}

    assert first_rows == set(range(10))


def test_the_block_mode_has_no_favoured_place():
    block = Block(rows=8, group=4)
    place_of_row_0 = [whole_order(block, [100], key).tolist().index(0) for key in range(4000)]
    counts = np.bincount(np.array(place_of_row_0) // 10, minlength=10)

    assert np.abs(counts - 400).max() < 4.5 * np.sqrt(400)


def slow_part_blocks(part_rows, group, key):
    """The order of blocks that are parts, row by row."""
    starts = [sum(part_rows[:part]) for part in range(len(part_rows))]
    keys = np.array([key], dtype=np.uint64)
    shuffled = permute(
        range(len(part_rows)), len(part_rows), int(derive_subkeys(keys, np.array([2**62]))[0])
    ).tolist()
    found = []
    for number in range(0, len(shuffled), group):
        rows = [
            starts[part] + row
            for part in shuffled[number : number + group]
            for row in range(part_rows[part])
        ]
        if rows:
            subkey = int(derive_subkeys(keys, np.array([number // group]))[0])
            found += [rows[at] for at in permute(range(len(rows)), len(rows), subkey).tolist()]
    return found


@given(PARTS, st.integers(1, 5), st.integers(0, 2**64 - 1))
def test_blocks_of_parts_equal_those_that_are_made_row_by_row(part_rows, group, key):
    order = whole_order(Block(rows="part", group=group), part_rows, key)

    assert order.tolist() == slow_part_blocks(part_rows, group, key)


def test_blocks_of_parts_need_few_parts_at_a_time():
    parts = [100] * 50
    order = whole_order(Block(rows="part", group=4), parts) // 100
    groups = [set(order[start : start + 400].tolist()) for start in range(0, 5_000, 400)]

    assert {len(group) for group in groups} == {4, 2}
    assert len(set.union(*groups)) == 50  # so no part is in two groups
    assert all(len(set(order[start : start + 32].tolist())) > 1 for start in range(0, 4_800, 400))


def test_the_key_of_an_epoch_depends_on_seed_name_and_number():
    keys = {epoch_key(seed, (name,), epoch) for seed in (0, 1) for name in "ab" for epoch in (0, 1)}

    assert len(keys) == 8
    assert epoch_key(17, ("web",), 3) == derive_key("shuffle", 17, "web", 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: arrange("ful", [Domain(3)]),
            'shuffle must be "full", "block" (or Block(rows=…, group=…)), "part" or "none"; got '
            "'ful'.",
        ),
        (
            lambda: arrange(False, [Domain(3)]),
            'shuffle must be "full", "block" (or Block(rows=…, group=…)), "part" or "none"; got '
            'False. Use "none".',
        ),
        (
            lambda: Block(rows="parts"),
            "Block(rows=…) must be a number or \"part\"; got 'parts'.",
        ),
        (lambda: Block(rows=0), "Block(rows=…) must be from 1 to 2^30; got 0."),
        (lambda: Block(group=-2), "Block(group=…) must be from 1 to 2^30; got -2."),
        (lambda: Block(rows=2**30 + 1), "Block(rows=…) must be from 1 to 2^30; got 1,073,741,825."),
    ],
)
def test_refuses_what_is_not_a_mode(call, message):
    with pytest.raises(PlanError) as caught:
        call()

    assert str(caught.value) == message
