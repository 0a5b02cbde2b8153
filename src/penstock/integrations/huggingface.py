"""Hugging Face datasets, Trainer and accelerate over penstock rows.

    build_dataset(load_dataset(…, split="train"), "stores/wiki")     # a dataset to a store
    class MyTrainer(RowsTrainer, transformers.Trainer): ...          # train on rows
    loader = StepLoader(rows, 8)                                     # accelerate, or your own loop

Both `transformers.Trainer` and accelerate would shard the batches of a DataLoader over the ranks,
and would read all old batches when they resume. A `StepLoader` reads only the share of its rank and
is marked as prepared, so it is not sharded twice. It skips old batches without reading them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from penstock.errors import PlanError, ResumeError
from penstock.integrations.batches import BatchSource, RankSpan, State, StepBatches, unchanged
from penstock.integrations.hf_datasets import build_dataset, export_texts, is_dataset
from penstock.integrations.hf_format import (
    Labels,
    MaskedPacks,
    hf_tokenizer,
    refuse_second_shift,
    row_format,
)
from penstock.loader.arguments import topology
from penstock.loader.batch_format import LabelBatch
from penstock.loader.loader import Loader
from penstock.loader.packed import keep_documents_apart, needs_one_row, without_cache
from penstock.loader.rank_positions import RankPositions
from penstock.order.plan import Plan
from penstock.ranges import whole_number
from penstock.rows.documents import Documents
from penstock.rows.packs import Packs
from penstock.rows.windows import Windows

__all__ = [
    "RowItems",
    "RowsTrainer",
    "StepLoader",
    "build_dataset",
    "export_texts",
    "hf_tokenizer",
    "is_dataset",
    "keep_documents_apart",
]

AnyRows = Windows | Documents | Packs | MaskedPacks


class RowItems(Dataset[LabelBatch]):
    """A map-style dataset of single rows, for evaluation; any trainer may shard it.

    Items of `Windows` and `Packs` have one length; `collate` stacks them to a batch. Items of
    `Documents` need a collator that pads, such as `penstock.integrations.pytorch.pad_collate` or
    Hugging Face's. Such a collator adds an `attention_mask`, with which packed documents attend to
    each other. `RowsTrainer` therefore collates packed items itself; a plain `Trainer` needs
    `data_collator=items.collate`.
    """

    def __init__(
        self,
        rows: AnyRows,
        *,
        labels: Labels = "same",
        pad_id: int | None = None,
        model: torch.nn.Module | None = None,
    ) -> None:
        """Make one item of each row, in order.

        Args:
            rows: `Windows`, `Packs` or `Documents`, as for `StepLoader`.
            labels: "same", for models that shift labels themselves, or "shifted".
            pad_id: The id in padded places.
            model: The model of packed rows, to test; `RowsTrainer` tests it itself.
        """
        shape = row_format(rows, pad_id, labels)
        self.packed = shape.packed
        """Whether items contain several documents, with `position_ids`."""
        if shape.packed and model is not None:
            keep_documents_apart(model)
        plan = Plan(shape.rows, shuffle="none")  # all rows: a trainer shards these items itself
        self._loader = Loader(plan, 1, rank=0, world_size=1, epochs=1, format=shape.format)
        self._to_batch = shape.to_batch

    def __repr__(self) -> str:
        return f"RowItems({self._loader.plan.sources['data']!r})"

    def __len__(self) -> int:
        return len(self._loader)

    def __getitem__(self, index: int) -> LabelBatch:
        index = whole_number("index", index)
        index = index + len(self) if index < 0 else index
        if not 0 <= index < len(self):
            raise IndexError(f"row {index:,} does not exist; there are {len(self):,} rows")
        batch = self._to_batch(self._loader[index])
        item = {name: values[0] for name, values in batch.items()}
        # Other collators than `collate` make a tensor of `use_cache`, and the model then raises an
        # error. Without it, documents would attend to each other without one.
        return cast("LabelBatch", without_cache(item))

    @staticmethod
    def collate(items: list[LabelBatch]) -> LabelBatch:
        """Stack items of one length; a collate function for packed items and windows."""
        tensors = [
            {name: each for name, each in item.items() if name != "use_cache"} for item in items
        ]
        return cast("LabelBatch", without_cache(default_collate(tensors)))


class _EpochSampler(Sampler[list[RankSpan]]):
    """The positions that this rank reads in each step of an epoch."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self.cuts = source.cuts
        self.start = 0
        """The position of the epoch's first step."""
        self.skipped = 0
        """Steps of this epoch that were trained already."""

    def __len__(self) -> int:
        return self._source.epoch_steps or 0

    def __iter__(self) -> Iterator[list[RankSpan]]:
        first, self.skipped = self.skipped, 0
        position = self.cuts.after(self.start, first)
        for _ in range(first, len(self)):
            rows = self.cuts.rows(position)
            yield [self._source.span(position, rows)]
            position += rows

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch. Trainers call this before each epoch; `skipped` does not change."""
        self.start = epoch * len(self._source.plan)


class StepLoader(DataLoader[LabelBatch]):
    """A DataLoader over the steps of a run. Trainers do not shard it again; skipping reads nothing.

    An iteration is an epoch: every row once, in another order each epoch. The last step may be
    smaller. A rank with one row fewer than others in that step gets a row whose labels are all
    -100, so that shapes agree. With one row a step on each rank, up to `world_size - 1` rows at
    the end of an epoch are left out.
    """

    _is_accelerate_prepared = True  # `Accelerator.prepare` returns it unchanged

    def __init__(  # noqa: PLR0913  (flat keywords read best)
        self,
        rows: AnyRows,
        batch_size: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        pad_id: int | None = None,
        labels: Labels = "same",
        model: torch.nn.Module | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        """Set the rows, the size of a step, and the share of this rank.

        Args:
            rows: `Windows` (`input_ids` and `labels`; if made without `stride=`, they overlap by
                one token so that every token is a target), `Documents` (also `attention_mask`)
                or `Packs` (also `position_ids` and `use_cache=False`, and no `attention_mask`).
            batch_size: Rows of a step on this rank.
            rank: The number of this rank; from `torch.distributed` if it is initialised.
            world_size: The number of ranks; likewise.
            seed: Determines the order.
            pad_id: The id in padded places.
            labels: "same", for models that shift labels themselves, or "shifted".
            model: The model that packed rows are for. It is tested as by `keep_documents_apart`;
                with FlashAttention, the rows of a batch become one row.
            drop_last: Whether to leave out a last step of an epoch that is not full.
            num_workers: Processes that make batches.
            **options: Other arguments of `torch.utils.data.DataLoader`, such as `pin_memory`.
        """
        shape = row_format(rows, pad_id, labels)
        rank, world_size = topology(rank, world_size)
        if whole_number("batch_size", batch_size) < 1:
            raise PlanError(f"batch_size={batch_size} must be at least 1.")
        self.source = BatchSource(
            plan=Plan(shape.rows, seed=seed),
            global_batch=batch_size * world_size,
            rank=rank,
            world_size=world_size,
            to_batch=shape.to_batch,
            format=shape.format,
            flat=shape.packed and bool(needs_one_row(model)),
            drop_last=drop_last,
        )
        if len(shape.rows) < self.source.global_batch:
            raise PlanError(
                f"{len(shape.rows):,} rows do not make one step of {self.source.global_batch:,} "
                f"({batch_size:,} on each of {world_size:,} ranks). Use a smaller batch_size."
            )
        self._steps = _EpochSampler(self.source)
        self._position = 0
        self._ranks = RankPositions(world_size)
        options.setdefault("generator", torch.Generator())  # leaves the global generator unchanged
        super().__init__(
            StepBatches(self.source),
            batch_sampler=self._steps,
            collate_fn=unchanged,
            num_workers=num_workers,
            **options,
        )

    def __repr__(self) -> str:
        return f"StepLoader({self.dataset!r}; at position {self._position:,})"

    def __iter__(self) -> Iterator[LabelBatch]:  # type: ignore[override]
        steps = self._steps
        # Taken before the sampler resets `skipped`, which it does when it yields its first step.
        start, first = steps.start, steps.skipped
        self._ranks.check(steps.cuts.after(start, first), self.source.settings)
        for number, batch in enumerate(super().__iter__(), start=first + 1):
            # Workers are ahead of this loop, so the position is that of the yielded batches. It
            # is set before the batch is yielded: the caller may save a state right away.
            self._position = steps.cuts.after(start, number)
            yield batch
        steps.start = start + len(self.source.plan)  # the next epoch, unless set_epoch is called

    def spans(self, step: int, batches: int = 1) -> list[tuple[int, int]]:
        """Return the positions of each batch of an optimizer step, on all ranks together.

        Args:
            step: The number of the step, from 1. The last one of an epoch may have fewer batches.
            batches: The batches of a step: `gradient_accumulation_steps`.
        """
        epoch, number = divmod(step - 1, -(-len(self) // batches))
        cuts, start = self._steps.cuts, epoch * len(self.source.plan)
        inside = range(number * batches, min((number + 1) * batches, len(self)))
        begins = [cuts.after(start, each) for each in inside]
        return [(begin, begin + cuts.rows(begin)) for begin in begins]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; in a resumed epoch, steps that were trained are still skipped."""
        self._steps.set_epoch(epoch)

    def state_dict(self) -> State:
        """Return the position: the same on every rank, without batches that workers made ahead."""
        # It is the state of a `penstock.Loader`, with the digests of the data and a checksum.
        loader = self.source.loader()
        loader.seek(self._position)
        return loader.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Continue from a state, with the same number of rows a step on all ranks.

        Raises:
            ResumeError: the state is of other data, or of steps of another size.
        """
        loader = self.source.loader()
        loader.load_state_dict(state)
        # At the end of an epoch whose last rows are left out, the next step is in the next epoch.
        position = self._steps.cuts.begin(loader.position)
        step = self._steps.cuts.step_at(position)
        if step is None:
            raise ResumeError(
                f"This state is at position {loader.position:,}, where no step of "
                f"{self.source.global_batch:,} rows begins. Use the batch_size times ranks of the "
                "run that saved it."
            )
        self._steps.set_epoch(position // len(self.source.plan))
        self._steps.skipped = step
        self._position = position
        self._ranks.moved()


class RowsTrainer:
    """A mixin for `transformers.Trainer` that trains on rows.

        class MyTrainer(RowsTrainer, transformers.Trainer):
            pass

        trainer = MyTrainer(model=model, args=args, train_rows=Packs("stores/wiki", 1024))
        trainer.train(resume_from_checkpoint=True)

    The order depends on `args.data_seed`, or `args.seed`. A stopped run resumes at exactly the
    next step, by the trainer's own count of steps. Do not change batch size times ranks.

    For packed rows, the model is tested as by `keep_documents_apart`.
    """

    # Attributes of `transformers.Trainer`, from which a subclass inherits too.
    args: Any
    model: Any
    data_collator: object
    train_dataset: object
    eval_dataset: Any

    def __init__(self, *arguments: Any, train_rows: AnyRows | None = None, **options: Any) -> None:
        if train_rows is not None and options.get("train_dataset") is not None:
            raise PlanError("train_rows and train_dataset are both given. Give one of them.")
        self.train_rows = train_rows
        super().__init__(*arguments, **options)

    def get_train_dataloader(self) -> DataLoader[LabelBatch]:
        """Return a loader of `train_rows`; without them, the Trainer's own of `train_dataset`."""
        args = self.args
        if self.train_rows is None:
            with self._stacking(self.train_dataset, args.train_batch_size):
                return super().get_train_dataloader()  # type: ignore[misc,no-any-return]
        return StepLoader(
            self.train_rows,
            args.train_batch_size,
            rank=args.process_index,
            world_size=args.world_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            model=self.model,
        )

    def get_eval_dataloader(self, eval_dataset: object = None) -> DataLoader[LabelBatch]:
        """Return the Trainer's loader; packed items get no `attention_mask`."""
        found = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(found, str):
            found = self.eval_dataset[found]
        with self._stacking(found, self.args.eval_batch_size):
            return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc,no-any-return]

    def get_test_dataloader(self, test_dataset: object) -> DataLoader[LabelBatch]:
        """Return the Trainer's loader, as `get_eval_dataloader` does."""
        with self._stacking(test_dataset, self.args.eval_batch_size):
            return super().get_test_dataloader(test_dataset)  # type: ignore[misc,no-any-return]

    @contextmanager
    def _stacking(self, dataset: object, batch_size: int) -> Iterator[None]:
        """Refuse shifted labels; for packed rows, test the model and add no mask."""
        if isinstance(dataset, AnyRows):
            raise PlanError(
                f"{dataset!r} holds rows, and the Trainer reads items of a dataset here. Pass "
                "RowItems(rows) of penstock.integrations.huggingface."
            )
        refuse_second_shift(self.model)
        if not (isinstance(dataset, RowItems) and dataset.packed):
            yield
            return
        if needs_one_row(self.model) and batch_size > 1:
            raise PlanError(
                f"The model uses FlashAttention, which finds packed documents in batches of one "
                f"row only, and here a batch has {batch_size:,}. Set per_device_eval_batch_size=1 "
                '(and train on train_rows=), or load the model with attn_implementation="sdpa".'
            )
        # The DataLoader keeps the collator with which it was made, so it is changed back at once.
        collator, self.data_collator = self.data_collator, dataset.collate
        try:
            yield
        finally:
            self.data_collator = collator
