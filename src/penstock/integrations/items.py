"""Rows as Hugging Face's models take them: which batches, and items one by one."""

from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from penstock.errors import PlanError
from penstock.integrations.dress import MaskedPacks, PaddedDress, named_pair
from penstock.integrations.windows import Labels, check_labels
from penstock.loader.loader import Loader
from penstock.loader.packed import check_packed, keep_documents_apart
from penstock.order.plan import Plan
from penstock.rows.documents import Documents
from penstock.rows.packs import Packs
from penstock.rows.windows import Windows

__all__ = ["Formatted", "RowItems", "formatted"]


class Formatted(NamedTuple):
    """Rows, and how batches of them are made."""

    rows: Any
    dress: Any
    narrow: bool
    packed: bool
    """Whether rows hold several documents, for a model that finds them in `position_ids`."""


def formatted(rows: Any, pad_id: int | None, labels: Labels) -> Formatted:
    """What a loader needs to know to make batches of `rows`."""
    check_labels(labels)
    shifted = labels == "shifted"
    packed = not shifted and rows.gives_positions
    if isinstance(rows, Windows):
        return Formatted(rows if shifted else rows.overlapping(), named_pair, False, packed)
    if isinstance(rows, Packs):
        rows = MaskedPacks(rows)
    if not isinstance(rows, MaskedPacks | Documents):
        raise PlanError(f"{rows!r:.80} are no rows: give Windows, Packs or Documents.")
    if pad_id is None:
        pad_id = rows.pad_id if isinstance(rows, Documents) else 0
    exact = isinstance(rows, Documents) and not rows.stream.has_loss
    return Formatted(rows, PaddedDress(pad_id, shifted=shifted, exact=exact), True, packed)


class RowItems(Dataset[dict[str, torch.Tensor]]):
    """Rows one by one, as a map-style dataset: for evaluation, which any trainer may deal out.

    Items of `Windows` and `Packs` are equally long; those of `Documents` want a collator that
    pads, as `penstock.integrations.pytorch.pad_collate` or Hugging Face's. Such a collator adds an
    `attention_mask`, with which documents of `Packs` see each other: `RowsTrainer` stacks these
    itself, and a plain `Trainer` needs `data_collator=transformers.default_data_collator`.
    """

    def __init__(
        self,
        rows: Any,
        *,
        labels: Labels = "same",
        pad_id: int | None = None,
        model: Any = None,
    ) -> None:
        """Items of rows, in order.

        Args:
            rows: `Windows`, `Packs` or `Documents`, as `StepLoader` takes them.
            labels: "same", for models that shift by themselves, or "shifted".
            pad_id: What padding holds.
            model: The model that packed rows are for; `keep_documents_apart` makes it ready.
                `RowsTrainer` does this by itself.
        """
        dressed = formatted(rows, pad_id, labels)
        self.packed = dressed.packed
        """Whether items hold several documents, with `position_ids`."""
        self._unchecked = dressed.packed
        if dressed.packed and model is not None:
            keep_documents_apart(model)
        self._loader = Loader(
            Plan(dressed.rows, shuffle="none"),
            1,
            rank=0,
            world_size=1,
            format="narrow" if dressed.narrow else "hf" if labels == "same" else "dict",
            prefetch=0,
        )
        self._dress = dressed.dress
        self._length = len(dressed.rows)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index:,} is not among {self._length:,}")
        if self._unchecked:
            self._unchecked = False
            check_packed()
        self._loader.seek(index)
        batch = self._dress(self._loader.make(self._loader.step).batch)
        return {name: values[0] for name, values in batch.items()}
