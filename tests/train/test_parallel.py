"""Several processes (DDP): the same run as with one process, killed and resumed.

Here are a few kills and changes of the number of processes; `tests/torture/test_parallel_kill.py`
has many.
"""

import os
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.train import to_gpt2, train
from penstock.train.checkpoint import Checkpoints

pytestmark = pytest.mark.skipif(os.name == "nt", reason="processes are forked")


def neighbour(name):
    """Another file of this folder."""
    spec = spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


processes, kills = neighbour("processes"), neighbour("kills")
# Runs of other numbers of processes compare only without dropout, and of other lengths at one rate.
PLAIN = {"model": {"dropout": 0.0}, "optimization": {"optimizer": "muon", "floor": 1.0}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = processes.Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


def killed_once(server, size, job, moment, generator):
    """Kill one process of a group after a step; returns whether it was still running."""
    group = server.start(size, job)
    while not any(
        line["kind"] == "step" and line["step"] >= moment for line in kills.written(job["output"])
    ):
        time.sleep(0.01)
    time.sleep(generator.random() * 0.05)
    victim = int(generator.integers(size))
    processes.kill(group[victim])
    time.sleep(0.1)  # the others find that they cannot reach it, or wait for it
    for each in group:
        processes.kill(each)
    return server.wait()[victim] == -9


def killed(server, size, job, moments, generator):
    """Run to the end through kills at these moments; returns how many were real."""
    real = sum(killed_once(server, size, job, moment, generator) for moment in moments)
    server.run(size, job)
    return real


def differences(one, two):
    """The largest difference of losses and of validation losses of two runs with equal rows."""
    found = []
    for kind, value in (("step", "loss"), ("val", "val_loss")):
        first, second = (
            {line["step"]: line[value] for line in kills.recorded(run) if line["kind"] == kind}
            for run in (one, two)
        )
        assert first.keys() <= second.keys()  # each session ends with a validation
        found += [abs(first[step] - second[step]) for step in first]
    logs = [(run / "fingerprints.jsonl").read_bytes() for run in (one, two)]
    assert logs[0] == logs[1]
    return max(found)


@pytest.fixture(scope="module")
def alone(store, tmp_path_factory):
    """The run of one process, of 10 steps, and its model."""
    output = tmp_path_factory.mktemp("alone") / "run"
    return train(processes.job_of(store.path, output, steps=10, **PLAIN), device="cpu")


@pytest.fixture(scope="module")
def resumed(server, store, tmp_path_factory):
    """The same run on other numbers of processes in turns; and its output."""
    folder = tmp_path_factory.mktemp("resumed")
    output, seen = folder / "run", []
    for size, steps, rows in (
        (2, 4, 3),  # saves after 3 and 4; two micro-batches of 3 rows in each process
        (3, 6, 4),
        (1, 8, 6),
        (2, 10, 6),
    ):
        job = {"store": store.path, "output": output, "steps": steps, **PLAIN}
        job["batch_size"] = rows
        server.run(size, job, export=str(folder / "exported"))
        seen.append(
            [
                path.name
                for path in Checkpoints(output / "checkpoints", keep_last=2).paths().values()
            ]
        )
    return output, seen, torch.load(folder / "exported", weights_only=True)


def test_a_run_is_the_same_on_any_number_of_processes(alone, resumed):
    """Losses to 1e-4 of 5 nats, weights to 1e-4."""
    output, seen, exported = resumed

    assert differences(alone.output, output) < 1e-4
    for name, weight in to_gpt2(alone.model).items():
        assert torch.allclose(weight, exported[name], atol=1e-4), name
    assert seen == [
        ["step-00000003.pt", "step-00000004.pt"],
        ["step-00000004.pt", "step-00000006.pt"],
        ["step-00000006.pt", "step-00000008.pt"],
        ["step-00000009.pt", "step-00000010.pt"],
    ]


@pytest.mark.parametrize(
    ("size", "moments"), [pytest.param(1, [3, 8], marks=pytest.mark.torture), (3, [5])]
)
def test_a_killed_run_has_bitwise_the_losses_of_one_that_was_not(
    server, store, tmp_path, size, moments
):
    job = {"store": store.path, "steps": 10, "batch_size": 2}
    server.run(size, {**job, "output": tmp_path / "straight"})
    generator = np.random.default_rng(5)
    real = killed(server, size, {**job, "output": tmp_path / "run"}, moments, generator)

    assert real == len(moments)
    assert kills.recorded(tmp_path / "run") == kills.recorded(tmp_path / "straight")
