"""A run: its position, the pass that the position belongs to, and the steps of the pass.

    epochs=2, 10 rows     0 ──────── 10 ──────── 20 ──────── 30 ──────── 40     positions
                          ├──── first loop ─────┤├───── second loop ────┤
    steps=5               ├── each loop ──┤                       starts over, or the run is over

A pass is what one loop over a loader reads. With `epochs=`, the next pass continues with the
epochs that follow: in a new order if the plan is shuffled, in the same order if it is not. With
`steps=`, an unshuffled run starts over, because it is a subset for validation. A shuffled run is
for training, and ends after its steps. The position determines the pass, so a state needs nothing
else.
"""

import warnings
from operator import index
from typing import SupportsIndex

from penstock.errors import PlanError, UnknownLengthError
from penstock.order.integers import END
from penstock.order.plan import Plan
from penstock.order.steps import Shard, Steps
from penstock.ranges import whole_number
from penstock.streaming.plan import StreamedPlan

AnyPlan = Plan | StreamedPlan


class Run:
    """The position of a loader, and the steps around it.

    Args:
        plan: The order of the rows.
        sizes: Rows of a global batch, by the position from which each applies.
        rank: The rank of this process.
        world_size: The number of ranks.
        epochs: How many times a pass reads all rows.
        num_steps: How many steps a pass takes, instead of `epochs`.
        drop_last: Whether to leave out the last batch of a pass if it is not full.
    """

    def __init__(
        self,
        plan: AnyPlan,
        sizes: dict[int, int],
        rank: int,
        world_size: int,
        *,
        epochs: int | None,
        num_steps: int | None,
        drop_last: bool,
    ) -> None:
        if epochs is not None and num_steps is not None:
            raise PlanError(
                f"epochs={epochs} and steps={num_steps} cannot be combined: both say where the run "
                "ends. Pass only one of them."
            )
        for name, value in (("epochs", epochs), ("steps", num_steps)):
            if value is not None and value < 1:
                raise PlanError(f"{name} must be at least 1; got {value}.")
        self.plan = plan
        self._streamed = plan if isinstance(plan, StreamedPlan) else None
        self._sizes = sizes
        self.rank, self.world_size = rank, world_size
        self._epochs, self._asked_steps = epochs, num_steps
        self._drop_last = drop_last
        self._warned = False
        self.position = 0
        self._pass_rows: int | None = None
        self.lay_out()
        self.refuse_no_step()

    def _find_pass_rows(self) -> int | None:
        """Return the number of rows of a pass; None if it has no end, or its end is unknown."""
        plan = self.plan
        if self._epochs is not None:
            rows = plan.epoch_rows
            if rows is None and self._streamed is None:
                raise PlanError(
                    f"epochs={self._epochs} is not defined for a mixture: every source has "
                    "separate epochs. Give steps= instead."
                )
            return None if rows is None else whole_number("epochs", self._epochs) * rows
        if self._asked_steps is not None:
            # Sizes may change by position, so the end of the last step has to be computed.
            end = Steps(self._sizes).span(whole_number("steps", self._asked_steps) - 1)[1]
            if end > plan.end:
                raise PlanError(
                    f"steps={self._asked_steps:,} needs {end:,} rows, but the plan ends after "
                    f"{plan.end:,}. Use fewer steps, or a larger Plan(max_epochs=…)."
                )
            return end
        return plan.end if plan.end < END else None

    def lay_out(self) -> None:
        """Compute the steps of the pass, counted from its start.

        After a resume with another batch size, the position may be inside a step. Then steps are
        counted from the position.
        """
        if self._pass_rows is None:
            self._pass_rows = self._find_pass_rows()
        rows, position, start = self._pass_rows, self.position, 0
        if rows is not None and self._epochs is not None:
            # 25 rows into passes of 10: this pass begins at 20.
            start = position // rows * rows
        self.end: int | None = None if rows is None else start + rows
        """The position after the last row of the pass; None if there is none, or it is unknown."""
        steps = Steps(self._sizes, start=start)
        # No step begins at the end of a pass, but the steps before it keep their numbers.
        ended = self.end is not None and position >= self.end
        aligned = ended or (position < END and steps.span(steps.at(position))[0] == position)
        self.steps = steps if aligned else Steps(self._sizes, start=position)
        self.shard = Shard(self.steps, rank=self.rank, world_size=self.world_size)
        """The rows of this rank in each step."""
        self._count_steps()

    def _count_steps(self) -> None:
        self.num_steps: int | None = None
        """The number of steps of the pass; None if it has no end, or its end is unknown."""
        if self.end is not None:
            self.num_steps = self.steps.count(self.end, drop_last=self._drop_last)

    def refuse_no_step(self) -> None:
        """Raise PlanError if a pass has no step, because its rows do not fill one batch."""
        if self.num_steps == 0 and self._pass_rows:
            raise PlanError(
                f"This run has {self._pass_rows:,} rows, and its first batch on all ranks together "
                f"takes {self.steps.sizes[0]:,}, so there would be no step. Use a smaller batch "
                "size, drop_last=False to pad the batch, or more epochs."
            )

    @property
    def step(self) -> int:
        """The number of the next step; `num_steps` after the last step of a pass."""
        if self.end is not None and self.position >= self.end:
            return self.num_steps or 0
        return self.steps.at(self.position)

    @property
    def limit(self) -> int:
        """The last position that the run can be at."""
        return END if self._pass_rows is None or self._epochs is not None else self._pass_rows

    def after(self, step: int) -> int:
        """Return the position after a step; a padded batch ends at the end of the pass."""
        stop = self.steps.span(step)[1]
        return stop if self.end is None else min(stop, self.end)

    def length(self) -> int:
        """Return the number of steps of a pass.

        Raises:
            UnknownLengthError: the run has no end, or the store is still being written.
        """
        if self.num_steps is None and self._streamed is not None and self._epochs is not None:
            self.find_end()
            if self.num_steps is None:
                raise UnknownLengthError(
                    "The number of steps is not known before the store is sealed; "
                    f"{self._streamed.num_rows:,} rows are known so far. Give steps= for a length."
                )
        if self.num_steps is None:
            raise UnknownLengthError(
                "This run has no end, so no length; give the loader epochs= or steps=."
            )
        return self.num_steps

    def steps_before(self, step: int) -> int:
        """Return the step before which a block that begins with `step` must end.

        That is the end of the pass, or the end of the known rows of a streamed store. The call
        waits until the rows of `step` are known. At the end of the pass, it returns `step` itself.
        """
        streamed = self._streamed
        if streamed is not None and (self.num_steps is None or step < self.num_steps):
            # Wait until all rows of the step are known, or until the store is known to end before.
            streamed.reach(self.steps.span(step)[1])
            if not streamed.complete:
                # Only steps that the known rows fill: later parts may add rows to the next step.
                known = self.steps.count(streamed.num_rows, drop_last=True)
                return known if self.num_steps is None else min(known, self.num_steps)
            self.find_end()
        return self.num_steps if self.num_steps is not None else 2**62

    def has_step(self, step: int) -> bool:
        """Return whether the pass has a step; wait until a streamed store has it or ends."""
        return step < self.steps_before(step)

    def checked_step(self, step: SupportsIndex | slice) -> int:
        """Return the number of a step that may be counted from the end."""
        if isinstance(step, slice):
            raise TypeError("A loader has no slices: take one step after the other.")
        limit, number = self.num_steps, index(step)
        if number < 0 and limit is not None:
            number += limit
        if number < 0 or (limit is not None and number >= limit):
            size = "no end" if limit is None else f"{limit:,} steps"
            raise IndexError(
                f"step {number:,} does not exist: this run has {size}, numbered from 0"
            )
        self.refuse_missing_step(number)
        return number

    def checked_position(self, position: SupportsIndex) -> int:
        """Return `position` as an int; raise if it is not in this run."""
        position = whole_number("position", position)
        if not 0 <= position <= self.limit:
            size, to = f", which has {self.limit:,} rows", f"to {self.limit:,}"
            if self.limit == END:
                size, to = "", "on"
            raise PlanError(
                f"Position {position:,} is not in this run{size}. Use a position from 0 {to}."
            )
        return position

    def refuse_missing_step(self, step: int) -> None:
        """Raise if a streamed run has no such step; wait until that is known."""
        if self._streamed is not None and not self.has_step(step):
            raise IndexError(f"step {step:,} does not exist: this run has {self.length():,} steps")

    def find_end(self) -> None:
        """Compute the end of the pass, if the streamed store is finished."""
        if self.end is not None or (rows := self._find_pass_rows()) is None:
            return
        self._pass_rows = rows
        if self._epochs is not None and self.position >= rows:
            self.lay_out()  # the position was set before it was known to be in a later pass
        else:
            # Steps keep their numbers: a thread may be reading ahead of the position.
            self.end = rows
            self._count_steps()

    def begin_pass(self) -> None:
        """Go to the next pass if no step of this one is left; called when a loop begins."""
        if self.end is None and self._streamed is not None and self.position:
            # Wait until the next step exists, or until the end of the pass is known. If the pass
            # ends before the position, the position is in a later pass, and steps get new numbers.
            self.has_step(self.step)
        if self.end is None or self.has_step(self.step):
            return
        # With `epochs=`, the next pass begins at the end of this one. With `steps=`, an unshuffled
        # run starts over.
        if self._epochs is not None or self.plan.shuffle == "none":
            self.position = self.end if self._epochs is not None else 0
            self.lay_out()
            self.refuse_no_step()
        elif not self._warned:
            self._warned = True
            steps = self._asked_steps
            read = f"its steps={steps:,} were" if steps is not None else "all of its rows were"
            more = "a larger steps=" if steps is not None else "the Plan a larger max_epochs="
            warnings.warn(
                f"This run is over: {read} read, so this loop has no batches. Give {more} to train "
                "further, or call loader.seek(0) to read the same batches again.",
                stacklevel=3,
            )

    def end_pass(self) -> None:
        """Skip the rows at the end of the last epoch that fill no batch; called after a loop.

        With `steps=`, no row is skipped, because the run may be continued with more steps.
        """
        if self._epochs is not None and self.end is not None:
            self.position = self.end
