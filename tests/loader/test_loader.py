"""What a loader hands out, and when a run ends."""

import json
import pickle
import re
from operator import length_hint

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

import penstock
from penstock.errors import PlanError, ResumeError
from penstock.loader import BatchFormat
from penstock.loader.loader import Loader
from penstock.order.plan import Plan
from penstock.order.shuffle import Block
from penstock.rows.windows import Windows

LENGTH = 16


@pytest.fixture(scope="module")
def windows(store):
    return Windows(store, LENGTH)


def inputs(loader):
    return [batch["inputs"].tolist() for batch in loader]


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_batches_are_the_rows_that_the_plan_has_at_their_positions(windows, naive, prefetch):
    loader = Loader(windows, 8, seed=17, steps=150, prefetch=prefetch)
    for step, batch in enumerate(loader):
        rows = naive(loader.plan, range(step * 8, step * 8 + 8), LENGTH)

        assert list(batch) == ["inputs", "targets"]
        assert batch["inputs"].tolist() == [row[:-1] for row in rows]
        assert batch["targets"].tolist() == [row[1:] for row in rows]
        assert batch["inputs"].dtype == batch["targets"].dtype == torch.int64
    assert step == 149


def test_inputs_and_targets_are_views_of_one_buffer(windows):
    batch = Loader(windows, 8)[3]

    assert batch["targets"].data_ptr() - batch["inputs"].data_ptr() == 8
    assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


def test_a_batch_does_not_hold_the_memory_of_its_neighbours(windows):
    batch = next(iter(Loader(windows, 8)))

    assert batch["inputs"].untyped_storage().nbytes() <= 8 * (LENGTH + 1) * 8


def test_a_tuple_holds_inputs_and_targets(windows):
    named = Loader(windows, 8, seed=1)[2]
    first, second = Loader(windows, 8, seed=1, format="tuple")[2]

    assert torch.equal(first, named["inputs"])
    assert torch.equal(second, named["targets"])


def test_hf_labels_are_shifted_by_the_model_to_the_same_targets_but_the_last(store):
    windows = Windows(store, LENGTH, stride=LENGTH - 1)
    named = Loader(windows, 8, seed=1)[2]
    batch = Loader(windows, 8, seed=1, format="hf")[2]
    logits = torch.randn(8, LENGTH, 257, generator=torch.Generator().manual_seed(0))

    assert list(batch) == ["input_ids", "labels"]
    assert torch.equal(batch["input_ids"], named["inputs"])
    assert torch.equal(batch["labels"][:, 1:], named["targets"][:, :-1])
    # As transformers computes it: logits without the last place, labels without the first.
    loss = torch.nn.functional.cross_entropy
    internal = loss(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    ours = loss(logits[:, :-1].flatten(0, 1), named["targets"][:, :-1].flatten())
    assert internal == ours


def test_hf_labels_may_be_written_to(store):
    """Training code sets labels to -100 in place; the inputs must stay."""
    batch = Loader(Windows(store, LENGTH, stride=LENGTH - 1), 8, format="hf")[0]
    before = batch["input_ids"].clone()
    batch["labels"][:] = -100

    assert torch.equal(batch["input_ids"], before)


def test_hf_masks_the_same_targets_as_the_others(store):
    windows = Windows(store, LENGTH, stride=LENGTH - 1, tail="pad")
    settings = {"epochs": 1, "drop_last": False, "shuffle": "none"}
    named = Loader(windows, 7, **settings)[-1]["targets"]
    labels = Loader(windows, 7, **settings, format="hf")[-1]["labels"]

    assert (named == -100).any()
    assert torch.equal(labels[:, 1:], named[:, :-1])
    assert (labels[(named == -100).all(dim=1)] == -100).all()


def test_ids_name_each_row(windows, other_store):
    plan = Plan(
        {"one": windows, "two": Windows(other_store, LENGTH)},
        weights={"one": 0.7, "two": 0.3},
        seed=5,
    )
    loader = Loader(plan, 6, format=BatchFormat(ids=True), rank=1, world_size=2)
    for step in (0, 1, 50):
        batch = loader[step]
        first = step * 12 + 6
        expected = plan.samples(first, first + 6)

        assert batch["position"].tolist() == list(range(first, first + 6))
        assert [plan.names[number] for number in batch["source"]] == [each[1] for each in expected]
        assert batch["epoch"].tolist() == [each.epoch for each in expected]
        assert batch["sample"].tolist() == [each.sample for each in expected]


def test_ids_may_be_written_to(windows):
    loader = Loader(windows, 8, format=BatchFormat(ids=True), prefetch=0)
    expected = [loader[step]["sample"].tolist() for step in range(6)]
    found = []
    for batch in loader:
        found.append(batch["sample"].tolist())
        for name in ("sample", "source", "position"):
            batch[name][:] = 0
        if len(found) == 6:
            break

    assert found == expected


def test_filled_rows_have_no_ids(numbered):
    batch = Loader(numbered(5), 4, epochs=1, drop_last=False, format=BatchFormat(ids=True))[-1]

    for name in ("source", "epoch", "sample", "position"):
        assert batch[name].tolist()[1:] == [-1, -1, -1]
        assert batch[name][0] >= 0


def test_narrow_ids_are_as_stored(windows, flat):
    loader = Loader(windows, 8, seed=3, format="narrow", steps=80)
    wide = Loader(windows, 8, seed=3, steps=80)
    for batch, expected in zip(loader, wide, strict=True):
        assert list(batch) == ["tokens"]
        assert batch["tokens"].dtype == torch.uint16
        assert batch["tokens"].shape == (8, LENGTH + 1)
        assert batch["tokens"][:, 1:].tolist() == expected["targets"].tolist()


def test_narrow_batches_say_which_targets_do_not_count(store):
    windows = Windows(store, LENGTH, tail="pad")
    settings = {"epochs": 1, "drop_last": False, "shuffle": "none"}
    narrow = Loader(windows, 7, **settings, format="narrow")[-1]
    wide = Loader(windows, 7, **settings)[-1]

    assert torch.equal(narrow["target_mask"], wide["targets"] != -100)


def test_mixtures_read_every_source_at_its_place(windows, other_store, flat):
    plan = Plan({"one": windows, "two": Windows(other_store, LENGTH)}, weights={"one": 1, "two": 2})
    other = other_store.tokens(0, other_store.num_tokens).tolist()
    tokens = {"one": flat, "two": other}
    loader = Loader(plan, 16, steps=20)
    for step, batch in enumerate(loader):
        for row, sample in zip(
            batch["inputs"].tolist(), plan.samples(step * 16, step * 16 + 16), strict=True
        ):
            start = sample.sample * LENGTH
            assert row == tokens[sample.source][start : start + LENGTH]


def test_sources_of_several_widths_share_a_batch(tmp_path, numbered):
    np.save(tmp_path / "narrow.npy", np.full(40, 65_535, "uint16"))
    np.save(tmp_path / "wide.npy", np.full(40, 2**32 - 1, "uint32"))
    wide = penstock.open_tokens(tmp_path / "wide.npy", vocab_size=2**32)
    plan = Plan({"narrow": Windows(tmp_path / "narrow.npy", 3), "wide": Windows(wide, 3)})

    found = torch.cat([batch["inputs"] for batch in Loader(plan, 4, epochs=1)])
    assert found.unique().tolist() == [65_535, 2**32 - 1]


def test_only_some_sources_may_have_a_short_row(store, other_store):
    long = Windows(other_store, LENGTH)
    plan = Plan({"padded": Windows(store, LENGTH, tail="pad"), "cut": long})
    counted = sum(
        int((batch["targets"] != -100).sum())
        for batch in Loader(plan, 16, epochs=1, drop_last=False)
    )

    assert counted == store.num_tokens - 1 + LENGTH * len(long)


@pytest.mark.parametrize("shuffle", ["full", "none", "part", "block", Block(rows=4, group=3)])
def test_every_way_to_shuffle_reads_every_row_once(windows, shuffle):
    loader = Loader(windows, 1, shuffle=shuffle, epochs=1, format=BatchFormat(ids=True))

    assert sorted(batch["sample"].item() for batch in loader) == list(range(len(windows)))


@given(
    num_rows=st.integers(1, 60),
    rows=st.integers(1, 9),
    world_size=st.integers(1, 5),
    epochs=st.integers(1, 3),
)
def test_a_run_is_cut_only_at_its_end(numbered, num_rows, rows, world_size, epochs):
    """All ranks take the same steps; the end is dropped, or filled with rows without targets."""
    total = num_rows * epochs
    for drop_last in (True, False):
        if drop_last and total < rows * world_size:
            continue  # no run: refused
        ranks = [
            Loader(
                numbered(num_rows),
                rows,
                rank=rank,
                world_size=world_size,
                epochs=epochs,
                drop_last=drop_last,
                prefetch=0,
                format=BatchFormat(ids=True),
            )
            for rank in range(world_size)
        ]
        taken = [list(loader) for loader in ranks]
        size = rows * world_size
        steps = total // size if drop_last else -(-total // size)

        assert [len(batches) for batches in taken] == [steps] * world_size
        assert {len(loader) for loader in ranks} == {loader.step for loader in ranks} == {steps}
        positions = [
            position
            for step in range(steps)
            for rank in range(world_size)
            for position in taken[rank][step]["position"].tolist()
        ]
        read = min(total, steps * size)
        assert positions == [*range(read), *[-1] * (steps * size - read)]
        for batches in taken:
            for batch in batches:
                filled = batch["position"] == -1
                assert (batch["targets"][filled] == -100).all()
                assert (batch["targets"][~filled] >= 0).all()
                assert {tuple(each.shape) for each in (batch["inputs"], batch["targets"])} == {
                    (rows, 2)
                }
        assert {loader.position for loader in ranks} == {total}  # where the next loop begins


def test_a_run_without_end_goes_on(numbered):
    loader = Loader(numbered(5), 4, format=BatchFormat(ids=True))
    epochs = [next(iter(loader))["epoch"].tolist() for _ in range(100)]

    assert [epoch for batch in epochs for epoch in batch] == [at // 5 for at in range(400)]
    with pytest.raises(IndexError, match="step -1 does not exist: this run has no end"):
        loader[-1]


def test_the_length_of_an_endless_loader_is_a_type_error_as_tqdm_and_list_expect(numbered):
    mixture = Plan({"a": numbered(5), "b": numbered(7)}, weights={"a": 1, "b": 1})
    loader = Loader(mixture, 4)
    # Of all of them, Python's own functions ask for a length, and do without it.
    for endless in (loader, loader.as_dataloader(), loader.as_dataloader().dataset, mixture):
        with pytest.raises(TypeError, match=r"This (run|plan) has no (end, so no )?length"):
            len(endless)
        assert length_hint(endless, 17) == 17
    for endless in (loader, loader.as_dataloader()):
        shown = tqdm(endless, disable=True)
        assert shown.total is None
        assert endless  # as every object that does not say otherwise
        assert len(list(zip(range(3), shown, strict=False))) == 3


def test_list_of_an_endless_loader_reads_it_and_does_not_fail_for_want_of_a_length(numbered):
    class Unreadable(numbered):
        def read(self, samples):
            raise LookupError("was read")

    loader = Loader(Unreadable(5), 4)
    for endless in (loader, loader.as_dataloader()):
        with pytest.raises(LookupError, match="was read"):  # otherwise it would never end
            list(endless)


def test_positions_far_out_are_read_as_soon(numbered):
    loader = Loader(numbered(10**15), 4)
    loader.seek(4 * 10**17)

    assert loader.step == 10**17
    assert torch.equal(next(iter(loader))["inputs"], loader[10**17]["inputs"])


def test_any_step_can_be_asked_for_without_moving(windows):
    loader = Loader(windows, 8, seed=2, epochs=1)
    expected = inputs(loader)
    loader.seek(24)

    assert [loader[step]["inputs"].tolist() for step in range(len(loader))] == expected
    assert loader[-1]["inputs"].tolist() == expected[-1]
    assert loader.position == 24
    for step in (len(loader), -len(loader) - 1):
        with pytest.raises(IndexError, match=rf"does not exist: this run has {len(loader)} steps"):
            loader[step]


@pytest.mark.parametrize(("found", "device"), [(0, "cuda"), (0, "cuda:0"), (2, "cuda:2")])
def test_a_gpu_that_torch_does_not_find_is_refused(windows, monkeypatch, found, device):
    monkeypatch.setattr("torch.cuda.device_count", lambda: found)

    with pytest.raises(PlanError, match=f"device='{device}' does not exist: torch finds {found} "):
        Loader(windows, 8, device=device)


def test_asking_for_steps_does_not_disturb_an_iteration(windows):
    expected = inputs(Loader(windows, 8, seed=2, epochs=2))
    loader = Loader(windows, 8, seed=2, epochs=2)
    found = []
    for batch in loader:
        found.append(batch["inputs"].tolist())
        assert loader[0]["inputs"].tolist() == expected[0]

    assert found == expected


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_each_iteration_goes_on_from_the_position(windows, prefetch):
    expected = inputs(Loader(windows, 8, epochs=2))
    loader = Loader(windows, 8, epochs=2, prefetch=prefetch)
    found = []
    while len(found) < len(expected):
        for batch in loader:
            found.append(batch["inputs"].tolist())
            assert loader.position == 8 * len(found)
            assert loader.state_dict()["position"] == 8 * len(found)
            if len(found) % 7 == 0:
                break

    assert found == expected
    assert len(inputs(loader)) == len(expected)  # the next two epochs


def test_seek_goes_to_any_row(windows, naive):
    loader = Loader(windows, 8, seed=9, epochs=1)
    for position in (0, 8, 13, 400, 3):
        loader.seek(np.int64(position))
        batch = next(iter(loader))

        expected = naive(loader.plan, range(position, position + 8), LENGTH)
        assert batch["inputs"].tolist() == [row[:-1] for row in expected]
        assert loader.position == position + 8
        assert type(loader.state_dict()["position"]) is int


def test_settings_may_be_numpy_integers(numbered):
    """A state made of them would not be JSON."""
    one, two, five = np.int64(1), np.int64(2), np.int32(5)
    loader = Loader(numbered(12), five, rank=one, world_size=two, epochs=one, drop_last=False)
    assert len(inputs(loader)) == 2

    assert type(json.loads(json.dumps(loader.state_dict()))["position"]) is int
    assert len(Loader(numbered(12), global_batch_size={np.int64(0): two}, steps=five)) == 5
    for settings in ({"batch_size": 1.5}, {"batch_size": 2, "epochs": 1.5}):
        with pytest.raises(PlanError, match=r"=1\.5 is not a whole number"):
            Loader(numbered(12), **settings)


@pytest.mark.parametrize("position", [-1, 10**9])
def test_seek_stays_inside_the_run(windows, position):
    with pytest.raises(PlanError, match=rf"Position {position:,} is not in this run, which has"):
        Loader(windows, 8, steps=7).seek(position)


def test_a_run_that_has_ended_resumes_with_the_next_epoch(numbered):
    """Also where its last batch was filled up, so that it ends where no step begins."""
    loader = Loader(numbered(10), 4, epochs=1, drop_last=False)
    assert len(inputs(loader)) == 3
    again = Loader(numbered(10), 4, epochs=1, drop_last=False)
    again.load_state_dict(loader.state_dict())

    assert (len(loader), loader.step, loader.position) == (3, 3, 10)
    assert (len(again), again.step, again.position) == (3, 0, 10)
    assert inputs(again) == inputs(loader)


def test_a_finished_run_goes_on_with_more_epochs(numbered):
    """Nothing is lost or read twice where the last batch was filled up."""
    loader = Loader(numbered(10), 4, epochs=1, drop_last=False)
    assert len(inputs(loader)) == 3
    longer = Loader(numbered(10), 4, epochs=2, drop_last=False, format=BatchFormat(ids=True))
    longer.load_state_dict(loader.state_dict())

    positions = [position for batch in longer for position in batch["position"].tolist()]
    assert positions == [*range(10, 20), -1, -1]


def test_an_iterator_that_was_overtaken_says_so(windows):
    loader = Loader(windows, 8)
    moves = [
        lambda: iter(loader),
        lambda: loader.seek(0),
        lambda: loader.load_state_dict(loader.state_dict()),
    ]
    for move in moves:
        for taken in (1, 31, 32, 63, 64):
            old = iter(loader)
            for _ in range(taken):
                next(old)
            move()
            with pytest.raises(ResumeError, match="This iterator was replaced"):
                next(old)
    unused = iter(loader)
    next(iter(loader))
    with pytest.raises(ResumeError, match="This iterator was replaced"):
        next(unused)


def test_batches_are_never_overwritten(windows):
    kept = [(batch, batch["inputs"].clone()) for batch in Loader(windows, 8, steps=200)]

    for step, (batch, copy) in enumerate(kept):
        assert torch.equal(batch["inputs"], copy)
        if step % 20 == 0:
            assert torch.equal(copy, Loader(windows, 8)[step]["inputs"])


def test_writing_to_a_batch_changes_no_other(windows):
    expected = inputs(Loader(windows, 8, epochs=1))
    found = []
    for batch in Loader(windows, 8, epochs=1):
        found.append(batch["inputs"].tolist())
        batch["inputs"][:] = -1

    assert found == expected


def test_a_plan_and_its_rows_make_the_same_loader(windows):
    plan = Plan(windows, seed=17, shuffle="block")

    assert Loader(plan, 8)[5]["inputs"].tolist() == (
        Loader(windows, 8, seed=17, shuffle="block")[5]["inputs"].tolist()
    )


def test_a_global_batch_is_the_same_on_any_number_of_ranks(windows):
    whole = Loader(windows, global_batch_size=12, seed=1)
    for world_size in (1, 2, 3, 4, 6, 12):
        ranks = [
            Loader(windows, global_batch_size=12, seed=1, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for step in (0, 7, 100):
            joined = torch.cat([loader[step]["inputs"] for loader in ranks])
            assert torch.equal(joined, whole[step]["inputs"])


def test_borders_come_with_the_batch(store):
    windows = Windows(store, LENGTH, borders=True)
    loader = Loader(windows, 8, seed=4)
    batch = loader[3]
    samples = loader.plan.locate(np.arange(24, 32))[2]
    expected = windows.read(samples)
    lengths = np.diff(batch["cu_seqlens"])

    assert list(batch) == ["inputs", "targets", "document_ids", "position_ids", "cu_seqlens"]
    for name in ("document_ids", "position_ids"):
        assert batch[name].tolist() == expected[name].tolist()
        assert batch[name].dtype == torch.int32
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["cu_seqlens"][0] == 0
    assert batch["cu_seqlens"][-1] == 8 * LENGTH
    # Walking the pieces gives the positions back.
    assert batch["position_ids"].flatten().tolist() == [
        place for length in lengths for place in range(length)
    ]


def test_a_pickled_loader_is_at_the_same_place(windows):
    loader = Loader(windows, 8, seed=5, epochs=1)
    expected = inputs(loader)
    loader.seek(16)
    iterator = iter(loader)
    next(iterator)
    data = pickle.dumps(loader)
    again = pickle.loads(data)

    assert len(data) < 20_000
    assert again.position == 24
    assert inputs(again) == expected[3:]
    assert next(iterator)["inputs"].tolist() == expected[3]


def test_a_device_other_than_cuda_gets_plain_copies(windows):
    batch = next(iter(Loader(windows, 8, device="meta")))

    assert {each.device.type for each in batch.values()} == {"meta"}
    assert batch["inputs"].shape == (8, LENGTH)


def test_rank_and_world_size_come_from_torch_distributed(windows, tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1
    )
    try:
        loader = Loader(windows, 8)
        given_rank = Loader(windows, 8, rank=2, world_size=4)
    finally:
        torch.distributed.destroy_process_group()

    assert (loader.rank, loader.world_size) == (0, 1)
    assert (given_rank.rank, given_rank.world_size) == (2, 4)


WEIGHTED = {"weights": {"data": 1}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fields": "tuple", "ids": True}, "ids=True adds named fields, which a tuple does not"),
        ({"fingerprint": "text"}, "fingerprint='text' is not \"samples\" or"),
    ],
)
def test_a_format_refuses_settings_that_contradict_each_other(settings, message):
    with pytest.raises(PlanError) as caught:
        BatchFormat(**settings)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "batch_size=None and global_batch_size=None: give one of them, the rows of a step on"),
        (
            {"batch_size": 4, "global_batch_size": 8},
            "batch_size=4 and global_batch_size=8: give one of them, the rows of a step on",
        ),
        (
            {"global_batch_size": 500, "rank": 0, "world_size": 8},
            "A global batch of 500 rows cannot be divided equally over 8 ranks: 4 rows would be "
            "left over in every step. Use global_batch_size=496 or 504.",
        ),
        (
            {"global_batch_size": {0: 8, 100: 9}, "rank": 0, "world_size": 4},
            "A global batch of 9 rows cannot be divided equally over 4 ranks: 1 row would be left",
        ),
        ({"batch_size": 4, "rank": 1}, "rank=1 and world_size=None: give both or neither."),
        (
            {"batch_size": 4, "rank": 4, "world_size": 4},
            "rank=4 must be from 0 to 3: world_size is 4",
        ),
        ({"batch_size": 0}, "A batch cannot have 0 rows on all ranks together. Use a"),
        (
            {"batch_size": 4, "epochs": 1, "steps": 1},
            "epochs=1 and steps=1 cannot be combined: both say where the run ends. Pass only one",
        ),
        ({"batch_size": 4, "epochs": 0}, "epochs must be at least 1; got 0."),
        ({"batch_size": 4, "steps": -3}, "steps must be at least 1; got -3."),
        ({"batch_size": 4, "prefetch": -1}, "prefetch=-1 must be at least 0."),
        (
            {"batch_size": 4, "format": "jax"},
            'format=\'jax\' is not "dict", "tuple", "hf" or "narrow".',
        ),
    ],
)
def test_refuses_what_cannot_be_a_run(windows, settings, message):
    with pytest.raises(PlanError) as caught:
        Loader(windows, **settings)

    assert str(caught.value).startswith(message)


def test_refuses_settings_that_belong_to_the_plan(windows):
    plan = Plan(windows, weights={"data": 1})

    with pytest.raises(PlanError, match=r"seed=1 was passed to the loader .* Pass it to Plan\(…\)"):
        Loader(plan, 4, seed=1, shuffle="full")
    with pytest.raises(PlanError, match="epochs=2 is not defined for a mixture: every source"):
        Loader(plan, 4, epochs=2)


def test_refuses_a_run_that_ends_before_its_first_step(windows, numbered):
    with pytest.raises(PlanError, match=r"This run has 5 rows, .* takes 50, .* drop_last=False"):
        Loader(numbered(5), batch_size=50, epochs=1)
    with pytest.raises(PlanError, match=r"This run has 6 rows, .* together takes 8,"):
        Loader(numbered(3), 4, rank=0, world_size=2, epochs=2)
    capped = Plan(windows, weights={"data": 1}, max_epochs=1)
    with pytest.raises(PlanError, match=rf"This run has {len(windows):,} rows, .* takes 10,000,"):
        Loader(capped, 10_000)

    assert len(Loader(numbered(5), 50, epochs=1, drop_last=False)) == 1
    assert next(iter(Loader(numbered(5), 50)))["inputs"].shape[0] == 50
    assert len(Loader(numbered(5), 50, epochs=10)) == 1


def test_refuses_more_steps_than_a_capped_plan_has(windows):
    plan = Plan(windows, weights={"data": 1}, max_epochs=1)
    rows = len(windows)

    assert len(Loader(plan, 4)) == rows // 4
    assert len(Loader(plan, 4, drop_last=False)) == -(-rows // 4)
    with pytest.raises(PlanError, match=rf"steps=1,000 needs 4,000 rows, .* ends after {rows}"):
        Loader(plan, 4, steps=1000)


def test_refuses_rows_that_cannot_share_a_batch(store, windows, tmp_path, gpt2):
    with pytest.raises(PlanError, match=r'the same length; these have: "a" 16, "b" 8\.'):
        Loader(Plan({"a": windows, "b": Windows(store, 8)}), 4)
    other = penstock.build(penstock.Texts(["some text " * 20]), tmp_path / "gpt2", tokenizer=gpt2)
    with pytest.raises(PlanError, match=r"come from different tokenizers \(digests: \"a\" 2770"):
        Loader(Plan({"a": windows, "b": Windows(other, LENGTH)}), 4)
    mixed = Plan({"a": windows, "b": Windows(store, LENGTH, borders=True)})
    with pytest.raises(PlanError, match="Some sources of this plan give 'document_ids' and oth"):
        next(iter(Loader(mixed, 16)))
    with pytest.raises(PlanError, match="These rows also have document_ids, position_ids, cu_s"):
        next(iter(Loader(Windows(store, LENGTH, borders=True), 4, format="tuple")))


def test_names_the_added_tokens_in_which_tokenizers_differ(tmp_path):
    texts, added = penstock.Texts(["some text " * 20]), ["<|im_start|>", "<|im_end|>"]
    plain = penstock.build(texts, tmp_path / "plain", tokenizer="gpt2")
    chat = penstock.build(
        texts, tmp_path / "chat", tokenizer=penstock.load_tokenizer("gpt2", add_tokens=added)
    )
    plan = Plan({"plain": Windows(plain, 8), "chat": Windows(chat, 8)})
    with pytest.raises(PlanError, match="differ by added tokens") as caught:
        Loader(plan, 4)
    advice = re.search(r"add_tokens=(\[.*?\])", str(caught.value))[1]
    same = penstock.build(
        texts, tmp_path / "same", tokenizer=penstock.load_tokenizer("gpt2", add_tokens=eval(advice))
    )

    assert '("plain" none, "chat" <|im_start|> <|im_end|>)' in str(caught.value)
    next(iter(Loader(Plan({"plain": Windows(same, 8), "chat": Windows(chat, 8)}), 4)))


def test_refuses_rows_that_cannot_be_read():
    class Lines(list):
        digest = "lines"

    with pytest.raises(PlanError, match=r'Source "data" is a Lines, which a plan can order but a'):
        Loader(Lines("abc"), 2)
