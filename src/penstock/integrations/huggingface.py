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
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from penstock.errors import PlanError, ResumeError
from penstock.integrations.dress import MaskedPacks, PaddedDress, named_pair
from penstock.integrations.feed import Feed
from penstock.integrations.rank_rows import RankRows, Span
from penstock.integrations.spool import is_dataset, spool
from penstock.integrations.windows import Labels, check_labels
from penstock.loader.loader import Loader
from penstock.order.plan import Plan
from penstock.rows.packs import Packs
from penstock.rows.padded import Documents
from penstock.rows.windows import Windows
from penstock.store.build import build
from penstock.store.reader import TokenStore

__all__ = ["RowItems", "RowsTrainer", "StepLoader", "build_dataset", "is_dataset", "spool"]

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


class _Dressed(NamedTuple):
    rows: Any
    dress: Any
    narrow: bool


def _dressed(rows: Any, pad_id: int | None, labels: Labels) -> _Dressed:
    """Rows as Hugging Face's models take them."""
    check_labels(labels)
    shifted = labels == "shifted"
    if isinstance(rows, Windows):
        return _Dressed(rows, named_pair, False)
    if isinstance(rows, Packs):
        rows = MaskedPacks(rows)
    if not isinstance(rows, MaskedPacks | Documents):
        raise PlanError(f"{rows!r:.80} are no rows: give Windows, Packs or Documents.")
    if pad_id is None:
        pad_id = rows.pad_id if isinstance(rows, Documents) else 0
    exact = isinstance(rows, Documents) and not rows.stream.has_loss
    return _Dressed(rows, PaddedDress(pad_id, shifted=shifted, exact=exact), True)


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
        drop_last: bool = False,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        """Steps over rows, or over a plan of one source.

        Args:
            rows: `Windows` (`input_ids` and `labels`), `Documents` or `Packs` (with
                `attention_mask`, and `position_ids` for packs).
            batch_size: Rows of a step on this rank.
            rank: Which of the ranks this is.
            world_size: How many there are.
            seed: Another seed, another order.
            pad_id: What padding holds.
            labels: "same", for models that shift by themselves, or "shifted".
            drop_last: Leave out a last step of an epoch that is not full.
            num_workers: Processes that make batches.
            **options: Of `torch.utils.data.DataLoader`, as `pin_memory`.
        """
        dressed = _dressed(rows, pad_id, labels)
        self.feed = Feed(
            plan=Plan(dressed.rows, seed=seed),
            global_batch=batch_size * world_size,
            rank=rank,
            world_size=world_size,
            dress=dressed.dress,
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


class RowItems(Dataset[dict[str, torch.Tensor]]):
    """Rows one by one, as a map-style dataset: for evaluation, which any trainer may deal out.

    Items of `Windows` and `Packs` are equally long; those of `Documents` want a collator that
    pads, as `penstock.integrations.pytorch.pad_collate` or Hugging Face's.
    """

    def __init__(self, rows: Any, *, labels: Labels = "same", pad_id: int | None = None) -> None:
        dressed = _dressed(rows, pad_id, labels)
        self._loader = Loader(
            Plan(dressed.rows, shuffle="none"),
            1,
            rank=0,
            world_size=1,
            format="hf" if labels == "same" and not dressed.narrow else "dict",
            narrow=dressed.narrow,
            prefetch=0,
        )
        self._dress = dressed.dress
        self._length = len(dressed.rows)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index:,} is not among {self._length:,}")
        self._loader.seek(index)
        batch = self._dress(self._loader.make(self._loader.step).batch)
        return {name: values[0] for name, values in batch.items()}


class RowsTrainer:
    """A mixin for `transformers.Trainer` that trains on rows.

        class MyTrainer(RowsTrainer, transformers.Trainer):
            pass

        trainer = MyTrainer(model=model, args=args, train_rows=Packs("stores/wiki", 1024))
        trainer.train(resume_from_checkpoint=True)

    The order depends on `args.data_seed`, or `args.seed`. A run that is stopped resumes at the
    very next step, by the trainer's own count of steps; keep batch size times ranks as it was.
    """

    train_rows: Any = None

    def __init__(self, *arguments: Any, train_rows: Any = None, **options: Any) -> None:
        self.train_rows = train_rows
        super().__init__(*arguments, **options)

    def get_train_dataloader(self) -> Any:
        """Steps over `train_rows`; of `train_dataset`, as ever, where there are none."""
        if self.train_rows is None:
            return super().get_train_dataloader()  # type: ignore[misc]
        args: Any = self.args  # type: ignore[attr-defined]
        return StepLoader(
            self.train_rows,
            args.train_batch_size,
            rank=args.process_index,
            world_size=args.world_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
        )


def _same(batch: Any) -> Any:
    return batch
