"""Batches of documents of like length under a budget of tokens."""

import json
import os
import pickle
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Documents, Loader, Packs, Plan
from penstock.errors import PlanError, ResumeError
from penstock.loader import BatchFormat
from penstock.order.budget import Budget, BudgetSteps
from penstock.order.steps import PADDING, Shard
from penstock.testing import assert_resumable, global_rows

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def store(write_store, tmp_path_factory):
    """240 documents of 1 to 60 tokens."""
    lengths = [number * 37 % 60 + 1 for number in range(240)]
    documents = [list(range(1, length + 1)) for length in lengths]
    return write_store(
        tmp_path_factory.mktemp("budget") / "store", [documents[:100], documents[100:]]
    )


def budget(store, *, tokens=480, window=96, rows=8, seed=3, **options):
    plan = Plan(Documents(store, 60, **options), seed=seed)
    return Budget(plan, tokens, window=window, rows_multiple_of=rows)


def test_an_epoch_holds_every_document_once_and_no_batch_more_than_its_tokens(store):
    loader = Loader(budget(store), epochs=3, format=BatchFormat(ids=True))
    seen = []
    for batch in loader:
        assert batch["inputs"].numel() <= 480
        seen += batch["sample"].tolist()

    for epoch in range(3):
        assert sorted(seen[epoch * 240 : (epoch + 1) * 240]) == list(range(240))
    assert seen[:240] != seen[240:480]
    assert len(loader) == loader.step


def test_wastes_little_and_does_not_grow_from_short_to_long(store):
    batches = list(Loader(budget(store, window=240), epochs=1))
    real = sum(int(batch["attention_mask"].sum()) for batch in batches)
    widths = [batch["inputs"].shape[1] for batch in batches]
    plain = list(Loader(Plan(Documents(store, 60), seed=3), 12, epochs=1))
    plain_real = sum(int(batch["attention_mask"].sum()) for batch in plain)

    assert real / sum(batch["inputs"].numel() for batch in batches) > 0.85
    assert plain_real / sum(batch["inputs"].numel() for batch in plain) < 0.62
    assert widths != sorted(widths)
    assert widths != sorted(widths, reverse=True)


@settings(max_examples=60)
@given(
    tokens=st.integers(480, 2_000),
    window=st.integers(8, 300),
    rows=st.integers(1, 8),
    world_size=st.integers(1, 5),
)
def test_ranks_share_the_same_batches(store, tokens, window, rows, world_size):
    made = budget(store, tokens=tokens, window=window, rows=rows)
    whole = made.steps().spans(0, 8)
    shards = [Shard(made.steps(), rank=r, world_size=world_size) for r in range(world_size)]
    for step, (start, size) in enumerate(zip(*whole, strict=True)):
        dealt = np.concatenate([shard.positions(step, step + 1) for shard in shards])
        assert len({int(shard.rows(step, step + 1)[0]) for shard in shards}) == 1
        assert dealt[dealt != PADDING].tolist() == list(range(start, start + size))
        filled = -(-size // rows) * rows
        assert len(dealt) == -(-filled // world_size) * world_size


def test_runs_resume_at_every_step_on_any_number_of_ranks(store):
    def make(**where):
        return Loader(budget(store), epochs=2, format=BatchFormat(ids=True), **where)

    assert_resumable(make, steps=14, prefetch=(0, 1))


def test_mixtures_resume_too(store):
    def make(**where):
        sources = {"a": Documents(store, 60), "b": Documents(store, 60, overflow="split")}
        plan = Plan(sources, weights={"a": 2, "b": 1}, seed=5)
        return Loader(Budget(plan, 480, window=80), steps=10, format=BatchFormat(ids=True), **where)

    assert_resumable(make, prefetch=(0, 1), world_sizes=(1, 2))


def test_ranks_that_do_not_divide_a_batch_get_rows_that_train_on_nothing(store):
    ranks = [
        Loader(budget(store), epochs=1, format=BatchFormat(ids=True), rank=rank, world_size=3)
        for rank in range(3)
    ]
    steps = global_rows(ranks, 1_000)
    seen = np.concatenate([step["sample"][step["position"] >= 0] for step in steps])
    one = list(Loader(budget(store), epochs=1, format=BatchFormat(ids=True)))

    assert sorted(seen.tolist()) == list(range(240))
    assert len(steps) == len(one)
    for step, right in zip(steps, one, strict=True):
        real = step["position"] >= 0
        assert (step["targets"][~real] == -100).all()
        assert np.array_equal(step["inputs"][real], right["inputs"])


def test_the_order_can_be_asked_for_both_ways(store):
    made = budget(store)
    seen = [sample.sample for sample in made.samples(0, 480)]

    assert [sample.position for sample in made.samples(7, 9)] == [7, 8]
    assert made.locate(np.arange(480))[2].tolist() == seen
    for sample in (0, 17, 239):
        places = [place for place, each in enumerate(seen) if each == sample]
        assert made.positions_of("data", sample, before=480).tolist() == places
        assert made.positions_of("data", sample, epoch=1).tolist() == places[1:]
        assert made.positions_of("data", sample, before=places[1]).tolist() == places[:1]


def test_seeking_into_a_batch_goes_on_with_the_rest_of_it(store):
    loader = Loader(budget(store), epochs=1, format=BatchFormat(ids=True))
    right = [sample for batch in loader for sample in batch["sample"].tolist()]
    loader.seek(5)
    found = [batch["sample"][batch["position"] >= 0].tolist() for batch in loader]

    assert [sample for batch in found for sample in batch] == right[5:]


def test_a_pickled_loader_and_a_dataloader_go_on_alike(store):
    loader = Loader(budget(store), epochs=1)
    batches = list(loader)
    loader.seek(0)
    next(iter(loader))
    restored = pickle.loads(pickle.dumps(loader))
    found = list(restored.as_dataloader(num_workers=1, multiprocessing_context="fork"))

    assert len(found) == len(batches) - 1
    for right, each in zip(batches[1:], found, strict=True):
        assert torch.equal(right["inputs"], each["inputs"])


def test_a_state_belongs_to_its_budget_and_window(store):
    loader = Loader(budget(store), epochs=1)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))

    for other in ({"tokens": 960}, {"window": 48}, {"rows": 4}, {"seed": 4}):
        with pytest.raises(ResumeError, match=r"budget|seed"):
            Loader(budget(store, **other), epochs=1).load_state_dict(state)
    with pytest.raises(ResumeError, match="budget"):
        Loader(Plan(Documents(store, 60), seed=3), 8).load_state_dict(state)


def test_the_order_is_golden(store):
    """Another value needs an entry in the changelog under "Data order"."""
    made = budget(store)

    assert made.steps().spans(0, 12)[1].tolist() == [16, 8, 8, 24, 8, 8, 8, 8, 8, 8, 24, 8]
    assert [sample.sample for sample in made.samples(0, 12)] == [
        174,
        187,
        85,
        200,
        93,
        179,
        145,
        72,
        127,
        208,
        28,
        54,
    ]


def test_what_cannot_be_is_refused(store):
    with pytest.raises(
        PlanError, match=r"8 rows of \"data\" may take 8 x 60 = 480 tokens, more th"
    ):
        budget(store, tokens=479)
    with pytest.raises(PlanError, match=r"window=4 and rows_multiple_of=8: .* and window at least"):
        budget(store, window=4)
    with pytest.raises(PlanError, match="is a Packs, whose rows are all equally long"):
        Budget(Plan(Packs(store, 60)), 480)
    with pytest.raises(PlanError, match="a budget of tokens decides how many rows a batch has"):
        Loader(budget(store), 8)
    with pytest.raises(PlanError, match=r"seed=3 was passed to the loader .* Pass it to Plan\(…\)"):
        Loader(budget(store), seed=3)
    with pytest.raises(PlanError, match="rank=2 must be from 0 to 1: world_size is 2"):
        Loader(budget(store), rank=2, world_size=2)
    with pytest.raises(PlanError, match="reads position 3"):
        budget(store).steps(8).at(3)
    with pytest.raises(PlanError, match="There are no steps from 2 to 1"):
        budget(store).steps().spans(2, 1)


def test_ends_where_the_plan_ends(store):
    plan = Plan({"a": Documents(store, 60)}, weights={"a": 1}, max_epochs=1, seed=1)
    made = Budget(plan, 480, window=96)
    loader = Loader(made, format=BatchFormat(ids=True))

    assert sorted(s for batch in loader for s in batch["sample"].tolist()) == list(range(240))
    with pytest.raises(PlanError, match="There are no steps after position 240, where the plan en"):
        made.steps().span(10_000)


def test_shows_itself_with_its_plan(store):
    made = budget(store)

    assert repr(made) == f"Budget(480 tokens a batch, windows of 96 rows; {made.plan!r})"
    assert str(made).endswith(repr(made))
    assert len(made) == 240
    assert made


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.torture)])
def test_the_end_of_an_epoch_is_filled_up_alike_on_any_number_of_ranks(
    write_store, tmp_path, every
):
    """237 rows leave 5 over in every epoch: 3 rows that train on nothing, for one rank too.

    `make test` resumes after every ninth step, `make torture` after every step.
    """
    documents = [list(range(1, number * 37 % 60 + 2)) for number in range(237)]
    store = write_store(tmp_path / "odd", [documents])

    def make(**where):
        return Loader(budget(store, window=240), epochs=2, format=BatchFormat(ids=True), **where)

    assert_resumable(make, prefetch=(0,), steps=50, stops=range(0, 51, every))
    filled = [int((batch["position"] < 0).sum()) for batch in make()]
    assert sorted(filled)[-3:] == [0, 3, 3]
    assert all(batch["inputs"].numel() <= 480 for batch in make())


def test_a_state_belongs_to_what_rows_are_padded_to(store):
    """Batches are cut by padded widths, so other padding is another order."""
    loader = Loader(budget(store, pad_to_multiple_of=4), epochs=1)
    next(iter(loader))
    state = loader.state_dict()

    for other in ({}, {"pad_to_multiple_of": 20}):
        with pytest.raises(ResumeError, match=r"budget .*'multiples': \[4\]"):
            Loader(budget(store, **other), epochs=1).load_state_dict(state)
    assert budget(store, pad_to_multiple_of=4).digest == loader.plan.digest


def naive_edges(made, start, stop):
    """Where batches begin from `start` to `stop`, window after window."""
    edges = [start]
    while edges[-1] < stop:
        edges += made.edges_after(edges[-1]).tolist()
    return edges


@settings(max_examples=20)
@given(
    start=st.integers(0, 500),
    asked=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 9)), max_size=12),
)
def test_steps_can_be_asked_for_in_any_order(store, start, asked):
    made = budget(store, window=16)
    edges = naive_edges(made, start, start + 4_500)
    steps = made.steps(start)
    for first, number in asked:
        starts, rows = steps.spans(first, first + number)
        assert starts.tolist() == edges[first : first + number]
        assert (starts + rows).tolist() == edges[first + 1 : first + number + 1]
        position = edges[first] + number % (edges[first + 1] - edges[first])
        assert steps.at(position) == first
        assert steps.count(edges[first] + 1, drop_last=False) == first + 1
        assert steps.count(edges[first], drop_last=False) == first


def test_an_endless_run_keeps_two_numbers_for_each_window(write_store, tmp_path):
    """Counting 1,000 more windows takes 16 bytes for each of them, and no window is kept."""
    store = write_store(tmp_path / "short", [[[1, 2]] * 8])
    steps = budget(store, tokens=480, window=8).steps()
    here = [
        tracemalloc.Filter(inclusive=True, filename_pattern=f"*{os.sep}order{os.sep}{name}.py")
        for name in ("budget", "steps")
    ]
    sizes = []
    tracemalloc.start()
    for step in (500, 1_500):
        assert steps.span(step) == (8 * step, 8 * step + 8)
        taken = tracemalloc.take_snapshot().filter_traces(here)
        sizes.append(sum(trace.size for trace in taken.traces))
    tracemalloc.stop()

    assert sizes[1] - sizes[0] < 25_000
    assert steps.span(1_234) == (9_872, 9_880)


class Slow:
    """A budget that takes its time with every window."""

    def __init__(self, made):
        self.made, self.end, self.multiple = made, made.end, made.multiple

    def edges_after(self, position):
        time.sleep(0.02)
        return self.made.edges_after(position)


def test_threads_that_meet_at_the_end_of_a_plan_both_get_their_steps(store):
    plan = Plan({"a": Documents(store, 60)}, weights={"a": 1}, max_epochs=1, seed=1)
    made = Budget(plan, 480, window=96)
    last = made.steps().count(240, drop_last=False)
    steps = BudgetSteps(Slow(made), 0)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: steps.spans(0, last)[1].sum(), range(4)))

    assert found == [240] * 4


@pytest.mark.parametrize(("rows", "world_size"), [(8, 3), (8, 5), (4, 8), (8, 4), (1, 2)])
def test_ranks_that_do_not_divide_the_rows_add_less_than_a_row_each(store, rows, world_size):
    """As the docstring says: without dividing, up to world_size - 1 rows on top of the tokens."""
    made = budget(store, rows=rows)
    ranks = [
        Loader(made, epochs=1, format=BatchFormat(ids=True), rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    steps = global_rows(ranks, 1_000)
    over = [step["inputs"].size - 480 for step in steps]
    widths = [step["inputs"].shape[1] for step in steps]

    if rows % world_size == 0:
        assert max(over) <= 0
    else:
        assert all(
            more <= (world_size - 1) * width for more, width in zip(over, widths, strict=True)
        )
        assert max(over) > 0
