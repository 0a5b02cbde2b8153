"""A store of a few thousand bytewise tokens, and jobs that train on it in a second."""

import sys
from dataclasses import replace

import pytest
import torch

import penstock as ps
from penstock.train import ModelConfig, OptimizationConfig, TrainingConfig, TrainingJob

torch.set_num_threads(1)

TEXTS = [f"document {number}: " + "some words " * (number % 9) for number in range(120)]


@pytest.fixture(autouse=True)
def _without_pictures(request, monkeypatch):
    """Runs draw no curve: that is a third of their time. Tests of curves ask for `pictures`."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def pictures():
    """Runs of this test draw their loss curve, as they do where matplotlib is installed."""


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """120 documents, 7,000 tokens."""
    return ps.build(ps.Texts(TEXTS), tmp_path_factory.mktemp("train") / "store", tokenizer="bytes")


@pytest.fixture(scope="session")
def tiny():
    """A model of two layers for bytes."""
    return ModelConfig(layers=2, heads=2, width=32, length=32, vocab_size=257, dropout=0.1)


@pytest.fixture
def job(store, tiny, tmp_path):
    """A job of 12 steps; keywords change its training, and `model`, `plan`, … the rest."""

    def job(*, optimization=None, **changes):
        whole = {name: changes.pop(name) for name in ("model", "plan", "val") if name in changes}
        training = {"steps": 12, "batch_size": 4, "val_every": 6, "save_every": 6, "seed": 3}
        training["val_rows"] = 24  # of 218, which would take ten times as long as the steps
        made = TrainingJob(
            plan=ps.Plan(ps.Windows(store, 32), seed=1),
            val=ps.Windows(store, 32),
            model=tiny,
            training=TrainingConfig(**{**training, **changes}),
            optimization=optimization or OptimizationConfig(learning_rate=3e-3, warmup_steps=3),
            output=tmp_path / "run",
        )
        return replace(made, **whole)

    return job
