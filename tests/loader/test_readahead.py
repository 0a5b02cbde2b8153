"""Announcing rows to the kernel before they are read: harmless, and off while all is in memory."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock
from penstock.loader.loader import Loader
from penstock.loader.prefetch import ReadAhead
from penstock.order.plan import Plan
from penstock.rows.windows import Windows


@pytest.fixture
def always(monkeypatch):
    """Announce every block, as if the disk was slow."""
    monkeypatch.setattr(ReadAhead, "begin", lambda self: True)


class Recorded:
    """Rows that record what is announced and what is read."""

    length = 1024
    digest = "recorded"

    def __init__(self):
        self.announced, self.read_rows = [], []

    def __len__(self):
        return 100_000

    def read_ahead(self, samples):
        self.announced.append(samples.tolist())

    def read(self, samples):
        self.read_rows.append(samples.tolist())
        return {"tokens": np.zeros((len(samples), 1025), np.uint16)}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_the_same_with_and_without(store, monkeypatch, prefetch):
    windows = Windows(store, 16, tail="pad")
    plain = list(Loader(windows, 8, seed=3, epochs=2, drop_last=False, prefetch=0))
    monkeypatch.setattr(ReadAhead, "begin", lambda self: True)
    loader = Loader(windows, 8, seed=3, epochs=2, drop_last=False, prefetch=prefetch)
    for batch, right in zip(loader, plain, strict=True):
        assert torch.equal(batch["inputs"], right["inputs"])
        assert torch.equal(batch["targets"], right["targets"])


def test_each_block_is_announced_while_the_one_before_is_read(always):
    rows = Recorded()
    loader = Loader(rows, 512, steps=80, prefetch=0)
    assert len(list(loader)) == 80

    assert len(rows.read_rows) > 10
    assert rows.announced == rows.read_rows[1:]


def test_nothing_is_announced_while_all_is_in_memory():
    rows = Recorded()
    loader = Loader(rows, 512, steps=40, prefetch=0)
    assert len(list(loader)) == 40

    assert rows.announced == []


def test_each_source_gets_announcements_of_its_own_rows(always):
    one, two = Recorded(), Recorded()
    plan = Plan({"one": one, "two": two}, weights={"one": 1, "two": 3})
    assert len(list(Loader(plan, 512, steps=20, prefetch=0))) == 20

    for rows in (one, two):
        assert [sorted(block) for block in rows.announced] == [
            sorted(block) for block in rows.read_rows[1:]
        ]


def test_rows_without_read_ahead_are_left_alone(numbered, always):
    loader = Loader(numbered(1000), 8, steps=50)

    assert len(list(loader)) == 50


def test_a_wait_for_the_disk_is_noticed_and_passes(tmp_path):
    """The kernel forgets a file; reading it then waits, and the next blocks are announced."""
    path = tmp_path / "cold.npy"
    np.save(path, np.arange(8_000_000, dtype="uint16"))
    windows = Windows(path, 1024)
    ahead = ReadAhead()
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


def test_requests_of_rows_in_checked_unchecked_and_bare_files_change_nothing(store, tmp_path):
    bare = tmp_path / "bare.npy"
    np.save(bare, np.arange(3_000, dtype="uint16"))
    rows = Windows([store.path, bare], 16, tail="pad")
    expected = Windows([store.path, bare], 16, tail="pad").read(np.arange(len(rows)))["tokens"]

    for half in (np.arange(0, len(rows), 2), np.arange(len(rows))):
        rows.read_ahead(np.arange(len(rows))[::-1])
        assert (rows.read(half)["tokens"] == expected[half]).all()
    rows.read_ahead(np.arange(len(rows)))
    rows.read_ahead(np.zeros(0, np.int64))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_row_that_is_not_in_memory_loads_its_blocks_and_not_their_neighbours(tmp_path):
    """Without requests, each page fault loads as much as the device reads ahead, up to 8 MB."""
    texts = penstock.Texts(["so much depends upon a red wheel barrow " * 200_000])
    store = penstock.build(texts, tmp_path / "store", tokenizer="bytes")
    num_tokens = store.num_tokens
    del store
    for path in (tmp_path / "store").iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    windows = Windows(tmp_path / "store", 1024)
    samples = np.arange(5, len(windows), len(windows) // 6)
    before = _disk_bytes()
    read = windows.read(samples)["tokens"]
    loaded = _disk_bytes() - before
    if not loaded:
        pytest.skip("this file system keeps its pages")

    assert read.shape == (len(samples), 1025)
    assert num_tokens * 2 > 15 << 20
    # A row may be in two blocks. The manifest and the checksums are small.
    assert loaded <= len(samples) * 2 * 65_536 + (1 << 20)


def _disk_bytes():
    """Bytes that this process has read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))
