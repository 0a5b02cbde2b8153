"""The loader: reads a plan step by step.

A loader has one number as its state: the position of the next row in the global order. Every
batch is a function of that number. So nothing else has to be saved or restored: there are no
worker processes, no shuffle buffer and no random state.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from functools import cached_property, partial
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, Unpack, cast, overload

import torch
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PlanError, ResumeError
from penstock.loader import batch_format as formats
from penstock.loader.arguments import LoaderOptions, ShuffleMode, batch_sizes, plan_of, rank_of
from penstock.loader.batch import DeviceCopy, Made, Maker, checked_device, made_blocks
from penstock.loader.batch_dict import shown
from penstock.loader.batch_format import BatchFormat
from penstock.loader.prefetch import Ahead
from penstock.loader.rank_positions import RankPositions
from penstock.loader.read import Assembler
from penstock.loader.run import AnyPlan, Run
from penstock.loader.state import State, check_state, identify, shortened, write_state
from penstock.loader.state_prefix import comparable, identity_at, position_of
from penstock.rows.protocol import RowsLike
from penstock.store.memory import keep_freed_memory
from penstock.streaming.plan import StreamedPlan

if TYPE_CHECKING:
    from penstock.loader.dataloader import LoaderBatches
    from penstock.loader.explain import ExplainedStep

Batch = TypeVar("Batch")


class Loader(Generic[Batch]):
    """Batches of a plan for one rank, from any position.

    Iteration continues from `position`, and advances it by the batches that were yielded, not by
    those that were prefetched. There is one iterator at a time; a new one replaces it. A run with
    an end can be iterated again: see `penstock.loader.run`.
    """

    @overload
    def __init__(
        self: "Loader[formats.TargetBatch]",
        rows: AnyPlan | RowsLike,
        batch_size: int | None = None,
        *,
        format: Literal["dict"] = "dict",
        **options: Unpack[LoaderOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: "Loader[formats.PairBatch]",
        rows: AnyPlan | RowsLike,
        batch_size: int | None = None,
        *,
        format: Literal["tuple"],
        **options: Unpack[LoaderOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: "Loader[formats.LabelBatch]",
        rows: AnyPlan | RowsLike,
        batch_size: int | None = None,
        *,
        format: Literal["hf"],
        **options: Unpack[LoaderOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: "Loader[formats.NarrowBatch]",
        rows: AnyPlan | RowsLike,
        batch_size: int | None = None,
        *,
        format: Literal["narrow"],
        **options: Unpack[LoaderOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: "Loader[Any]",
        rows: AnyPlan | RowsLike,
        batch_size: int | None = None,
        *,
        format: formats.Format | BatchFormat,
        **options: Unpack[LoaderOptions],
    ) -> None: ...

    def __init__(  # noqa: PLR0913  (the object that every user makes: flat keywords read best)
        self,
        rows: AnyPlan | RowsLike,
        batch_size: int | None = None,
        *,
        global_batch_size: int | Mapping[int, int] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        seed: int | None = None,
        shuffle: ShuffleMode | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        drop_last: bool = True,
        device: str | torch.device | None = None,
        format: formats.Format | BatchFormat = "dict",
        prefetch: int = 2,
    ) -> None:
        """Make a loader over a plan, or over rows.

        Args:
            rows: A `Plan`, or rows to make a plan of with `seed` and `shuffle`.
            batch_size: Rows per step on this rank.
            global_batch_size: Rows per step on all ranks together, instead; or sizes by the
                position from which each applies. Must be a multiple of `world_size`.
            rank: The rank of this process; by default that of `torch.distributed`, or 0.
            world_size: The number of ranks. Give it together with `rank`, or leave out both.
            mesh: torch's DeviceMesh, instead of both: ranks are counted along its data dimensions,
                such as "dp_shard".
            seed: The seed of the order, if `rows` is not a plan.
            shuffle: "full", "block", "part" or "none", if `rows` is not a plan; see `Plan`.
            epochs: How many times one loop reads all rows; the next loop reads the epochs that
                follow. Without `epochs` and `steps`, a loop has no end.
            steps: How many steps a loop takes, counted from position 0. The next loop starts
                over if the plan is not shuffled; otherwise the run is over.
            drop_last: Leave out the last batch of a loop if it is not full. Otherwise it is padded
                with rows whose targets are all -100.
            device: The device of the batches; the CPU if None. CUDA copies use a separate stream.
            format: "dict" (`inputs`, `targets`, shifted), "tuple" of the same, "hf" (`input_ids`,
                `labels`, not shifted), or "narrow" (`tokens` in the dtype of the store). Or a
                `BatchFormat`, which can also add the source and the position of each row.
            prefetch: How many blocks of batches a thread makes ahead of time; 0 for no thread.
        """
        if prefetch < 0:
            raise PlanError(f"prefetch={prefetch} must be at least 0.")
        self.plan = plan_of(rows, seed, shuffle)
        self.rank, self.world_size = rank_of(rank, world_size, mesh)
        sizes = batch_sizes(batch_size, global_batch_size, self.world_size)
        self._sizes, self.rank_positions = sizes, RankPositions(self.world_size)
        self.run = Run(
            self.plan,
            sizes,
            self.rank,
            self.world_size,
            epochs=epochs,
            num_steps=steps,
            drop_last=drop_last,
        )
        self._iterator_number = 0
        self._reader: Ahead[Iterable[Made]] | None = None
        self._prefetch = prefetch
        self.device = checked_device("cpu" if device is None else device)
        chosen = format if isinstance(format, BatchFormat) else BatchFormat(fields=format)
        read = self._assembler = Assembler(self.run, by_tokens=chosen.fingerprint == "tokens")
        self.shape = formats.Shape(chosen, read.length)
        self.shape.check_targets(self.plan.sources)
        self._maker = Maker(self.shape, self.device, read.side, read.whole_documents)
        self.fingerprint: int | None = None
        """The fingerprint of the last batch on this rank, of whole rows. The sum over all ranks
        (of a mesh: one of each group that reads the same rows) does not depend on their number."""

    def __repr__(self) -> str:
        run, sizes = self.run, self.run.steps.sizes
        rows = f"{sizes[0]:,}" if len(set(sizes)) == 1 else "a varying number of"
        steps = "" if run.num_steps is None else f" of {run.num_steps:,}"
        place = f"rank {self.rank} of {self.world_size}, {self.device}"
        at = f"at step {self.step:,}{steps}, position {self.position:,}"
        return f"Loader({self.plan!r}; global batches of {rows} rows, {place}; {at})"

    @property
    def position(self) -> int:
        """The position of the next row, in rows of all ranks together."""
        return self.run.position

    @property
    def unread_targets(self) -> int:
        """How many tokens of `Windows` are no target of any row."""
        return self.shape.unread_targets(self.plan.sources)

    @property
    def step(self) -> int:
        """The number of the next step: `loader[step]` is the next batch. See `Run.lay_out`."""
        return self.run.step

    def __len__(self) -> int:
        """Return the number of steps of one loop, counted like `step`; the same on every rank.

        Raises UnknownLengthError, a TypeError, if the run has no end, or none that is known yet.
        """
        return self.run.length()

    def __bool__(self) -> bool:
        return True  # without this, bool() would ask for the length

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of any step, without changing the position."""
        return cast("Batch", shown(self.make(self.run.checked_step(step)).batch))

    def make(self, step: int) -> Made:
        """Return the batch of a step with its fingerprint and the position after it."""
        self.run.refuse_missing_step(step)
        copy = DeviceCopy(self.device) if self.device.type == "cuda" else None
        made = next(self._maker.batches(self._assembler.block(step, step + 1), copy))
        if made.finish is not None:
            made.finish()
        return made

    def explain(self, step: int, tokenizer: object = None) -> "ExplainedStep":
        """Return the rows of a step on this rank, with documents and text; print it, or use `rows`.

        Args:
            step: The number of the step, as in `loader[step]`.
            tokenizer: The tokenizer, of bare token files or if you did not load the store's before.
        """
        from penstock.loader.explain import explain_step

        step = self.run.checked_step(step)
        positions = self.run.shard.positions(step, step + 1, end=self.run.end)
        return explain_step(self.plan, step, positions, tokenizer)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches from `position` to the end of the pass; at its end, the next pass."""
        return self._iterate(self._stop_iterator())

    def _stop_iterator(self) -> int:
        """Stop the current iterator; return the number of the next one."""
        self._iterator_number += 1
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        return self._iterator_number

    def _check_iterator(self, number: int) -> None:
        if number != self._iterator_number:
            raise ResumeError(
                "This iterator was replaced: the loader was moved by seek(), load_state_dict() "
                "or another iter(). Use the newest iterator."
            )

    def follow(self, made: Iterable[tuple[Batch, int]]) -> Iterator[Batch]:
        """Yield batches that a DataLoader made, given with their fingerprints, from `step` on."""
        steps = zip(count(self.step), made, strict=False)
        block = (Made(step, self.run.after(step), *each, None) for step, each in steps)
        return self._iterate(self._stop_iterator(), [block])

    def _iterate(
        self, iterator: int, blocks: Iterable[Iterable[Made]] | None = None
    ) -> Iterator[Batch]:
        """Yield the batches of `blocks`, or make them if None, and advance the position."""
        self._check_iterator(iterator)
        reader = None
        if blocks is None:
            self.run.begin_pass()
            keep_freed_memory()
            copy = DeviceCopy(self.device) if self.device.type == "cuda" else None
            made = partial(made_blocks, self._assembler, self._maker, self.step, copy)
            reader = self._reader = Ahead(made, self._prefetch) if self._prefetch else None
            blocks = reader or made()
        try:
            # After the thread was started, which makes batches while this thread waits for ranks.
            self.rank_positions.check(self.position, self.shared_settings)
            for batches in blocks:
                for number, each in enumerate(batches):
                    # Before the yield: a state that the loop saves must not repeat this batch.
                    self._advance(each)
                    if number == 0 and reader is not None:
                        reader.taken()
                    yield shown(each.batch)
                    self._check_iterator(iterator)
            self.run.end_pass()
        finally:
            if reader is not None:
                reader.close()
            if self._reader is reader:
                self._reader = None

    def _advance(self, made: Made) -> None:
        """Move the position past a batch that is about to be yielded."""
        if isinstance(self.plan, StreamedPlan):
            self.plan.store.check()  # an error of the build is raised at once
        if made.finish is not None:
            made.finish()
        self.run.position = made.stop
        self.fingerprint = made.fingerprint

    def seek(self, position: int) -> None:
        """Go to a position of the global order; the next batch begins there.

        Call it on all ranks: in a process group of this loader's size, the next batch raises
        ResumeError if ranks are at different positions. `load_state_dict` does the same.
        """
        self.move(position)
        self.rank_positions.moved()

    def move(self, position: int) -> None:
        """Go to a position that does not have to be compared with those of other ranks."""
        position = self.run.checked_position(position)
        self._stop_iterator()  # before the position changes: the thread reads `run`
        self.run.position = position
        self.run.lay_out()

    def state_dict(self) -> State:
        """Return the state of this run: small, JSON, and the same on every rank."""
        return write_state(identity_at(self.plan, self.position, self._identity), self.position)

    @cached_property
    def _identity(self) -> State | None:
        return None if isinstance(self.plan, StreamedPlan) else identify(self.plan)

    def shared_settings(self) -> State:
        """Return the settings that must be the same on all ranks."""
        identity = comparable(self.plan, self._identity)
        sizes = list(self._sizes.items()) if len(self._sizes) > 1 else self._sizes.get(0)
        order = {**identity["order"], "global_batch_size": shortened(sizes)}
        return {**identity, "order": order}

    def load_state_dict(
        self, state: Mapping[str, Any], *, on_change: Literal["error", "restart"] = "error"
    ) -> None:
        """Resume from a state, on any number of ranks and with any batch size.

        Args:
            state: The return value of `state_dict`.
            on_change: What to do with a state of another order: "error" raises ResumeError, and
                "restart" begins the new order at position 0. A damaged state is always an error.
        """
        if on_change not in ("error", "restart"):
            raise ResumeError(f'on_change={on_change!r} is not "error" or "restart".')
        checked = check_state(state)
        try:
            position = position_of(self.plan, self._identity, checked)
        except ResumeError:
            if on_change == "error":
                raise
            position = 0
        if position > self.run.limit:
            raise ResumeError(
                f"This state is at position {position:,}, past the end of this run at "
                f"{self.run.limit:,}. Give the loader more steps."
            )
        self.seek(position)

    def __getstate__(self) -> State:
        return {**self.__dict__, "_reader": None}  # threads cannot be pickled

    def copy(self) -> Self:
        """Return a loader of the same batches with a separate position."""
        other = copy(self)
        # Only the run has a position, and the assembler reads the run; the rest can be shared.
        other.run = copy(self.run)
        other._assembler = copy(self._assembler)
        other._assembler.run = other.run
        return other

    def as_dataloader(self, num_workers: int = 0, **options: Any) -> "LoaderBatches":
        """Return this loader as a `torch.utils.data.DataLoader`, for tools that require one.

        Each loop over it yields what a loop over the loader would, and advances the loader.
        """
        from penstock.loader.dataloader import as_dataloader

        return as_dataloader(self, num_workers=num_workers, **options)
