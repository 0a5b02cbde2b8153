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
from functools import partial
from itertools import chain
from multiprocessing.context import BaseContext
from operator import index
from typing import Any, TypedDict, Unpack

import torch
from torch.utils.data import DataLoader, Sampler

from penstock.errors import PlanError
from penstock.integrations.hf_format import Labels
from penstock.integrations.pytorch.datasets import TextDataset, TransformerDataset
from penstock.integrations.pytorch.encoders import AnyTokenizer, as_given
from penstock.integrations.pytorch.samples import suffix_layout
from penstock.integrations.pytorch.windows import EPOCH, FILLER, stack
from penstock.loader.arguments import topology
from penstock.loader.batch_format import LabelBatch, PairBatch
from penstock.loader.dataloader import WorkerOptions
from penstock.order.permute import permute
from penstock.order.shuffle import epoch_key
from penstock.order.steps import Shard, Steps
from penstock.transforms.transform import Transform, gives_labels

PathLike = str | os.PathLike[str]
WindowDataset = TransformerDataset | TextDataset
Batches = DataLoader[Any]
LabelLoaders = tuple[DataLoader[LabelBatch], DataLoader[LabelBatch]]
PairLoaders = tuple[DataLoader[PairBatch], DataLoader[PairBatch]]

_CHUNK = 8_192
_NAMES = ("data",)  # the name that a plan gives to its only source


class _Options(TypedDict, total=False):
    """Options of both functions. `create_dataloaders` describes them, `_pair` sets defaults."""

    stride: int
    eos: bool | int | str
    labels: Labels
    transform: Transform | None
    val_transform: Transform | None
    cache_dir: PathLike | None
    seed: int
    pin_memory: bool | None
    prefetch_factor: int | None
    multiprocessing_context: str | BaseContext | None
    rank: int | None
    world_size: int | None


def create_dataloaders(
    train_path: PathLike,
    val_path: PathLike,
    tokenizer: AnyTokenizer,
    batch_size: int = 16,
    seq_length: int = 128,
    num_workers: int = 0,
    *,
    is_jsonl: bool | None = None,
    **options: Unpack[_Options],
) -> LabelLoaders:
    """DataLoaders over a training and a validation file; batches are `{"input_ids", "labels"}`.

    Training is shuffled, in a new order each epoch that depends on `seed` and the epoch alone,
    and drops the last incomplete batch. Validation is not shuffled and drops nothing. The batches
    do not depend on the number of workers, nor on how workers are started.

    All ranks take the same number of steps, in validation too. A rank that has one window fewer
    than others gets a window whose labels are all -100. For a validation loss, sum the losses and
    the number of labels over ranks, then divide.

    Args:
        train_path: The training file, as for `TransformerDataset`.
        val_path: The validation file.
        tokenizer: See `TransformerDataset`.
        batch_size: Windows in a batch.
        seq_length: Ids in a window.
        num_workers: Processes that make batches. With 0, batches are made in this process, which
            is usually fast enough. Always 0 on Windows.
        is_jsonl: Whether the files contain JSON lines; if not given, their suffixes decide.
        **options: Any of these.

            - `stride`: the distance between windows, 1 by default; `seq_length` makes them
              disjoint.
            - `eos`: whether to put an end token after each sample, or which token; by default
              False.
            - `labels`: "shifted", or "same" for models that shift labels themselves.
            - `transform`: changes the windows of training in another way each epoch: one of
              `penstock.transforms`, such as `MaskTokens`, `FillInTheMiddle`, `TokenDropout`.
            - `val_transform`: changes the windows of validation, in the same way each epoch. If
              not given, `transform` if labels are of masked tokens, so that both losses mean the
              same; otherwise nothing.
            - `seed`: determines the order, and the choices of a transform.
              `train_loader.sampler.set_epoch(n)` continues with epoch n.
            - `pin_memory`: whether batches are in pinned memory; by default, if there is a GPU.
            - `prefetch_factor`: batches that each worker makes ahead.
            - `multiprocessing_context`: how workers are started: "fork", "spawn" or "forkserver".
            - `cache_dir`: where tokenized files are kept; see `penstock.integrations.stores`.
            - `rank`: the number of this process among those that train together. Each reads its
              share of the windows. If not given, that of `torch.distributed` where it is
              initialised.
            - `world_size`: the number of processes; likewise.

    Raises:
        PlanError: a file has too little text for one window, or for one batch of training.
    """
    given = as_given(tokenizer)  # once, for both files

    def dataset(path: PathLike, **windows: Any) -> TransformerDataset:
        lines = suffix_layout(path) == "jsonl" if is_jsonl is None else is_jsonl
        return TransformerDataset(path, given, seq_length, lines, **windows)

    return _pair(dataset, (train_path, val_path), batch_size, num_workers, **options)


def create_text_dataloaders(
    train: PathLike,
    val: PathLike,
    batch_size: int = 32,
    sequence_length: int = 256,
    num_workers: int = 0,
    *,
    tokenizer: AnyTokenizer = "gpt2",
    **options: Unpack[_Options],
) -> PairLoaders:
    """DataLoaders over two text files, each one document; batches are `(x, y)`.

    Everything else is as in `create_dataloaders`.
    """
    dataset = partial(TextDataset, sequence_length=sequence_length, tokenizer=as_given(tokenizer))
    return _pair(dataset, (train, val), batch_size, num_workers, **options)


def _pair(  # noqa: PLR0913  (the options of two functions, with their defaults)
    dataset: Callable[..., WindowDataset],
    paths: tuple[PathLike, PathLike],
    batch_size: int,
    num_workers: int,
    *,
    seed: int = 0,
    transform: Transform | None = None,
    val_transform: Transform | None = None,
    pin_memory: bool | None = None,
    prefetch_factor: int | None = None,
    multiprocessing_context: str | BaseContext | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    **windows: Any,
) -> tuple[Batches, Batches]:
    """Return a training and a validation loader; raise if a file has too little text."""
    if unknown := windows.keys() - _Options.__annotations__:
        raise TypeError(
            f"{', '.join(sorted(unknown))}: there is no such argument. The keyword arguments are "
            f"{', '.join(_Options.__annotations__)}."
        )
    # Workers stay alive between epochs: new ones would have to open the store again.
    context = multiprocessing_context if num_workers else None
    workers = WorkerOptions(num_workers, prefetch_factor, num_workers > 0, 0, None, context)
    workers = workers.checked(stacklevel=4)
    rank, world_size = topology(rank, world_size)
    if val_transform is None and transform is not None and gives_labels(transform):
        val_transform = transform
    training, validation = (
        dataset(path, transform=each, seed=seed, **windows)
        for path, each in zip(paths, (transform, val_transform), strict=True)
    )
    _refuse_too_short(training, paths[0], batch_size * world_size)
    _refuse_too_short(validation, paths[1], 1)
    numbers = EpochShuffle if transform is None else _EpochNumbers
    order = numbers(
        len(training), seed=seed, rank=rank, world_size=world_size, batch_size=batch_size
    )
    # On one rank, PyTorch's SequentialSampler reads all windows in order.
    share = _RankWindows(len(validation), rank, world_size) if world_size > 1 else None

    def loader(windows: WindowDataset, sampler: Sampler[int] | None, drop: bool) -> Batches:
        return DataLoader(
            windows,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop,
            collate_fn=stack,
            pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
            **workers._asdict(),
            # It seeds the workers, which draw no random numbers. Without it, PyTorch would draw
            # the seed from its global generator, and loading data would change dropout.
            generator=torch.Generator(),
        )

    return loader(training, order, True), loader(validation, share, False)


class _RankWindows(Sampler[int]):
    """Yields the windows that one rank validates on, equally many on every rank.

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
    """Yields every number below `num_samples` once an epoch, in another order each epoch.

    The order depends only on the seed and the epoch. Each iteration is the next epoch; after a
    restart, call `set_epoch` to continue.

    >>> order = EpochShuffle(5, seed=17)
    >>> list(order), list(order)
    ([4, 2, 1, 3, 0], [3, 1, 4, 0, 2])

    Each of several ranks takes its share of every global batch, as in `penstock.Loader`; rank and
    world size are those of `torch.distributed` if it is initialised and they are not given. All
    ranks leave out an incomplete global batch at the end of an epoch.

    >>> [list(EpochShuffle(5, seed=17, rank=rank, world_size=2)) for rank in (0, 1)]
    [[4, 1], [2, 3]]
    """

    def __init__(
        self,
        num_samples: int,
        *,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        batch_size: int = 1,
    ) -> None:
        rank, world_size = topology(rank, world_size)
        self.num_samples, self.seed = index(num_samples), index(seed)
        # On one rank, the DataLoader drops an incomplete batch itself, and every number is yielded.
        self._rows = index(batch_size) if world_size > 1 else 1
        self._shard = Shard(Steps(self._rows * world_size), rank=rank, world_size=world_size)
        self.epoch = 0
        """The epoch of the next iteration."""

    def __repr__(self) -> str:
        return f"EpochShuffle({self.num_samples:,} samples, seed {self.seed}, epoch {self.epoch:,})"

    def __len__(self) -> int:
        return self._shard.steps.count(self.num_samples, drop_last=True) * self._rows

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be `epoch`."""
        if index(epoch) < 0:
            raise PlanError(f"epoch={epoch} must be 0 or more.")
        self.epoch = index(epoch)

    def __iter__(self) -> Iterator[int]:
        # This is the key of a `Plan` with a single source, so the order is the same as in `Loader`.
        # The epoch is counted when an iteration begins: a loop that is left early counts too.
        key = epoch_key(self.seed, _NAMES, self.epoch)
        self.epoch += 1
        # Some steps at a time: the order of 10^8 windows takes no memory.
        total, some = len(self) // self._rows, max(1, _CHUNK // self._rows)
        return chain.from_iterable(
            permute(
                self._shard.positions(first, min(first + some, total)), self.num_samples, key
            ).tolist()
            for first in range(0, total, some)
        )


class _EpochNumbers(EpochShuffle):
    """The order of `EpochShuffle`, in numbers that also say the epoch, for a transform.

    >>> order = _EpochNumbers(5, seed=17)
    >>> list(order), [number - EPOCH for number in order]
    ([4, 2, 1, 3, 0], [3, 1, 4, 0, 2])
    """

    def __iter__(self) -> Iterator[int]:
        return map((self.epoch * EPOCH).__add__, super().__iter__())
