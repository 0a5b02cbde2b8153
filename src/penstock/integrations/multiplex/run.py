"""The state of a run: its position, and the examples of its next batches.

    epoch 0                          epoch 1
    |── step 0 ──|── step 1 ──|─ 2 ─||── step 0 ──| …      positions in one endless order
     rank 0 rank 1                                          each rank reads its slice of a step

A step is one batch on every rank. It starts at the current position of the run, so the sequence
of examples is the same for any batch size, number of ranks and number of workers. The main
process computes which examples are at the next positions, thousands at a time. It sends their
numbers to a worker with each request. So workers do not compute the order, and cannot use an
outdated one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import NamedTuple, overload

import numpy as np

from penstock.digest import canonical_json, digest_bytes
from penstock.errors import PlanError
from penstock.integrations.multiplex.mixing import Json, Mixing
from penstock.loader.state import shortened
from penstock.order.integers import Integers
from penstock.order.steps import shorter_steps

_SAMPLED = 16  # the number of examples in the digest of a dataset

# Locate few positions at first, so that the first batch is ready soon.
_FIRST_ROWS, _MOST_ROWS = 512, 8_192

# The positions of one batch of this rank: its first position, the position after its last one,
# and the position after the step on all ranks. A plain tuple, because every batch has one.
Span = tuple[int, int, int]


class BatchRequest(NamedTuple):
    """The examples of one batch: for each, the number of its dataset and its number in it."""

    sources: list[int]
    samples: list[int]


@dataclass(slots=True)
class MultiplexRun:
    """Everything that changes while a loader is used. Only the loader changes it.

    Its dataset and its sampler read it, so they always agree with the loader.
    """

    mixing: Mixing
    """The current order; `set_weights` and `load_state_dict` replace it."""
    batch_size: int = 1
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
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

    @property
    def step_rows(self) -> int:
        """The examples of a full step on all ranks."""
        return self.batch_size * self.world_size

    def num_steps(self, num_rows: int) -> int:
        """The number of steps that read `num_rows` examples; the same on every rank.

        Raises:
            PlanError: In the last step, a rank would have no example.
        """
        full, shorter = self._sizes(num_rows)
        return full + len(shorter)

    def _sizes(self, num_rows: int) -> tuple[int, tuple[int, ...]]:
        """The steps that read `num_rows` examples: how many are full, and the rows of the others.

        Raises:
            PlanError: In the last step, a rank would have no example.
        """
        full, rest = divmod(num_rows, self.step_rows)
        if self.drop_last or not rest:
            return full, ()
        shorter = shorter_steps(num_rows, self.step_rows, self.world_size)
        if not shorter:
            # No batch size helps at the end of a resumed epoch. Elsewhere, batches of two can be
            # shorter.
            few = num_rows < self.world_size
            advice = f"resume on fewer ranks, such as {num_rows:,}" if few else "use batch_size=2"
            raise PlanError(
                f"{num_rows:,} examples in batches of {self.batch_size:,} on {self.world_size:,} "
                f"ranks leave {rest:,} for the last step. A rank without an example would block "
                f"the others. Pass drop_last=True, or {advice}."
            )
        return (num_rows - sum(shorter)) // self.step_rows, shorter

    def steps_per_epoch(self) -> int:
        """`num_steps` of a whole epoch.

        Raises:
            PlanError: An epoch would have no step, or a rank would have no example.
        """
        num_rows = self.mixing.total
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
        """Let the next iterator begin `epoch`; no effect if `epoch` is the next one anyway."""
        if epoch < 0:
            raise PlanError(f"epoch={epoch} must be 0 or more.")
        if epoch == self.epoch + self.iterating:
            return
        if epoch == self.epoch:
            start = self.start  # known exactly, also if earlier epochs were left early
        elif not self.shuffle:
            start = 0  # every epoch repeats the first
        elif self.drop_last and self.mixing.stages:
            # The next epoch begins after the last full step, see `_next_epoch`.
            start = epoch * self.num_steps(self.mixing.total) * self.step_rows
        else:
            # For weights this assumes that all earlier epochs were read to their end.
            start = epoch * self.mixing.total
        self.go_to(epoch, start, start)

    def spans(self) -> Iterator[Span]:
        """The batches of this rank from the current position to the end of the epoch."""
        # The end is computed now, not in the generator: before the first batch is requested,
        # another epoch may have begun.
        return self._spans(self.position, self.start + self.mixing.total)

    def _spans(self, position: int, stop: int) -> Iterator[Span]:
        size, rows = self.batch_size, self.step_rows
        # Before the loop: this raises if a rank would have no example, and the run should not
        # train on all other steps first.
        full, shorter = self._sizes(stop - position)
        for _ in range(full):
            # Rank r reads the r-th slice of the step. So all ranks together read the examples in
            # the same order as one process with a larger batch.
            begin = position + self.rank * size
            position += rows
            yield begin, begin + size, position
        for rest in shorter:
            # Split as evenly as possible: the shares differ by at most one example.
            begin, end = (rest * each // self.world_size for each in (self.rank, self.rank + 1))
            yield position + begin, position + end, position + rest
            position += rest

    def steps(self) -> Iterator[tuple[BatchRequest, Span]]:
        """`spans`, each with its examples."""
        return self._located(self.spans(), self.mixing.order.locate)

    def _located(
        self, spans: Iterator[Span], locate: Callable[[Integers], tuple[Integers, ...]]
    ) -> Iterator[tuple[BatchRequest, Span]]:
        # A call to `locate` costs about 0.15 ms for a single position and 2.5 ms for 8,192, so
        # batches are located in groups. Larger groups would not fit in the CPU cache.
        rows = _FIRST_ROWS
        while several := list(islice(spans, max(1, rows // self.batch_size))):
            positions = np.concatenate([np.arange(begin, end) for begin, end, _ in several])
            sources, _, samples = locate(positions)
            row = 0
            for span in several:
                end = row + span[1] - span[0]
                yield BatchRequest(sources[row:end].tolist(), samples[row:end].tolist()), span
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
            self.start = self.epoch * self.mixing.total  # each epoch reads every example once
        self.position = self.start


class IndexMap(Sequence[tuple[int, int]]):
    """`(dataset_idx, example_idx)` of every item: a list that is computed when it is read."""

    def __init__(self, mixing: Mixing) -> None:
        self._mixing = mixing

    def __len__(self) -> int:
        return self._mixing.total

    @overload
    def __getitem__(self, number: int) -> tuple[int, int]: ...

    @overload
    def __getitem__(self, number: slice) -> list[tuple[int, int]]: ...

    def __getitem__(self, number: int | slice) -> tuple[int, int] | list[tuple[int, int]]:
        if isinstance(number, slice):
            return self._pairs(range(len(self))[number])  # slicing a range handles all signs
        number = index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"There is no item {number:,}; there are {len(self):,}.")
        return self._pairs([number % len(self)])[0]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for start in range(0, len(self), _MOST_ROWS):
            yield from self[start : start + _MOST_ROWS]

    def _pairs(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        sources, _, samples = self._mixing.order.locate(np.array(numbers, dtype=np.int64))
        return list(zip(sources.tolist(), samples.tolist(), strict=True))


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
