"""Where a run ends, and what the next loop over it reads.

    epochs=2, 10 rows     0 ──────── 10 ──────── 20 ──────── 30 ──────── 40     positions
                          ├──── first loop ─────┤├───── second loop ────┤
    steps=5               ├── each loop ──┤                                 starts over, or is over

A pass is what one loop over a loader reads. With `epochs=` the next pass continues with the
epochs that follow: in a new order if the plan is shuffled, and in the same order if it is not.
With `steps=` an unshuffled run starts over, because it is a subset for validation; a shuffled
one is a training run, and it is over. Which pass a position belongs to follows from the
position, so a state needs nothing else.
"""

import warnings
from typing import Any

from penstock.loader.arguments import run_end
from penstock.order.integers import END

__all__ = ["Extent"]


class Extent:
    """The passes of a run: where each begins and ends, in positions.

    Args:
        plan: The order of the rows.
        sizes: Rows of a global batch, by the position from which each is in force.
        epochs: As the loader was given.
        steps: Likewise.
    """

    def __init__(
        self, plan: Any, sizes: dict[int, int], epochs: int | None, steps: int | None
    ) -> None:
        self._asked = (plan, sizes, epochs, steps)
        self.by_epochs = epochs is not None
        self.rows = run_end(*self._asked)
        """The rows of a pass; None where it has no end, or none that is known yet."""
        self._warned = False

    def find(self) -> int | None:
        """The rows of a pass, also where the store was still growing when this was made."""
        if self.rows is None:
            self.rows = run_end(*self._asked)
        return self.rows

    @property
    def limit(self) -> int:
        """The last position that a run can be at."""
        return END if self.rows is None or self.by_epochs else self.rows

    def span(self, position: int) -> tuple[int, int | None]:
        """The pass that a position belongs to: where it begins, and where it ends if it does."""
        if self.rows is None or not self.by_epochs:
            return 0, self.rows
        start = position // self.rows * self.rows
        return start, start + self.rows

    def after(self, end: int) -> int | None:
        """The position at which the next pass begins; None, and one warning, if there is none."""
        if self.by_epochs:
            return end
        plan, _, _, steps = self._asked
        if plan.shuffle == "none":
            return 0
        if not self._warned:
            self._warned = True
            of = f"its steps={steps:,} were" if steps is not None else "all of its rows were"
            more = "a larger steps=" if steps is not None else "a larger max_epochs"
            warnings.warn(
                f"This run is over: {of} read, so this loop has no batches. Give {more} to train "
                "further, or call loader.seek(0) to read the same batches again.",
                stacklevel=4,
            )
        return None
