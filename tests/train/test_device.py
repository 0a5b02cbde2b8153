"""The trainer on a GPU; `pytest -m gpu --noconftest tests/train/test_device.py` needs NumPy and
torch alone.
"""

from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.train import (
    ModelConfig,
    OptimizationConfig,
    RunReport,
    TrainingConfig,
    TrainingJob,
    read_metrics,
    train,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TESTS = Path(__file__).parents[1]


def neighbour(path):
    """Another file of tests, for its tools."""
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """200 documents of 2 to 64 tokens, whose ids go up in even steps: they can be learned."""
    generator = np.random.default_rng(3)
    documents = [
        (np.arange(size) * step + begin) % 211
        for size, step, begin in zip(
            generator.integers(2, 65, 200),
            generator.integers(1, 4, 200),
            generator.integers(0, 211, 200),
            strict=True,
        )
    ]
    write = neighbour(TESTS / "rows" / "test_packs_attention.py").write_store
    return ps.TokenStore(write(tmp_path_factory.mktemp("device") / "store", documents))


@pytest.mark.parametrize("options", [{}, {"positions": "rotary", "qk_norm": True}], ids=str)
def test_packed_documents_lose_what_they_lose_alone(store, options):
    """To 2e-3 nats: the kernel of FlexAttention rounds products to ten bits."""
    models = neighbour(TESTS / "train" / "test_model.py")

    assert models.largest_difference(store, options, "cuda") < 2e-3


def job_of(store, output, kind=ps.Windows, **training):
    shape = {"layers": 2, "heads": 2, "width": 128, "length": 128, "vocab_size": 211}
    settings = {"steps": 30, "batch_size": 4, "val_every": 10, "save_every": 10}
    return TrainingJob(
        plan=ps.Plan(kind(store, 128), seed=1),
        val=kind(store, 128),
        model=ModelConfig(**shape, positions="rotary"),
        training=TrainingConfig(**{**settings, "precision": "bfloat16", **training}),
        optimization=OptimizationConfig(learning_rate=3e-3, warmup_steps=5),
        output=output,
    )


def losses(job):
    lines = read_metrics(job.output / "metrics.jsonl")
    return {each["step"]: each["loss"] for each in lines if each["kind"] == "step"}


def test_an_interrupted_run_resumes_within_rounding(store, tmp_path):
    """To 2e-2 nats in bfloat16: sums of gradients are taken in no fixed order on a GPU."""
    straight, broken = (job_of(store, tmp_path / name) for name in ("straight", "broken"))
    train(straight)

    def stop(logged):
        if isinstance(logged, RunReport) and logged.progress.step == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(broken, log=stop)
    train(broken)

    found, right = losses(broken), losses(straight)
    assert sorted(found) == sorted(right)
    assert max(abs(found[step] - right[step]) for step in right) < 2e-2


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_twenty_kills_change_losses_by_no_more_than_rounding(
    store, tmp_path, precision, record_property
):
    """Ten in each precision; two runs that nobody kills show what rounding alone does."""
    kills = neighbour(TESTS / "train" / "kills.py")
    how = {"device": "cuda", "precision": precision}
    steps, generator = 200, np.random.default_rng(11)
    for name in ("straight", "again"):
        kills.here(store, tmp_path / name, steps, **how)
    moments = sorted(generator.integers(1, steps - 5, 10).tolist())
    _, real = kills.killed_run(store, tmp_path / "run", steps, moments, generator, **how)

    right, again, found = (kills.recorded(tmp_path / name) for name in ("straight", "again", "run"))
    rows = [[line.get("fingerprint") for line in lines] for lines in (right, found)]
    kept, changed = (furthest(right, lines) for lines in (again, found))
    logged = (
        f"{precision}, killed {real} times: losses differ by {changed:.1e}; without, {kept:.1e}"
    )
    record_property("figure", logged)
    assert real == 10
    assert rows[0] == rows[1]
    assert changed < 2e-2


def test_two_processes_on_one_gpu_and_one_agree(store, tmp_path):
    """By gloo: nccl wants a GPU for each. In float32, whose products are rounded to ten bits."""
    kills = neighbour(TESTS / "train" / "kills.py")
    kills.losses_of_two_and_one(store, tmp_path, tolerance=2e-3, device="cuda")


def furthest(some, others):
    """The largest difference of a loss, in nats, between the lines of two runs."""
    name = {"step": "loss", "val": "val_loss"}
    return max(
        abs(one[name[one["kind"]]] - two[name[two["kind"]]])
        for one, two in zip(some, others, strict=True)
    )


@pytest.mark.filterwarnings("ignore")  # compiling makes torch warn of its own code
@pytest.mark.parametrize("kind", [ps.Windows, ps.Packs], ids=lambda kind: kind.__name__)
def test_all_modes_see_the_same_rows_and_compile_once(store, tmp_path, kind):
    from torch._dynamo.utils import counters

    fingerprints = []
    for number, mode in enumerate(
        [{}, {"recompute": True}, {"compile": True}, {"compile": True, "recompute": True}]
    ):
        torch._dynamo.reset()
        counters.clear()
        job = job_of(store, tmp_path / f"{number}", kind, **mode)
        result = train(job)
        assert result.progress.val_loss < 4.5
        if mode.get("compile"):
            # To train; to validate: the embedding, a layer, the loss and, for packs, the mask.
            assert counters["stats"]["unique_graphs"] == (4 if kind is ps.Windows else 5)
        lines = read_metrics(job.output / "metrics.jsonl")
        fingerprints.append([each["fingerprint"] for each in lines if each["kind"] == "step"])

    assert all(each == fingerprints[0] for each in fingerprints)


def test_the_batch_size_that_fits_is_found(store, tmp_path):
    logged = []
    made = job_of(store, tmp_path / "auto", batch_size="auto", global_batch_size=64, steps=2)
    train(replace(made, val=None), log=logged.append)

    assert "batch_size: 64 rows of 128 tokens at once" in logged
