"""Arrays to the tensors that a training loop wants.

    tokens    t0 t1 t2 t3 t4        (rows, length + 1)
    inputs    t0 t1 t2 t3           two views of one buffer; targets are copied only
    targets      t1 t2 t3 t4        where some are ignored (-100)

`format="hf"` gives `input_ids` and `labels` unshifted, as `model(**batch)` expects, which
shifts them itself: shifted tensors under these names would be shifted twice, in silence.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.loader.assemble import IGNORED, Block
from penstock.order.shard import PADDING
from penstock.rows.documents import cu_seqlens

__all__ = ["Format", "Shape", "host_tensors"]

Format = Literal["dict", "tuple", "hf"]

Tensors = dict[str, torch.Tensor]


class Shape:
    """How batches look: their format, and how long their rows are at each position."""

    def __init__(
        self, format: Format, length: int, lengths: Mapping[int, int] | None, *, ids: bool
    ) -> None:
        if format not in ("dict", "tuple", "hf"):
            raise PlanError(f'format={format!r} is not "dict", "tuple" or "hf".')
        if ids and format == "tuple":
            raise PlanError('ids=True needs names for what it adds; use format="dict".')
        self.format = format
        self.ids = ids
        self.length = length
        self.lengths = sorted((lengths or {}).items())
        for position, each in self.lengths:
            if each < 1 or length % each:
                raise PlanError(
                    f"lengths={dict(self.lengths)} asks for rows of {each:,} tokens from position "
                    f"{position:,} on; rows of {length:,} are cut into equal ones, so it must "
                    "divide that."
                )

    def length_at(self, position: int) -> int:
        """The length of rows in a batch that begins at `position`."""
        found = self.length
        for start, length in self.lengths:
            if start > position:
                break
            found = length
        return found

    def row_targets(self, length: int) -> int:
        """Targets of a full row of windows, while rows are cut to `length`.

        >>> [Shape(format, 8, None, ids=False).row_targets(4) for format in ("dict", "hf")]
        [8, 6]
        """
        return self.length if self.format != "hf" else self.length - self.length // length

    def overlaps(self, fields: Iterable[str]) -> bool:
        """Whether shorter rows overlap by one token: where each predicts the next, unshifted."""
        return self.format == "hf" and "labels" not in fields

    def dress(self, tensors: Tensors, length: int) -> Any:
        """The batch as the user asked for it, in rows of `length`.

        `tensors` holds `tokens` (rows, length + 1) int64, and may hold `target_mask`, `labels`
        and `targets` in the rows of the block, and other fields in rows of `length` already.
        `labels` are what places predict of themselves (masked tokens), which nothing shifts, and
        `targets` what they predict of the next, where a transform has changed the tokens.
        """
        overlap = self.overlaps(tensors)
        tokens = tensors.pop("tokens")
        inputs = tokens[:, :-1]
        mask = tensors.pop("target_mask", None)
        labels, following = tensors.pop("labels", None), tensors.pop("targets", None)
        shifted = self.format != "hf" or labels is not None
        if labels is not None:
            targets = labels
        elif following is not None:
            targets = following
            if not shifted:  # the first label is one that models leave out
                targets = torch.cat((inputs[:, :1], targets[:, :-1]), dim=1)
        else:
            targets = tokens[:, 1:] if shifted else inputs
        if mask is not None:
            targets = targets.masked_fill(~(mask if shifted else _unshifted(mask)), IGNORED)
        elif not shifted:
            # Code for these models writes -100 into labels; the inputs must not change with them.
            targets = targets.clone()
        if length != self.length:
            if overlap:
                inputs, targets = (each.unfold(1, length, length - 1) for each in (inputs, targets))
                inputs, targets = (each[:, : self.length // length] for each in (inputs, targets))
            inputs, targets = inputs.reshape(-1, length), targets.reshape(-1, length)
        if self.format == "tuple":
            if tensors:
                raise PlanError(
                    f"These rows also give {', '.join(tensors)}, which a tuple of two has no place "
                    'for. Use format="dict".'
                )
            return inputs, targets
        names = ("input_ids", "labels") if self.format == "hf" else ("inputs", "targets")
        return {names[0]: inputs, names[1]: targets, **tensors}


def _unshifted(mask: torch.Tensor) -> torch.Tensor:
    """Whether each input is a target of the one before it; the first never is counted."""
    return torch.cat((mask[:, :1], mask[:, :-1]), dim=1)


def _cut(rows: NDArray[Any], length: int, overlap: bool) -> NDArray[Any]:
    """Rows of `length`, as many as fill a row; with `overlap`, by one token.

    >>> _cut(np.arange(8)[None], 4, overlap=True).tolist()
    [[0, 1, 2, 3], [3, 4, 5, 6]]
    """
    if overlap:
        count = rows.shape[1] // length
        rows = sliding_window_view(rows, length, axis=1)[:, :: length - 1][:, :count]
    return rows.reshape(-1, length)


def host_tensors(block: Block, number: int, shape: Shape, length: int) -> dict[str, NDArray[Any]]:
    """The arrays of one step of a block, ids narrow, as they go to the device.

    Ids come in the rows of the block, everything else in rows of `length`.
    """
    rows = slice(block.edges[number], block.edges[number + 1])
    arrays: dict[str, NDArray[Any]] = {"tokens": block.tokens[rows]}
    if block.targets is not None and not block.targets[rows].all():
        arrays["target_mask"] = block.targets[rows]
    overlap = length != shape.length and shape.overlaps(block.extras)
    for name, values in block.extras.items():
        whole = name in ("labels", "targets")  # cut with the inputs
        arrays[name] = values[rows] if whole else _cut(values[rows], length, overlap)
    if "position_ids" in arrays:
        # A row that was cut begins anew, as any row that begins inside a document.
        columns = np.arange(length, dtype=np.int32)
        arrays["position_ids"] = np.minimum(arrays["position_ids"], columns)
        arrays["document_ids"] = arrays["document_ids"] - arrays["document_ids"][:, :1]
        arrays["cu_seqlens"] = cu_seqlens(arrays["position_ids"])
    if shape.ids:
        located = np.repeat(block.located[:, rows], (block.tokens.shape[1] - 1) // length, axis=1)
        located[:, located[3] == PADDING] = PADDING
        arrays |= dict(zip(("source", "epoch", "sample", "position"), located, strict=True))
    return arrays
