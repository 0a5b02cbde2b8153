"""Runs of several processes (DDP), killed at random moments and resumed by as many or others."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.train import train

pytestmark = pytest.mark.torture


def neighbour():
    """tests/train/test_parallel.py, whose small runs these are."""
    path = Path(__file__).parents[1] / "train" / "test_parallel.py"
    spec = spec_from_file_location("train_parallel", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


parallel = neighbour()
server = parallel.server


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    texts = [f"document {number}: " + "some words " * (number % 9) for number in range(120)]
    return ps.build(ps.Texts(texts), tmp_path_factory.mktemp("train") / "store", tokenizer="bytes")


@pytest.mark.parametrize(("size", "optimizer"), [(3, "muon"), (2, "adamw")])
def test_kills_change_no_bit_on_as_many_processes(server, store, tmp_path, size, optimizer, figure):
    generator = np.random.default_rng([size, len(optimizer)])
    job = {"store": store.path, "steps": 40, "batch_size": 2}
    job["optimization"] = {"optimizer": optimizer}
    server.run(size, {**job, "output": tmp_path / "straight"})
    moments = sorted(generator.integers(1, 34, 5).tolist())
    real = parallel.killed(server, size, {**job, "output": tmp_path / "run"}, moments, generator)

    straight = parallel.kills.recorded(tmp_path / "straight")
    assert real == len(moments)
    assert parallel.kills.recorded(tmp_path / "run") == straight
    figure(
        f"{size} processes, {optimizer}: killed {real} times, {len(straight)} lines of "
        "losses equal bitwise"
    )


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_kills_and_other_processes_change_losses_by_rounding(
    server, store, tmp_path, optimizer, figure
):
    torch.set_num_threads(1)
    generator = np.random.default_rng(len(optimizer))
    plain = {**parallel.PLAIN, "optimization": {"optimizer": optimizer, "floor": 1.0}}
    alone = parallel.processes.job_of(store.path, tmp_path / "alone", steps=40, **plain)
    train(alone, device="cpu")
    output, real, sizes = tmp_path / "run", 0, []
    for moment in sorted(generator.integers(1, 34, 10).tolist()):
        size = int(generator.integers(1, 4))
        job = {"store": store.path, "output": output, "steps": 40, **plain}
        job["batch_size"] = 2
        real += parallel.killed_once(server, size, job, moment, generator)
        sizes.append(f"{size}")
    server.run(2, job)

    worst = parallel.differences(alone.output, output)
    assert real == 10
    assert worst < 1e-4
    figure(
        f"{optimizer}, killed {real} times on {' '.join(sizes)} processes: losses within "
        f"{worst:.1e} of those of one process"
    )
