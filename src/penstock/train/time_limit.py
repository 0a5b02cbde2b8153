"""The time limit of a run, `max_minutes`: how many steps fit, and when to stop.

    max_minutes  ├── steps, with validations between them ──┤ final loss ├ reserve ┤

The steps are planned once, after the first ones were timed, so that the learning rate has a
schedule. If later steps are slower, the run stops in time before its last planned step.
"""

from penstock.train.config import TrainingConfig
from penstock.train.metrics import Throughput

_PLANNED_SHARE = 0.97  # of max_minutes; the rest is reserve for slower steps


class TimeLimit:
    """The time limit of one run."""

    def __init__(self, config: TrainingConfig, throughput: Throughput, final_steps: float) -> None:
        """Read the limit.

        Args:
            config: The settings of the run.
            throughput: The speed so far.
            final_steps: How many steps take as long as the evaluation at the end.
        """
        self._minutes, self._val_every = config.max_minutes, config.val_every
        self._throughput, self._final_steps = throughput, final_steps

    def is_over(self, seconds: float) -> bool:
        """Whether no time would be left after one more validation.

        Args:
            seconds: The time spent so far.
        """
        needed = self._throughput.last_pause + self._final_seconds
        return self._minutes is not None and seconds + needed > 60 * self._minutes

    def num_steps(self, seconds: float) -> int:
        """How many more steps fit into the limit, by the speed so far."""
        assert self._minutes is not None  # TrainingConfig demands steps or max_minutes
        left = 60 * self._minutes * _PLANNED_SHARE - seconds - self._final_seconds
        # The time of a validation, divided among the steps between two of them.
        pause = self._throughput.last_pause / self._val_every
        return max(0, int(left / (self._throughput.seconds_per_step + pause)))

    @property
    def _final_seconds(self) -> float:
        if self._throughput.num_steps < Throughput.TIMED_STEPS:
            return 0.0  # the speed is not known yet
        return self._final_steps * self._throughput.seconds_per_step
