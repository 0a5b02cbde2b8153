"""DataLoaders over text files, with the names and arguments of hand-written ones.

    train_loader, val_loader = create_dataloaders("train.jsonl", "val.jsonl", tokenizer)
    for batch in train_loader:
        loss = model(batch["input_ids"], batch["labels"])     # labels are already shifted

PyTorch's RandomSampler stores a permutation of all windows: with 10^8 of them, 800 MB and seconds
before the first batch of every epoch. Here the order is computed, a few thousand positions at a
time. It is the order of `penstock.Loader` over the same windows.
"""

import os
from collections.abc import Callable, Iterator
from itertools import chain
from multiprocessing.context import BaseContext
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Sampler

from penstock.errors import PlanError
from penstock.integrations.hf_format import Labels
from penstock.integrations.pytorch.datasets import FILLER, TextDataset, TransformerDataset, stack
from penstock.integrations.pytorch.encoders import AnyTokenizer, as_given
from penstock.integrations.pytorch.samples import suffix_layout
from penstock.loader.dataloader import WorkerOptions
from penstock.order.permute import permute
from penstock.order.shuffle import epoch_key
from penstock.order.steps import Shard, Steps

__all__ = ["EpochShuffle", "create_dataloaders", "create_text_dataloaders"]

PathLike = str | os.PathLike[str]
WindowDataset = TransformerDataset | TextDataset
Batches = DataLoader[Any]
Loaders = tuple[Batches, Batches]

_CHUNK = 8_192
_NAMES = ("data",)  # the name that a plan gives to its only source


def create_dataloaders(  # noqa: PLR0913  (a drop-in: the arguments of the code it replaces)
    train_path: PathLike,
    val_path: PathLike,
    tokenizer: AnyTokenizer,
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
    multiprocessing_context: str | BaseContext | None = None,
    cache_dir: PathLike | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Loaders:
    """DataLoaders over a training and a validation file; batches are `{"input_ids", "labels"}`.

    Training is shuffled, in a new order each epoch that depends on `seed` and the epoch alone,
    and drops the last incomplete batch. Validation is not shuffled and drops nothing. The batches
    do not depend on the number of workers, nor on how workers are started.

    All ranks take the same number of steps, in validation too. A rank that has one window fewer
    than others gets a window whose labels are all -100. For a validation loss, sum the losses and
    the number of labels over ranks, then divide.

    Args:
        train_path: A file for `TransformerDataset`.
        val_path: Another.
        tokenizer: See `TransformerDataset`.
        batch_size: Windows in a batch.
        seq_length: Ids in a window.
        num_workers: Processes that make batches. With 0, batches are made in this process, which
            is usually fast enough. Always 0 on Windows.
        is_jsonl: Whether the files contain JSON lines; if not given, their suffixes decide.
        stride: The distance between windows; `seq_length` makes them disjoint.
        eos: Whether to put an end token after each sample, or which token.
        labels: "shifted", or "same" for models that shift labels themselves.
        seed: Determines the order. `train_loader.sampler.set_epoch(n)` continues with epoch n.
        pin_memory: Whether batches are in pinned memory; if not given, when there is a GPU.
        prefetch_factor: Batches that each worker makes ahead.
        multiprocessing_context: How workers are started: "fork", "spawn" or "forkserver".
        cache_dir: Where tokenized files are kept; see `penstock.integrations.stores`.
        rank: The number of this process among those that train together. Each reads its share
            of the windows.
        world_size: The number of processes.

    Raises:
        PlanError: a file has too little text for one window, or for one batch of training.
    """

    def dataset(path: PathLike) -> TransformerDataset:
        holds_jsonl = suffix_layout(path) == "jsonl" if is_jsonl is None else is_jsonl
        return TransformerDataset(
            path,
            given,
            seq_length,
            holds_jsonl,
            stride=stride,
            eos=eos,
            labels=labels,
            cache_dir=cache_dir,
        )

    given = as_given(tokenizer)  # once, for both files
    options = _LoaderOptions(batch_size, pin_memory, rank, world_size, seed)
    workers = _workers(num_workers, prefetch_factor, multiprocessing_context).checked()
    return options.pair(dataset, train_path, val_path, workers)


def create_text_dataloaders(  # noqa: PLR0913  (as above)
    train: PathLike,
    val: PathLike,
    batch_size: int = 32,
    sequence_length: int = 256,
    num_workers: int = 0,
    *,
    tokenizer: AnyTokenizer = "gpt2",
    stride: int = 1,
    eos: bool | int | str = False,
    labels: Labels = "shifted",
    seed: int = 0,
    pin_memory: bool | None = None,
    prefetch_factor: int | None = None,
    multiprocessing_context: str | BaseContext | None = None,
    cache_dir: PathLike | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Loaders:
    """DataLoaders over two text files, each one document; batches are `(x, y)`.

    Everything else is as in `create_dataloaders`.
    """

    def dataset(path: PathLike) -> TextDataset:
        return TextDataset(
            path,
            sequence_length,
            given,
            stride=stride,
            eos=eos,
            labels=labels,
            cache_dir=cache_dir,
        )

    given = as_given(tokenizer)
    options = _LoaderOptions(batch_size, pin_memory, rank, world_size, seed)
    workers = _workers(num_workers, prefetch_factor, multiprocessing_context).checked()
    return options.pair(dataset, train, val, workers)


def _workers(
    num_workers: int, prefetch_factor: int | None, context: str | BaseContext | None
) -> WorkerOptions:
    # Workers stay alive between epochs: each would have to open the store again.
    context = context if num_workers else None
    return WorkerOptions(num_workers, prefetch_factor, num_workers > 0, 0, None, context)


class _LoaderOptions(NamedTuple):
    """The options of both DataLoaders of a pair."""

    batch_size: int
    pin_memory: bool | None
    rank: int
    world_size: int
    seed: int

    def pair(
        self,
        dataset: Callable[[PathLike], WindowDataset],
        train: PathLike,
        val: PathLike,
        workers: WorkerOptions,
    ) -> Loaders:
        """A training and a validation loader, if each file has enough text."""
        training, validation = dataset(train), dataset(val)
        _refuse_too_short(training, train, self.batch_size * self.world_size)
        _refuse_too_short(validation, val, 1)
        ranks = {"rank": self.rank, "world_size": self.world_size}
        order = EpochShuffle(len(training), seed=self.seed, batch_size=self.batch_size, **ranks)
        # On one rank, PyTorch's SequentialSampler reads all windows in order.
        share = _RankWindows(len(validation), **ranks) if self.world_size > 1 else None
        pinned = torch.cuda.is_available() if self.pin_memory is None else self.pin_memory

        def loader(windows: WindowDataset, sampler: Sampler[int] | None, drop: bool) -> Batches:
            return DataLoader(
                windows,
                batch_size=self.batch_size,
                sampler=sampler,
                drop_last=drop,
                collate_fn=stack,
                pin_memory=pinned,
                **workers._asdict(),
                # It seeds the workers, which draw no random numbers. Without it, PyTorch would
                # draw the seed from its global generator, and loading data would change dropout.
                generator=torch.Generator(),
            )

        return loader(training, order, True), loader(validation, share, False)


class _RankWindows(Sampler[int]):
    """The windows that one rank validates on, as many as on every other rank.

    >>> list(_RankWindows(5, 0, 2)), list(_RankWindows(5, 1, 2)) == [1, FILLER, 3]
    ([0, 2, 4], True)
    """

    def __init__(self, num_windows: int, rank: int, world_size: int) -> None:
        self._numbers = range(rank, num_windows, world_size)
        self._length = -(-num_windows // world_size)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        # The filler comes before the last window. A batch of filler alone would have no label, and
        # a mean over no labels is NaN.
        last = max(0, len(self._numbers) - 1)
        filler = [FILLER] * (self._length - len(self._numbers))
        return chain(self._numbers[:last], filler, self._numbers[last:])


def _refuse_too_short(dataset: WindowDataset, path: PathLike, batch_size: int) -> None:
    """Raise if a file has too little text for one window, or for one batch."""
    length = dataset.length
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


class EpochShuffle(Sampler[int]):
    """Every number below `num_samples` once an epoch, in another order each epoch.

    The order is a function of seed and epoch. Each iteration is the next epoch; after a restart,
    `set_epoch` sets the next one.

    >>> order = EpochShuffle(5, seed=17)
    >>> list(order), list(order)
    ([4, 2, 1, 3, 0], [3, 1, 4, 0, 2])

    Each of several ranks takes its share of every global batch, as in `penstock.Loader`. All
    ranks leave out an incomplete global batch at the end of an epoch.

    >>> [list(EpochShuffle(5, seed=17, rank=rank, world_size=2)) for rank in (0, 1)]
    [[4, 1], [2, 3]]
    """

    def __init__(
        self,
        num_samples: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        batch_size: int = 1,
    ) -> None:
        self.num_samples = index(num_samples)
        self.seed = index(seed)
        self._steps = Steps(index(batch_size) * index(world_size))
        self._shard = Shard(self._steps, rank=rank, world_size=world_size)
        self.epoch = 0
        """The epoch of the next iteration."""

    def __len__(self) -> int:
        if self._shard.world_size == 1:  # the DataLoader drops an incomplete batch itself
            return self.num_samples
        return self._num_steps * (self._steps.sizes[0] // self._shard.world_size)

    @property
    def _num_steps(self) -> int:
        """Global batches of an epoch."""
        return self._steps.count(self.num_samples, drop_last=True)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one."""
        if index(epoch) < 0:
            raise PlanError(f"epoch={epoch} must be 0 or more.")
        self.epoch = index(epoch)

    def __iter__(self) -> Iterator[int]:
        # The key of `Plan` for a single source, so the order is the same as in `Loader`. The
        # epoch is counted when an iteration begins: a loop that is left early has had its epoch.
        key = epoch_key(self.seed, _NAMES, self.epoch)
        self.epoch += 1
        return chain.from_iterable(
            permute(positions, self.num_samples, key).tolist() for positions in self._positions()
        )

    def _positions(self) -> Iterator[NDArray[np.int64]]:
        """The positions of an epoch that this rank reads."""
        if self._shard.world_size == 1:
            return (np.arange(start, stop) for start, stop in _chunks(self.num_samples))
        rows = self._steps.sizes[0] // self._shard.world_size
        # Whole steps at a time, of about as many positions as below on one rank.
        return (
            self._shard.positions(start, stop)
            for start, stop in _chunks(self._num_steps, max(1, _CHUNK // rows))
        )


def _chunks(total: int, most: int = _CHUNK) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of `range(total)`; the first is short, for a fast first batch."""
    # Twice as long each time, up to `most`: 256, 512, … of 8,192 positions.
    start, size = 0, max(1, most // 32)
    while start < total:
        yield start, min(start + size, total)
        start, size = start + size, min(2 * size, most)
