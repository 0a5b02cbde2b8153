"""Where training is, as the trainer counts it.

    position = that of the checkpoint, and the rows of the batches that were trained after it

A loader that counts what it hands out is ahead of the training by what was prefetched, and
what it counts on one rank is not what Lightning keeps, which is the state of rank 0. Here the
trainer's own counter says how many batches were trained, so that every rank computes the
same, prefetched or not. A run without a trainer counts what was handed out.
"""

from typing import Any

from penstock.errors import PlanError, ResumeError
from penstock.integrations.feed import Feed
from penstock.loader.loader import Loader

__all__ = ["Progress", "per_device"]

_FIELDS = ("data", "batches", "global_batch", "batch_size", "devices")


def per_device(global_batch: int, devices: int) -> int:
    """Rows of a batch on each of some devices.

    Raises:
        PlanError: they would not have equally many.
    """
    if global_batch % devices:
        raise PlanError(
            f"global_batch_size={global_batch:,} does not divide over {devices:,} devices. Use a "
            f"multiple of {devices:,}."
        )
    return global_batch // devices


class Progress:
    """The position of one training run, in rows of all ranks together."""

    def __init__(self, batch_size: int, global_batch: int | None = None) -> None:
        """Begin at 0.

        Args:
            batch_size: Rows of a step on one rank.
            global_batch: Rows of a step on all ranks, where they were said for all.
        """
        self.trainer: Any = None
        """The trainer that counts, where there is one."""
        self._batch_size = batch_size
        self._wanted = global_batch
        self._feed: Feed | None = None
        self._scribe: Loader | None = None
        self._restored: dict[str, Any] | None = None
        self._position = 0
        self._batches = 0
        self._handed_out = 0

    @property
    def ready(self) -> bool:
        """Whether it was said what to train on."""
        return self._feed is not None

    @property
    def feed(self) -> Feed:
        """What is trained on, in steps as large as they are now."""
        assert self._feed is not None  # given before any batch is asked for
        return self._feed

    def give(self, feed: Feed) -> None:
        """Train on `feed`, on as many ranks as it says; the size of its steps is ours to say."""
        self._feed = feed.sized(self._global_batch(feed.world_size))
        self._scribe = None
        self._feed.refuse_no_step()
        if self._restored is not None:
            self._go_to(self._restored)

    def start_over(self, trainer: Any) -> None:
        """Belong to `trainer`; to another than before, from the beginning."""
        if trainer is not self.trainer:
            self.trainer = trainer
            self._restored = None
            self._position = self._batches = self._handed_out = 0

    @property
    def has_trainer(self) -> bool:
        """Whether a trainer counts."""
        return self.trainer is not None

    def begin(self) -> int:
        """The position of the first batch that is asked for now."""
        if self.trainer is not None and self.trainer.overfit_batches:
            return 0
        return self._position_after(self._trained("completed"))

    def took_one(self) -> None:
        """One more batch was handed out; of use only where no trainer counts."""
        self._handed_out += 1

    def state_dict(self) -> dict[str, Any]:
        """Where training is: JSON, the same on every rank, whatever was prefetched."""
        # `processed` counts a batch right after its step, before the hooks in which checkpoints
        # are written; `completed` after them.
        batches = self._trained("processed")
        feed = self.feed
        if self._scribe is None:
            self._scribe = feed.loader()
        self._scribe.seek(self._position_after(batches))
        return {
            "data": self._scribe.state_dict(),
            "batches": batches,
            "global_batch": feed.global_batch,
            "batch_size": self._batch_size,
            "devices": feed.world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, on any number of ranks."""
        if not isinstance(state, dict) or not all(name in state for name in _FIELDS):
            raise ResumeError(f"{state!r:.80} is not the state of a data module.")
        self._restored = dict(state)
        if self._feed is not None:
            self.give(self._feed)

    def _go_to(self, state: dict[str, Any]) -> None:
        if self._scribe is None:
            self._scribe = self.feed.loader()
        self._scribe.load_state_dict(state["data"])
        self._position = self._scribe.position
        self._batches = self._handed_out = int(state["batches"])

    def _global_batch(self, devices: int) -> int:
        """Rows of a step on all ranks together.

        A run that goes on with another number of devices, and nothing else changed, keeps the
        steps of its checkpoint where they divide: so a step stays what it was, to the schedule
        of the learning rate and to the length of an epoch.
        """
        if self._wanted is not None:
            return per_device(self._wanted, devices) * devices
        then = self._restored
        if then is not None and then["batch_size"] == self._batch_size:
            kept = int(then["global_batch"])
            if kept % devices == 0:
                return kept
        return self._batch_size * devices

    def _trained(self, counter: str) -> int:
        if self.trainer is None:
            return self._handed_out
        total = self.trainer.fit_loop.epoch_loop.batch_progress.total
        # A trainer that resumes may ask for data before it has restored its own counters.
        return max(int(getattr(total, counter)), self._batches)

    def _position_after(self, batches: int) -> int:
        return self.feed.cuts.after(self._position, batches - self._batches)
