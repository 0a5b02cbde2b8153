"""Evaluation: every token is a target exactly once, over all ranks."""

import pytest
import torch

from penstock.loader.loader import Loader
from penstock.rows.windows import Windows


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("length", "rows"), [(16, 8), (1000, 1), (6_800, 3), (7, 64)])
def test_every_token_is_a_target_exactly_once(store, flat, world_size, length, rows):
    ranks = [
        Loader(
            Windows(store, length, tail="pad"),
            rows,
            rank=rank,
            world_size=world_size,
            shuffle="none",
            epochs=1,
            drop_last=False,
        )
        for rank in range(world_size)
    ]
    found = []
    for batches in zip(*ranks, strict=True):  # equally many steps on all
        for batch in batches:
            assert batch["inputs"].shape == (rows, length)
            counted = batch["targets"] != -100
            found += batch["targets"][counted].tolist()

    assert found == flat[1:]  # nothing comes before the first


def test_a_loss_over_ranks_equals_the_loss_over_one(store):
    table = torch.randn(257, 257, generator=torch.Generator().manual_seed(0))

    def loss(world_size):
        total, count = 0.0, 0
        for rank in range(world_size):
            loader = Loader(
                Windows(store, 24, tail="pad"),
                5,
                rank=rank,
                world_size=world_size,
                shuffle="none",
                epochs=1,
                drop_last=False,
            )
            for inputs, targets in ((batch["inputs"], batch["targets"]) for batch in loader):
                logits = table[inputs].flatten(0, 1).double()
                losses = torch.nn.functional.cross_entropy(
                    logits, targets.flatten(), reduction="sum", ignore_index=-100
                )
                total += losses.item()
                count += (targets != -100).sum().item()
        return total / count, count

    alone = loss(1)
    for world_size in (2, 3, 5):
        assert loss(world_size) == pytest.approx(alone, rel=1e-12)


def test_an_evaluation_is_repeated_from_the_beginning(store):
    loader = Loader(Windows(store, 16, tail="pad"), 8, shuffle="none", epochs=1, drop_last=False)
    first = [batch["targets"] for batch in loader]
    loader.seek(0)
    second = [batch["targets"] for batch in loader]

    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
