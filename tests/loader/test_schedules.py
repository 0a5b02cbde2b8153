"""Batch sizes and row lengths that change on the way, without changing what is read."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loader import BatchFormat
from penstock.loader.loader import Loader
from penstock.rows.windows import Windows

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


@pytest.mark.parametrize("prefetch", [0, 2])
def test_shorter_rows_at_first_hold_the_same_tokens_in_the_same_order(store, prefetch):
    windows = Windows(store, 16)
    common = {"seed": 4, "epochs": 1, "prefetch": prefetch}
    whole = Loader(windows, 6, **common)
    warm = Loader(windows, 6, format=BatchFormat(lengths={0: 4, 60: 8, 121: 16}), **common)
    shapes = []
    for batch, expected in zip(warm, whole, strict=True):
        shapes.append(tuple(batch["inputs"].shape))
        for name in ("inputs", "targets"):
            assert batch[name].flatten().tolist() == expected[name].flatten().tolist()

    # In force from the first batch that begins at or after the position.
    assert shapes == [(24, 4)] * 10 + [(12, 8)] * 11 + [(6, 16)] * (len(whole) - 21)


def test_lengths_are_full_until_the_first_that_is_given(store):
    loader = Loader(Windows(store, 16), 4, format=BatchFormat(lengths={8: 2, 16: 16}))

    assert [loader[step]["inputs"].shape[1] for step in range(6)] == [16, 16, 2, 2, 16, 16]


def test_shorter_rows_in_other_formats(store):
    windows = Windows(store, 16)
    named = Loader(windows, 4, format=BatchFormat(lengths={0: 4}))[0]
    first, second = Loader(windows, 4, format=BatchFormat(fields="tuple", lengths={0: 4}))[0]
    overlapping = Windows(store, 16, stride=12)
    whole = Loader(overlapping, 4)[0]["inputs"]
    labels = Loader(overlapping, 4, format=BatchFormat(fields="hf", lengths={0: 4}))[0]["labels"]

    assert torch.equal(first, named["inputs"])
    assert torch.equal(second, named["targets"])
    assert torch.equal(labels, whole.unfold(1, 4, 3)[:, :4].reshape(-1, 4))


def test_shorter_rows_have_ids_and_borders_of_their_own(store):
    """As rows that were cut so short from the beginning."""
    long = Windows(store, 16, borders=True)
    short = Windows(store, 4, borders=True)
    batch = Loader(long, 6, seed=1, format=BatchFormat(ids=True, lengths={0: 4}))[2]
    samples = batch["sample"].numpy()
    quarters = np.tile(np.arange(4), 6)
    expected = short.read(samples * 4 + quarters)

    assert batch["sample"].shape == batch["position"].shape == (24,)
    assert batch["position"].tolist() == [12 + row // 4 for row in range(24)]
    assert batch["inputs"].tolist() == expected["tokens"][:, :-1].tolist()
    assert batch["document_ids"].tolist() == expected["document_ids"].tolist()
    assert batch["position_ids"].tolist() == expected["position_ids"].tolist()
    assert set(range(0, 96, 4)) <= set(batch["cu_seqlens"].tolist())


def test_shorter_rows_keep_targets_that_do_not_count(store):
    windows = Windows(store, 16, tail="pad")
    common = {"epochs": 1, "drop_last": False, "shuffle": "none"}
    whole = Loader(windows, 7, **common)[-1]["targets"]
    cut = Loader(windows, 7, format=BatchFormat(lengths={0: 8}), **common)[-1]["targets"]

    assert torch.equal(cut, whole.reshape(-1, 8))
