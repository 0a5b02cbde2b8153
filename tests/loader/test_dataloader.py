"""A loader as a `torch.utils.data.DataLoader`: same batches, same state."""

import pytest
import torch
from torch.utils.data import DataLoader

from penstock.errors import PlanError, ResumeError
from penstock.loader.dataloader import log_fingerprints
from penstock.loader.loader import Loader
from penstock.rows.windows import Windows


@pytest.fixture(scope="module")
def windows(store):
    return Windows(store, 16)


@pytest.fixture(scope="module")
def expected(windows):
    return [batch["inputs"] for batch in Loader(windows, 8, seed=3, steps=40)]


def made(windows, **settings):
    return Loader(windows, 8, seed=3, **{"steps": 40, **settings})


def equal(found, expected):
    return all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


WORKERS = [
    {"num_workers": 0},
    {"num_workers": 2, "multiprocessing_context": "fork"},
    {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    {"num_workers": 2, "multiprocessing_context": "forkserver", "persistent_workers": True},
    pytest.param({"num_workers": 2, "multiprocessing_context": "spawn"}, marks=pytest.mark.torture),
]


@pytest.mark.parametrize("options", WORKERS)
def test_batches_and_state_are_those_of_the_loader(windows, expected, options):
    """The loop is left and entered again, with what workers made ahead thrown away."""
    loader = made(windows)
    dataloader = loader.as_dataloader(**options)
    found = []
    for batch in dataloader:
        found.append(batch["inputs"])
        assert loader.position == 8 * len(found)
        if len(found) == 7:
            break
    fresh = made(windows)
    fresh.load_state_dict(loader.state_dict())

    assert isinstance(dataloader, DataLoader)
    assert len(dataloader) == len(loader) == 40  # of a pass, wherever the loader is in it
    found += [batch["inputs"] for batch in dataloader]
    assert equal(found, expected)
    assert equal([batch["inputs"] for batch in fresh], expected[7:])
    with pytest.warns(UserWarning, match="This run is over"):
        assert list(dataloader) == []


def test_workers_follow_where_the_loader_was_moved(windows):
    """Also to a place where no step of this batch size begins, after they were started."""
    loader = made(windows)
    dataloader = loader.as_dataloader(
        2, multiprocessing_context="fork", persistent_workers=True, prefetch_factor=1
    )
    next(iter(dataloader))
    for position in (13, 80, 101, 0):
        loader.seek(position)
        plain = made(windows)
        plain.seek(position)

        found = [batch["inputs"] for batch in dataloader]
        assert equal(found, [batch["inputs"] for batch in plain])
        assert loader.position == plain.position


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fingerprints_arrive_with_the_batches(windows, num_workers, tmp_path):
    plain = made(windows)
    right = [plain.fingerprint for _ in plain]
    loader = made(windows)
    options = {"multiprocessing_context": "fork"} if num_workers else {}
    batches = log_fingerprints(loader.as_dataloader(num_workers, **options), tmp_path / "log")

    assert [loader.fingerprint for _ in batches] == right
    assert len((tmp_path / "log").read_text().splitlines()) == 40


def test_a_run_without_end_can_be_followed(windows, expected):
    loader = made(windows, steps=None)
    found = [batch["inputs"] for batch, _ in zip(loader.as_dataloader(), range(40), strict=False)]

    assert equal(found, expected)


def test_the_dataset_answers_by_step(windows, expected):
    dataset = made(windows).as_dataloader().dataset

    assert len(dataset) == 40
    assert torch.equal(dataset[5]["inputs"], expected[5])


def test_an_iteration_is_overtaken_as_any_other(windows):
    loader = made(windows)
    iterator = iter(loader.as_dataloader())
    next(iterator)
    loader.seek(13)  # where no step begins

    with pytest.raises(ResumeError, match="This iterator was replaced"):
        next(iterator)
    assert loader.position == 13


def test_workers_do_not_write_to_a_device(windows):
    with pytest.raises(PlanError, match=r"num_workers=2 would make batches on meta in several"):
        made(windows, device="meta").as_dataloader(2)
