"""A run killed twenty times has bitwise the losses of one that never was; torchrun too."""

import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock as ps

pytestmark = pytest.mark.torture


def neighbour():
    """tests/train/kills.py, whose small runs these are."""
    path = Path(__file__).parents[1] / "train" / "kills.py"
    spec = spec_from_file_location("train_kill", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kills = neighbour()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    texts = [f"document {number}: " + "some words " * (number % 9) for number in range(120)]
    return ps.build(ps.Texts(texts), tmp_path_factory.mktemp("train") / "store", tokenizer="bytes")


def test_twenty_kills_change_no_loss(store, tmp_path, figure):
    torch.set_num_threads(1)
    steps, generator = 400, np.random.default_rng(11)
    kills.here(store, tmp_path / "straight", steps)
    straight = kills.recorded(tmp_path / "straight")
    moments = sorted(generator.integers(1, steps - 5, 20).tolist())
    ever, real = kills.killed_run(store, tmp_path / "run", steps, moments, generator)

    assert real == 20
    assert kills.recorded(tmp_path / "run") == straight
    known = {json.dumps(line) for line in straight}
    assert all(json.dumps(line) in known for line in ever)
    figure(f"training, killed {real} times: {len(straight):,} lines of losses equal bitwise")


def test_torchrun_starts_two_processes_of_a_recipe(store, tmp_path):
    (tmp_path / "a.toml").write_text(
        f'[data]\ntrain = "{store.path}"\nval = "{store.path}"\nlength = 32\n'
        '[model]\nsize = "nano"\nlayers = 1\nwidth = 16\nheads = 2\n'
        "[training]\nsteps = 8\nbatch_size = 2\nglobal_batch_size = 8\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
            *("-m", "penstock.train", "a.toml", "--device", "cpu"),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    lines = kills.recorded(tmp_path / "runs" / "a")
    loader = ps.Loader(ps.Plan(ps.Windows(store, 32)), 8)
    right = [loader.fingerprint for _, _ in zip(range(8), loader, strict=False)]
    assert [line["fingerprint"] for line in lines if line["kind"] == "step"] == right
    assert done.stdout.count("step 8: validation loss") == 1
