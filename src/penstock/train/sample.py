"""A few words from a model."""

from typing import Any

import torch

from penstock.digest import derive_key
from penstock.errors import TrainError
from penstock.train.model import GPT

__all__ = ["write_on"]


@torch.no_grad()
def write_on(
    model: GPT,
    tokens: list[int],
    *,
    num_tokens: int = 100,
    temperature: float = 0.8,
    top: int = 50,
    seed: int = 0,
    vocab_size: int | None = None,
) -> list[int]:
    """`tokens` and what the model writes after them; the same for the same seed.

    Args:
        model: Any; its rows' length is as far back as it looks.
        tokens: What to go on from, at least one.
        num_tokens: How many to write.
        temperature: 1 draws as the model says, less is more cautious.
        top: Only so many of the likeliest tokens are drawn from.
        seed: Of the draws.
        vocab_size: Only ids below it are drawn; a model may know more than its tokenizer.

    Raises:
        TrainError: what the model computes are no numbers.
    """
    device = model.tokens.weight.device
    generator = torch.Generator(device).manual_seed(derive_key("sample", seed) >> 1)
    was_training = model.training
    model.eval()
    written = torch.tensor([tokens], device=device)
    try:
        for _ in range(num_tokens):
            logits = model(written[:, -model.shape.length :])[0, -1, :vocab_size].float()
            if not bool(logits.isfinite().all()):
                raise TrainError("The model's numbers are not finite any more.")
            likeliest, ids = (logits / temperature).topk(min(top, len(logits)))
            drawn = torch.multinomial(likeliest.softmax(0), 1, generator=generator)
            written = torch.cat([written, ids[drawn][None]], dim=1)
    finally:
        model.train(was_training)
    told: Any = written[0].tolist()
    return list(told)
