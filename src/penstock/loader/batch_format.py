"""The format of batches: the names of their fields, and which tokens are targets.

    tokens    t0 t1 t2 t3 t4 t5 t6 t7 t8        length=4, stride=4
    "dict"    t0 t1 t2 t3 -> t1 t2 t3 t4        the next row trains on t5 t6 t7 t8
    "hf"      t0 t1 t2 t3 -> t1 t2 t3           the next row trains on t5 t6 t7, and no row on t4

`format="hf"` returns `input_ids` and `labels` unshifted, as `model(**batch)` expects, because the
model shifts them. Shifted tensors under these names would be shifted twice without an error.
Batches with `position_ids` also have `use_cache=False`, which the model takes as an argument.

With "hf" the model never sees the token after the inputs of a row, and the first token of a row is
not a target. Rows that overlap by one token lose no target.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

import torch

from penstock.errors import PlanError
from penstock.loader.packed import without_cache
from penstock.rows.protocol import Rows

IGNORED = -100
"""The target that losses ignore."""

Format = Literal["dict", "tuple", "hf", "narrow"]
Tensors = dict[str, torch.Tensor]
Batch = Any
"""One of the types below; which one depends on the format."""


class _RowFields(TypedDict, total=False):
    """The fields that some rows add, and those of `BatchFormat(ids=True)`."""

    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    use_cache: bool
    document_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    source: torch.Tensor
    epoch: torch.Tensor
    sample: torch.Tensor
    position: torch.Tensor


class TargetBatch(_RowFields):
    """A batch of `format="dict"`: the target of an input is the next token."""

    inputs: torch.Tensor
    targets: torch.Tensor


class LabelBatch(_RowFields):
    """A batch of `format="hf"`, and of the integrations that use these names."""

    input_ids: torch.Tensor
    labels: torch.Tensor


class NarrowBatch(_RowFields):
    """A batch of `format="narrow"`: ids in the dtype of the store."""

    tokens: torch.Tensor
    target_mask: NotRequired[torch.Tensor]


PairBatch = tuple[torch.Tensor, torch.Tensor]
"""A batch of `format="tuple"`: inputs and targets."""


@dataclass(frozen=True, kw_only=True)
class BatchFormat:
    """The format of a loader's batches, with options that a name such as "hf" cannot set.

    >>> BatchFormat(fields="hf", ids=True)
    BatchFormat(fields='hf', ids=True, fingerprint='samples')
    """

    fields: Format = "dict"
    """"dict" (`inputs` and `targets`, shifted), "tuple" of the same, "hf" (`input_ids` and
    `labels`, not shifted), or "narrow": `tokens` (rows, length + 1) in the dtype of the store, and
    `target_mask` in batches that have targets to ignore."""

    ids: bool = False
    """Add `source`, `epoch`, `sample` and `position` of each row."""

    fingerprint: Literal["samples", "tokens"] = "samples"
    """Whether a fingerprint covers which rows a batch has, or also their tokens."""

    def __post_init__(self) -> None:
        if self.fields not in ("dict", "tuple", "hf", "narrow"):
            raise PlanError(f'format={self.fields!r} is not "dict", "tuple", "hf" or "narrow".')
        if self.fingerprint not in ("samples", "tokens"):
            raise PlanError(f'fingerprint={self.fingerprint!r} is not "samples" or "tokens".')
        if self.ids and self.fields == "tuple":
            raise PlanError(
                'ids=True adds named fields, which a tuple does not have. Use fields="dict".'
            )


class Shape:
    """A batch format for rows of a known length."""

    def __init__(self, format: BatchFormat, length: int) -> None:
        self.format = format.fields
        self.ids = format.ids
        self.length = length

    @property
    def row_targets(self) -> int:
        """How many targets a full row of windows has.

        >>> [Shape(BatchFormat(fields=each), 8).row_targets for each in ("dict", "hf")]
        [8, 7]
        """
        return self.length - (self.format == "hf")

    def is_shifted_later(self, fields: Iterable[str]) -> bool:
        """Return whether labels are the inputs, which the model shifts."""
        return self.format == "hf" and "labels" not in fields

    def to_batch(self, tensors: Tensors) -> Batch:
        """Return the batch in the user's format.

        `tensors` holds `tokens` (rows, length + 1) int64, and may hold `target_mask`, `labels`,
        `targets` and other fields of `length` columns. `labels` are what each column must predict
        for itself (masked tokens); they are never shifted. `targets` are what each column must
        predict for the next column, if a transform changed `tokens`.
        """
        tokens = tensors.pop("tokens")
        inputs = tokens[:, :-1]
        mask = tensors.pop("target_mask", None)
        labels, following = tensors.pop("labels", None), tensors.pop("targets", None)
        shifted = self.format != "hf" or labels is not None
        if labels is not None:
            targets = labels
        elif following is not None:
            targets = following
            if not shifted:  # models ignore the first label
                targets = torch.cat((inputs[:, :1], targets[:, :-1]), dim=1)
        else:
            targets = tokens[:, 1:] if shifted else inputs
        if mask is not None:
            targets = targets.masked_fill(~(mask if shifted else _unshifted(mask)), IGNORED)
        elif not shifted:
            # Code for these models writes -100 into labels, which must not change the inputs.
            targets = targets.clone()
        if self.format == "tuple":
            if tensors:
                raise PlanError(
                    f"These rows also have {', '.join(tensors)}, which a tuple of two cannot hold. "
                    'Use format="dict".'
                )
            return inputs, targets
        names = ("input_ids", "labels") if self.format == "hf" else ("inputs", "targets")
        batch = {names[0]: inputs, names[1]: targets, **tensors}
        return without_cache(batch) if self.format == "hf" else batch

    def unread_targets(self, sources: Mapping[str, Rows]) -> int:
        """Return how many tokens of windows are no target of any row."""
        return sum(rows.unread(self.row_targets) for rows in _windows(sources).values())

    def check_targets(self, sources: Mapping[str, Rows]) -> None:
        """Check that `format="hf"`, where the first token of a row is no target, loses no targets.

        Warns if windows do not overlap by the token that makes up for it.

        Raises:
            PlanError: rows have no target at all.
        """
        if self.format != "hf":
            return
        kept = self.row_targets
        for name, rows in _windows(sources).items():
            if not kept:
                raise PlanError(
                    'Rows of 1 token have no target with format="hf": the model shifts '
                    "labels itself, so it needs rows of 2 tokens or more."
                )
            if rows.stride is not None and rows.stride > kept:
                # The warning shows the line that called Loader: level 1 is this method, 2 is
                # Loader.__init__, and 3 is that line.
                warnings.warn(
                    f'format="hf" leaves out {_left_out(rows, rows.stride, kept)} of source '
                    f'"{name}": the model shifts labels itself, so the first token of a row '
                    "is not a target. Rows that overlap keep them: "
                    f"Windows(…, {rows.length}, stride={kept}).",
                    stacklevel=3,
                )


def _unshifted(mask: torch.Tensor) -> torch.Tensor:
    """Return whether each input is a target of the one before it; models ignore the first."""
    return torch.cat((mask[:, :1], mask[:, :-1]), dim=1)


def _windows(sources: Mapping[str, Rows]) -> dict[str, Rows]:
    """Return the sources that are windows and in which each token predicts the next one."""
    return {
        name: rows
        for name, rows in sources.items()
        if rows.stride is not None and not rows.gives_labels
    }


def _left_out(rows: Rows, stride: int, kept: int) -> str:
    """Describe the targets that this format leaves out and other formats have."""
    if rows.stream is None or not rows.stream.sealed:
        return f"{stride - kept:,} of every {stride:,} targets"
    count = rows.unread(kept) - rows.unread(rows.length)
    return f"{count:,} of {rows.stream.num_tokens - 1:,} targets"
