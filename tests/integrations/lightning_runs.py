"""Runs of `fit_script.py`, and the rows that they must have seen."""

import json
import os
import subprocess
import zlib
from pathlib import Path

import numpy as np
import zygote

from penstock import Documents, Plan, Windows, build
from penstock.preprocess import preprocess

SCRIPT = Path(__file__).parent / "fit_script.py"
LENGTH = 16
KINDS = ("padded", "preprocessed", "streaming")


def write_data(folder, num_lines=90):
    """A training and a validation file, and their token files."""
    folder.mkdir()
    train = [f"line {n} says {zlib.crc32(b'%d' % n)} and {n * n}." for n in range(num_lines)]
    (folder / "train.txt").write_text("\n".join(train) + "\n")
    (folder / "val.txt").write_text("".join(f"val {n} is {n * n * 7}.\n" for n in range(11)))
    preprocess(folder / "train.txt", folder / "owt_train_preprocessed.npy")
    preprocess(folder / "val.txt", folder / "owt_val_preprocessed.npy")
    return folder


def fit(data, out, kind, *flags, killed=False, timeout=250):
    """Run the script; returns where it wrote to. Its processes are a group of their own."""
    command = [str(SCRIPT), "--data", str(data), "--out", str(out)]
    command += ["--kind", kind, *map(str, flags)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    run = zygote.Popen(
        command,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        told, _ = run.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, 9)
        raise
    assert run.returncode == (-9 if killed else 0), told
    return out


def steps(out):
    """The rows of each step, those of all ranks together in order."""
    found = {}
    for path in sorted(Path(out).glob("rank*.jsonl")):
        for line in path.read_text().splitlines():
            told = json.loads(line)
            found.setdefault(told["step"], []).extend(told["rows"])
    return found


def last_checkpoint(out):
    """The newest checkpoint of a run, and its step."""
    step = max(int(path.stem.partition("=")[2]) for path in Path(out).glob("step=*.ckpt"))
    return Path(out) / f"step={step}.ckpt", step


def expected_steps(data, kind, scratch, *, global_batch, epochs=2, slice_bytes=64_000_000):
    """What an uninterrupted run sees, computed from the plan alone, without Lightning.

    The last step of an epoch has the rows that are left. There is more than one such row, so
    that up to two processes share it without a change to the steps before.
    """
    from penstock.sources.slices import cut

    kept, cut.__kwdefaults__["slice_bytes"] = cut.__kwdefaults__["slice_bytes"], slice_bytes
    try:
        store = build(data / "train.txt", scratch, eos=kind != "padded", documents="lines")
    finally:
        cut.__kwdefaults__["slice_bytes"] = kept
    if kind == "padded":
        rows, shuffle = Documents(store, LENGTH), "full"
    elif kind == "preprocessed":
        rows = Windows(data / "owt_train_preprocessed.npy", LENGTH, tail="pad")
        shuffle = "full"
    else:
        rows, shuffle = Windows(store, LENGTH, tail="pad"), "part"
    plan = Plan(rows, seed=0, shuffle=shuffle)
    assert len(rows) % global_batch > 1
    _, _, samples = plan.locate(np.arange(epochs * len(rows)))
    read = rows.read(samples)
    hashes = []
    for number, tokens in enumerate(read["tokens"]):
        ids = tokens[:LENGTH].astype(np.int64)
        if kind == "padded":
            ids = ids[read["attention_mask"][number] != 0]
        hashes.append(zlib.crc32(ids.tobytes()))
    found = []
    for epoch in range(epochs):
        once = hashes[epoch * len(rows) : (epoch + 1) * len(rows)]
        found += [once[at : at + global_batch] for at in range(0, len(once), global_batch)]
    return dict(enumerate(found))
