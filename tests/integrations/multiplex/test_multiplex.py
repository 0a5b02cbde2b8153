"""Arguments, errors, statistics and batches of the multiplex loader."""

import copy
import inspect
import json
import pickle
from collections import Counter, UserDict, defaultdict

import pytest
import torch
from torch.utils.data import DataLoader

from penstock.errors import PlanError, SourceError
from penstock.integrations.multiplex import (
    MultiplexDataset,
    create_multiplex_dataloader,
    default_collate_fn,
    get_dataset_stats,
    print_dataloader_stats,
)


def examples(name, number, **more):
    return [{"text": f"{name} {i}", "label": i, **more} for i in range(number)]


@pytest.fixture
def pairs():
    return [("a", examples("a", 100)), ("b", examples("b", 50))]


def same(batch):
    return batch


def test_the_signatures_have_the_original_parameters_and_defaults():
    defaults = {
        "batch_size": 32,
        "shuffle": True,
        "num_workers": 0,
        "pin_memory": False,
        "prefetch_factor": None,
        "persistent_workers": False,
        "drop_last": False,
        "sampling_strategy": "proportional",
        "sampling_weights": None,
        "collate_fn": None,
        "shuffle_seed": 42,
    }
    parameters = inspect.signature(create_multiplex_dataloader).parameters
    ordered = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    extras = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    dataset = list(inspect.signature(MultiplexDataset).parameters.values())[:4]

    assert {p.name: p.default for p in ordered[1:]} == defaults
    assert [p.name for p in ordered] == ["datasets", *defaults]
    assert extras[:5] == [
        "rank", "world_size", "timeout", "worker_init_fn", "multiprocessing_context",
    ]  # fmt: skip
    assert [(p.name, p.default) for p in dataset[1:]] == [
        ("sampling_strategy", "proportional"),
        ("sampling_weights", None),
        ("shuffle_seed", 42),
    ]


def test_it_is_a_dataloader_with_the_usual_attributes(pairs):
    loader = create_multiplex_dataloader(pairs, batch_size=8, drop_last=True)

    assert isinstance(loader, DataLoader)
    assert (loader.batch_size, loader.drop_last, loader.num_workers) == (8, True, 0)
    assert isinstance(loader.dataset, MultiplexDataset)
    assert loader.dataset.datasets == pairs
    assert loader.dataset.datasets[0][1] is pairs[0][1]
    assert len(loader) == 18
    assert len(create_multiplex_dataloader(pairs, batch_size=8)) == 19


def test_a_batch_has_the_dataset_of_each_example(pairs):
    loader = create_multiplex_dataloader(pairs, batch_size=8)
    batches = list(loader)

    assert [len(batch["text"]) for batch in batches] == [8] * 18 + [6]
    for batch in batches:
        assert list(batch) == ["text", "label", "dataset_name", "dataset_idx"]
        for text, name, number in zip(
            batch["text"], batch["dataset_name"], batch["dataset_idx"], strict=True
        ):
            assert text.startswith(name + " ")
            assert pairs[number][0] == name


@pytest.mark.parametrize("strategy", ["proportional", "uniform", "weighted"])
def test_the_length_is_the_number_of_examples_and_the_index_map_locates_them(pairs, strategy):
    weights = [3, 1] if strategy == "weighted" else None
    dataset = MultiplexDataset(pairs, strategy, weights)

    assert len(dataset) == len(dataset.index_map) == 150
    assert (
        list(dataset.index_map)
        == dataset.index_map[:]
        == [dataset.index_map[i] for i in range(150)]
    )
    for number in (0, 7, 149, -1, -150):
        source, sample = dataset.index_map[number]
        expected = {**pairs[source][1][sample], "dataset_name": "ab"[source], "dataset_idx": source}
        assert dataset[number] == expected
    for number in (150, -151):
        with pytest.raises(IndexError, match="there are 150"):
            dataset[number]


def test_the_index_map_is_computed_and_not_stored():
    class Endless:
        def __len__(self):
            return 10**12

        def __getitem__(self, number):
            return {"number": number}

    dataset = MultiplexDataset([("huge", Endless()), ("small", [{"number": -1}])])
    source, sample = dataset.index_map[5 * 10**11]

    assert dataset[5 * 10**11] == {"number": sample, "dataset_name": "huge", "dataset_idx": source}
    assert len(pickle.dumps(dataset.index_map)) < 5_000


def test_a_plain_dataloader_can_use_the_dataset(pairs):
    loader = DataLoader(
        MultiplexDataset(pairs), batch_size=50, shuffle=True, collate_fn=default_collate_fn
    )

    seen = Counter(text for batch in loader for text in batch["text"])

    assert seen == Counter(each["text"] for _, rows in pairs for each in rows)


def test_the_users_examples_are_never_changed(pairs):
    before = copy.deepcopy(pairs)

    for batch in create_multiplex_dataloader(pairs, collate_fn=same):
        for example in batch:
            example["text"] = "mine"
            example["new"] = 1
    list(create_multiplex_dataloader(pairs))

    assert pairs == before


@pytest.mark.parametrize("key", ["dataset_name", "dataset_idx"])
@pytest.mark.parametrize("collate", [None, len])
def test_an_example_that_already_has_an_added_key_is_refused(key, collate):
    rows = [*examples("a", 3), {"text": "x", "label": 1, key: "mine"}]
    loader = create_multiplex_dataloader([("a", rows)], collate_fn=collate)

    with pytest.raises(SourceError, match=f"Example 3 of \"a\" already has '{key}'"):
        list(loader)


@pytest.mark.parametrize("item", ["text", 7, None, ["a"]])
def test_an_example_that_is_not_a_dict_is_refused(item):
    for collate in (None, len):
        loader = create_multiplex_dataloader([("a", [item])], collate_fn=collate)
        with pytest.raises(SourceError, match=f'Example 0 of "a" is a {type(item).__name__}'):
            list(loader)


@pytest.mark.parametrize("item", ["text", 7, None, ["a"], object()])
def test_an_example_that_is_not_a_dict_is_refused_among_dicts(item):
    """The fast path for dicts must not fail with another error."""
    for collate in (None, len):
        rows = [*examples("a", 3), item]
        loader = create_multiplex_dataloader([("a", rows)], collate_fn=collate)
        with pytest.raises(SourceError, match=f'Example 3 of "a" is a {type(item).__name__}'):
            list(loader)


def test_a_defaultdict_is_not_changed():
    filled = defaultdict(int, {"a": 1})
    rows = [{"a": 1, "b": 2}, filled, {"a": 1, "b": 2, "c": 3}]
    batches = [
        batch
        for seed in range(12)  # the first example of a batch decides whether the fast path is used
        for batch in create_multiplex_dataloader([("rows", rows)], shuffle_seed=seed)
    ]

    assert filled == {"a": 1}
    assert all(sorted(map(str, batch["b"])) == ["2", "2", "None"] for batch in batches)


def test_other_mappings_work_and_getitems_is_called_once_per_batch():
    class Table:
        def __init__(self):
            self.asked = []

        def __len__(self):
            return 10

        def __getitem__(self, number):
            raise AssertionError("one at a time")

        def __getitems__(self, numbers):
            self.asked.append(numbers)
            return [{"n": number} for number in numbers]

    table = Table()
    pairs = [("table", table), ("dicts", [UserDict(n=-i) for i in range(10)])]
    batches = list(create_multiplex_dataloader(pairs, batch_size=10))

    assert sorted(n for batch in batches for n in batch["n"]) == sorted([*range(10), *range(-9, 1)])
    assert len(table.asked) == 2


def test_the_statistics_have_this_layout(capsys):
    pairs = [("arc", range(2_300)), ("gsm8k", range(8_000)), ("mmlu", range(50))]
    print_dataloader_stats(create_multiplex_dataloader(pairs))

    assert capsys.readouterr().out == (
        "======================================================================\n"
        "Multiplex DataLoader Statistics\n"
        "======================================================================\n"
        "Number of datasets: 3\n"
        "Total examples: 10,350\n"
        "Sampling strategy: proportional\n"
        "\n"
        "Dataset Breakdown:\n"
        "----------------------------------------------------------------------\n"
        "Dataset                        Examples        Sampling %     \n"
        "----------------------------------------------------------------------\n"
        "arc                            2,300           22.22%\n"
        "gsm8k                          8,000           77.29%\n"
        "mmlu                           50              0.48%\n"
        "======================================================================\n"
    )


def test_the_statistics_report_the_current_weights(pairs):
    def shares(loader):
        stats = get_dataset_stats(loader)
        return stats["sampling_strategy"], [d["sampling_percentage"] for d in stats["datasets"]]

    loader = create_multiplex_dataloader(pairs, sampling_weights=[7, 3], schedule={32: [1, 4]})

    assert list(get_dataset_stats(loader)) == [
        "num_datasets", "total_examples", "sampling_strategy", "datasets",
    ]  # fmt: skip
    assert get_dataset_stats(loader)["datasets"][1] == {
        "name": "b", "size": 50, "sampling_percentage": 30.0, "asked": 0.0, "delivered": 0,
    }  # fmt: skip
    assert shares(create_multiplex_dataloader(pairs, sampling_strategy="uniform")) == (
        "uniform", [50.0, 50.0],
    )  # fmt: skip
    assert shares(loader) == ("weighted", [70.0, 30.0])
    next(iter(loader))
    assert shares(loader) == shares(loader.dataset) == ("weighted", [20.0, 80.0])
    loader.set_weights({"a": 1, "b": 3})
    assert shares(loader) == ("weighted", [25.0, 75.0])


@pytest.mark.parametrize("other", [[1, 2], DataLoader([1, 2]), None])
def test_the_statistics_of_anything_else_are_a_type_error(other):
    for function in (print_dataloader_stats, get_dataset_stats):
        with pytest.raises(TypeError, match="create_multiplex_dataloader returned"):
            function(other)


REFUSED = {
    "prefetch_factor is not valid with num_workers=0": {"prefetch_factor": 2},
    "persistent_workers=True is not valid with num_workers=0": {"persistent_workers": True},
    "timeout=5 is not valid with num_workers=0": {"timeout": 5},
    "multiprocessing_context='spawn' is not valid": {"multiprocessing_context": "spawn"},
    "prefetch_factor=0 must be 1 or more": {"prefetch_factor": 0, "num_workers": 1},
    "num_workers=-1 must be 0 or more": {"num_workers": -1},
    "batch_size=0 must be 1 or more": {"batch_size": 0},
    'must be one of "proportional", "uniform", "weighted"': {"sampling_strategy": "random"},
    "needs sampling_weights": {"sampling_strategy": "weighted"},
    "Remove the weights": {"sampling_strategy": "uniform", "sampling_weights": [1, 2]},
    "has 3 values for 2 datasets": {"sampling_weights": [1, 2, 3]},
    'weight of source "b" is -1': {"sampling_weights": [1, -1]},
    'weight of source "a" is nan': {"sampling_weights": [float("nan"), 1]},
    'weight of source "a" is inf': {"sampling_weights": [float("inf"), 1]},
    "All 2 weights are 0": {"sampling_weights": [0, 0.0]},
    'Missing: "b"; unknown: "c"': {
        "sampling_weights": {"a": 1, "c": 2},
    },
    "sampler= is not supported": {"sampler": [1, 2]},
    "batch_size=2.5 is not a whole number": {"batch_size": 2.5},
    "batch_size=True is not a whole number": {"batch_size": True},
    "batch_size='8' is not a whole number": {"batch_size": "8"},
    "batch_size=None is not a whole number": {"batch_size": None},
    "num_workers='2' is not a whole number": {"num_workers": "2"},
    "num_workers=1.0 is not a whole number": {"num_workers": 1.0},
    "prefetch_factor='2' is not a whole number": {"prefetch_factor": "2", "num_workers": 1},
    "timeout='5' is not a number of seconds": {"timeout": "5", "num_workers": 1},
    "shuffle_seed=1.5 is not a whole number": {"shuffle_seed": 1.5},
    "shuffle_seed='x' is not a whole number": {"shuffle_seed": "x"},
    "sampling_weights=0.5 must be a list": {"sampling_weights": 0.5},
    "sampling_weights='ab' must be a list": {"sampling_weights": "ab"},
    "weight of source \"a\" is '7'": {"sampling_weights": ["7", 3]},
    "position in schedule=1.5 is not a whole number": {
        "schedule": {1.5: [1, 1]}, "sampling_weights": [1, 2],
    },
    "schedule=[1, 1] must map": {"schedule": [1, 1], "sampling_weights": [1, 2]},
    "schedule[9]=0.5 must be a list": {"schedule": {9: 0.5}, "sampling_weights": [1, 2]},
    "schedule[9] has 1 values for 2 datasets": {"schedule": {9: [1]}, "sampling_weights": [1, 2]},
    "lengths=5 must be a list": {"lengths": 5, "sampling_weights": [1, 2]},
    'lengths of "a" is 5': {"lengths": {"a": 5, "b": [1] * 50}, "sampling_weights": [1, 2]},
    'lengths of "a"=1.5 is not a whole number': {
        "lengths": lambda example: 1.5, "sampling_weights": [1, 2],
    },
    "rank='1' is not a whole number": {"rank": "1", "world_size": 2},
    "world_size=2.0 is not a whole number": {"rank": 1, "world_size": 2.0},
    "rank=1 and world_size=None: give both or neither": {"rank": 1},
    "rank=2 must be from 0 to 1: world_size is 2": {"rank": 2, "world_size": 2},
    "are fewer than the 200 of one step": {"batch_size": 200, "drop_last": True},
    "leave 1 for the last step": {"batch_size": 1, "rank": 0, "world_size": 149},
    "150 examples are fewer than the 200 ranks": {"rank": 0, "world_size": 200},
    "schedule= needs shuffle=True": {
        "schedule": {9: [1, 1]}, "sampling_weights": [1, 2], "shuffle": False,
    },
    "schedule has weights for example 0": {"schedule": {0: [1, 1]}, "sampling_weights": [1, 2]},
    "Weights cannot change in a proportional loader": {"schedule": {9: [1, 1]}},
    "lengths= makes weights shares of tokens": {"lengths": len},
    'lengths must have a value for each of the datasets "a", "b". Missing: "b"': {
        "lengths": {"a": [1] * 100}, "sampling_weights": [1, 2],
    },
    "lengths has 1 values for 2 datasets": {
        "lengths": [[1] * 100], "sampling_weights": [1, 2],
    },
    'lengths of "a" has 2 numbers for 100 examples': {
        "lengths": [[1, 2], [1] * 50], "sampling_weights": [1, 2],
    },
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_invalid_arguments_raise_a_value_error_with_this_message(pairs, message):
    with pytest.raises(ValueError, match=r".") as caught:
        create_multiplex_dataloader(pairs, **REFUSED[message])

    assert message in str(caught.value)
    assert isinstance(caught.value, PlanError)


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ([], "datasets is empty"),
        ([("a", [])], 'Dataset "a" is empty'),
        ([("a", [1]), ("a", [2])], 'Two datasets have the name "a"'),
        ([("a", (i for i in "xy"))], "is a generator. It must be a list of dicts"),
        ([("a", "text")], "is a str. It must be a list of dicts"),
        ([("a", {"train": [1]})], "is a dict with the keys train"),
        ([("", [1])], "The name of a dataset is ''"),
        ([[1, 2, 3]], "datasets must be a list of pairs"),
        (7, "datasets must be a list of pairs"),
    ],
)
def test_datasets_that_cannot_be_mixed_are_refused(datasets, message):
    with pytest.raises(ValueError, match=r".") as caught:
        create_multiplex_dataloader(datasets)

    assert message in str(caught.value)


def test_on_windows_no_workers_are_used_and_one_warning_is_issued(pairs, monkeypatch):
    from penstock.loader import dataloader

    monkeypatch.setattr(dataloader.os, "name", "nt")
    with pytest.warns(UserWarning, match="num_workers=2 is taken as 0") as caught:
        loader = create_multiplex_dataloader(
            pairs, num_workers=2, prefetch_factor=2, persistent_workers=True
        )
    monkeypatch.undo()

    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert loader.num_workers == 0
    assert len(list(loader)) == 5


def test_tensors_of_equal_shape_are_stacked_and_the_rest_are_lists():
    pairs = [
        (
            "a",
            [{"x": torch.ones(2), "y": torch.ones(i + 1), "z": torch.tensor(i)} for i in range(4)],
        ),
        ("b", [{"x": torch.zeros(2), "w": None} for _ in range(4)]),
    ]
    (batch,) = create_multiplex_dataloader(pairs, batch_size=8)
    plain = default_collate_fn(MultiplexDataset(pairs).read([0, 0, 1], [0, 1, 2]))

    assert set(batch) == {"x", "y", "z", "w", "dataset_name", "dataset_idx"}
    assert batch["x"].shape == (8, 2)
    assert sum(value is None for value in batch["z"]) == 4
    assert plain["x"].tolist() == [[1, 1], [1, 1], [0, 0]]
    assert [None if y is None else len(y) for y in plain["y"]] == [1, 2, None]
    assert default_collate_fn(pairs[0][1])["z"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "rows",
    [
        [{"a": 1, "b": 2}, {"b": 3, "a": 4}],
        [{"a": 1, "b": 2}, {"a": 3, "c": 4}],
        [{"a": 1}, {"a": 2}],
        [{}, {"a": 1}],
        [{"a": torch.ones(2), "b": 1}, {"a": torch.ones(2), "b": 2}],
    ],
)
def test_the_fast_path_returns_the_batch_of_the_collate_function(rows):
    dataset = MultiplexDataset([("x", rows)])
    fast, plain = (
        dataset.read_collated([0, 0], [0, 1]),
        default_collate_fn(dataset.read([0, 0], [0, 1])),
    )

    assert list(fast) == list(plain)
    assert str(fast) == str(plain)


USES = {
    "iteration": lambda batch: [*batch],
    "an item": lambda batch: (batch[0], batch[-1], batch[1:3]),
    "length": len,
    "truth": bool,
    "comparison": lambda batch: (batch == [], batch != [], list.__eq__([], [*batch])),
    "comparison from the left": lambda batch: [{"text": "a 1"}] == batch,  # noqa: SIM300
    "addition": lambda batch: (batch + [1], [1] + batch, batch * 2),  # noqa: RUF005
    "appending": lambda batch: (batch.append(1), batch.extend([2]), batch.pop(0), len(batch)),
    "sorting": lambda batch: (batch.sort(key=str), batch.reverse(), batch.index(batch[2])),
    "repr": repr,
    "json": json.dumps,
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "copies": lambda batch: (copy.copy(batch), copy.deepcopy(batch), batch.copy(), list(batch)),
    "unpacking": lambda batch: (lambda *each: each)(*batch),
    "tuple": tuple,
    "membership": lambda batch: ({} in batch, batch.count({})),
    "extending another": lambda batch: [*[1], *batch][:3],
    "deletion": lambda batch: (batch.__delitem__(0), batch.__setitem__(0, 1), len(batch)),
    "torch": lambda batch: torch.utils.data.default_collate([each["label"] for each in batch]),
}


@pytest.mark.parametrize("name", USES)
def test_a_collate_function_gets_a_real_list(pairs, name):
    loader = create_multiplex_dataloader(pairs, batch_size=5, collate_fn=same)
    batch, use = next(iter(loader)), USES[name]
    plain = [loader.dataset[number] for number in range(5)]

    assert isinstance(batch, list)
    assert str(use(batch)) == str(use(plain))
    assert batch == plain


def test_importing_it_needs_torch_and_numpy_only(python):
    code = """
import sys
from penstock.integrations.multiplex import create_multiplex_dataloader, print_dataloader_stats
print([name for name in sys.argv[1:] if name in sys.modules])
"""
    others = ["pyarrow", "gigatoken", "tokenizers", "tiktoken", "fsspec", "datasets", "lightning"]

    assert python(code, *others).stdout == "[]\n"


def test_shares_of_lengths_are_called_so(capsys):
    pairs = [(name, [{"n": "x" * size}] * 4) for name, size in (("a", 2), ("b", 6))]
    for lengths in (None, lambda each: len(each["n"])):
        loader = create_multiplex_dataloader(pairs, sampling_strategy="uniform", lengths=lengths)
        print_dataloader_stats(loader)
        told = "share of the lengths, not of the examples" in capsys.readouterr().out
        assert told == (lengths is not None)
