"""The loader: a plan, read step by step.

It owns one number, the position of the next row in the global order. Everything it hands
out is a function of that number, so there is nothing else to save, to restore or to get
out of step: no worker processes, no shuffle buffer, no random state.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import count
from operator import index
from pathlib import Path
from typing import Any, Literal

import torch

from penstock.errors import PlanError, ResumeError, UnknownLengthError
from penstock.loader.arguments import batch_sizes, budgeted, plan_of, steps_of, topology
from penstock.loader.batch import Format, Made, Maker, Shape
from penstock.loader.device import DeviceCopy
from penstock.loader.extent import Extent
from penstock.loader.fingerprint import FingerprintLog
from penstock.loader.packed import check_packed, gives_positions
from penstock.loader.prefetch import Ahead
from penstock.loader.read import MOST_STEPS, Assembler, Block
from penstock.loader.state import check_state, identify, write_state
from penstock.loader.state_prefix import identity_at, place_of
from penstock.loader.targets import check_targets, unread_targets
from penstock.order.budget import Budget, BudgetShard, BudgetSteps
from penstock.order.growing import GrowingPlan
from penstock.order.integers import END
from penstock.order.plan import Plan, Rows
from penstock.order.shuffle import Block as ShuffleBlock
from penstock.order.shuffle import Mode
from penstock.order.steps import Shard, Steps
from penstock.store.files import keep_freed_memory

__all__ = ["Loader", "Made"]


class Loader:
    """Batches of a plan, from any position, for one rank.

    Iterating continues from `position`, and advances it by what was yielded, not by what was
    prefetched. One iterator at a time: a new one takes over. A run with an end can be iterated
    again: see `penstock.loader.extent`.
    """

    def __init__(  # noqa: PLR0913  (the object every user makes: flat keywords read best)
        self,
        rows: Plan | Budget | Rows,
        batch_size: int | None = None,
        *,
        global_batch_size: int | Mapping[int, int] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int | None = None,
        shuffle: Mode | ShuffleBlock | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        drop_last: bool = True,
        device: str | torch.device | None = None,
        format: Format = "dict",
        lengths: Mapping[int, int] | None = None,
        ids: bool = False,
        narrow: bool = False,
        prefetch: int = 2,
        read_ahead: bool | None = None,
        fingerprint: Literal["samples", "tokens"] = "samples",
        fingerprint_log: str | Path | None = None,
    ) -> None:
        """A loader over a plan, or over rows alone.

        Args:
            rows: A `Plan`, or rows to make one of with `seed` and `shuffle`; or a plan with a
                `Budget`, which then takes the place of a batch size.
            batch_size: Rows a step on this rank.
            global_batch_size: Rows a step on all ranks together, instead; or sizes by the
                position from which each is in force. Must divide by `world_size`.
            rank: Which of the ranks this is; from `torch.distributed` where that runs.
            world_size: How many ranks there are; likewise.
            seed: Of the order, where `rows` is not a plan.
            shuffle: Likewise: "full", "block", "part" or "none".
            epochs: How many times one loop reads all rows; the next loop reads the epochs that
                follow. Without it and `steps`, a loop has no end.
            steps: How many steps a loop takes, counted from position 0. The next loop starts
                over if the plan is not shuffled; otherwise the run is over.
            drop_last: At the end of a loop, leave out a batch that is not full; otherwise
                it is filled with rows whose targets are all -100.
            device: Where batches go; a CUDA device gets them on a stream of its own.
            format: "dict" (`inputs`, `targets`, shifted), "tuple" of the same, or "hf"
                (`input_ids`, `labels`, not shifted).
            lengths: Shorter rows at first, by position: {0: 256, 50_000: 1024} cuts each row
                of 1024 into four until position 50,000. The tokens and their order stay; with
                format="hf" the four overlap by one token each.
            ids: Add `source`, `epoch`, `sample` and `position` of each row.
            narrow: Leave ids as narrow as they are stored, (rows, length + 1) under the name
                `tokens`; with `target_mask` in batches that have targets to ignore.
            prefetch: How many blocks of batches are made ahead; 0 makes none.
            read_ahead: Whether the kernel is told which rows come next; for stores that are not
                in memory. By default, after reading had to wait for the disk.
            fingerprint: Of which rows they are, or of their tokens.
            fingerprint_log: A file to which each step's fingerprint is added.
        """
        self.plan = plan_of(rows, seed, shuffle)
        self.rank, self.world_size = topology(rank, world_size)
        sizes = budgeted if isinstance(rows, Budget) else batch_sizes
        self._sizes = sizes(batch_size, global_batch_size, self.world_size)
        self._drop_last = drop_last
        plan: Any = self.plan
        self._growing: GrowingPlan | None = plan if isinstance(plan, GrowingPlan) else None
        self._extent = Extent(self.plan, self._sizes, epochs, steps)
        self._end = self._extent.rows
        self._position = 0
        self._taken_over = 0
        self._reader: Ahead[Iterable[Made]] | None = None
        self._prefetch = prefetch
        self.device = torch.device(device) if device is not None else torch.device("cpu")
        if fingerprint not in ("samples", "tokens"):
            raise PlanError(f'fingerprint={fingerprint!r} is not "samples" or "tokens".')
        if prefetch < 0:
            raise PlanError(f"prefetch={prefetch} is less than none; use 0 or more.")
        if narrow and (format != "dict" or lengths):
            raise PlanError(
                "narrow=True gives rows as they are stored, and nothing is made of them: it does "
                f"not go with format={format!r} and lengths={lengths}."
            )
        self._steps = steps_of(self.plan, self._sizes)
        self._assembler = Assembler(
            self.plan,
            self._shard(),
            end=self._end,
            by_tokens=fingerprint == "tokens",
            read_ahead=read_ahead,
        )
        if lengths and self._assembler.side:
            raise PlanError(
                f"lengths={lengths} cuts rows of one length; these are as long as their documents."
            )
        self.shape = Shape(format, self._assembler.length, lengths, ids=ids)
        check_targets(self.plan.sources, self.shape)
        self._maker = Maker(
            self.shape,
            self.device,
            narrow=narrow,
            end=self._end,
            side=self._assembler.side,
            whole_documents=self._assembler.whole_documents,
        )
        self._layout()
        self._refuse_no_step()
        self._log = FingerprintLog(fingerprint_log) if fingerprint_log is not None else None
        self.fingerprint: int | None = None
        """Of the batch handed out last, on this rank; the sum over ranks is the same for any."""

    def _refuse_no_step(self) -> None:
        """Raise where all rows of a loop do not fill one batch, so that all would be left out."""
        rows = self._extent.rows
        if self._num_steps == 0 and rows and self._sizes and self._growing is None:
            raise PlanError(
                f"This run has {rows:,} rows, and its first batch on all ranks together takes "
                f"{self._steps.sizes[0]:,}, so it would end before a step. Use a smaller batch "
                "size, drop_last=False to fill the batch up, or more epochs."
            )

    def _shard(self) -> Shard:
        steps: Any = self._steps
        kind: Any = BudgetShard if isinstance(steps, BudgetSteps) else Shard
        shard: Shard = kind(steps, rank=self.rank, world_size=self.world_size)
        return shard

    def _layout(self) -> None:
        """Lay out the steps of the pass: from its start, or where none begins here, from here."""
        self._extent.find()
        start, self._end = self._extent.span(self._position)
        steps = steps_of(self.plan, self._sizes, start, self._position)
        ended = self._end is not None and self._position >= self._end
        aligned = ended or (
            self._position < END and steps.span(steps.at(self._position))[0] == self._position
        )
        self._steps = steps if aligned else Steps(self._sizes, start=self._position)
        self._assembler = self._assembler.sharing(self._shard(), end=self._end)
        self._maker = self._maker.ending(self._end)
        self._num_steps = (
            None if self._end is None else self._steps.count(self._end, drop_last=self._drop_last)
        )

    @property
    def position(self) -> int:
        """The position of the next row, in rows of all ranks together."""
        return self._position

    @property
    def unread_targets(self) -> int:
        """Tokens of all windows that are the target of no row, in the format in use.

        Where `lengths` changes, with rows as long as they are at the position.
        """
        length = self.shape.length_at(self._position)
        return unread_targets(self.plan.sources, self.shape, length)

    @property
    def ends(self) -> bool:
        """Whether this run has an end, and so a length."""
        return self._num_steps is not None

    @property
    def counted_from(self) -> int:
        """The position at which step 0 begins."""
        return self._steps.start

    @property
    def step(self) -> int:
        """The number of the next step, which `loader[step]` gives.

        Counted from where the pass began, so it is `len(loader)` after the last step of one;
        after a resume with another batch size, where no step of that size would begin at the
        position, from there.
        """
        if self._end is not None and self._position >= self._end:
            return self._num_steps or 0
        return self._steps.at(self._position)

    def __len__(self) -> int:
        """Steps of one pass, counted as `step` is, the same on every rank."""
        if self._num_steps is None and self._growing is not None and self._extent.by_epochs:
            self._find_end()
            if self._num_steps is None:
                raise UnknownLengthError(
                    "How many steps this run has is not known before the store is sealed: "
                    f"{self._growing.num_rows:,} rows are so far. Give steps= for a length."
                )
        if self._num_steps is None:
            raise PlanError("This run has no end, so no length; give the loader epochs= or steps=.")
        return self._num_steps

    def __getitem__(self, step: int) -> Any:
        """The batch of any step, without touching the position."""
        limit = self._num_steps
        if step < 0 and limit is not None:
            step += limit
        if step < 0 or (limit is not None and step >= limit):
            run = "without end" if limit is None else f"of {limit:,} steps"
            raise IndexError(f"step {step:,} is not in a run {run}")
        return self.make(step).batch

    def make(self, step: int) -> "Made":
        """The batch of a step with its fingerprint and the position after it."""
        if self._growing is not None and not self.has_step(step):
            raise IndexError(f"step {step:,} is not in a run of {len(self):,} steps")
        copy = DeviceCopy(self.device) if self.device.type == "cuda" else None
        made = next(self._maker.batches(self._block(step, step + 1), copy))
        if made.finish is not None:
            made.finish()
        return made

    def __iter__(self) -> Iterator[Any]:
        """Batches from `position` to the end of the pass; of the next pass, if that is where it is.

        After the last batch of a pass, `epochs=` continues with the epochs that follow; with
        `steps=`, an unshuffled run starts over and a shuffled one yields nothing and warns once.
        """
        self._check_packed()
        return self._iterate(self._take_over())

    def _check_packed(self) -> None:
        if self.shape.format == "hf" and gives_positions(self.plan.sources.values()):
            check_packed()

    def _take_over(self) -> int:
        """End what reads now; returns the turn of what does from here on."""
        self._taken_over += 1
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        return self._taken_over

    def _check_turn(self, turn: int) -> None:
        if turn != self._taken_over:
            raise ResumeError(
                "This iterator was overtaken: the loader was moved by seek(), load_state_dict() "
                "or another iter(). Use the newest iterator."
            )

    def _iterate(self, turn: int) -> Iterator[Any]:
        self._check_turn(turn)
        self.begin_pass()
        keep_freed_memory()
        copy = DeviceCopy(self.device) if self.device.type == "cuda" else None
        made = partial(self._made, self.step, copy)
        reader = Ahead(made, self._prefetch) if self._prefetch else None
        self._reader = reader
        try:
            for batches in reader or made():
                for number, each in enumerate(batches):
                    self._hand_out(each)
                    if number == 0 and reader is not None:
                        reader.taken()
                    yield each.batch
                    self._check_turn(turn)
            self._end_pass()
        finally:
            if reader is not None:
                reader.close()
            if self._reader is reader:
                self._reader = None

    def begin_pass(self) -> None:
        """Go to the next pass where no step of this one is left; called as a loop begins."""
        if self._end is None and self._growing is not None and self._position:
            # Waits until there is such a step, or it is known where the pass ends. If that is
            # before the position, this lays out the later pass, and steps get other numbers.
            self.has_step(self.step)
        if self._end is None or self.has_step(self.step):
            return
        position = self._extent.after(self._end)
        if position is not None:
            self._position = position
            self._layout()
            self._refuse_no_step()

    def _end_pass(self) -> None:
        """Leave out the rows that fill no batch: what follows is the next pass, for any state.

        Rows of a run with `steps=` stay: it may be continued with more steps.
        """
        if self._extent.by_epochs and self._end is not None:
            self._position = self._end

    def follow(self, made: Iterable[tuple[Any, int]]) -> Iterator[Any]:
        """Hand out batches that were made elsewhere, with their fingerprints, from `step` on."""
        self._check_packed()
        return self._follow(self._take_over(), self.step, made)

    def _follow(self, turn: int, first: int, made: Iterable[tuple[Any, int]]) -> Iterator[Any]:
        for step, (batch, fingerprint) in zip(count(first), made, strict=False):
            self._check_turn(turn)
            self._hand_out(Made(step, self._after(step), batch, fingerprint, None))
            yield batch
        self._check_turn(turn)
        self._end_pass()

    def _after(self, step: int) -> int:
        """The position after a step; the end of the run where the last batch was filled up."""
        stop = self._steps.span(step)[1]
        return stop if self._end is None else min(stop, self._end)

    def _hand_out(self, made: Made) -> None:
        if self._growing is not None:
            self._growing.handed_out(made.stop)
        if made.finish is not None:
            made.finish()
        self._position = made.stop
        self.fingerprint = made.fingerprint
        if self._log:
            self._log.add(made.step, made.stop, made.fingerprint)

    def _made(self, first: int, copy: DeviceCopy | None) -> Iterator[Iterable[Made]]:
        """Finished batches, a block at a time."""
        step = first
        most = 1  # the first batch is wanted at once; then blocks grow
        while step < (last := self._steps_before(step)):
            block = self._block(step, last, most)
            most = min(4 * most, MOST_STEPS)
            batches = self._maker.batches(block, copy)
            if copy is not None:
                # One by one: what is on its way to the device is what was asked to be ahead.
                yield from ([made] for made in batches)
            else:
                yield batches
            step += len(block.spans)

    def _steps_before(self, step: int) -> int:
        """The step before which a block may end that begins with this one, or `step` at the end.

        That is the end of the run; or as far as a store has grown by now, which is waited for.
        """
        if self._growing is not None and (self._num_steps is None or step < self._num_steps):
            self._growing.reach(self._steps.span(step)[1])
            if not self._growing.complete:
                known = self._steps.count(self._growing.num_rows, drop_last=True)
                return known if self._num_steps is None else min(known, self._num_steps)
            self._find_end()
        return self._num_steps if self._num_steps is not None else 2**62

    @property
    def drops_parts(self) -> bool:
        """Whether what was read goes away, as in a stream with `keep=False`."""
        return self._growing is not None and self._growing.drops_parts

    def has_step(self, step: int) -> bool:
        """Whether the run has a step; where a store is still growing, that is waited for."""
        return step < self._steps_before(step)

    def _find_end(self) -> None:
        """Lay out the end of a run over a store that has become complete, if it has one."""
        if self._end is None and (rows := self._extent.find()) is not None:
            if self._extent.by_epochs and self._position >= rows:
                self._layout()  # sought before it was known that this is a later pass
            else:
                self._end = rows
        if self._end is not None and self._num_steps is None:
            self._assembler.end = self._end
            self._maker = self._maker.ending(self._end)
            self._num_steps = self._steps.count(self._end, drop_last=self._drop_last)

    def _block(self, first: int, last: int, most: int = MOST_STEPS) -> Block:
        try:
            return self._assembler.block(first, last, most)
        except Exception as error:
            start = self._steps.span(first)[0]
            error.add_note(
                f"While reading a block of steps from step {first:,} on (position {start:,}), as "
                f"rank {self.rank} of {self.world_size}."
            )
            raise

    def seek(self, position: int) -> None:
        """Go to a position of the global order; the next batch begins there."""
        position = index(position)
        limit = self._extent.limit
        if not 0 <= position <= limit:
            raise PlanError(f"Position {position:,} is not in a run of {limit:,} rows.")
        self._take_over()
        self._position = position
        self._layout()
        if self._growing is not None:
            self._growing.handed_out(position)

    def state_dict(self) -> dict[str, Any]:
        """Where this run is: small, JSON, and the same on every rank."""
        told = identity_at(self.plan, self._position, self._identity)
        return write_state(told, self._position)

    @cached_property
    def _identity(self) -> dict[str, Any] | None:
        return identify(self.plan) if self._growing is None else None

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
            position = place_of(self.plan, self._identity, checked)
        except ResumeError:
            if on_change == "error":
                raise
        limit = self._extent.limit
        if not 0 <= position <= limit:
            raise ResumeError(
                f"This state is at position {position:,}, past the end of this run at {limit:,}. "
                "Give the loader more steps."
            )
        self.seek(position)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}  # threads stay where they are

    def as_dataloader(self, num_workers: int = 0, **options: Any) -> Any:
        """This loader as a `torch.utils.data.DataLoader`, for tools that insist.

        Each loop over it yields what a loop over the loader would, and moves the loader on.
        """
        from penstock.loader.dataloader import as_dataloader

        return as_dataloader(self, num_workers=num_workers, **options)
