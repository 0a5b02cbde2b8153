"""Chains, and rows with a transform, read as a loader reads them."""

import copy
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.order.plan import Plan
from penstock.order.steps import Shard, Steps
from penstock.transforms import (
    Chain,
    FillInTheMiddle,
    MaskTokens,
    TokenDropout,
    Transformed,
    row_keys,
)
from penstock.transforms.draws import subkeys

MASKING = MaskTokens(49, 50, rate=0.4)
MIDDLE = FillInTheMiddle(prefix_id=51, middle_id=52, suffix_id=53, rate=0.8)
DROPOUT = TokenDropout(0.3, replace_with=48)


def same(ours, others):
    return sorted(ours) == sorted(others) and all(
        np.array_equal(ours[name], others[name]) for name in ours
    )


def as_loader_reads(plan, positions):
    """Rows at positions, located as a loader does: each source is asked with its epochs."""
    sources, epochs, samples = plan.locate(positions)
    rows = [None] * len(positions)
    for number in np.unique(sources).tolist():
        which = np.flatnonzero(sources == number)
        source = plan.sources[plan.names[number]]
        fields = source.read_epochs(samples[which], epochs[which])
        for place, row in enumerate(which.tolist()):
            rows[row] = {name: values[place].tolist() for name, values in fields.items()}
    return rows


def test_a_chain_is_its_transforms_in_order_each_with_keys_of_its_own(made):
    rows = made(documents=True)
    keys = row_keys(0, "", np.arange(len(rows)))
    by_hand = MIDDLE.apply(rows.fields, subkeys(keys, 0), 12)
    by_hand = DROPOUT.apply(by_hand, subkeys(keys, 1), 12)

    assert same(Chain(MIDDLE, DROPOUT).apply(rows.fields, keys, 12), by_hand)


def test_the_same_transform_twice_in_a_chain_does_not_drop_the_same_tokens(made):
    rows = made(200, 50)
    keys = row_keys(0, "", np.arange(200))
    once = Chain(DROPOUT).apply(rows.fields, keys, 50)
    twice = Chain(DROPOUT, DROPOUT).apply(rows.fields, keys, 50)
    shares = [(each["tokens"][:, :50] == 48).mean() for each in (once, twice)]

    assert shares[1] > shares[0] * 1.5  # 0.51 against 0.3


@pytest.mark.parametrize("second", [MASKING, MIDDLE], ids=repr)
@pytest.mark.parametrize("first", [MASKING, DROPOUT], ids=repr)
def test_transforms_that_would_make_targets_untrue_are_refused(made, first, second):
    rows = made(documents=True)
    keys = row_keys(0, "", np.arange(len(rows)))
    with pytest.raises(PlanError, match="Put it before the transform that adds them"):
        Chain(first, second).apply(rows.fields, keys, 12)


def test_an_empty_chain_is_refused():
    with pytest.raises(PlanError, match="needs at least one transform"):
        Chain()


def test_rows_are_keyed_by_seed_rows_epoch_and_sample(made):
    rows = made()
    samples, epochs = np.array([3, 3, 7]), np.array([0, 5, 5])
    expected = MASKING.apply(rows.read(samples), row_keys(17, rows.digest, epochs, samples), 12)

    assert same(Transformed(rows, MASKING, seed=17).read_epochs(samples, epochs), expected)


def test_reading_without_epochs_is_reading_epoch_0(made):
    rows = Transformed(made(), MASKING)
    samples = np.arange(40)

    assert same(rows.read(samples), rows.read_epochs(samples, np.zeros(40, int)))
    assert not same(rows.read(samples), rows.read_epochs(samples, np.ones(40, int)))


@given(
    st.integers(0, 3),
    st.integers(0, 200),
    st.sampled_from([1, 2, 3, 4, 6]),
    st.sampled_from([MASKING, Chain(MIDDLE, DROPOUT)]),
    st.booleans(),
)
def test_a_position_has_the_same_row_at_any_world_size(
    made, seed, first, world_size, transform, weighted
):
    """Several sources and epochs, in batches of 12 that ranks share."""
    sources = {
        name: Transformed(made(rows, seed=rows, documents=True), transform, seed=seed)
        for name, rows in (("web", 31), ("code", 17))
    }
    plan = Plan(sources, weights={"web": 2, "code": 1} if weighted else None, seed=seed)
    whole = as_loader_reads(plan, np.arange(first * 12, first * 12 + 36))

    dealt = {}
    for rank in range(world_size):
        shard = Shard(Steps({0: 12}), rank=rank, world_size=world_size)
        positions = shard.positions(first, first + 3, end=None)
        dealt |= dict(zip(positions.tolist(), as_loader_reads(plan, positions), strict=True))
    assert [dealt[position] for position in sorted(dealt)] == whole


def test_a_row_is_fresh_in_every_epoch_and_repeats_in_another_run(made):
    def run():
        return Plan(Transformed(made(30, 64), MASKING, seed=3), seed=1)

    plan = run()
    seen = set()
    for epoch in range(10):
        position = plan.positions_of("data", 7, epoch=epoch)
        row = as_loader_reads(plan, position)[0]
        assert row == as_loader_reads(run(), position)[0]
        seen.add(tuple(row["target_mask"]))
    assert len(seen) == 10


def test_sources_seeds_and_epochs_do_not_share_their_choices(made):
    rows, others = made(200, 64), made(200, 64, seed=1)
    samples, zeros = np.arange(200), np.zeros(200, int)
    masks = [
        each["target_mask"]
        for each in (
            Transformed(rows, MASKING).read_epochs(samples, zeros),
            Transformed(rows, MASKING).read_epochs(samples, zeros + 1),
            Transformed(rows, MASKING, seed=1).read_epochs(samples, zeros),
            Transformed(others, MASKING).read_epochs(samples, zeros),
        )
    ]
    agree = [(one == two).mean() for i, one in enumerate(masks) for two in masks[:i]]

    # Two independent choices with 0.4 agree in 0.52.
    assert np.abs(np.array(agree) - 0.52).max() < 4 * (0.25 / masks[0].size) ** 0.5


def test_changing_weights_changes_the_order_and_no_row(made):
    def rows_by_sample(weights):
        sources = {
            name: Transformed(made(20, seed=n), MASKING) for n, name in enumerate(("web", "code"))
        }
        plan = Plan(sources, weights=weights)
        located = zip(*(each.tolist() for each in plan.locate(np.arange(60))), strict=True)
        return dict(zip(located, map(repr, as_loader_reads(plan, np.arange(60))), strict=True))

    before = rows_by_sample({"web": 1, "code": 1})
    after = rows_by_sample({"web": 3, "code": 1})
    common = before.keys() & after.keys()

    assert len(common) > 30
    assert all(before[each] == after[each] for each in common)


def test_the_digest_binds_rows_seed_and_every_setting_into_a_plan(made):
    rows = made()
    different = [
        rows,
        Transformed(rows, MASKING),
        Transformed(rows, MASKING, seed=1),
        Transformed(made(seed=1), MASKING),
        Transformed(rows, MaskTokens(49, 50, rate=0.41)),
        Transformed(rows, Chain(MASKING)),
        Transformed(rows, Chain(MIDDLE, DROPOUT)),
        Transformed(rows, Chain(DROPOUT, MIDDLE)),
        Transformed(Transformed(rows, MIDDLE), DROPOUT),
    ]

    assert len({Plan(each).digest for each in different}) == len(different)
    assert Plan(different[1]).digest == Plan(Transformed(made(), MASKING)).digest


def test_what_a_state_says_of_a_transform_is_short_and_json(made):
    rows = Transformed(made(), MaskTokens(49, 50, special_ids=range(40)), seed=9)
    described = Transformed(rows, DROPOUT).describe()

    assert json.loads(json.dumps(described)) == described
    assert described["transform"].startswith("masked-tokens ")
    assert "seed 9, token-dropout" in described["transform"]
    assert len(described["transform"]) < 100


def test_transformed_rows_can_be_transformed_again_in_the_same_epoch(made):
    rows = made(documents=True)
    inner = Transformed(rows, MIDDLE, seed=1)
    samples, epochs = np.arange(5), np.array([0, 1, 2, 3, 4])
    expected = DROPOUT.apply(
        inner.read_epochs(samples, epochs), row_keys(2, inner.digest, epochs, samples), 12
    )

    assert same(Transformed(inner, DROPOUT, seed=2).read_epochs(samples, epochs), expected)


def test_what_else_rows_have_is_theirs(made):
    rows = Transformed(made(), MASKING)

    assert rows.num_tokens == 480
    assert rows.part_rows is None
    assert len(rows) == 40
    assert repr(rows).endswith("MaskTokens(0.4 of the tokens, 0.8 masked), seed=0)")


def test_copies_and_pickled_rows_read_alike(made):
    rows = Transformed(made(), Chain(MASKING))
    samples = np.arange(40)

    assert same(copy.copy(rows).read(samples), rows.read(samples))
    assert pickle.loads(pickle.dumps(MASKING)).describe() == MASKING.describe()
