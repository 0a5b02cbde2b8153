"""The time limit of a run, `max_minutes`: how many steps fit, and when to stop.

    max_minutes  ├── steps, with validations between them ──┤ final loss ├ reserve ┤

The steps are planned after the first ones were timed, so that the learning rate has a schedule. If
their speed changes, they are planned again after a validation.
"""

from dataclasses import replace

from penstock.train.config import OptimizationConfig, TrainingConfig
from penstock.train.metrics import RunProgress, Throughput

_PLANNED_SHARE = 0.97  # of max_minutes; the rest is reserve for slower steps
_LATER_SHARE = 0.98  # the same, where the steps are planned again
_BETWEEN_PLANS = 0.05  # of max_minutes: the speed of fewer steps is a matter of chance
_MOST_MORE = 1.05  # fewer additional steps are not planned: each plan changes the learning rate


class TimeLimit:
    """The time limit of one run."""

    def __init__(
        self,
        config: TrainingConfig,
        throughput: Throughput,
        final_steps: float,
        *,
        queued_steps: int = 2,
    ) -> None:
        """Read the limit.

        Args:
            config: The settings of the run.
            throughput: The speed so far.
            final_steps: How many steps take as long as the evaluation at the end.
            queued_steps: How many steps end after the loop asks, if the answer is no.
        """
        self._minutes, self._val_every = config.max_minutes, config.val_every
        self._throughput, self._final_steps = throughput, final_steps
        self._queued_steps = queued_steps
        self._asked: float | None = None

    def is_over(self, seconds: float) -> bool:
        """Whether no time would be left after the steps that are queued and one more validation.

        Args:
            seconds: The time spent so far.
        """
        speed = self._throughput
        steps = self._queued_steps * speed.seconds_per_step if speed.num_steps > 1 else 0.0
        needed = steps + speed.last_pause + self._final_seconds
        return self._minutes is not None and seconds + needed > 60 * self._minutes

    def num_steps(self, seconds: float) -> int:
        """How many more steps fit into the limit, by the speed of the last ones."""
        return self._fitting(seconds, _PLANNED_SHARE, self._throughput.seconds_per_step)

    def other_steps(self, seconds: float, left: int) -> int | None:
        """How many more steps fit, if these are fewer than `left`, or many more; otherwise None.

        By the speed since the last plan; None if that is not long ago.
        """
        assert self._minutes is not None
        if self._asked is None:
            self._asked = seconds
        if seconds - self._asked < 60 * self._minutes * _BETWEEN_PLANS:
            return None
        speed = self._throughput.recent_seconds_per_step()
        if speed is None:
            return None
        self._asked = seconds
        usual = self._fitting(seconds, _LATER_SHARE, speed)
        is_right = usual <= _MOST_MORE * left and left <= self._fitting(seconds, 1.0, speed)
        return None if is_right else usual

    def _fitting(self, seconds: float, share: float, seconds_per_step: float) -> int:
        assert self._minutes is not None  # TrainingConfig demands steps or max_minutes
        pause = self._throughput.last_pause
        left = 60 * self._minutes * share - seconds - pause - self._final_seconds
        # The time of a validation, divided among the steps between two of them.
        return max(0, int(left / (seconds_per_step + pause / self._val_every)))

    @property
    def _final_seconds(self) -> float:
        if self._throughput.num_steps < Throughput.TIMED_STEPS:
            return 0.0  # the speed is not known yet
        return self._final_steps * self._throughput.seconds_per_step


def is_planned(progress: RunProgress, config: TrainingConfig) -> bool:
    """Whether the number of steps is final, and not unknown or an estimate of a resumed run."""
    return config.steps is not None or progress.minutes is not None


def resumed(before: RunProgress, config: TrainingConfig) -> RunProgress:
    """Return the progress of a checkpoint, with the number of steps by the current settings."""
    steps, minutes = config.steps, config.max_minutes
    if steps is not None:
        return replace(before, steps=steps, minutes=None)
    if minutes is None or minutes == before.minutes:
        return before
    # The steps are planned again when their speed is known. Until then, it is that of the steps so
    # far: without an end, the learning rate would go back to its peak.
    if before.steps is not None and before.step > 0:
        steps = max(before.step, int(before.step * 60 * minutes / before.seconds))
    return replace(before, steps=steps, minutes=None)


def raised_rate(
    before: RunProgress,
    progress: RunProgress,
    config: TrainingConfig,
    optimization: OptimizationConfig,
) -> str | None:
    """Return what to log if the learning rate rises, because a resumed run has a later end."""
    step, steps, peak = progress.step, progress.steps, optimization.learning_rate
    old = optimization.rate(max(0, step - 1), before.steps)
    new = optimization.rate(step, steps)
    if steps is None or step <= optimization.warmup_steps or new <= old:
        return None
    end = f"after {'' if is_planned(progress, config) else 'about '}{steps:,} steps"
    return (
        f"the schedule now ends {end}, so the learning rate rises from {peak * old:.2g} to "
        f"{peak * new:.2g}, and falls from there"
    )
