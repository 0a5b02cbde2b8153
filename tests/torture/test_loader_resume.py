"""Stopped after every step, resumed in every topology; and chains of fifty resumes.

pytest -m torture tests/torture/test_loader_resume.py
"""

import json
from itertools import product

import numpy as np
import pytest
import torch

from penstock.loader import BatchFormat
from penstock.loader.loader import Loader
from penstock.order.plan import Plan
from penstock.rows.windows import Windows
from penstock.testing import global_rows

pytestmark = pytest.mark.torture
torch.set_num_threads(1)

TOPOLOGIES = list(product((1, 2, 3, 4, 8), (0, 1, 4)))
GLOBAL = 24  # divides by every world size


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    """247 rows: an epoch is ten global batches and seven rows."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(0, 60_000, 247 * 8 + 1).astype("uint16"))
    return Windows(path, 8)


def kinds(windows):
    small = Windows(windows.stream.members[0], 8, stride=30)
    mixture = Plan(
        {"large": windows, "small": small},
        weights={"large": 0.8, "small": 0.2},
        schedule={200: {"large": 0.5, "small": 0.5}},
        seed=7,
    )
    return {
        "epochs": (Plan(windows, seed=5), {"epochs": 2}),
        "filled up": (Plan(windows, seed=5, shuffle="block"), {"epochs": 2, "drop_last": False}),
        "mixture": (mixture, {"steps": 21, "format": BatchFormat(fingerprint="tokens")}),
    }


def ranks(plan, topology, settings):
    world_size, prefetch = topology
    return [
        Loader(
            plan,
            global_batch_size=GLOBAL,
            rank=rank,
            world_size=world_size,
            prefetch=prefetch,
            format=BatchFormat(ids=True),
            **settings,
        )
        for rank in range(world_size)
    ]


def states(plan, topology, settings):
    """The state before each step and after the last, each from another rank."""
    loaders = ranks(plan, topology, settings)
    iterators = [iter(loader) for loader in loaders]
    taken = [json.dumps(loaders[0].state_dict())]
    while None not in [next(iterator, None) for iterator in iterators]:
        taken.append(json.dumps(loaders[len(taken) % len(loaders)].state_dict()))
    return taken


@pytest.mark.parametrize("kind", ["epochs", "filled up", "mixture"])
def test_every_step_of_two_epochs_from_every_topology_into_every_other(windows, figure, kind):
    plan, settings = kinds(windows)[kind]
    expected = global_rows(ranks(plan, (1, 0), settings), 100)
    resumes = 0
    for before in TOPOLOGIES:
        taken = states(plan, before, settings)
        assert len(taken) == len(expected) + 1
        for after, stop in product(TOPOLOGIES, range(len(taken))):
            loaders = ranks(plan, after, settings)
            for loader in loaders:
                loader.load_state_dict(json.loads(taken[stop]))
            found = global_rows(loaders, 100)
            resumes += 1

            assert len(found) == len(expected) - stop, (before, after, stop)
            for one, two in zip(found, expected[stop:], strict=True):
                for name in two:  # rows in order, targets, ids and fingerprint
                    assert np.array_equal(one[name], two[name]), (before, after, stop, name)
    figure(
        f"resume, {kind}: {resumes:,} resumes after every one of {len(expected)} steps, from and "
        f"into {len(TOPOLOGIES)} topologies, all identical"
    )


def test_two_hundred_chains_of_fifty_resumes(windows, figure):
    """Other ranks, batch sizes and threads at every link; the sequence of rows is one."""
    rows = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        plan = Plan(windows, seed=seed)
        found, text = [], None
        for _ in range(50):
            world_size = int(random.choice([1, 2, 3, 4, 8]))
            loaders = [
                Loader(
                    plan,
                    int(size),
                    rank=rank,
                    world_size=world_size,
                    prefetch=int(random.choice([0, 1, 4])),
                    format=BatchFormat(ids=True),
                )
                for size in [random.integers(1, 7)]
                for rank in range(world_size)
            ]
            if text is not None:
                for loader in loaders:
                    loader.load_state_dict(json.loads(text))
            for step in global_rows(loaders, int(random.integers(0, 5))):
                found += step["sample"].tolist()
            text = json.dumps(loaders[int(random.integers(world_size))].state_dict())
        uninterrupted = Loader(plan, 1)
        uninterrupted.seek(len(found))

        assert found == plan.locate(np.arange(len(found)))[2].tolist(), seed
        assert json.loads(text) == uninterrupted.state_dict(), seed
        rows += len(found)
    figure(f"chains: 200 of 50 resumes each, {rows:,} rows, all as one run")
