"""Ten thousand random runs: each window once an epoch, equal steps on all ranks.

pytest -m torture tests/torture/test_loader_epochs.py
"""

import numpy as np
import pytest
import torch

from penstock.loader import BatchFormat
from penstock.loader.loader import Loader
from penstock.order.plan import Plan
from penstock.order.shuffle import Block

pytestmark = pytest.mark.torture
torch.set_num_threads(1)

CONFIGURATIONS = 10_000


class Numbered:
    """Rows whose every token is the number of the row."""

    length = 1

    def __init__(self, num_rows, part_rows):
        self._num_rows = num_rows
        self.part_rows = part_rows
        self.digest = f"numbered {num_rows}"

    def __len__(self):
        return self._num_rows

    def read(self, samples):
        return {"tokens": np.repeat(samples[:, None], 2, axis=1)}


def configuration(random):
    sizes = random.integers(1, 120, size=random.integers(1, 4))
    sources = {}
    for number, size in enumerate(sizes.tolist()):
        cuts = np.sort(random.integers(0, size + 1, size=3))
        parts = np.diff(cuts, prepend=0, append=size).tolist()
        sources[f"source {number}"] = Numbered(size, parts)
    shuffles = ["full", "none", "part", "block", Block(rows=3, group=4)]
    plan = Plan(
        sources, seed=int(random.integers(2**62)), shuffle=shuffles[random.integers(len(shuffles))]
    )
    return plan, {
        "batch_size": int(random.integers(1, 17)),
        "epochs": int(random.integers(1, 4)),
        "world_size": int(random.integers(1, 9)),
        "drop_last": bool(random.integers(2)),
        "prefetch": int(random.choice([0, 0, 0, 1, 4])),
    }


def test_every_epoch_holds_each_window_once_and_ranks_take_equal_steps(figure):
    windows = 0
    for number in range(CONFIGURATIONS):
        plan, settings = configuration(np.random.default_rng(number))
        world_size, epochs = settings["world_size"], settings["epochs"]
        ranks = [
            list(Loader(plan, rank=rank, format=BatchFormat(ids=True), **settings))
            for rank in range(world_size)
        ]
        total = len(plan) * epochs
        size = settings["batch_size"] * world_size
        steps = total // size if settings["drop_last"] else -(-total // size)

        assert {len(batches) for batches in ranks} == {steps}, number
        read = [batch for step in zip(*ranks, strict=True) for batch in step]
        rows = torch.cat(
            [
                torch.stack([batch[name] for name in ("position", "epoch", "source", "sample")])
                for batch in read
            ]
            or [torch.zeros(4, 0, dtype=torch.int64)],
            dim=1,
        )
        filled = rows[0] == -1
        rows = rows[:, ~filled]
        assert int(filled.sum()) == max(0, steps * size - total), number
        assert rows[0].tolist() == list(range(min(total, steps * size))), number
        # Of the last epoch, what the dropped end leaves; of the others, everything.
        for epoch in range(epochs):
            held = {tuple(row) for row in rows[2:, rows[1] == epoch].T.tolist()}
            count = int((rows[1] == epoch).sum())
            assert len(held) == count, number
            assert count == max(0, min(len(plan), rows.shape[1] - epoch * len(plan))), number
        for batch in read:
            targets = batch["targets"][:, 0]
            right = torch.where(batch["position"] == -1, -100, batch["sample"])
            assert torch.equal(targets, right), number
        windows += rows.shape[1]
    figure(
        f"epochs: {CONFIGURATIONS:,} random configurations, {windows:,} rows: each window once an "
        "epoch, equal steps on all ranks"
    )
