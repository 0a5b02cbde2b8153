"""Hugging Face datasets in a multiplex loader are not copied and give the batches of lists."""

import json
import tracemalloc

import pytest
import torch

from penstock.errors import PlanError
from penstock.integrations.multiplex import create_multiplex_dataloader

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")

STRATEGIES = {
    "proportional": {},
    "uniform": {"sampling_strategy": "uniform"},
    "weighted": {"sampling_strategy": "weighted", "sampling_weights": [0.5, 0.3, 0.2]},
}
SIZES = {"arc": 60, "gsm8k": 25, "mmlu": 7}


def rows(name):
    more = {"choices": ["x", "y"]} if name == "mmlu" else {}
    return [{"text": f"{name} {n}", "label": n, **more} for n in range(SIZES[name])]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Three kinds of datasets: in memory, mapped from disk, and a selection of rows."""
    folder = str(tmp_path_factory.mktemp("datasets") / "gsm8k")  # datasets 3.0 takes no Path
    datasets.Dataset.from_list(rows("gsm8k")).save_to_disk(folder)
    mirrored = datasets.Dataset.from_list(rows("mmlu")[::-1])
    return [
        ("arc", datasets.Dataset.from_list(rows("arc"))),
        ("gsm8k", datasets.load_from_disk(folder)),
        ("mmlu", mirrored.select(range(len(mirrored))[::-1])),
    ]


def make(pairs, name, **options):
    return create_multiplex_dataloader(pairs, batch_size=8, **STRATEGIES[name], **options)


def test_the_loader_keeps_the_datasets_themselves(stored):
    loader = make(stored, "uniform")

    kept = [rows for _, rows in loader.dataset.datasets]
    assert all(ours is theirs for ours, (_, theirs) in zip(kept, stored, strict=True))
    assert len(loader.dataset) == sum(SIZES.values())
    assert loader.dataset[0]["dataset_name"] in SIZES


def test_a_large_dataset_is_neither_copied_nor_read_in_advance(tmp_path):
    large = datasets.Dataset.from_dict({"n": range(1_000_000)})
    large.save_to_disk(str(tmp_path / "large"))
    mapped = datasets.load_from_disk(str(tmp_path / "large"))
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    loader = create_multiplex_dataloader([("large", mapped), ("small", [{"n": -1}])])
    batch = next(iter(loader))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most < 4_000_000  # a list of a million numbers takes twice as much
    assert pa.total_allocated_bytes() - before < 1_000_000
    assert len(batch["n"]) == 32


@pytest.mark.parametrize("name", STRATEGIES)
def test_batches_equal_those_of_lists_with_and_without_workers(stored, name):
    lists = make([(each, rows(each)) for each in SIZES], name)
    loaders = [make(stored, name, num_workers=number) for number in (0, 2)]

    for _ in range(2):
        plain = list(lists)
        assert all(list(loader) == plain for loader in loaders)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.torture)])
def test_a_run_resumes_in_the_middle_of_an_epoch(stored, name, workers):
    loader = make(stored, name, num_workers=workers)
    left = iter(loader)
    for _ in range(5):
        next(left)
    state = json.dumps(loader.state_dict())
    expected = [*left, *loader]
    for number in (0, 2):
        again = make(stored, name, num_workers=number)
        again.load_state_dict(json.loads(state))

        assert [*again, *again] == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_columns_in_torch_format_are_stacked(stored, workers):
    numbers = stored[0][1].with_format("torch", columns=["label"])
    loader = create_multiplex_dataloader([("arc", numbers)], batch_size=30, num_workers=workers)
    labels = [batch["label"] for batch in loader]

    assert [each.shape for each in labels] == [(30,), (30,)]
    assert torch.equal(torch.cat(labels).sort().values, torch.arange(60))


def test_splits_and_iterable_datasets_are_refused_with_advice(stored):
    splits = datasets.DatasetDict({"train": stored[0][1]})
    with pytest.raises(PlanError, match=r"DatasetDict with the keys train, .* Choose one"):
        create_multiplex_dataloader([("arc", splits)])
    with pytest.raises(PlanError, match=r"IterableDataset\. .* Make a list of it"):
        create_multiplex_dataloader([("arc", stored[0][1].to_iterable_dataset())])


def as_pair(batch):
    """A custom collate function."""
    return [each["text"] for each in batch], torch.tensor([each["label"] for each in batch])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.torture)])
def test_a_collate_function_may_return_a_tuple_with_fork_and_spawn(stored, method):
    options = {"collate_fn": as_pair, "num_workers": 1, "multiprocessing_context": method}
    worked = list(make(stored, "weighted", **options))
    plain = list(make(stored, "weighted", collate_fn=as_pair))

    assert len(worked) == 12
    for (texts, labels), (other_texts, other_labels) in zip(worked, plain, strict=True):
        assert texts == other_texts
        assert torch.equal(labels, other_labels)
