import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.order.steps import PADDING, Shard, Steps, rows_per_rank

WORLDS = st.sampled_from([1, 2, 3, 4, 8])
RAMPS = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(
    lambda sizes: {60 * number: 24 * size for number, size in enumerate(sizes)}
)


def ranks(steps, world_size):
    return [Shard(steps, rank=rank, world_size=world_size) for rank in range(world_size)]


@given(RAMPS, WORLDS, st.integers(0, 100))
def test_ranks_together_read_every_step_in_order(sizes, world_size, start):
    steps = Steps(sizes, start=start)
    for step in range(10):
        dealt = [shard.positions(step, step + 1) for shard in ranks(steps, world_size)]
        assert np.concatenate(dealt).tolist() == list(range(*steps.span(step)))
        assert len({len(positions) for positions in dealt}) == 1


@given(RAMPS, WORLDS, st.integers(0, 8), st.integers(0, 8))
def test_many_steps_at_once_equal_one_by_one(sizes, world_size, first, num_steps):
    shard = Shard(Steps(sizes), rank=world_size - 1, world_size=world_size)
    alone = [shard.positions(step, step + 1) for step in range(first, first + num_steps)]

    together = shard.positions(first, first + num_steps)

    assert together.tolist() == [position for step in alone for position in step.tolist()]
    assert shard.rows(first, first + num_steps).tolist() == [len(step) for step in alone]


@given(RAMPS, WORLDS, st.integers(0, 400), st.booleans())
def test_a_run_reads_each_position_once_and_fills_the_rest(sizes, world_size, end, drop_last):
    steps = Steps(sizes)
    num_steps = steps.count(end, drop_last=drop_last)
    shards = ranks(steps, world_size)
    dealt = np.concatenate([shard.positions(0, num_steps, end=end) for shard in shards])
    read = np.sort(dealt[dealt != PADDING])

    assert read.tolist() == list(range(len(read)))
    assert len(read) == end or (drop_last and end - len(read) < max(sizes.values()))
    assert (PADDING in dealt) <= (not drop_last)


@given(WORLDS, WORLDS)
def test_another_number_of_ranks_reads_the_same_rows_at_each_step(before, after):
    steps = Steps(48)
    for step in range(5):
        batches = [
            np.concatenate([shard.positions(step, step + 1) for shard in ranks(steps, size)])
            for size in (before, after)
        ]
        assert np.array_equal(*batches)


@pytest.mark.parametrize(
    ("size", "world_size", "message"),
    [
        (
            500,
            8,
            "A global batch of 500 rows cannot be divided equally over 8 ranks: 4 rows would be "
            "left over in every step. Use global_batch_size=496 or 504.",
        ),
        (
            5,
            8,
            "A global batch of 5 rows cannot be divided equally over 8 ranks: 5 rows would be "
            "left over in every step. Use global_batch_size=8.",
        ),
        (
            9,
            2,
            "A global batch of 9 rows cannot be divided equally over 2 ranks: 1 row would be "
            "left over in every step. Use global_batch_size=8 or 10.",
        ),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_those_that_do(size, world_size, message):
    with pytest.raises(PlanError) as caught:
        rows_per_rank(size, world_size)

    assert str(caught.value) == message


def test_every_size_of_a_ramp_must_divide():
    with pytest.raises(PlanError, match="A global batch of 10 rows cannot be divided"):
        Shard(Steps({0: 8, 100: 10}), rank=0, world_size=4)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_ranks_outside_the_world_are_refused(rank, world_size):
    message = f"rank must be from 0 to world_size - 1; got rank={rank} and world_size={world_size}."
    with pytest.raises(PlanError, match=message):
        Shard(Steps(4), rank=rank, world_size=world_size)
