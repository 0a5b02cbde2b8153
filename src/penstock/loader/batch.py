"""Arrays to the tensors that a training loop wants.

    tokens    t0 t1 t2 t3 t4        (rows, length + 1)
    inputs    t0 t1 t2 t3           two views of one buffer; targets are copied only
    targets      t1 t2 t3 t4        where some are ignored (-100)

`format="hf"` gives `input_ids` and `labels` unshifted, as `model(**batch)` expects, which
shifts them itself: shifted tensors under these names would be shifted twice, in silence.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from functools import partial
from itertools import count, pairwise
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.loader.device import DeviceCopy
from penstock.loader.read import IDS, IGNORED, Block
from penstock.order.steps import PADDING
from penstock.rows.documents import narrowed
from penstock.rows.pieces import Side
from penstock.rows.windows import cu_seqlens

__all__ = ["Format", "Made", "Maker", "Shape", "host_tensors"]

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


_NOT_FOR_HF = ("document_ids", "cu_seqlens")

Dress = Callable[[dict[str, torch.Tensor]], Any]


class Made(NamedTuple):
    """A batch that is ready to be handed out."""

    step: int
    stop: int  # the position after it
    batch: Any
    fingerprint: int
    finish: Callable[[], None] | None  # what is left to do, on the reader's thread


class Maker:
    """Batches of one shape, for one device."""

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        *,
        narrow: bool,
        end: int | None,
        side: Side | None,
        whole_documents: bool,
    ) -> None:
        """What batches look like.

        Args:
            shape: Keys, and the length of rows.
            device: Where they go.
            narrow: Whether ids stay as narrow as they are stored.
            end: The position at which the run ends, where it does.
            side: Where rows are padded, if to the widest of their step.
            whole_documents: Whether some rows begin a document.
        """
        self._shape = shape
        self._device = device
        self._narrow = narrow
        self._end = end
        self._side = side
        self._for_hf = shape.format == "hf"
        self._whole_documents = whole_documents

    def ending(self, end: int | None) -> Self:
        """The same for a run of which it is known by now where it ends."""
        other = copy(self)
        other._end = end
        return other

    def batches(self, block: Block, copy: DeviceCopy | None = None) -> Iterator[Made]:
        """The batches of a block, one a step, each made when it is asked for."""
        made = self._plain(block) if self._is_plain(block) else self._any(block, copy)
        stops = [stop if self._end is None else min(stop, self._end) for _, stop in block.spans]
        steps = count(block.first_step)
        fields = zip(steps, stops, block.fingerprints, made, strict=False)
        for step, stop, fingerprint, (batch, finish) in fields:
            yield Made(step, stop, batch, fingerprint, finish)

    def _is_plain(self, block: Block) -> bool:
        """Whether batches are nothing but inputs and targets of full rows, on the CPU."""
        return (
            block.targets is None
            and not block.extras
            and block.widths is None
            and not self._narrow
            and not self._shape.ids
            and not self._shape.lengths
            and self._shape.format != "hf"
            and self._device.type == "cpu"
        )

    def _plain(self, block: Block) -> Iterator[tuple[Any, None]]:
        """What `Shape.dress` gives, by NumPy's views, which cost a tenth of torch's."""
        tokens, as_tuple = block.tokens, self._shape.format == "tuple"
        for start, stop in pairwise(block.edges):
            wide = tokens[start:stop].astype(np.int64)
            inputs, targets = torch.from_numpy(wide[:, :-1]), torch.from_numpy(wide[:, 1:])
            yield (inputs, targets) if as_tuple else {"inputs": inputs, "targets": targets}, None

    def _any(
        self, block: Block, copy: DeviceCopy | None
    ) -> Iterator[tuple[Any, Callable[[], None] | None]]:
        """Any batch, with what is left to do when it is handed out."""
        for number, (start, _) in enumerate(block.spans):
            length = self._shape.length_at(start)
            arrays = host_tensors(block, number, self._shape, length)
            if block.widths is not None:
                arrays = narrowed(arrays, block.widths[number], length, self._side or "right")
            if copy is not None:
                dress = self._dress(arrays, length)
                yield copy.put(arrays, dress, narrow=self._narrow)
            else:
                yield self._on_device(arrays, length), None

    def _on_device(self, arrays: dict[str, NDArray[Any]], length: int) -> Any:
        """Any batch, where no stream of the device has to be waited for."""
        dress = self._dress(arrays, length)
        if not self._narrow:
            arrays |= {name: arrays[name].astype(np.int64) for name in IDS if name in arrays}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self._device.type != "cpu":
            tensors = {name: each.to(self._device) for name, each in tensors.items()}
        return dress(tensors)

    def _dress(self, arrays: dict[str, NDArray[Any]], length: int) -> Dress:
        """What makes a batch of tensors; takes out of `arrays` what the batch does not have."""
        dress: Dress = _as_they_are if self._narrow else partial(self._shape.dress, length=length)
        if self._for_hf:
            # These models take no such arguments; position_ids say the same.
            for name in _NOT_FOR_HF:
                arrays.pop(name, None)
            if self._whole_documents and "labels" not in arrays:
                return partial(_without_first, dress)
        return dress


def _without_first(dress: Dress, tensors: dict[str, torch.Tensor]) -> Any:
    """A batch whose rows' first labels count for nothing, also after rows are laid end to end."""
    batch = dress(tensors)
    batch["labels"][:, 0] = IGNORED
    return batch


def _as_they_are(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors
