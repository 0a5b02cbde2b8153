"""Small runs in processes of their own, which can be killed, and what they have written."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import zygote

CODE = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import penstock as ps
from penstock.train import ModelConfig, OptimizationConfig, TrainingConfig, TrainingJob, train

store, output, steps, rank, size, rendezvous = sys.argv[1:]
if int(size) > 1:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(size)
    )
job = TrainingJob(
    plan=ps.Plan(ps.Windows(store, 32), seed=1),
    val=ps.Windows(store, 32),
    model=ModelConfig(
        layers=2, heads=2, width=32, length=32, vocab_size=257, dropout=float(DROPOUT)
    ),
    training=TrainingConfig(
        steps=int(steps), batch_size=4, global_batch_size=8, val_every=10, save_every=5,
        precision="PRECISION",
    ),
    optimization=OptimizationConfig(learning_rate=3e-3, warmup_steps=5, floor=float(FLOOR)),
    output=Path(output),
)
train(job, device="DEVICE")
if int(size) > 1:
    torch.distributed.destroy_process_group()
"""


def code_of(*, plain=False, device="cpu", precision="float32"):
    """Plain: without dropout, and at one rate, so that runs of other lengths compare."""
    dropout, floor = ("0.0", "1.0") if plain else ("0.1", "0.1")
    code = CODE.replace("DROPOUT", dropout).replace("FLOOR", floor)
    return code.replace("DEVICE", device).replace("PRECISION", precision)


def words_of(store, output, steps, rank=0, size=1, rendezvous="none"):
    return [str(each) for each in (store.path, output, steps, rank, size, rendezvous)]


def start(store, output, steps, *, rank=0, size=1, rendezvous="none", **how):
    words = words_of(store, output, steps, rank, size, rendezvous)
    command = ["-c", code_of(**how), *words]
    options = {
        "env": {**os.environ, "OMP_NUM_THREADS": "1"},
        "stderr": subprocess.PIPE,
        "text": True,
    }
    if how.get("device") == "cuda":
        # Tests on a GPU need NumPy and torch alone, and the zygote imports more than these.
        return subprocess.Popen([sys.executable, *command], **options)
    return zygote.Popen(command, **options)


def here(store, output, steps, **how):
    """The same in this process, which need not import torch first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["-c", *words_of(store, output, steps)])
        exec(compile(code_of(**how), "run", "exec"), {})


def finish(*processes):
    try:
        for process in processes:
            errors = process.communicate(timeout=120)[1]
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def written(output):
    """Every whole line of metrics.jsonl."""
    path = output / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def recorded(output):
    """What a run computed, without what its clock said."""
    clocked = ("seconds", "waited", "tokens_per_second")
    return [
        {name: value for name, value in line.items() if name not in clocked}
        for line in written(output)
    ]


def killed_run(store, output, steps, moments, generator, **how):
    """Run to the end through kills; returns all that was ever written, and how many were real."""
    ever, real = [], 0
    for moment in moments:
        process = start(store, output, steps, **how)
        while process.poll() is None:
            done = [line["step"] for line in written(output) if line["kind"] == "step"]
            if done and done[-1] >= moment:
                time.sleep(generator.random() * 0.02)
                break
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        real += process.returncode == -signal.SIGKILL
        ever += recorded(output)
    here(store, output, steps, **how)
    return ever, real


def losses_of_two_and_one(store, folder, *, tolerance, **how):
    """Two processes take 20 steps, one resumes: the rows and the losses of one process alone."""
    both, alone = folder / "both", folder / "alone"
    shared = {"size": 2, "rendezvous": folder / "meet", "plain": True, **how}
    finish(*(start(store, both, 20, rank=rank, **shared) for rank in range(2)))
    here(store, both, 40, plain=True, **how)
    here(store, alone, 40, plain=True, **how)

    steps = [
        [line for line in recorded(output) if line["kind"] == "step"] for output in (both, alone)
    ]
    pairs = list(zip(*steps, strict=True))
    assert [one["fingerprint"] for one, _ in pairs] == [two["fingerprint"] for _, two in pairs]
    assert len({one["fingerprint"] for one, _ in pairs}) == len(pairs) == 40
    logs = [(output / "fingerprints.jsonl").read_bytes() for output in (both, alone)]
    assert logs[0] == logs[1]
    assert max(abs(one["loss"] - two["loss"]) for one, two in pairs) < tolerance
    vals = [
        {line["step"]: line["val_loss"] for line in recorded(output) if line["kind"] == "val"}
        for output in (both, alone)
    ]
    assert vals[0].keys() == vals[1].keys() == {0, 10, 20, 30, 40}
    assert all(abs(vals[0][step] - vals[1][step]) < tolerance for step in vals[0])
