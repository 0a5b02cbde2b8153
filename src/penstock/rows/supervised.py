"""Windows over a chat store, with its loss masks.

The loss mask of a chat store marks the tokens to train on: what the assistant says. `Packs` and
`Documents` read it themselves. `Windows` cut conversations wherever a row ends; `Supervised` adds
the masks of their targets.
"""

from typing import final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.rows.protocol import Fields, Integers, Rows, WrappedRows
from penstock.rows.tokens import Stream
from penstock.rows.windows import Windows

__all__ = ["Supervised", "supervised"]


@final
class Supervised(WrappedRows):
    """Windows with `target_mask`, which marks the targets to train on; the digest is the same.

    A loader wraps windows over a store with loss masks by itself. Before a transform you must do
    it: `Transformed(Supervised(windows), transform)`.
    """

    def __init__(self, windows: Windows) -> None:
        super().__init__(windows)
        self.windows = windows
        self.gives_loss = True

    def __repr__(self) -> str:
        return f"Supervised({self.windows!r})"

    def read(self, samples: Integers) -> Fields:
        """Return the rows `samples`, with `target_mask` (rows, length)."""
        starts = np.asarray(samples, np.int64) * self.windows.stride
        # Targets are one token after the inputs, and the mask of the target counts.
        mask = _loss_masks(self.windows.stream, starts + 1, self.length)
        return {**self.windows.read(samples), "target_mask": mask}


def supervised(name: str, rows: Rows) -> Rows:
    """Return rows that give the loss masks of their stores, if the stores have any.

    Raises:
        PlanError: the rows are transformed without masks; the message names the source, `name`.
    """
    if rows.stream is None or not rows.stream.has_loss or rows.gives_loss:
        return rows
    if isinstance(rows, Windows):
        return Supervised(rows)
    raise PlanError(
        f'Source "{name}" is a {rows.type_name} over a store with loss masks, which it does not '
        "return. The model would train on tokens that are marked not to be trained on. Use Packs "
        "or Documents, or wrap the windows before the transform: Transformed(Supervised(windows), "
        "…), with Supervised from penstock.rows."
    )


def _loss_masks(stream: Stream, starts: Integers, length: int) -> NDArray[np.bool_]:
    """Return the loss masks of `length` tokens from each of `starts`; False past the end."""
    masks = np.zeros((len(starts), length), np.uint8)
    numbers = np.searchsorted(stream.ends, starts, side="right")
    for row, (start, number) in enumerate(zip(starts.tolist(), numbers.tolist(), strict=True)):
        # A row may reach into the next pieces.
        done = 0
        while done < length and number < len(stream.ends):
            first = start + done - int(stream.starts[number])
            size = min(length - done, int(stream.ends[number]) - start - done)
            known = stream.loss(number)
            # A part without a mask trains on every token.
            masks[row, done : done + size] = 1 if known is None else known[first : first + size]
            done += size
            number += 1
    return np.asarray(masks != 0)
