"""Hugging Face's datasets, Trainer and accelerate, over our rows.

    build_dataset(load_dataset(…, split="train"), "stores/wiki")     # datasets in
    class MyTrainer(RowsTrainer, transformers.Trainer): ...          # batches out
    loader = StepLoader(rows, 8, rank=…, world_size=…)               # accelerate, or a loop

Both `transformers.Trainer` and accelerate would deal the batches of a DataLoader over the
ranks, and skip those that were seen when they resume. A `StepLoader` gives each rank its share
already, and says so; and to skip its batches is to count, so nothing is read twice.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler, default_collate

from penstock.errors import PlanError, ResumeError
from penstock.integrations.dress import OneRow
from penstock.integrations.feed import Feed
from penstock.integrations.items import RowItems, formatted
from penstock.integrations.rank_rows import RankRows, Span
from penstock.integrations.spool import is_dataset, spool
from penstock.integrations.windows import Labels
from penstock.loader.packed import check_packed, keep_documents_apart, prepare
from penstock.order.plan import Plan
from penstock.store.build import build
from penstock.store.reader import TokenStore

__all__ = [
    "RowItems",
    "RowsTrainer",
    "StepLoader",
    "build_dataset",
    "is_dataset",
    "keep_documents_apart",
    "spool",
]

PathLike = str | os.PathLike[str]


def build_dataset(
    dataset: Any, store: PathLike, *, column: str = "text", **settings: Any
) -> TokenStore:
    """Tokenize a Hugging Face dataset, map-style or streaming, into a store.

    Its texts are first written to files beside the store, in a directory `STORE.texts`, which
    may be removed afterwards. A streaming dataset must have an end: `dataset.take(n)`.

    Args:
        dataset: A `datasets.Dataset` or `IterableDataset`.
        store: The directory to write.
        column: That of the text.
        **settings: As of `penstock.build`.
    """
    if not is_dataset(dataset):
        raise PlanError(
            f"{dataset!r:.80} is no datasets.Dataset or IterableDataset; of a DatasetDict, name a "
            'split: dataset["train"].'
        )
    target = Path(store)
    files = spool(dataset, target.with_name(f"{target.name}.texts"), column)
    return build(files, target, format="parquet", field="text", **settings)


class _EpochSteps(Sampler[list[Span]]):
    """What this rank reads in each step of an epoch, one a batch."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.cuts = feed.cuts
        self.start = 0
        """The position of the epoch's first step."""
        self.skipped = 0
        """Steps of this epoch that were trained already."""

    def __len__(self) -> int:
        return self._feed.epoch_steps or 0

    def __iter__(self) -> Iterator[list[Span]]:
        first, self.skipped = self.skipped, 0
        position = self.cuts.after(self.start, first)
        for _ in range(first, len(self)):
            rows = self.cuts.rows(position)
            yield [self._feed.span(position, rows)]
            position += rows

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, which trainers call before each; one that resumed continues within it."""
        self.start = epoch * len(self._feed.plan)


class _Batches(RankRows):
    """The batch of the one step that a batch sampler asks for."""

    def __len__(self) -> int:
        # Trainers report it as the number of examples.
        return super().__len__() // self._feed.world_size

    def __getitems__(self, spans: list[Span]) -> Any:
        return self[spans[0]]


class StepLoader(DataLoader[Any]):
    """The steps of a run as a DataLoader that nobody shards or skips a second time.

    An iteration is an epoch: every row once, in a new order each. The last step holds the rows
    that are left, so it may be smaller; a rank with a row fewer than others has one whose labels
    are all -100, so that shapes agree. With one row a step on each rank, fewer rows than ranks
    at the end of an epoch are left out.
    """

    _is_accelerate_prepared = True  # `Accelerator.prepare` gives it back as it is

    def __init__(  # noqa: PLR0913  (flat keywords read best)
        self,
        rows: Any,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        pad_id: int | None = None,
        labels: Labels = "same",
        model: Any = None,
        drop_last: bool = False,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        """Steps over rows.

        Args:
            rows: `Windows` (`input_ids` and `labels`; where made without `stride=`, they overlap
                by one token so that every token is a target), `Documents` (also
                `attention_mask`) or `Packs` (also `position_ids`, and no `attention_mask`).
            batch_size: Rows of a step on this rank.
            rank: Which of the ranks this is.
            world_size: How many there are.
            seed: Another seed, another order.
            pad_id: What padding holds.
            labels: "same", for models that shift by themselves, or "shifted".
            model: The model that packed rows are for. It is made ready as by
                `keep_documents_apart`; with FlashAttention, the rows of a batch become one row.
            drop_last: Leave out a last step of an epoch that is not full.
            num_workers: Processes that make batches.
            **options: Of `torch.utils.data.DataLoader`, as `pin_memory`.
        """
        dressed = formatted(rows, pad_id, labels)
        self._packed = dressed.packed
        flat = dressed.packed and prepare(model)
        self.feed = Feed(
            plan=Plan(dressed.rows, seed=seed),
            global_batch=batch_size * world_size,
            rank=rank,
            world_size=world_size,
            dress=OneRow(dressed.dress) if flat else dressed.dress,
            format="hf" if labels == "same" and not dressed.narrow else "dict",
            narrow=dressed.narrow,
            drop_last=drop_last,
        )
        if len(dressed.rows) < self.feed.global_batch:
            raise PlanError(
                f"{len(dressed.rows):,} rows do not make one step of {self.feed.global_batch:,} "
                f"({batch_size:,} on each of {world_size:,} ranks). Use a smaller batch_size."
            )
        self._steps = _EpochSteps(self.feed)
        self._position = 0
        options.setdefault("generator", torch.Generator())  # the global one is the user's
        super().__init__(
            _Batches(self.feed),
            batch_sampler=self._steps,
            collate_fn=_same,
            num_workers=num_workers,
            **options,
        )

    def __iter__(self) -> Any:
        if self._packed:
            check_packed()
        steps = self._steps
        start, first = steps.start, steps.skipped
        for number, batch in enumerate(super().__iter__(), start=first + 1):
            self._position = steps.cuts.after(start, number)
            yield batch
        steps.start = start + len(self.feed.plan)  # the next epoch, unless set_epoch says another

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; the steps of one that was resumed are skipped all the same."""
        self._steps.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is: the same on every rank, not counting what workers made ahead."""
        loader = self.feed.loader()
        loader.seek(self._position)
        return loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken, with the same number of rows a step on all ranks.

        Raises:
            ResumeError: it is of other data, or of steps of another size.
        """
        loader = self.feed.loader()
        loader.load_state_dict(state)
        position = self._steps.cuts.begin(loader.position)
        step = self._steps.cuts.step_at(position)
        if step is None:
            raise ResumeError(
                f"This state is at position {loader.position:,}, where no step of "
                f"{self.feed.global_batch:,} rows begins. Keep batch_size times ranks as it was."
            )
        self._steps.set_epoch(position // len(self.feed.plan))
        self._steps.skipped = step
        self._position = position


class RowsTrainer:
    """A mixin for `transformers.Trainer` that trains on rows.

        class MyTrainer(RowsTrainer, transformers.Trainer):
            pass

        trainer = MyTrainer(model=model, args=args, train_rows=Packs("stores/wiki", 1024))
        trainer.train(resume_from_checkpoint=True)

    The order depends on `args.data_seed`, or `args.seed`. A run that is stopped resumes at the
    very next step, by the trainer's own count of steps; keep batch size times ranks as it was.

    For packed rows, the model is made ready as by `keep_documents_apart`.
    """

    train_rows: Any = None

    def __init__(self, *arguments: Any, train_rows: Any = None, **options: Any) -> None:
        self.train_rows = train_rows
        super().__init__(*arguments, **options)

    def get_train_dataloader(self) -> Any:
        """Steps over `train_rows`; of `train_dataset`, as ever, where there are none."""
        args: Any = self.args  # type: ignore[attr-defined]
        if self.train_rows is None:
            dataset: Any = self.train_dataset  # type: ignore[attr-defined]
            with self._stacking(dataset, args.train_batch_size):
                return super().get_train_dataloader()  # type: ignore[misc]
        return StepLoader(
            self.train_rows,
            args.train_batch_size,
            rank=args.process_index,
            world_size=args.world_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            model=self.model,  # type: ignore[attr-defined]
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The Trainer's; items of packed rows are stacked, whatever its collator would add."""
        found: Any = self.eval_dataset if eval_dataset is None else eval_dataset  # type: ignore[attr-defined]
        if isinstance(found, str):
            found = self.eval_dataset[found]  # type: ignore[attr-defined]
        with self._stacking(found, self.args.eval_batch_size):  # type: ignore[attr-defined]
            return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Likewise."""
        with self._stacking(test_dataset, self.args.eval_batch_size):  # type: ignore[attr-defined]
            return super().get_test_dataloader(test_dataset)  # type: ignore[misc]

    @contextmanager
    def _stacking(self, dataset: Any, batch_size: int) -> Iterator[None]:
        """Make the model ready for a dataset of packed rows, and its DataLoader add no mask."""
        if not (isinstance(dataset, RowItems) and dataset.packed):
            yield
            return
        trainer: Any = self
        if prepare(trainer.model) and batch_size > 1:
            raise PlanError(
                f"The model uses FlashAttention, which finds packed documents in batches of one "
                f"row only, and here a batch is {batch_size:,}. Set per_device_eval_batch_size=1 "
                "(and train on train_rows=), or load the model with attn_implementation="
                '"sdpa".'
            )
        collator, trainer.data_collator = trainer.data_collator, default_collate
        try:
            yield
        finally:
            trainer.data_collator = collator


def _same(batch: Any) -> Any:
    return batch
