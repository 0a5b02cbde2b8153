"""Weights that are set during a run: shares, the size of the state, and resuming."""

import json
import pickle

import numpy as np
import pytest

from penstock.errors import PlanError
from penstock.integrations.multiplex import (
    MultiplexDataset,
    create_multiplex_dataloader,
    get_dataset_stats,
)

SIZES = {"a": 600, "b": 250, "c": 70}


def pairs(sizes=None):
    return [(name, [{"n": n} for n in range(size)]) for name, size in (sizes or SIZES).items()]


def make(weights=(5, 3, 2), sizes=None, **options):
    options = {"batch_size": 10, "sampling_weights": list(weights), **options}
    return create_multiplex_dataloader(pairs(sizes), collate_fn=list, **options)


def rows(batches):
    return [(each["dataset_idx"], each["n"]) for batch in batches for each in batch]


def endless(loader):
    while True:
        yield from loader


def drive(loader, steps, draws, batches=None):
    """Take steps with other weights before each; returns rows, largest error and last errors."""
    sizes, found = len(loader.dataset.datasets), []
    batches = batches or endless(loader)  # a new iterator would begin the next epoch
    debts, worst = np.zeros(sizes), 0.0
    for _ in range(steps):
        weights = draws.dirichlet(np.full(sizes, 0.5)) + 1e-6
        loader.set_weights(weights.tolist())
        new = rows([next(batches)])
        for source, _ in new:
            debts += weights / weights.sum()
            debts[source] -= 1
            worst = max(worst, np.abs(debts).max())
        found += new
    return found, worst, debts


def test_five_hundred_tiny_changes_do_not_starve_a_dataset():
    loader = make([0.95, 0.05], {"a": 6_000, "b": 250}, batch_size=8)
    batches = iter(loader)
    found = []
    for step in range(500):
        loader.set_weights([0.95 + 1e-6 * (step % 2), 0.05])
        found += rows([next(batches)])

    assert abs(sum(source for source, _ in found) - 200) <= 1


def test_weights_set_before_every_batch_keep_the_shares_of_the_run():
    loader = make()
    found, worst, debts = drive(loader, 300, np.random.default_rng(0))
    stats = get_dataset_stats(loader)["datasets"]

    assert worst < 2
    assert [each["delivered"] for each in stats] == np.bincount([s for s, _ in found]).tolist()
    owed = [each["asked"] - each["delivered"] for each in stats]
    assert owed == pytest.approx(debts.tolist(), abs=1e-6)


def test_the_size_of_a_state_is_bounded_after_many_changes():
    sizes = {f"a dataset with a name of some length, number {i}": 3 + i for i in range(60)}
    lengths = [list(range(1, 1 + size)) for size in sizes.values()]
    loader = make([1] * 60, sizes, lengths=lengths)
    draws = np.random.default_rng(1)
    bound = 4 * 1024 + 100 * len(sizes)
    for _ in range(4):
        drive(loader, 25, draws)
        assert len(json.dumps(loader.state_dict())) <= bound

    schedule = {i: draws.random(60).tolist() for i in range(1, 400)}
    given = make([1] * 60, sizes, schedule=schedule)
    assert len(json.dumps(given.state_dict())) <= bound


@pytest.mark.torture
def test_torture_a_state_after_ten_thousand_changes():
    sizes = {f"dataset number {i}": 50 for i in range(100)}
    loader = make([1] * 100, sizes, batch_size=4)
    _, worst, _ = drive(loader, 10_000, np.random.default_rng(2))
    size = len(json.dumps(loader.state_dict()))
    print(f"10,000 changes of 100 datasets: {worst:.3f} rows, {size:,} bytes")  # noqa: T201

    assert worst < 4
    assert size <= 4 * 1024 + 100 * 100


@pytest.mark.parametrize("changes", [1, 2, 30])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 7},
        {"world_size": 2},
        {"num_workers": 2},
        {"lengths": lambda example: 1 + example["n"] % 5},
    ],
)
def test_a_run_resumes_with_exactly_the_next_rows(changes, options):
    same = {name: value for name, value in options.items() if name == "lengths"}
    loader = make(**same)
    batches = endless(loader)
    drive(loader, changes, np.random.default_rng(changes), batches)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = rows(batch for _, batch in zip(range(42), batches, strict=False))

    ranks = range(options.pop("world_size", 1))
    found = []
    for rank in ranks:
        resumed = make(**options, rank=rank, world_size=len(ranks))
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        found.append([rows([batch]) for _, batch in zip(range(21), endless(resumed), strict=False)])
    got = [row for step in zip(*found, strict=True) for batch in step for row in batch]
    assert got == expected[: len(got)]
    assert len(got) >= 140


def test_later_changes_have_the_same_effect_in_a_resumed_run():
    def later(loader, batches):
        found, _, _ = drive(loader, 140, np.random.default_rng(9), batches)
        return found, loader.state_dict()

    loader = make()
    batches = endless(loader)
    drive(loader, 17, np.random.default_rng(3), batches)
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))

    assert later(resumed, endless(resumed)) == later(loader, batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_weights_set_between_iter_and_the_first_batch_apply_to_the_first_batch(workers):
    loader = make(num_workers=workers)
    batches = iter(loader)
    loader.set_weights([0, 1, 0])
    first = next(batches)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())

    assert {source for source, _ in rows([first])} == {1}
    assert rows(batches) == rows(resumed)


def test_of_weights_set_twice_before_a_batch_only_the_last_count():
    once, twice, resumed = make(), make(), make()
    iterators = [iter(once), iter(twice)]
    for loader, batches in zip((once, twice), iterators, strict=True):
        drive(loader, 3, np.random.default_rng(4), batches)
    twice.set_weights([1, 0, 0])
    resumed.load_state_dict(twice.state_dict())
    for loader in (once, twice, resumed):
        loader.set_weights([0, 1, 1])

    assert once.state_dict() == twice.state_dict() == resumed.state_dict()
    assert rows(iterators[0]) == rows(iterators[1]) == rows(resumed)


def test_other_earlier_weights_give_another_history():
    states = []
    for weights in ([1, 1, 1], [1, 1, 2]):
        loader = make()
        next(iter(loader))
        loader.set_weights(weights)
        loader.set_epoch(3)  # a position that both runs share
        loader.set_weights([1, 0, 0])
        states.append(loader.state_dict()["changed"]["history"])

    assert states[0] != states[1]


def test_a_resumed_run_cannot_compute_rows_before_the_last_change():
    loader = make()
    first = rows(loader)
    loader.set_weights([1, 1, 1])
    resumed = make()
    resumed.load_state_dict(loader.state_dict())

    assert loader.dataset[0]["n"] == first[0][1]  # the first run still has all its weights
    message = "Position 0 is before position 920, where this order was"
    with pytest.raises(PlanError, match=message):
        resumed.dataset[0]
    resumed.set_epoch(0)
    with pytest.raises(PlanError, match=message):
        next(iter(resumed))
    resumed.load_state_dict(loader.state_dict())
    assert rows(resumed) == rows(loader)


def test_the_fingerprint_of_the_last_batch_stays_when_weights_change():
    loader = make()
    next(iter(loader))
    before = loader.fingerprint
    loader.set_weights([0, 0, 1])

    assert loader.fingerprint == before


def test_the_fingerprint_of_the_last_batch_stays_at_the_end_of_an_epoch_without_shuffle():
    loader = make(shuffle=False)
    batches = iter(loader)
    next(batches)
    loader.set_weights([0, 0, 1])
    fingerprints = [loader.fingerprint for _ in batches]

    assert loader.fingerprint == fingerprints[-1]


@pytest.mark.parametrize("strategy", ["proportional", "uniform"])
def test_the_statistics_report_what_was_asked_and_delivered(strategy):
    loader = create_multiplex_dataloader(
        pairs(), batch_size=92, sampling_strategy=strategy, collate_fn=list
    )
    batches, found = iter(loader), []
    for _ in range(4):
        found += rows([next(batches)])
        stats = get_dataset_stats(loader)["datasets"]
        counts = np.bincount([source for source, _ in found], minlength=3)
        assert [each["delivered"] for each in stats] == counts.tolist()
        shares = [1 / 3] * 3 if strategy == "uniform" else [s / 920 for s in SIZES.values()]
        asked = [len(found) * share for share in shares]
        assert [each["asked"] for each in stats] == pytest.approx(asked)


def test_a_dataset_is_small_when_pickled_after_many_changes():
    loader = make()
    drive(loader, 200, np.random.default_rng(5))
    copied = pickle.loads(pickle.dumps(loader.dataset))
    alone = len(pickle.dumps(make().dataset))

    assert len(pickle.dumps(loader.dataset)) < alone + 200 * 200
    assert isinstance(copied, MultiplexDataset)
    assert list(copied.index_map[:50]) == list(loader.dataset.index_map[:50])
