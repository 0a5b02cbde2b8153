"""Blocks that are checked together: which are read, by how many threads, and what is an error."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.disk import BLOCK_BYTES
from penstock.errors import StoreError
from penstock.store.block_reads import Run, check_runs, runs_of


def slow_runs(blocks, between):
    """Runs that grow block by block, as long as the next block is near and the run is short."""
    runs = []
    for block in sorted(blocks):
        if runs and block - runs[-1][-1] <= between + 1 and block - runs[-1][0] < 64:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


@given(st.lists(st.sets(st.integers(0, 500), max_size=100), max_size=4))
def test_few_blocks_are_read_in_long_runs(parts):
    runs = runs_of([(number, np.array(sorted(each))) for number, each in enumerate(parts)])

    expected = [(number, run) for number, each in enumerate(parts) for run in slow_runs(each, 32)]
    assert [(run.part, run.needed) for run in runs] == expected
    assert all((run.first, run.stop) == (run.needed[0], run.needed[-1] + 1) for run in runs)


def test_of_many_blocks_few_others_are_read_with_them():
    near, far = np.arange(0, 90_000, 9), np.arange(100_000, 300_000, 10)
    runs = runs_of([(3, np.concatenate((near, far)))])

    expected = slow_runs([*near.tolist(), *far.tolist()], 8)
    assert [run.needed for run in runs] == expected
    assert [run.needed for run in runs[-len(far) :]] == far[:, None].tolist()


def long_runs(number):
    return [Run(0, 16 * n, 16 * n + 16, [*range(16 * n, 16 * n + 16)]) for n in range(number)]


def test_each_run_is_checked_once_and_failures_are_returned_in_order():
    seen, runs = [], long_runs(200)

    def check(run):
        seen.append(run.first)
        if run.first % 160 == 0:
            raise StoreError(f"run {run.first}")

    failed = check_runs(runs, check)

    assert sorted(seen) == [run.first for run in runs]
    assert [str(error) for _, error in failed] == [f"run {n}" for n in range(0, 3200, 160)]
    assert [run for run, _ in failed] == runs[::10]
    assert not [each for each in threading.enumerate() if each.name == "penstock-check"]


def test_an_error_of_the_system_is_raised():
    def check(run):
        if run.first == 32:
            raise OSError(5, "Input/output error")
        raise StoreError("damaged")

    with pytest.raises(OSError, match="Input/output error"):
        check_runs(long_runs(9), check)


def test_runs_are_checked_if_no_thread_can_be_started(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    seen = []
    assert check_runs(long_runs(9), lambda run: seen.append(run.first)) == []

    assert seen == [run.first for run in long_runs(9)]


@pytest.fixture
def store(tmp_path):
    """A store of one part with 40 blocks of tokens."""
    text = "".join(f"{number:063d}\n" for number in range(20 * 1024))
    ps.build(ps.Texts([text]), tmp_path, tokenizer="bytes")
    return tmp_path


def damage(store, block):
    with (store / "part-00000.tokens.npy").open("r+b") as stream:
        stream.seek(block * BLOCK_BYTES + 1000)
        stream.write(b"?")


def check(files, blocks):
    files.check("tokens", np.zeros(len(blocks), np.int64), np.array(blocks))


def test_a_damaged_block_is_an_error_only_if_it_is_needed(store):
    damage(store, 3)
    files = ps.TokenStore(store).files

    check(files, [1, 2, 4, 30])  # 3 is read with its neighbours
    with pytest.raises(StoreError, match="block 3 "):
        check(files, [3])
    with pytest.raises(StoreError, match="block 3 "):
        check(files, [2, 3, 4])
    check(files, [0, 1, 2, 4, 5, 39])


def test_the_first_of_several_damaged_blocks_is_named(store):
    for block in (39, 17, 25):
        damage(store, block)

    for _ in range(20):
        with pytest.raises(StoreError, match="block 17 "):
            check(ps.TokenStore(store).files, range(40))
