"""Batch sizes that change on the way, without changing what is read."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loader.loader import Loader

RAMPS = st.dictionaries(st.integers(1, 200), st.integers(1, 12), max_size=4)


@settings(max_examples=40)
@given(first=st.integers(1, 12), later=RAMPS, world_size=st.sampled_from([1, 2, 3]))
def test_a_ramp_reads_the_rows_of_a_run_without_one(numbered, first, later, world_size):
    rows = numbered(37)
    sizes = {at: size * world_size for at, size in {0: first, **later}.items()}
    ranks = [
        Loader(rows, global_batch_size=sizes, rank=rank, world_size=world_size, prefetch=0)
        for rank in range(world_size)
    ]
    iterators = [iter(loader) for loader in ranks]
    found = []
    while len(found) < 250:
        size = sizes[max(at for at in sizes if at <= len(found))]
        step = torch.cat([next(iterator)["inputs"][:, 0] for iterator in iterators])
        assert len(step) == size
        found += step.tolist()
        assert {loader.position for loader in ranks} == {len(found)}

    plain = Loader(rows, 1, steps=len(found), prefetch=0)
    assert found == [batch["inputs"][0, 0].item() for batch in plain]


def test_a_ramp_goes_on_where_a_run_of_another_size_stopped(numbered):
    plain = Loader(numbered(50), 7, seed=3, steps=30)
    expected = torch.cat([batch["inputs"] for batch in plain])[:, 0].tolist()
    plain.seek(21)
    ramp = Loader(numbered(50), global_batch_size={0: 4, 40: 10}, seed=3, steps=20)
    ramp.load_state_dict(plain.state_dict())
    batches = [batch["inputs"][:, 0].tolist() for batch in ramp]

    assert [len(batch) for batch in batches[:8]] == [4, 4, 4, 4, 4, 10, 10, 10]
    found = [row for batch in batches for row in batch]
    assert found == expected[21 : 21 + len(found)]


def test_steps_of_a_ramp_can_be_asked_for(numbered):
    loader = Loader(numbered(50), global_batch_size={0: 2, 10: 8}, steps=12)
    expected = [batch["inputs"].tolist() for batch in loader]

    assert len(expected) == len(loader) == 12
    assert [loader[step]["inputs"].tolist() for step in range(12)] == expected
    assert loader.position == 10 + 7 * 8
