"""Loaders in other processes: forked, spawned, and many that train together."""

import json
import multiprocessing
import os
import time

import pytest
import torch

from penstock.loader.loader import Loader
from penstock.order.plan import Plan
from penstock.rows.windows import Windows

TIMEOUT = 60


def read(loader, answers):
    """Send the rest of a run, in numbers, and how it was read."""
    answers.put((os.getpid(), [batch["inputs"].tolist() for batch in loader]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_parent_child_and_parent_again_read_the_same(store, method, prefetch):
    """The parent is in the middle of an iteration, with a thread at work, when it forks."""
    plan = Plan({"a": Windows(store, 16), "b": Windows(store, 16)}, weights={"a": 1, "b": 2})
    expected = [batch["inputs"].tolist() for batch in Loader(plan, 8, steps=60)]
    loader = Loader(plan, 8, steps=60, prefetch=prefetch)
    iterator = iter(loader)
    for step in range(10):
        assert next(iterator)["inputs"].tolist() == expected[step]
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    children = [context.Process(target=read, args=(loader, answers)) for _ in range(2)]
    for child in children:
        child.start()
    found = [answers.get(timeout=TIMEOUT) for _ in children]
    for child in children:
        child.join(TIMEOUT)
        assert child.exitcode == 0

    assert len({pid for pid, _ in found}) == 2
    assert [rows for _, rows in found] == [expected[10:]] * 2
    assert [batch["inputs"].tolist() for batch in iterator] == expected[10:]


def test_a_loader_uses_no_shared_memory_and_no_processes(numbered):
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208  (names are what is compared)
    iterator = iter(Loader(numbered(100), 8))
    next(iterator)

    assert multiprocessing.active_children() == []
    assert set(os.listdir("/dev/shm")) <= before  # noqa: PTH208
    iterator.close()


def train(rank, world_size, meeting, store, answers):
    """Three epochs with an all-reduce at every step, as training has."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world_size,
        timeout=__import__("datetime").timedelta(seconds=20),
    )
    loader = Loader(
        Windows(store, 16), global_batch_size=20, epochs=3, drop_last=False, seed=11, prefetch=2
    )
    assert (loader.rank, loader.world_size) == (rank, world_size)
    sums = []
    for batch in loader:
        total = torch.stack([batch["inputs"].sum(), torch.tensor(len(batch["inputs"]))])
        torch.distributed.all_reduce(total)
        sums.append(total.tolist())
    states = [None] * world_size
    torch.distributed.all_gather_object(states, json.dumps(loader.state_dict()))
    torch.distributed.destroy_process_group()
    answers.put((rank, sums, states))


def test_four_processes_end_three_epochs_together(store, tmp_path):
    """Here rather than in the torture run: one step too many would hang the all-reduce."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    arguments = (4, tmp_path / "meet", str(store.path), answers)
    children = [context.Process(target=train, args=(rank, *arguments)) for rank in range(4)]
    begin = time.monotonic()
    for child in children:
        child.start()
    found = [answers.get(timeout=TIMEOUT) for _ in children]
    for child in children:
        child.join(TIMEOUT)

    alone = Loader(Windows(store, 16), 20, epochs=3, drop_last=False, seed=11)
    expected = [[batch["inputs"].sum().item(), 20] for batch in alone]
    assert sorted(rank for rank, _, _ in found) == [0, 1, 2, 3]
    assert [sums for _, sums, _ in found] == [expected] * 4
    assert {state for _, _, states in found for state in states} == {json.dumps(alone.state_dict())}
    assert time.monotonic() - begin < TIMEOUT
