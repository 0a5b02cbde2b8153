"""Windows over a chat store, with its loss masks.

A chat store marks the tokens that are trained on: what the assistant says. `Packs` and
`Documents` know of it; `Windows` cut through conversations wherever a row ends, and are
given the marks of their targets here.
"""

from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.rows.tokens import Stream
from penstock.rows.windows import Windows

__all__ = ["Supervised", "supervised"]


@final
class Supervised:
    """Windows that say which of their targets are trained on; also rows, of the same digest.

    A loader does this by itself to windows over a store with loss masks. Before a transform it
    has to be said: `Transformed(Supervised(windows), transform)`.
    """

    gives_loss = True

    def __init__(self, windows: Windows) -> None:
        self.windows = windows
        self.length = windows.length

    def __len__(self) -> int:
        return len(self.windows)

    def __repr__(self) -> str:
        return f"Supervised({self.windows!r})"

    def __getattr__(self, name: str) -> Any:
        if name == "windows" or name.startswith("_"):  # not there yet, while being unpickled
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.windows, name)

    @property
    def digest(self) -> str:
        """That of the windows: the marks are part of the store."""
        return self.windows.digest

    def read(self, samples: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The rows `samples`, with `target_mask` (rows, length)."""
        starts = np.asarray(samples, np.int64) * self.windows.stride
        # Of the tokens after the inputs: it is the target's mark that counts.
        mask = _marks(self.windows.stream, starts + 1, self.length)
        return {**self.windows.read(samples), "target_mask": mask}


def supervised(name: str, rows: Any) -> Any:
    """Rows that give the loss masks of their stores, where those have some.

    Raises:
        PlanError: they are transformed without; the message names the source, `name`.
    """
    stream = getattr(rows, "stream", None)
    if not isinstance(stream, Stream) or not stream.has_loss or hasattr(rows, "gives_loss"):
        return rows
    if isinstance(rows, Windows):
        return Supervised(rows)
    raise PlanError(
        f'Source "{name}" is a {type(rows).__name__} over a store with loss masks, which it does '
        "not give: tokens would be trained on that are marked not to be. Use Packs or Documents, "
        "or say before the transform: Transformed(Supervised(windows), …), of "
        "penstock.rows.supervised."
    )


def _marks(stream: Stream, starts: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    """The marks of `length` tokens from each of `starts` on; False past the end."""
    marks = np.zeros((len(starts), length), np.uint8)
    numbers = np.searchsorted(stream.ends, starts, side="right")
    for row, (start, number) in enumerate(zip(starts.tolist(), numbers.tolist(), strict=True)):
        done = 0
        while done < length and number < len(stream.ends):
            first = start + done - int(stream.starts[number])
            size = min(length - done, int(stream.ends[number]) - start - done)
            known = stream.loss(number)
            marks[row, done : done + size] = 1 if known is None else known[first : first + size]
            done += size
            number += 1
    return np.asarray(marks != 0)
