"""Loaders in other processes: forked, spawned, and many that train together."""

import faulthandler
import json
import multiprocessing
import os
from datetime import timedelta

import pytest
import torch

import penstock
from penstock.loader.loader import Loader
from penstock.order.plan import Plan
from penstock.rows.windows import Windows
from penstock.sources.slices import cut

TIMEOUT = 200  # a process that imports torch beside others may take half a minute to start


@pytest.fixture(scope="module")
def many_parts(tmp_path_factory):
    """More parts than are kept open."""
    texts = [f"document {number} " * (number % 40 + 1) for number in range(400)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cut.__kwdefaults__, "slice_bytes", 300)
        store = penstock.build(
            penstock.Texts(texts), tmp_path_factory.mktemp("p"), tokenizer="bytes"
        )
    assert len(store.manifest.parts) > 200
    return store


def read(loader, answers):
    """Send the rest of a run, in numbers, and how it was read."""
    answers.put((os.getpid(), [batch["inputs"].tolist() for batch in loader]))


@pytest.mark.parametrize(
    ("method", "prefetch"),
    [
        ("fork", 0),
        ("fork", 2),
        ("forkserver", 2),
        pytest.param("spawn", 2, marks=pytest.mark.torture),
    ],
)
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


@pytest.mark.parametrize("rounds", [10, pytest.param(40, marks=pytest.mark.torture)])
def test_forks_while_a_thread_opens_parts_of_a_store(many_parts, rounds):
    """What the thread holds when the fork comes must not stay locked in the child."""
    loader = Loader(Windows(many_parts, 16), 2, prefetch=4)
    expected = [loader[step]["inputs"].sum().item() for step in range(4)]
    iterator = iter(loader)
    for _ in range(rounds):
        for _ in range(64):
            next(iterator)
        child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(20, exit=True)  # says where it hangs
            fresh = Loader(loader.plan, 2, prefetch=1)
            found = [
                batch["inputs"].sum().item() for batch, _ in zip(fresh, range(4), strict=False)
            ]
            os._exit(0 if found == expected else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def test_a_loader_uses_no_shared_memory_and_no_processes(numbered):
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208  (names are what is compared)
    iterator = iter(Loader(numbered(100), 8))
    next(iterator)

    assert multiprocessing.active_children() == []
    assert set(os.listdir("/dev/shm")) <= before  # noqa: PTH208
    iterator.close()


def train(rank, world_size, meeting, store, barrier, answers):
    """Three epochs with an all-reduce at every step, as training has."""
    torch.set_num_threads(1)
    barrier.wait(TIMEOUT)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
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
    answers.put((rank, sums, states))
    answers.close()
    answers.join_thread()
    barrier.wait(TIMEOUT)  # no rank needs the others any more
    # gloo's thread needs the GIL to free the last tensors, and the end of the process group waits
    # for this thread with the GIL: torch 2.6 hangs in destroy_process_group.
    os._exit(0)


def test_four_processes_end_three_epochs_together(store, tmp_path, imported_once):
    """One step too many anywhere would hang the all-reduce."""
    context = imported_once
    answers = context.Queue()
    arguments = (4, tmp_path / "meet", str(store.path), context.Barrier(4), answers)
    children = [context.Process(target=train, args=(rank, *arguments)) for rank in range(4)]
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
