"""A run of a minute, for `penstock demo`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.order.plan import Plan
from penstock.rows.windows import Windows
from penstock.train.job import Job, Outcome, Tell, Training
from penstock.train.model import SIZES
from penstock.train.optimize import Optimization
from penstock.train.run import train

__all__ = ["demo_run"]


def demo_run(
    store: Any,
    output: str | Path,
    *,
    val: Any = None,
    seconds: float = 60.0,
    tell: Tell | None = None,
) -> Outcome:
    """Train the smallest model on a store for so long; `output`/curve.svg is the picture.

    Args:
        store: A store to train on, or its path.
        output: Where the run goes; one that is there is gone on with.
        val: A store to validate on.
        seconds: How long.
        tell: As in `penstock.train.run.train`.
    """
    length = 128
    rows = Windows(store, length)
    manifest = rows.stream.members[0].manifest  # type: ignore[union-attr]
    vocab_size = int(manifest.contents["tokenizer"]["vocab_size"])
    shape = replace(SIZES["nano"], vocab_size=vocab_size, positions="rotary")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    job = Job(
        plan=Plan(rows),
        val=None if val is None else Windows(val, length),
        shape=shape,
        training=Training(
            max_minutes=seconds / 60,
            batch_size=4,
            val_every=25,
            val_rows=32,
            save_every=1_000_000,
            keep_last=1,
        ),
        optimization=Optimization(learning_rate=3e-3, warmup_steps=20, betas=(0.9, 0.99)),
        output=Path(output),
    )
    return train(job, device=device, tell=tell)
