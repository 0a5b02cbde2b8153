"""The loader: a plan, read step by step.

It owns one number, the position of the next row in the global order. Everything it hands
out is a function of that number, so there is nothing else to save, to restore or to get
out of step: no worker processes, no shuffle buffer, no random state.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch

from penstock.errors import PlanError, ResumeError
from penstock.loader.assemble import Assembler, Block
from penstock.loader.batch import Format, Shape, host_tensors
from penstock.loader.device import DeviceCopy
from penstock.loader.log import FingerprintLog
from penstock.loader.prefetch import Ahead
from penstock.loader.state import check_state, identify, position_in, write_state
from penstock.order.integers import END
from penstock.order.plan import Plan, Rows
from penstock.order.shard import Shard
from penstock.order.shuffle import Mode
from penstock.order.steps import Steps

__all__ = ["Loader"]


class _Made(NamedTuple):
    """A batch that is ready to be handed out."""

    step: int
    stop: int  # the position after it
    batch: Any
    fingerprint: int
    finish: Callable[[], None] | None  # what is left to do, on the reader's thread


class Loader:
    """Batches of a plan, from any position, for one rank.

    Iterating goes on from `position`, and advances it by what was handed out, not by what
    was prefetched. One iterator at a time: a new one takes over.
    """

    def __init__(  # noqa: PLR0913  (the object every user makes: flat keywords read best)
        self,
        rows: Plan | Rows,
        batch_size: int | None = None,
        *,
        global_batch_size: int | Mapping[int, int] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int | None = None,
        shuffle: Mode | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        drop_last: bool = True,
        device: str | torch.device | None = None,
        format: Format = "dict",
        lengths: Mapping[int, int] | None = None,
        ids: bool = False,
        narrow: bool = False,
        prefetch: int = 2,
        fingerprint: Literal["samples", "tokens"] = "samples",
        fingerprint_log: str | Path | None = None,
    ) -> None:
        """A loader over a plan, or over rows alone.

        Args:
            rows: A `Plan`, or rows to make one of with `seed` and `shuffle`.
            batch_size: Rows a step on this rank.
            global_batch_size: Rows a step on all ranks together, instead; or sizes by the
                position from which each is in force. Must divide by `world_size`.
            rank: Which of the ranks this is; from `torch.distributed` where that runs.
            world_size: How many ranks there are; likewise.
            seed: Of the order, where `rows` is not a plan.
            shuffle: Likewise: "full", "block", "part" or "none".
            epochs: How many times all rows are read; without it and `steps`, for ever.
            steps: How many steps the run takes, counted from position 0.
            drop_last: At the end of the run, leave out a batch that is not full; otherwise
                it is filled with rows whose targets are all -100.
            device: Where batches go; a CUDA device gets them on a stream of its own.
            format: "dict" (`inputs`, `targets`, shifted), "tuple" of the same, or "hf"
                (`input_ids`, `labels`, not shifted).
            lengths: Shorter rows at first, by position: {0: 256, 50_000: 1024} cuts each row
                of 1024 into four until position 50,000. The tokens and their order stay.
            ids: Add `source`, `epoch`, `sample` and `position` of each row.
            narrow: Leave ids as narrow as they are stored, under the name `tokens`.
            prefetch: How many blocks of batches are made ahead; 0 makes none.
            fingerprint: Of which rows they are, or of their tokens.
            fingerprint_log: A file to which each step's fingerprint is added.
        """
        self.plan = _plan(rows, seed, shuffle)
        self.rank, self.world_size = _topology(rank, world_size)
        self._sizes = _batch_sizes(batch_size, global_batch_size, self.world_size)
        self._drop_last = drop_last
        self._end = _run_end(self.plan, self._sizes, epochs, steps)
        self._position = 0
        self._taken_over = 0
        self._prefetch = prefetch
        self._by_tokens = fingerprint == "tokens"
        self._narrow = narrow
        self._device = torch.device(device) if device is not None else torch.device("cpu")
        if fingerprint not in ("samples", "tokens"):
            raise PlanError(f'fingerprint={fingerprint!r} is not "samples" or "tokens".')
        if prefetch < 0:
            raise PlanError(f"prefetch={prefetch} is less than none; use 0 or more.")
        self._layout()
        self.shape = Shape(format, self._assembler.length, lengths, ids=ids)
        self._log = FingerprintLog(fingerprint_log) if fingerprint_log is not None else None
        self.fingerprint: int | None = None
        """Of the batch handed out last, on this rank; the sum over ranks is the same for any."""

    def _layout(self) -> None:
        """Lay out the steps from the position where the run is."""
        steps = Steps(self._sizes)
        aligned = self._position == 0 or (
            self._position < END and steps.span(steps.at(self._position))[0] == self._position
        )
        self._steps = steps if aligned else Steps(self._sizes, start=self._position)
        shard = Shard(self._steps, rank=self.rank, world_size=self.world_size)
        self._assembler = Assembler(self.plan, shard, end=self._end, by_tokens=self._by_tokens)
        self._num_steps = (
            None if self._end is None else self._steps.count(self._end, drop_last=self._drop_last)
        )

    @property
    def position(self) -> int:
        """The position of the next row, in rows of all ranks together."""
        return self._position

    @property
    def step(self) -> int:
        """The number of the next step, counted with the batch size in force."""
        if self._end is not None and self._position >= self._end:
            return self._num_steps or 0
        return self._steps.at(self._position)

    def __len__(self) -> int:
        """Steps of the whole run, the same on every rank."""
        if self._num_steps is None:
            raise PlanError("This run has no end, so no length; give the loader epochs= or steps=.")
        return self._num_steps

    def __getitem__(self, step: int) -> Any:
        """The batch of any step, without touching the position."""
        limit = self._num_steps
        if step < 0 and limit is not None:
            step += limit
        if step < 0 or (limit is not None and step >= limit):
            raise IndexError(f"step {step:,} is not in a run of {limit or 0:,} steps")
        copy = DeviceCopy(self._device) if self._device.type == "cuda" else None
        made = next(self._batches(self._assembler.block(step, step + 1), copy))
        if made.finish is not None:
            made.finish()
        return made.batch

    def __iter__(self) -> Iterator[Any]:
        """Batches from `position` on."""
        self._taken_over += 1
        return self._iterate(self._taken_over)

    def _iterate(self, turn: int) -> Iterator[Any]:
        first = self.step
        source: Any = None
        try:
            copy = DeviceCopy(self._device) if self._device.type == "cuda" else None
            made = partial(self._made, first, copy)
            source = Ahead(made, self._prefetch) if self._prefetch else made()
            for batches in source:
                for number, made in enumerate(batches):
                    if turn != self._taken_over:
                        raise ResumeError(
                            "This iterator was overtaken: the loader was moved by seek(), "
                            "load_state_dict() or another iter(). Use the newest iterator."
                        )
                    self._hand_out(made)
                    if number == 0 and isinstance(source, Ahead):
                        source.taken()
                    yield made.batch
        finally:
            if isinstance(source, Ahead):
                source.close()

    def _hand_out(self, made: _Made) -> None:
        if made.finish is not None:
            made.finish()
        self._position = made.stop
        self.fingerprint = made.fingerprint
        if self._log:
            self._log.add(made.step, made.stop, made.fingerprint)

    def _made(self, first: int, copy: DeviceCopy | None) -> Iterator[list[_Made]]:
        """Finished batches, a block at a time."""
        last = self._num_steps if self._num_steps is not None else 2**62
        step = first
        while step < last:
            block = self._assembler.block(step, last)
            if copy is not None:
                # One by one: what is on its way to the device is what was asked to be ahead.
                yield from ([made] for made in self._batches(block, copy))
            else:
                yield list(self._batches(block))
            step += len(block.spans)

    def _batches(self, block: Block, copy: DeviceCopy | None = None) -> Iterator[_Made]:
        """The batches of a block, one a step."""
        for number, (start, stop) in enumerate(block.spans):
            finish = None
            arrays = host_tensors(block, number, ids=self.shape.ids)
            if copy is not None:
                tensors, ready = copy.put(arrays)
                finish = partial(copy.hand_out, dict(tensors), ready)
            else:
                if not self._narrow:
                    # Batch by batch: memory of this size is used again by the next one, where
                    # a whole block would be new pages every time, at several times the cost.
                    arrays["tokens"] = arrays["tokens"].astype("int64")
                tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
            yield _Made(
                block.first_step + number,
                stop if self._end is None else min(stop, self._end),
                tensors if self._narrow else self.shape.dress(tensors, start),
                block.fingerprints[number],
                finish,
            )

    def seek(self, position: int) -> None:
        """Go to a position of the global order; the next batch begins there."""
        limit = self._end if self._end is not None else END
        if not 0 <= position <= limit:
            raise PlanError(f"Position {position:,} is not in a run of {limit:,} rows.")
        self._taken_over += 1
        self._position = position
        self._layout()

    def state_dict(self) -> dict[str, Any]:
        """Where this run is: small, JSON, and the same on every rank."""
        return write_state(self._identity, self._position)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return identify(self.plan)

    def load_state_dict(
        self, state: Mapping[str, Any], *, on_change: Literal["error", "restart"] = "error"
    ) -> None:
        """Go on where `state` was taken, on any number of ranks and with any batch size.

        Args:
            state: What `state_dict` gave.
            on_change: Whether a state of another order is an error, or the new order begins
                at 0. A damaged state is an error in either case.
        """
        if on_change not in ("error", "restart"):
            raise ResumeError(f'on_change={on_change!r} is not "error" or "restart".')
        checked = check_state(state)
        position = 0
        try:
            position = position_in(self._identity, checked)
        except ResumeError:
            if on_change == "error":
                raise
        limit = self._end if self._end is not None else END
        if not 0 <= position <= limit:
            raise ResumeError(
                f"This state is at position {position:,}, past the end of this run at {limit:,}. "
                "Give the loader more epochs or steps."
            )
        self.seek(position)

    def as_dataloader(self, num_workers: int = 0, **options: Any) -> Any:
        """The rest of this run as a `torch.utils.data.DataLoader`, for tools that insist."""
        from penstock.loader.dataloader import as_dataloader

        return as_dataloader(self, num_workers=num_workers, **options)


def _plan(rows: Plan | Rows, seed: int | None, shuffle: Mode | None) -> Plan:
    if isinstance(rows, Plan):
        given = [
            name for name, value in (("seed", seed), ("shuffle", shuffle)) if value is not None
        ]
        if given:
            raise PlanError(
                f"{' and '.join(given)} belong to the plan, which was given. Pass them to Plan()."
            )
        return rows
    return Plan(rows, seed=seed or 0, shuffle=shuffle or "full")


def _topology(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and number of ranks: as given, as torch.distributed says, or one alone."""
    if (rank is None) != (world_size is None):
        raise PlanError(
            f"rank={rank} and world_size={world_size} are given together or not at all."
        )
    if rank is not None and world_size is not None:
        return rank, world_size
    with suppress(AttributeError, ValueError, RuntimeError):
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _batch_sizes(
    batch_size: int | None, global_batch_size: int | Mapping[int, int] | None, world_size: int
) -> dict[int, int]:
    if (batch_size is None) == (global_batch_size is None):
        raise PlanError(
            f"batch_size={batch_size} and global_batch_size={global_batch_size}: give one of them, "
            "the rows a step on this rank or on all ranks together."
        )
    if batch_size is not None:
        return {0: batch_size * world_size}
    if isinstance(global_batch_size, Mapping):
        return dict(global_batch_size)
    return {0: cast(int, global_batch_size)}


def _run_end(
    plan: Plan, sizes: dict[int, int], epochs: int | None, steps: int | None
) -> int | None:
    """The position after the last row of the run, or None for a run without end."""
    if epochs is not None and steps is not None:
        raise PlanError(f"epochs={epochs} and steps={steps} both end the run; give one.")
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None and value < 1:
            raise PlanError(f"{name}={value} is not a run; use at least 1.")
    if epochs is not None:
        if plan.epoch_rows is None:
            raise PlanError(
                f"epochs={epochs} has no meaning in a mixture: each source has epochs of its own. "
                "Give steps= instead."
            )
        return epochs * plan.epoch_rows
    if steps is not None:
        end = Steps(sizes).span(steps - 1)[1]
        if end > plan.end:
            raise PlanError(
                f"{steps:,} steps need {end:,} rows, and the plan ends after {plan.end:,}."
            )
        return end
    return plan.end if plan.end < END else None
