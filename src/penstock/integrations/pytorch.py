r"""PyTorch's Dataset and DataLoader over text files, as people write them by hand.

    train_loader, val_loader = create_dataloaders("train.jsonl", "val.jsonl", tokenizer)
    for batch in train_loader:
        loss = model(batch["input_ids"], batch["labels"])     # labels are shifted already

What is different from writing it by hand: the text is tokenized once and kept (see
`penstock.integrations.cache`), ids stay in a memory-mapped file at two or four bytes each
instead of a list of Python integers, a batch is one gather instead of a tensor for every row,
and the shuffled order is computed, not stored. The classes and functions keep their names,
arguments and shapes.
"""

import os
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Sampler

from penstock.errors import PlanError
from penstock.integrations.checking import check_dataloader, label_convention, test_dataloader
from penstock.integrations.dataset import TextDataset, TransformerDataset
from penstock.integrations.encode import encoder_of
from penstock.integrations.padding import SpecialIds, pad_collate, special_ids
from penstock.integrations.samples import layout_of
from penstock.integrations.shuffle import EpochShuffle
from penstock.integrations.windows import FILLER, Labels, ready_batch
from penstock.integrations.workers import Workers

__all__ = [
    "EpochShuffle",
    "SpecialIds",
    "TextDataset",
    "TransformerDataset",
    "check_dataloader",
    "create_dataloaders",
    "create_text_dataloaders",
    "label_convention",
    "pad_collate",
    "special_ids",
    "test_dataloader",
]

PathLike = str | os.PathLike[str]


def create_dataloaders(  # noqa: PLR0913  (a drop-in: the arguments of the code it replaces)
    train_path: PathLike,
    val_path: PathLike,
    tokenizer: Any,
    batch_size: int = 16,
    seq_length: int = 128,
    num_workers: int = 0,
    *,
    is_jsonl: bool | None = None,
    stride: int = 1,
    eos: bool | int | str = False,
    labels: Labels = "shifted",
    seed: int = 0,
    pin_memory: bool | None = None,
    prefetch_factor: int | None = None,
    multiprocessing_context: Any = None,
    cache_dir: PathLike | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """DataLoaders over a training and a validation file, giving `{"input_ids", "labels"}`.

    Training is shuffled, in a new order each epoch that depends on `seed` and the epoch alone,
    and drops the last incomplete batch; validation is neither shuffled nor cut. The batches
    are the same for any number of workers and any way to start them.

    On several ranks, all take the same number of steps, in validation too: a rank with a window
    fewer than others has one whose labels are all -100. Sum losses and counted labels over
    ranks, then divide.

    Args:
        train_path: A file for `TransformerDataset`.
        val_path: Another.
        tokenizer: See `TransformerDataset`.
        batch_size: Windows in a batch.
        seq_length: Ids in a window.
        num_workers: Processes that make batches; with none, batches are made in this one, which
            is usually fast enough. Always none on Windows.
        is_jsonl: What the files hold; by their suffixes where not given.
        stride: How far apart windows begin; `seq_length` makes them disjoint.
        eos: Whether to put an end token after each sample, or which.
        labels: "shifted", or "same" for models that shift by themselves.
        seed: Another seed, another order. `train_loader.sampler.set_epoch(n)` goes to epoch n.
        pin_memory: Whether batches lie in pinned memory; where there is a GPU if not given.
        prefetch_factor: Batches that each worker makes ahead.
        multiprocessing_context: How workers are started: "fork", "spawn" or "forkserver".
        cache_dir: Where tokenized files are kept; see `penstock.integrations.cache`.
        rank: Which of several processes that train together this is. Each reads its share of
            the windows.
        world_size: How many there are.

    Raises:
        PlanError: a file has too little text for one window, or for one batch of training.
    """

    def dataset(path: PathLike) -> TransformerDataset:
        holds_jsonl = layout_of(path) == "jsonl" if is_jsonl is None else is_jsonl
        return TransformerDataset(
            path,
            encoder,
            seq_length,
            holds_jsonl,
            stride=stride,
            eos=eos,
            labels=labels,
            cache_dir=cache_dir,
        )

    encoder = encoder_of(tokenizer)
    context = multiprocessing_context if num_workers else None
    workers = Workers(num_workers, prefetch_factor, num_workers > 0, 0, None, context).checked()
    options = _Options(batch_size, workers, pin_memory, rank, world_size)
    return options.pair(dataset, train_path, val_path, seq_length, seed)


def create_text_dataloaders(  # noqa: PLR0913  (as above)
    train: PathLike,
    val: PathLike,
    batch_size: int = 32,
    sequence_length: int = 256,
    num_workers: int = 0,
    *,
    tokenizer: Any = "gpt2",
    stride: int = 1,
    eos: bool | int | str = False,
    labels: Labels = "shifted",
    seed: int = 0,
    pin_memory: bool | None = None,
    prefetch_factor: int | None = None,
    multiprocessing_context: Any = None,
    cache_dir: PathLike | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """DataLoaders over two text files, each one document, giving `(x, y)`.

    As `create_dataloaders` in all else.
    """

    def dataset(path: PathLike) -> TextDataset:
        return TextDataset(
            path,
            sequence_length,
            encoder,
            stride=stride,
            eos=eos,
            labels=labels,
            cache_dir=cache_dir,
        )

    encoder = encoder_of(tokenizer)
    context = multiprocessing_context if num_workers else None
    workers = Workers(num_workers, prefetch_factor, num_workers > 0, 0, None, context).checked()
    options = _Options(batch_size, workers, pin_memory, rank, world_size)
    return options.pair(dataset, train, val, sequence_length, seed)


class _Options(NamedTuple):
    """What both DataLoaders of a pair are given."""

    batch_size: int
    workers: Workers
    pin_memory: bool | None
    rank: int
    world_size: int

    def pair(
        self,
        dataset: Callable[[PathLike], Any],
        train: PathLike,
        val: PathLike,
        length: int,
        seed: int,
    ) -> tuple[DataLoader[Any], DataLoader[Any]]:
        """The loaders over two files, if each has enough text for one."""
        training, validation = dataset(train), dataset(val)
        _refuse_too_short(training, train, length, self.batch_size * self.world_size)
        _refuse_too_short(validation, val, length, 1)
        return self.training(training, seed), self.validation(validation)

    def training(self, dataset: Any, seed: int) -> DataLoader[Any]:
        """A shuffled loader of full batches."""
        order = EpochShuffle(
            len(dataset),
            seed=seed,
            rank=self.rank,
            world_size=self.world_size,
            batch_size=self.batch_size,
        )
        return self._loader(dataset, sampler=order, drop_last=True)

    def validation(self, dataset: Any) -> DataLoader[Any]:
        """A loader of everything, in order."""
        share = _Share(len(dataset), self.rank, self.world_size) if self.world_size > 1 else None
        return self._loader(dataset, sampler=share, drop_last=False)

    def _loader(self, dataset: Any, *, sampler: Any, drop_last: bool) -> DataLoader[Any]:
        pinned = torch.cuda.is_available() if self.pin_memory is None else self.pin_memory
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=ready_batch,
            pin_memory=pinned,
            **self.workers._asdict(),
            # Seeds workers, which draw nothing; without it, PyTorch would draw from its global
            # generator here, and loading data would change what dropout does.
            generator=torch.Generator(),
        )


class _Share(Sampler[int]):
    """The windows that one rank validates on, equally many on each; takes no room.

    >>> list(_Share(5, 0, 2)), list(_Share(5, 1, 2)) == [1, FILLER, 3]
    ([0, 2, 4], True)
    """

    def __init__(self, num_windows: int, rank: int, world_size: int) -> None:
        self._numbers = range(rank, num_windows, world_size)
        self._length = -(-num_windows // world_size)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        # The filler comes before the last window: a batch of nothing else has no loss, and the
        # mean over it is NaN.
        last = max(0, len(self._numbers) - 1)
        filler = [FILLER] * (self._length - len(self._numbers))
        return chain(self._numbers[:last], filler, self._numbers[last:])


def _refuse_too_short(dataset: Any, path: PathLike, length: int, batch_size: int) -> None:
    """Raise where a file has no window, or not the windows of one batch."""
    num_tokens = len(dataset.tokenized_data)
    if not len(dataset):
        raise PlanError(
            f"{os.fspath(path)} has {num_tokens:,} tokens, and one window of {length:,} with its "
            f"labels takes {length + 1:,}. Use a shorter length, or more text."
        )
    if len(dataset) < batch_size:
        raise PlanError(
            f"{os.fspath(path)} has {num_tokens:,} tokens, which make {len(dataset):,} windows of "
            f"{length:,}, {dataset.stride:,} apart; one batch of training takes {batch_size:,}. "
            "Use a smaller batch_size, length or stride, or more text."
        )
