"""Naming rows to the disk before they are read: harmless, and off while all is in memory."""

import os

import numpy as np
import pytest
import torch

from penstock.loader.loader import Loader
from penstock.loader.readahead import ReadAhead
from penstock.order.plan import Plan
from penstock.rows.windows import Windows


class Told:
    """Rows that note what is named to them and what is read."""

    length = 1024
    digest = "told"

    def __init__(self):
        self.named, self.read_rows = [], []

    def __len__(self):
        return 100_000

    def read_ahead(self, samples):
        self.named.append(samples.tolist())

    def read(self, samples):
        self.read_rows.append(samples.tolist())
        return {"tokens": np.zeros((len(samples), 1025), np.uint16)}


@pytest.mark.parametrize("read_ahead", [None, True, False])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_the_same_with_and_without(store, read_ahead, prefetch):
    windows = Windows(store, 16, tail="pad")
    plain = Loader(windows, 8, seed=3, epochs=2, drop_last=False, prefetch=0)
    loader = Loader(
        windows, 8, seed=3, epochs=2, drop_last=False, prefetch=prefetch, read_ahead=read_ahead
    )
    for batch, right in zip(loader, plain, strict=True):
        assert torch.equal(batch["inputs"], right["inputs"])
        assert torch.equal(batch["targets"], right["targets"])


def test_each_block_is_named_while_the_one_before_is_read():
    rows = Told()
    loader = Loader(rows, 512, steps=40, prefetch=0, read_ahead=True)
    assert len(list(loader)) == 40

    assert len(rows.read_rows) > 10
    assert rows.named == rows.read_rows[1:]


def test_nothing_is_named_while_all_is_in_memory():
    rows = Told()
    loader = Loader(rows, 512, steps=40, prefetch=0)
    assert len(list(loader)) == 40

    assert rows.named == []


def test_each_source_is_told_of_its_own_rows():
    one, two = Told(), Told()
    plan = Plan({"one": one, "two": two}, weights={"one": 1, "two": 3})
    assert len(list(Loader(plan, 512, steps=20, prefetch=0, read_ahead=True))) == 20

    for rows in (one, two):
        assert [sorted(block) for block in rows.named] == [
            sorted(block) for block in rows.read_rows[1:]
        ]


def test_rows_that_cannot_be_named_are_left_alone(numbered):
    loader = Loader(numbered(1000), 8, steps=50, read_ahead=True)

    assert len(list(loader)) == 50


def test_a_wait_for_the_disk_is_noticed_and_passes(tmp_path):
    """The kernel forgets a file; reading it then waits, and the next blocks are named."""
    path = tmp_path / "cold.npy"
    np.save(path, np.arange(8_000_000, dtype="uint16"))
    windows = Windows(path, 1024)
    ahead = ReadAhead([windows], None)
    assert not ahead.begin()
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    windows = Windows(path, 1024)
    windows.read(np.arange(0, len(windows), 97))
    ahead.end()
    if not ahead.begin():
        pytest.skip("this file system keeps its pages")
    for _ in range(70):
        windows.read_ahead(np.arange(100))
        ahead.begin()
        windows.read(np.arange(100))
        ahead.end()

    assert not ahead.begin()
