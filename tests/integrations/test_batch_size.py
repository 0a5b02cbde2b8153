"""The largest batch that fits on a GPU: the search, and trials on a real one."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from penstock.integrations.batch_size import (
    largest_batch,
    largest_lightning_batch,
    largest_that_fits,
    round_down,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_the_largest_batch_is_found_in_few_trials():
    tried = []

    def fits(size, limit):
        tried.append(size)
        return size <= limit

    for limit in range(1, 200):
        tried.clear()
        assert largest_that_fits(partial(fits, limit=limit)) == limit
        assert len(tried) <= 17


@pytest.mark.parametrize("most", [1, 2, 64, 72, 100])
def test_no_size_above_the_limit_is_tried(most):
    tried = []

    assert largest_that_fits(lambda size: tried.append(size) or True, most) == most
    assert max(tried) == tried[-1] == most


@pytest.mark.parametrize("divides", [1, 12, 64, 97])
def test_rows_are_rounded_down_to_a_divisor(divides):
    for rows in range(1, 100):
        rounded = round_down(rows, divides)
        assert divides % rounded == 0
        assert rounded <= rows
        assert not [each for each in range(rounded + 1, rows + 1) if divides % each == 0]


class Model(torch.nn.Module):
    """A step whose memory grows with its rows: logits over a vocabulary."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50_257, 64)
        self.head = torch.nn.Linear(64, 50_257)
        self.dropout = torch.nn.Dropout(0.1)

    def log(self, *_):
        raise RuntimeError("no loop is running")

    def training_step(self, batch, batch_idx):
        logits = self.head(self.dropout(self.embedding(batch["input_ids"])))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss)
        return loss


@pytest.mark.gpu
@needs_gpu
def test_a_step_of_the_batch_that_was_found_fits_and_nothing_has_changed(record_property):
    """On a device of which this process may use 4 GB."""
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(4e9 / total, device)
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=device),
        precision_plugin=SimpleNamespace(forward_context=nullcontext),
    )
    torch.manual_seed(0)
    model = Model()
    before = [each.clone() for each in model.parameters()]
    drawn = torch.random.get_rng_state()
    size = largest_lightning_batch(model, trainer, 1024)

    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert next(model.parameters()).device.type == "cpu"
    assert all(each.grad is None for each in model.parameters())
    assert "log" not in model.__dict__
    record_property("figure", f"largest batch of 1,024 tokens in 4 GB: {size}")
    # Logits take 4 bytes x 50,257 x 1,024 a row; a step holds them two to four times.
    assert 3 <= size <= 10
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model.log = lambda *_: None
    for _ in range(3):
        rows = torch.zeros((size, 1024), dtype=torch.long, device=device)
        model.training_step({"input_ids": rows, "labels": rows}, 0).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.gpu
@needs_gpu
def test_a_row_that_does_not_fit_is_an_error():
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(2e8 / total, device)
    torch.cuda.empty_cache()
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=device),
        precision_plugin=SimpleNamespace(forward_context=nullcontext),
    )

    with pytest.raises(
        torch.cuda.OutOfMemoryError, match="Even one row of 1,024 tokens does not fit"
    ):
        largest_lightning_batch(Model(), trainer, 1024)


@pytest.mark.gpu
@needs_gpu
def test_the_limit_is_the_answer_if_it_fits_with_a_margin():
    """And the answer divides what it has to divide."""
    device = torch.device("cuda", 0)
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    weight = torch.ones(8, device=device, requires_grad=True)
    tried = []

    def step(rows):
        tried.append(rows)
        (weight * rows).sum().backward()

    assert largest_batch(step, [weight], device, most=64) == 64
    assert max(tried) == 72  # nine tenths of it are 64
    assert largest_batch(step, [weight], device, most=64, divides=60) == 60
    assert weight.grad is None
