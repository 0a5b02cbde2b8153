"""The order of examples: shares, epochs, ranks, workers, resuming and changes of weights."""

import json
import os
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError, ResumeError
from penstock.integrations import multiplex
from penstock.integrations.multiplex import create_multiplex_dataloader
from penstock.testing import assert_resumable

SIZES = {"a": 60, "b": 25, "c": 7}
STRATEGIES = {
    "proportional": {},
    "uniform": {"sampling_strategy": "uniform"},
    "weighted": {"sampling_weights": [0.5, 0.3, 0.2]},
    "by name": {"sampling_weights": {"c": 1, "b": 2, "a": 3}},
    "scheduled": {"sampling_weights": [8, 1, 1], "schedule": {40: [1, 1, 8], 130: [1, 0, 1]}},
    "by tokens": {"sampling_weights": [1, 1, 1], "lengths": lambda example: 1 + example["n"] % 5},
}


def datasets(sizes=SIZES):
    return [(name, [{"n": n} for n in range(size)]) for name, size in sizes.items()]


def tensors(batch):
    """A collate function for comparisons: the dataset and number of each example."""
    return {key: torch.tensor([each[key] for each in batch]) for key in ("dataset_idx", "n")}


def make(**options):
    return create_multiplex_dataloader(
        datasets(), **{"batch_size": 4, "collate_fn": tensors, **options}
    )


def rows(batches):
    return [
        row
        for batch in batches
        for row in zip(batch["dataset_idx"].tolist(), batch["n"].tolist(), strict=True)
    ]


def worst(sources, weights):
    """The largest distance of any dataset from its share at any prefix, in examples."""
    share = np.array(weights, dtype=float) / sum(weights)
    drawn = np.cumsum(np.eye(len(weights))[sources], axis=0)
    return np.abs(drawn - np.arange(1, len(sources) + 1)[:, None] * share).max()


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"sampling_strategy": "uniform"}, [1, 1, 1]),
        ({"sampling_weights": [0.5, 0.3, 0.2]}, [0.5, 0.3, 0.2]),
        ({"sampling_weights": [7, 3, 0]}, [7, 3, 0]),
        ({"sampling_weights": [1, 1e-3, Fraction(1, 3)]}, [1, 1e-3, 1 / 3]),
    ],
)
@pytest.mark.parametrize("num_draws", [10_000, pytest.param(100_000, marks=pytest.mark.torture)])
def test_every_prefix_of_the_draws_is_within_two_examples_of_the_shares(
    options, weights, num_draws
):
    loader = make(batch_size=92, **options)
    drawn = []
    while len(drawn) < num_draws:
        drawn += [source for batch in loader for source in batch["dataset_idx"].tolist()]

    assert worst(drawn, weights) <= 2


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("name", ["uniform", "weighted"])
def test_a_dataset_continues_in_the_next_epoch_and_repeats_only_when_exhausted(name, drop_last):
    loader = make(drop_last=drop_last, batch_size=10, **STRATEGIES[name])
    drawn = rows(batch for _ in range(12) for batch in loader)

    for source, size in enumerate(SIZES.values()):
        numbers = [n for each, n in drawn if each == source]
        for start in range(0, len(numbers), size):
            whole = numbers[start : start + size]
            assert len(set(whole)) == len(whole)


def test_exact_shares_are_promised_only_of_the_strategies_that_keep_them():
    """At every prefix of an epoch; "proportional" has exact shares in a whole epoch only."""
    sizes = {"a": 2_300, "b": 8_000, "c": 50}
    found = {}
    for strategy, shares in {"proportional": [*sizes.values()], "uniform": [1, 1, 1]}.items():
        order = rows(
            create_multiplex_dataloader(
                datasets(sizes), batch_size=50, collate_fn=tensors, sampling_strategy=strategy
            )
        )
        found[strategy] = worst([dataset for dataset, _ in order], shares)

    assert found["uniform"] < 2
    assert 30 < found["proportional"] < 35  # the 32 of the page
    page = Path(__file__).parents[3] / "docs" / "mixing.md"
    lines = [*page.read_text(encoding="utf-8").splitlines(), *str(multiplex.__doc__).split(". ")]
    claims = [" ".join(line.split()) for line in lines]
    claims = [line for line in claims if "within two examples" in line]
    assert len(claims) == 4
    assert all("uniform" in line or "its weight divided by" in line for line in claims)


def test_proportional_reads_each_example_once_per_epoch_in_a_new_order():
    loader = make()
    epochs = [rows(loader) for _ in range(4)]

    everything = [(s, n) for s, size in enumerate(SIZES.values()) for n in range(size)]
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs[0] == list(loader.dataset.index_map)


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_shuffle_every_epoch_equals_the_first(name):
    if name == "scheduled":
        return
    loader, shuffled = make(shuffle=False, **STRATEGIES[name]), make(**STRATEGIES[name])
    first = rows(loader)

    assert first == rows(loader) == rows(shuffled)
    assert first != rows(shuffled)
    assert first == list(loader.dataset.index_map)
    assert first != rows(make(shuffle=False, shuffle_seed=43, **STRATEGIES[name]))


@pytest.mark.parametrize("stops", [(0, 5, 16), pytest.param(None, marks=pytest.mark.torture)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_is_resumed_exactly_on_any_number_of_ranks(name, stops):
    def loader(rank, world_size):
        return make(
            batch_size=12 // world_size, rank=rank, world_size=world_size, **STRATEGIES[name]
        )

    assert_resumable(loader, world_sizes=(1, 2, 3, 4), stops=stops)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("proportional", [12]),
        ("scheduled", [3]),
        pytest.param("proportional", [3], marks=pytest.mark.torture),
        pytest.param("scheduled", [12], marks=pytest.mark.torture),
    ],
)
def test_a_run_is_resumed_exactly_on_any_number_of_workers(name, stops):
    def loader(prefetch):
        return make(batch_size=8, num_workers=prefetch, **STRATEGIES[name])

    assert_resumable(loader, prefetch=(0, 1, 3), stops=stops)


@pytest.mark.parametrize(
    "method", ["fork", pytest.param("spawn", marks=pytest.mark.torture), "forkserver"]
)
def test_workers_return_the_same_batches_with_any_start_method(method):
    loader = make(
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=True,
        sampling_strategy="uniform",
        batch_size=16,
    )
    plain = make(sampling_strategy="uniform", batch_size=16)

    for _ in range(3):
        assert rows(loader) == rows(plain)
        assert loader.state_dict() == plain.state_dict()


def test_the_state_counts_returned_batches_and_not_prefetched_ones():
    loader = make(num_workers=2, prefetch_factor=4)
    batches = iter(loader)
    for step in range(1, 4):
        next(batches)
        assert loader.state_dict()["position"] == loader.position == 4 * step


def test_a_run_resumes_in_any_epoch_from_a_small_state():
    loader, steps, states = make(sampling_weights=[3, 2, 1]), [], []
    for _ in range(3):
        for batch in loader:
            steps.append(rows([batch]))
            states.append(json.dumps(loader.state_dict()))
    for stop in (0, 11, 22, 23, 40, 68):
        resumed = make(sampling_weights=[3, 2, 1], batch_size=4)
        resumed.load_state_dict(json.loads(states[stop]))
        rest = [rows([batch]) for _ in range(3) for batch in resumed]
        assert rest[: len(steps) - stop - 1] == steps[stop + 1 :]
    assert max(map(len, states)) < 1_000


def test_a_state_saved_with_the_last_batch_resumes_at_the_end_of_the_epoch():
    loader = make()
    list(zip(range(len(loader)), loader, strict=False))  # the iterator never sees its end
    state, resumed = loader.state_dict(), make()
    resumed.load_state_dict(state)

    assert (state["epoch"], state["position"]) == (0, 92)
    assert list(resumed) == []
    assert resumed.epoch == 1
    assert len(list(resumed)) == len(loader)


def test_the_batch_size_may_change_on_resume_and_the_sequence_stays():
    whole = rows(make(batch_size=92, **STRATEGIES["weighted"]))
    loader = make(batch_size=5, **STRATEGIES["weighted"])
    batches = iter(loader)
    head = rows([next(batches) for _ in range(7)])
    other = make(batch_size=16, **STRATEGIES["weighted"])
    other.load_state_dict(loader.state_dict())

    assert head + rows(other) == whole


def test_an_epoch_that_was_left_early_is_not_continued():
    loader, whole = make(), make()
    next(iter(loader))
    first, second = rows(whole), rows(whole)

    assert rows(loader) == second != first


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_together_read_what_one_process_reads(world_size, drop_last):
    options = {"drop_last": drop_last, "batch_size": 4}
    ranks = [make(rank=r, world_size=world_size, **options) for r in range(world_size)]
    one = make(**{**options, "batch_size": 4 * world_size})
    for _ in range(2):
        steps = [rows(step) for step in zip(*ranks, strict=True)]
        assert steps == [rows([batch]) for batch in one]
    assert len({len(each) for each in ranks}) == 1
    assert len({json.dumps(each.state_dict()) for each in [*ranks, one]}) == 1


def in_group(rank, world_size, path, results):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=world_size
    )
    results.put((rank, rows(make())))
    torch.distributed.destroy_process_group()


def test_rank_and_world_size_come_from_torch_distributed(tmp_path, imported_once):
    # Not forked from this process: threads of earlier tests may hold locks.
    results = imported_once.Queue()
    processes = [
        imported_once.Process(target=in_group, args=(rank, 2, tmp_path / "group", results))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)

    assert sorted(found[0] + found[1]) == sorted(rows(make()))
    assert found[0] == rows(make(rank=0, world_size=2))


def test_the_sampler_is_a_distributed_sampler():
    loader = make(rank=1, world_size=2)

    assert isinstance(loader.sampler, torch.utils.data.distributed.DistributedSampler)
    epochs = [rows(loader) for _ in range(3)]
    loader.set_epoch(1)
    assert rows(loader) == epochs[1]
    loader.sampler.set_epoch(2)  # the next epoch anyway
    assert rows(loader) == epochs[2]
    with pytest.raises(PlanError, match="epoch=-1 must be 0 or more"):
        loader.sampler.set_epoch(-1)


@pytest.mark.parametrize(("total", "batch_size", "world_size"), [(13, 4, 3), (9, 4, 2), (25, 2, 8)])
def test_last_batches_are_short_also_if_fewer_examples_than_ranks_are_left(
    total, batch_size, world_size
):
    """It was an error: 13 examples in steps of 12 leave one, and a rank without one would hang."""
    examples = [{"n": number} for number in range(total)]

    def loader(rank):
        return create_multiplex_dataloader(
            [("some", examples)],
            batch_size,
            collate_fn=lambda batch: {"n": torch.tensor([each["n"] for each in batch])},
            rank=rank,
            world_size=world_size,
        )

    ranks = [loader(rank) for rank in range(world_size)]
    for _ in range(2):
        steps = [[batch["n"].tolist() for batch in step] for step in zip(*ranks, strict=True)]
        assert len(steps) == len(ranks[0])
        sizes = [len(batch) for step in steps for batch in step]
        assert 1 <= min(sizes) < max(sizes) <= batch_size
        assert sorted(n for step in steps for batch in step for n in batch) == list(range(total))
    assert_resumable(lambda: loader(0), steps=2 * len(ranks[0]))
    # One example a step on each rank cannot be shorter, and the advice of the message works.
    with pytest.raises(PlanError, match="drop_last=True, or use batch_size=2"):
        create_multiplex_dataloader([("some", examples)], 1, rank=0, world_size=total - 1)
    for options in ({"batch_size": 2}, {"batch_size": 1, "drop_last": True}):
        create_multiplex_dataloader([("some", examples)], rank=0, world_size=total - 1, **options)


@pytest.mark.parametrize("drop_last", [False, True])
def test_with_fewer_examples_than_ranks_the_message_does_not_name_batch_size(drop_last):
    with pytest.raises(PlanError, match="Use fewer ranks or more examples") as caught:
        make(rank=0, world_size=93, drop_last=drop_last)

    assert "batch_size" not in str(caught.value)


def test_with_fewer_examples_left_than_ranks_the_advice_of_the_message_works():
    stopped = make(batch_size=10)
    batches = iter(stopped)
    for _ in range(9):
        next(batches)
    state = stopped.state_dict()

    with pytest.raises(PlanError, match="drop_last=True, or resume on fewer ranks, such as 2"):
        make(rank=0, world_size=4, batch_size=23).load_state_dict(state)
    for options in ({"world_size": 4, "drop_last": True}, {"world_size": 2}):
        make(rank=0, **options).load_state_dict(state)


@pytest.mark.parametrize("options", [{"shuffle": False}, {"sampling_strategy": "uniform"}])
def test_set_epoch_goes_forward_and_back(options):
    loader = make(drop_last=True, batch_size=10, **options)
    epochs = [rows(loader) for _ in range(4)]
    for epoch in (2, 0, 3):
        loader.set_epoch(epoch)
        assert loader.epoch == epoch
        assert rows(loader) == epochs[epoch]
    next(iter(loader))
    loader.sampler.set_epoch(loader.epoch)  # the epoch that was left early, from its beginning
    assert len(rows(loader)) == len(epochs[0])
    plain = make(**options)
    plain.sampler.set_epoch(1)
    assert plain.position == (0 if "shuffle" in options else 92)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_a_curriculum_by_set_weights_neither_repeats_nor_skips_examples(workers):
    sizes = {"easy": 400, "hard": 400}
    loader = create_multiplex_dataloader(
        datasets(sizes), batch_size=8, sampling_weights=[0.8, 0.2], collate_fn=tensors, **workers
    )
    early, late, batches = [], [], iter(loader)
    for _ in range(20):
        early += rows([next(batches)])
    loader.set_weights([0.2, 0.8])
    for _ in range(40):
        late += rows([next(batches)])

    assert worst([source for source, _ in early], [8, 2]) <= 2
    assert worst([source for source, _ in late], [2, 8]) <= 2
    assert len(set(early + late)) == len(early + late) == 480
    scheduled = create_multiplex_dataloader(
        datasets(sizes),
        batch_size=8,
        sampling_weights=[0.8, 0.2],
        schedule={160: [0.2, 0.8]},
        collate_fn=tensors,
    )
    assert rows(scheduled)[:480] == early + late


def test_a_curriculum_of_two_loaders_needs_no_strategy():
    sizes = {"easy": 100, "hard": 100}
    for weights in ([0.8, 0.2], [0.2, 0.8]):
        loader = create_multiplex_dataloader(
            datasets(sizes), sampling_weights=weights, collate_fn=tensors
        )
        counts = Counter(source for source, _ in rows(loader))
        assert [counts[0] / 200, counts[1] / 200] == weights


def test_the_state_includes_weights_that_were_set():
    def run(loader, steps):
        batches = (batch for _ in range(9) for batch in loader)
        return [rows([next(batches)]) for _ in range(steps)]

    loader = make(sampling_strategy="uniform", batch_size=8)
    batches = iter(loader)
    for weights in ([5, 1, 1], {"a": 1, "b": 0, "c": Fraction(1, 3)}):
        next(batches)
        loader.set_weights(weights)
    next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = make(sampling_strategy="uniform", batch_size=8)
    resumed.load_state_dict(state)

    assert resumed.state_dict() == state
    assert resumed.dataset.sampling_strategy == "weighted"
    rest = [rows([batch]) for batch in batches] + [rows([batch]) for batch in loader]
    assert run(resumed, len(rest)) == rest


def test_weights_set_without_shuffle_apply_to_all_later_epochs():
    loader = make(shuffle=False, sampling_weights=[1, 1, 1], batch_size=46)
    next(iter(loader))
    loader.set_weights([1, 0, 0])

    assert {source for source, _ in rows(loader)} == {0}
    assert rows(loader) == rows(make(shuffle=False, sampling_weights=[1, 0, 0], batch_size=46))


def test_weights_of_a_proportional_loader_cannot_be_set():
    with pytest.raises(PlanError, match=r"the numbers of examples, \[60, 25, 7\], give the same"):
        make().set_weights([1, 1, 1])


def test_weights_by_tokens_are_exact_over_whole_epochs():
    rng = np.random.default_rng(5)
    lengths = {"short": rng.integers(1, 50, 300), "long": rng.integers(500, 2_000, 200)}
    sizes = {name: len(each) for name, each in lengths.items()}
    totals = [int(each.sum()) for each in lengths.values()]
    loader = create_multiplex_dataloader(
        datasets(sizes), sampling_weights=[0.25, 0.75], lengths=lengths, collate_fn=tensors
    )
    by_function = create_multiplex_dataloader(
        datasets(sizes), sampling_weights=[0.25, 0.75], lengths=[*lengths.values()]
    )
    # As many draws as give 30 epochs of the long examples, and the short ones in their share.
    short_epochs = 30 * totals[1] / 3 / totals[0]
    draws = round(30 * sizes["long"] + short_epochs * sizes["short"])
    drawn = rows(batch for _ in range(draws // 500 + 1) for batch in loader)[:draws]
    tokens = [0, 0]
    for source, number in drawn:
        tokens[source] += int([*lengths.values()][source][number])

    assert abs(tokens[0] / sum(tokens) - 0.25) < 0.002
    assert loader.state_dict()["order"] == by_function.state_dict()["order"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shuffle_seed": 7}, "shuffle_seed 42 -> 7"),
        ({"shuffle": False}, "shuffle True -> False"),
        ({"sampling_weights": [1, 1, 2]}, r"weights \[\[0, \[1, 1, 1\]\]\] -> "),
        ({"sampling_strategy": "proportional"}, "-> 'each example once'"),
        ({"lengths": lambda example: 1 + example["n"]}, "tokens None -> "),
    ],
)
def test_a_state_of_another_order_is_refused_and_the_message_names_the_change(change, message):
    state = make(sampling_strategy="uniform").state_dict()
    options = {"sampling_strategy": "uniform", **change}
    if "sampling_weights" in change:
        del options["sampling_strategy"]

    with pytest.raises(ResumeError, match=message):
        make(**options).load_state_dict(state)


def test_the_digest_of_a_dataset_distinguishes_json_values():
    def digest(value):
        pair = ("a", [{"x": value}])
        return create_multiplex_dataloader([pair]).state_dict()["order"]["datasets"][0][2]

    values = [1, "1", 1.5, float("nan"), None, [1], {"y": (1, 2)}, torch.ones(1)]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(torch.ones(1)) == digest(torch.zeros(2))
    assert digest(float("nan")) == digest(float("nan"))


def test_other_examples_make_another_order():
    state = make().state_dict()
    changed = create_multiplex_dataloader(datasets({"a": 60, "b": 25, "c": 8}))
    edited = datasets()
    edited[0][1][0]["n"] = -1

    for loader in (changed, create_multiplex_dataloader(edited)):
        with pytest.raises(ResumeError, match="datasets "):
            loader.load_state_dict(state)


@pytest.mark.parametrize("key", ["epoch", "start", "position", "changed", "order", "check"])
def test_a_state_that_was_edited_is_refused(key):
    state = make().state_dict()

    for wrong in ({**state, key: 5}, {k: v for k, v in state.items() if k != key}):
        with pytest.raises(ResumeError, match="changed after it was written"):
            make().load_state_dict(wrong)


def test_invalid_states_and_states_of_other_versions_are_refused():
    for wrong in (None, [], {}, {"position": 3}):
        with pytest.raises(ResumeError, match="is not the state of a multiplex DataLoader"):
            make().load_state_dict(wrong)
    with pytest.raises(ResumeError, match="is of version 3"):
        make().load_state_dict({**make().state_dict(), "version": 3})


def test_loading_data_does_not_change_the_global_generator():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    list(make(num_workers=1))
    list(make())

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}]
)
def test_an_older_iterator_raises_an_error(options):
    """The newer iterator continues; the batches of both together would not be one run."""
    loader, plain = make(**options), make()
    older = iter(loader)
    next(older)
    newer = iter(loader)

    with pytest.raises(ResumeError, match=r"This iterator is outdated: .* the newest iterator"):
        next(older)
    list(plain)
    assert rows(list(newer)) == rows(list(plain))
    assert loader.position == 2 * 92


@pytest.mark.parametrize("move", ["load", "epoch"])
def test_an_iterator_raises_an_error_after_the_loader_was_moved(move):
    loader = make()
    batches = iter(loader)
    next(batches)
    if move == "load":
        loader.load_state_dict(loader.state_dict())
    else:
        loader.set_epoch(5)

    with pytest.raises(ResumeError, match="This iterator is outdated"):
        next(batches)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    weights=st.lists(st.integers(0, 9), min_size=5, max_size=5),
    batch_size=st.integers(1, 9),
    stop=st.integers(0, 60),
)
def test_any_mixture_is_within_two_examples_and_resumes_exactly(sizes, weights, batch_size, stop):
    chosen = weights[: len(sizes)]
    if not any(chosen):
        chosen[0] = 1
    pairs = datasets({f"s{number}": size for number, size in enumerate(sizes)})

    def loader():
        return create_multiplex_dataloader(
            pairs, batch_size=batch_size, sampling_weights=chosen, collate_fn=tensors
        )

    whole, part = loader(), loader()
    steps = [batch for _ in range(3) for batch in whole]
    stop = min(stop, len(part) - 1)
    list(zip(range(stop), part, strict=False))
    rest = loader()
    rest.load_state_dict(part.state_dict())

    assert worst([source for source, _ in rows(steps)], chosen) <= 2
    assert rows(batch for _ in range(3) for batch in rest)[: len(rows(steps[stop:]))] == rows(
        steps[stop:]
    )


def test_the_first_batch_of_a_huge_dataset_reads_no_other_examples():
    class Numbers:
        read = 0

        def __len__(self):
            return 10**12  # a list of all positions would not fit in memory

        def __getitem__(self, number):
            self.read += 1
            return {"n": number}

    for strategy in ("proportional", "uniform"):
        numbers = Numbers()
        pairs = [("huge", numbers), ("small", [{"n": -1}] * 7)]
        loader = create_multiplex_dataloader(pairs, sampling_strategy=strategy)
        batch = next(iter(loader))
        assert len(batch["n"]) == 32
        assert numbers.read == batch["dataset_name"].count("huge")
    assert batch["dataset_name"].count("small") == 16
    state = loader.state_dict()
    assert state["position"] == 32


def test_after_a_worker_died_the_last_state_still_resumes():
    loader = make(num_workers=1, prefetch_factor=1, collate_fn=Fatal(), batch_size=23)
    batches = iter(loader)
    rows([next(batches)])
    state = loader.state_dict()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(batches)
    resumed = make(batch_size=23)
    resumed.load_state_dict(state)

    assert rows(resumed) == rows(make())[23:]


class Fatal:
    """A collate function whose process ends at its second batch."""

    calls = 0

    def __call__(self, batch):
        self.calls += 1
        if self.calls > 1:
            os._exit(1)
        return tensors(batch)
