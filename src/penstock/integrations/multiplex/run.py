"""Where a run is, which examples its next batches hold, and its state as JSON.

    epoch 0                          epoch 1
    |── step 0 ──|── step 1 ──|─ 2 ─||── step 0 ──| …      positions in one endless order
     rank 0 rank 1                                          each rank reads its slice of a step

A step is one batch on every rank. It starts at the current position of the run, so the sequence
of examples is the same for any batch size, number of ranks and number of workers. The main
process locates the examples, thousands of positions at a time, and sends them to a worker with
each request. So workers do not compute the order and cannot use an outdated one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from penstock.digest import canonical_json, digest_bytes
from penstock.errors import PlanError, ResumeError
from penstock.integrations.multiplex.mixing import Json, Mixing
from penstock.loader.state import sealed, shortened, unsealed
from penstock.order.integers import Integers
from penstock.order.schedule import StartingPoint

__all__ = ["MultiplexRun", "RankBatches", "Span", "order_settings", "read_state", "write_state"]

_VERSION = 2
_FIELDS = {"epoch": int, "start": int, "position": int, "changed": dict, "order": dict}
_FIELDS_OF_1 = {"epoch": int, "start": int, "position": int, "stages": list, "order": dict}
_SAMPLED = 16  # the number of examples in the digest of a dataset

# Locate few positions at first, so that the first batch is ready soon.
_FIRST_ROWS, _MOST_ROWS = 512, 8_192

# The positions of one batch of this rank: its first position, the position after its last one,
# and the position after the step on all ranks. A plain tuple, because every batch has one.
Span = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class RankBatches:
    """The positions in each batch of one rank."""

    batch_size: int
    rank: int
    world_size: int
    drop_last: bool

    @property
    def step_rows(self) -> int:
        """The examples of a full step on all ranks."""
        return self.batch_size * self.world_size

    def num_steps(self, num_rows: int) -> int:
        """The number of steps that read `num_rows` examples; the same on every rank.

        Raises:
            PlanError: In the last step, a rank would have no example.
        """
        steps, rest = divmod(num_rows, self.step_rows)
        if self.drop_last or not rest:
            return steps
        if rest < self.world_size:
            if num_rows < self.world_size:  # no batch size helps at the end of a resumed epoch
                advice = f"resume on fewer ranks, such as {num_rows:,}"
            else:
                advice = f"use another batch_size, such as {self._other_batch_size(num_rows)}"
            raise PlanError(
                f"{num_rows:,} examples in batches of {self.batch_size:,} on {self.world_size:,} "
                f"ranks leave {rest:,} for the last step. A rank without an example would block "
                f"the others. Pass drop_last=True, or {advice}."
            )
        return steps + 1

    def steps_per_epoch(self, num_rows: int) -> int:
        """`num_steps` of a whole epoch.

        Raises:
            PlanError: There is not one step, or a rank would have no example.
        """
        if num_rows < self.world_size:
            raise PlanError(
                f"{num_rows:,} examples are fewer than the {self.world_size:,} ranks, and a rank "
                "without an example would block the others. Use fewer ranks or more examples."
            )
        steps = self.num_steps(num_rows)
        if not steps:
            raise PlanError(
                f"{num_rows:,} examples are fewer than the {self.step_rows:,} of one step "
                f"({self.batch_size:,} on each of {self.world_size:,} ranks), and drop_last=True "
                "drops them. Use a smaller batch_size, or drop_last=False."
            )
        return steps

    def _other_batch_size(self, num_rows: int) -> int:
        """The nearest batch size that leaves every rank an example, or no rest at all."""
        # The search ends if there are at least as many examples as ranks: in one step of all
        # examples, every rank has at least one.
        near = (self.batch_size + sign * by for by in count(1) for sign in (-1, 1))
        rests = ((size, num_rows % (size * self.world_size)) for size in near if size > 0)
        return next(size for size, rest in rests if not rest or rest >= self.world_size)

    def spans(self, position: int, stop: int) -> Iterator[Span]:
        """The batches of this rank from `position` to the end of the epoch at `stop`."""
        size, rows = self.batch_size, self.step_rows
        # Compare before the loop: `num_steps` raises if a rank would have no example, and the
        # run should not train on all other steps first.
        has_rest = self.num_steps(stop - position) > (stop - position) // rows
        while position + rows <= stop:
            # Rank r reads the r-th slice of the step. So all ranks together read the examples in
            # the same order as one process with a larger batch.
            begin = position + self.rank * size
            position += rows
            yield begin, begin + size, position
        if has_rest:
            # Split the rest as evenly as possible: the shares differ by at most one example.
            rest = stop - position
            begin, end = (rest * each // self.world_size for each in (self.rank, self.rank + 1))
            yield position + begin, position + end, stop

    def positions(self, spans: list[Span]) -> Integers:
        """The positions of several successive batches."""
        if self.world_size == 1:  # without other ranks there are no gaps between batches
            return np.arange(spans[0][0], spans[-1][1])
        return np.concatenate([np.arange(begin, end) for begin, end, _ in spans])


@dataclass(slots=True)
class MultiplexRun:
    """Everything that changes while a loader is used. Only the loader changes it.

    Its dataset and its sampler read it, so they always agree with the loader.
    """

    mixing: Mixing
    """The current order; `set_weights` and `load_state_dict` replace it."""
    batches: RankBatches = RankBatches(1, 0, 1, drop_last=False)
    shuffle: bool = True
    epoch: int = 0
    start: int = 0
    """The position where the epoch began."""
    position: int = 0
    """The position of the next example; it counts the examples of all ranks and epochs."""
    iterating: bool = False
    """Whether an iterator of the current epoch was created."""
    iterator: int = 0
    """The number of the newest iterator. An iterator with another number must stop."""
    last: tuple[Mixing, Span] | None = None
    """The batch that was returned last, and the order that it is from."""

    def begin(self) -> int:
        """Start an iterator over the rest of the epoch, or over the next; returns its number."""
        if self.iterating:
            self._next_epoch()
        self.iterating = True
        self.iterator += 1
        return self.iterator

    def finish(self) -> None:
        """End the epoch after its last batch."""
        self._next_epoch()
        self.iterating = False

    def go_to(self, epoch: int, start: int, position: int) -> None:
        """Let the next iterator begin at `position`, and stop the current one."""
        self.epoch, self.start, self.position = epoch, start, position
        self.iterating = False
        self.iterator += 1

    def set_epoch(self, epoch: int) -> None:
        """Let the next iterator begin `epoch`; does nothing if it would do so anyway."""
        if epoch < 0:
            raise PlanError(f"epoch={epoch} must be 0 or more.")
        if epoch == self.epoch + self.iterating:
            return
        if epoch == self.epoch:
            start = self.start  # known exactly, also if earlier epochs were left early
        elif not self.shuffle:
            start = 0  # every epoch repeats the first
        elif self.batches.drop_last and self.mixing.stages:
            # The next epoch begins after the last full step, see `_next_epoch`.
            steps = self.batches.num_steps(self.mixing.total)
            start = epoch * steps * self.batches.step_rows
        else:
            # For weights this assumes that all earlier epochs were read to their end.
            start = epoch * self.mixing.total
        self.go_to(epoch, start, start)

    def spans(self) -> Iterator[Span]:
        """The batches of this rank from the current position to the end of the epoch."""
        # The end is computed now, not in the generator: before the first batch is requested,
        # another epoch may have begun.
        return self.batches.spans(self.position, self.start + self.mixing.total)

    def steps(self) -> Iterator[tuple[Integers, Integers, Span]]:
        """`spans` with their examples: the dataset numbers, and the numbers in the dataset."""
        return self._located(self.spans(), self.mixing.order.locate)

    def _located(
        self, spans: Iterator[Span], locate: Callable[[Integers], tuple[Integers, ...]]
    ) -> Iterator[tuple[Integers, Integers, Span]]:
        # A call to `locate` costs about 0.15 ms for a single position and 2.5 ms for 8,192, so
        # batches are located in groups. Larger groups would not fit in the CPU cache.
        rows = _FIRST_ROWS
        while several := list(islice(spans, max(1, rows // self.batches.batch_size))):
            sources, _, samples = locate(self.batches.positions(several))
            row = 0
            for span in several:
                end = row + span[1] - span[0]
                yield sources[row:end], samples[row:end], span
                row = end
            rows = min(4 * rows, _MOST_ROWS)

    def _next_epoch(self) -> None:
        self.epoch += 1
        if not self.shuffle:
            self.mixing = self.mixing.restarted(self.position)
            self.start = 0
        elif self.mixing.stages:
            self.start = self.position  # each dataset continues where it stopped
        else:
            self.start = self.epoch * self.mixing.total  # each epoch is one order of everything
        self.position = self.start


def order_settings(mixing: Mixing, shuffle: bool, datasets: Iterable[tuple[str, Sized]]) -> Json:
    """The settings that determine the order of a run, under the names that users know."""
    settings = {
        "shuffle_seed": mixing.seed,
        "shuffle": shuffle,
        "weights": [stage.to_json() for stage in mixing.stages] or "each example once",
        "tokens": None if mixing.num_tokens is None else list(mixing.num_tokens),
        "datasets": [[name, len(rows), _digest_examples(rows)] for name, rows in datasets],
    }
    # Long lists become a digest: the size of a state is bounded, a schedule is not.
    return {name: shortened(value) for name, value in settings.items()}


def write_state(run: MultiplexRun, original: Mixing, settings: Json) -> Json:
    """The state of a run that began with the mixing `original`."""
    changed = run.mixing.stages != original.stages
    state = {
        "epoch": run.epoch,
        "start": run.start,
        "position": run.position,
        "changed": run.mixing.to_resume() if changed else {},
        "order": settings,
    }
    return sealed(state, _VERSION)


def read_state(state: Mapping[str, object]) -> Json:
    """The fields of a state that can be resumed; a state of version 1 is converted.

    Raises:
        ResumeError: It is not a state, was damaged or edited, or is of version 1 and its weights
            changed.
    """
    of = "a multiplex DataLoader"
    if not isinstance(state, Mapping) or state.get("version") != 1:
        return unsealed(state, _VERSION, _FIELDS, of=of)
    fields = unsealed(state, 1, _FIELDS_OF_1, of=of)
    stages = fields.pop("stages")
    changed = {}
    if len(stages) > 1:
        raise ResumeError(
            f"The weights of this run changed {len(stages) - 1:,} times, and its state was written "
            "by an older penstock, which used another order after a change of weights. Resume with "
            "the penstock that wrote it, or start a new run with the current weights."
        )
    if stages and fields["order"].get("weights") != stages:  # weights were set before the start
        position, weights = stages[0]
        # At position 0 nothing was read and no rounding error exists.
        zeros = [0] * len(weights)
        changed = StartingPoint(position, zeros, zeros)._asdict() | {
            "weights": weights,
            "history": "",
        }
    return {**fields, "changed": changed}


def _digest_examples(rows: object) -> str:
    """A digest of 16 examples of a list or tuple; "" for other datasets.

    Other datasets may return different values when read again, or be slow to read. Of values
    that JSON cannot hold, only the type is included.
    """
    if not isinstance(rows, list | tuple):
        return ""
    # Evenly spaced from the first example to the last one. Fewer than 16 examples are all used;
    # the set removes the repetitions.
    numbers = sorted({each * (len(rows) - 1) // (_SAMPLED - 1) for each in range(_SAMPLED)})
    return digest_bytes(canonical_json([_to_json(rows[number]) for number in numbers]))[:16]


def _to_json(value: object) -> object:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return repr(value)  # JSON has no NaN and no infinity
    if isinstance(value, Mapping):
        return {str(key): _to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    return type(value).__name__
