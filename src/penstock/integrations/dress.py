"""The loader's batches with Hugging Face's names: `input_ids`, `attention_mask`, `labels`.

tokens           a b c .        a row of three tokens, padded
                 d e . .
attention_mask   1 1 1 0
labels           a b c -        "same": a label wherever there is a token; - is -100
labels           b c - -        "shifted": the next token's, so the last has none

Packed rows have `position_ids` instead of `attention_mask`: given both, models of transformers
ignore where documents begin, and documents see each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.loader.packed import one_row
from penstock.rows.packs import Packs
from penstock.rows.protocol import Fields, Integers, WrappedRows
from penstock.rows.tokens import Stream

__all__ = ["MaskedPacks", "OneRow", "PaddedDress", "named_pair"]


def named_pair(batch: Any) -> Any:
    """A dict of `input_ids` and `labels`, and `position_ids` where rows have them.

    The tensors are contiguous, as `.view(-1)` needs them.
    """
    inputs, labels, *_ = batch.values()
    pair = {"input_ids": inputs.contiguous(), "labels": labels.contiguous()}
    if "position_ids" in batch:
        pair["position_ids"] = batch["position_ids"].long()
    return pair


@dataclass(frozen=True)
class PaddedDress:
    """Narrow rows with a mask to `input_ids`, `labels`, and `attention_mask` or `position_ids`."""

    pad_id: int
    shifted: bool
    exact: bool
    """Whether every token has a label; otherwise those that are no target have none."""

    def __call__(self, arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The batch that a user sees."""
        tokens = arrays["tokens"].long()
        counted = arrays.get("target_mask")
        if counted is None:
            counted = torch.ones_like(tokens[:, 1:], dtype=torch.bool)
        if "attention_mask" in arrays:
            real = arrays["attention_mask"] != 0
        else:  # of a window, the first token and every target hold text
            real = torch.cat((torch.ones_like(counted[:, :1]), counted[:, :-1]), dim=1)
        input_ids = tokens[:, :-1].masked_fill(~real, self.pad_id)
        if self.shifted:
            labels = tokens[:, 1:].masked_fill(~counted, -100)
        else:
            trained = real
            if not self.exact:
                begins = torch.zeros_like(real[:, :1])
                trained = real & torch.cat((begins, counted[:, :-1]), dim=1)
            labels = input_ids.masked_fill(~trained, -100)
        if "position_ids" in arrays:
            positions = arrays["position_ids"].long()
            return {"input_ids": input_ids, "labels": labels, "position_ids": positions}
        return {"input_ids": input_ids, "attention_mask": real.long(), "labels": labels}


@dataclass(frozen=True)
class OneRow:
    """Packed batches as one row each, for attention that finds documents in one row only."""

    dress: Callable[[Any], dict[str, torch.Tensor]]

    def __call__(self, batch: Any) -> dict[str, torch.Tensor]:
        """The batch of `dress`, its rows end to end."""
        return one_row(self.dress(batch))


class MaskedPacks(WrappedRows):
    """Packs that also return, as `attention_mask`, which columns hold a token.

    The mask decides what padding holds and which labels count; batches do not have it.
    """

    def __init__(self, packs: Packs) -> None:
        super().__init__(packs)
        self.packs = packs

    def __repr__(self) -> str:
        return repr(self.packs)

    @property
    def padding_share(self) -> float:
        """The share of all columns that hold no token."""
        return self.packs.padding_share

    def over(self, stream: Stream) -> "MaskedPacks":
        """Return the same rows over a later snapshot of a store that is being written."""
        return MaskedPacks(self.packs.over(stream))

    def read(self, samples: Integers) -> Fields:
        """The rows `samples`, as packs give them, and the mask (rows, length)."""
        fields = self.packs.read(samples)
        # A row has one token more than targets.
        real = np.arange(self.length) <= fields["num_targets"][:, None]
        return {**fields, "attention_mask": real.view(np.uint8)}
