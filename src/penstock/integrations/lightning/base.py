"""The base class of penstock's LightningDataModules: loaders, and a state that resumes exactly.

Lightning calls `prepare_data` in one process of a node, then `setup` in all processes, then asks
for loaders. A checkpoint keeps what `state_dict` returns on rank 0.
"""

import logging
import os
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

import torch

from penstock.errors import MissingExtraError, MissingInputError, PlanError
from penstock.integrations import hf_format
from penstock.integrations.batches import BatchSource, State
from penstock.integrations.lightning import loaders
from penstock.integrations.stores import StoreSettings, store_of, stores_together, stream_of
from penstock.loader.arguments import plan_of, topology
from penstock.loader.dataloader import WorkerOptions
from penstock.loader.packed import needs_one_row
from penstock.order.shuffle import Mode
from penstock.ranges import whole_number
from penstock.rows.documents import Documents
from penstock.rows.tokens import ArrayFile, StreamLike
from penstock.rows.windows import Windows
from penstock.store.reader import TokenStore
from penstock.streaming.snapshots import Snapshot, StreamedStore

if TYPE_CHECKING:
    from penstock.integrations.stores import Inputs

try:
    from lightning.pytorch import LightningDataModule
except ImportError:
    try:
        from pytorch_lightning import LightningDataModule
    except ImportError:
        raise MissingExtraError(
            "A LightningDataModule needs lightning, which is not installed.\n"
            'Install it with: pip install "penstock[lightning]"'
        ) from None

PathLike = str | os.PathLike[str]
OnChange = Literal["error", "restart"]
ModuleRows = Windows | Documents | hf_format.MaskedPacks

# A child of Lightning's logger, so that these lines are shown.
_log = logging.getLogger("lightning.pytorch.penstock")

_STAGES: dict[str | None, tuple[str, ...]] = {
    None: ("train", "val", "test"),
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": (),
}


class CommonArguments(TypedDict, total=False):
    """The arguments that all data modules of penstock have."""

    seed: int
    """Determines the order."""
    shuffle: Mode | None
    """How rows to train on are shuffled: "part" keeps the parts of a store in order and shuffles
    the rows inside each; "full" shuffles all rows, "block" large blocks of them; "none" shuffles
    nothing. The default is "part" with `streaming`, which allows no other order because the rest
    of the rows is not known yet, and "full" otherwise. With "part", streamed, tokenized and
    preprocessed text gives the same batches."""
    global_batch_size: int | None
    """Rows of a training step on all devices together. If it is given, `batch_size` applies to
    validation only."""
    drop_last: bool
    """Whether to leave out the last step of a training epoch if it is not full. Otherwise that
    step is smaller, and every row is read once an epoch."""
    pin_memory: bool | None
    """Whether batches are in pinned memory; by default, if there is a GPU."""
    cache_dir: PathLike | None
    """Where stores are kept."""
    on_change: OnChange
    """What to do with a checkpoint of another order of the data: "error" raises ResumeError, and
    "restart" begins the new order at its first row, with the model of the checkpoint."""


def check_sizes(**sizes: int | None) -> None:
    """Raise if a size was given that is no whole number, or below 1."""
    for name, value in sizes.items():
        if value is not None and whole_number(name, value) < 1:
            raise PlanError(f"{name}={value} must be at least 1.")


def truncation(rows: ModuleRows) -> list[str]:
    """Return a text that says how many tokens `max_length` cuts off, or nothing if it is none."""
    if not isinstance(rows, Documents) or not rows.cut_documents:
        return []
    return [
        f"{rows.cut_documents:,} rows were cut off after max_length={rows.max_length:,} tokens, "
        f'which loses {rows.cut_tokens:,} tokens; overflow="split" or packing=True keeps them'
    ]


def check_exists(path: Path, advice: str) -> None:
    """Raise if there is no such file; `advice` says how to get it."""
    if not path.is_file():
        where = f"working directory: {Path.cwd()}"
        raise MissingInputError(f"{path} does not exist ({where}). {advice}")


class ResumableDataModule(LightningDataModule):  # type: ignore[misc]
    """A data module over stores. A subclass decides which inputs are read, and what a row is."""

    settings: StoreSettings
    """The settings with which stores are built."""

    def __init__(  # noqa: PLR0913  (the arguments of CommonArguments, with their defaults)
        self,
        tokenizer: str,
        batch_size: int | None,
        max_length: int,
        labels: hf_format.Labels,
        *,
        seed: int = 0,
        shuffle: Mode | None = None,
        global_batch_size: int | None = None,
        drop_last: bool = False,
        pin_memory: bool | None = None,
        cache_dir: PathLike | None = None,
        on_change: OnChange = "error",
    ) -> None:
        super().__init__()
        check_sizes(
            batch_size=batch_size, global_batch_size=global_batch_size, max_length=max_length
        )
        if on_change not in ("error", "restart"):
            raise PlanError(f'on_change={on_change!r} is not "error" or "restart".')
        if shuffle is not None and shuffle not in get_args(Mode):
            modes = ", ".join(f'"{mode}"' for mode in get_args(Mode))
            raise PlanError(f"shuffle={shuffle!r} is not one of {modes}.")
        hf_format.check_labels(labels)
        self.batch_size, self.max_length, self.labels = batch_size, max_length, labels
        self.seed = whole_number("seed", seed)
        self._on_change = on_change
        self._shuffle = shuffle
        self.streaming = False
        self.num_workers = 0
        self.prefetch_factor: int | None = None
        self.train_dataset: ModuleRows | None = None
        self.val_dataset: ModuleRows | None = None
        self.test_dataset: ModuleRows | None = None
        self._tokenizer_name = tokenizer
        self._global_batch_size = global_batch_size
        self._drop_last, self._pin_memory, self._cache_dir = drop_last, pin_memory, cache_dir
        self.progress = loaders.TrainerProgress(on_change=on_change)
        """The position of the training run."""

    def __repr__(self) -> str:
        sides = ("train", "val", "test")
        opened = [f"{each}: {rows!r}" for each in sides if (rows := vars(self)[f"{each}_dataset"])]
        held = ", ".join(opened) or "setup() has opened no data yet"
        batch = f"batch_size {self.batch_size}, max_length {self.max_length:,}"
        return f"{type(self).__name__}({held}; {self._tokenizer_name}, {batch})"

    __str__ = __repr__  # Lightning's lists four loaders, without what they hold

    @property
    def shuffle(self) -> Mode:
        """How the rows to train on are shuffled."""
        # While a store grows, only the order within its parts can be known.
        return self._shuffle or ("part" if self.streaming else "full")

    def check_shuffle(self) -> None:
        """Raise if the order needs all rows, and training begins before all text is tokenized."""
        if self.streaming and self.shuffle != "part":
            raise PlanError(
                f'shuffle="{self.shuffle}" needs all rows, but with streaming=True training begins '
                'before all text is tokenized. Pass streaming=False, or shuffle="part".'
            )

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, with Hugging Face's API."""
        return hf_format.hf_tokenizer(self._tokenizer_name)

    def inputs(self) -> "Mapping[str, Inputs]":
        """The inputs of each side: "train", "val" and perhaps "test"."""
        raise NotImplementedError

    def rows(self, side: str) -> ModuleRows:
        """The rows of one side."""
        raise NotImplementedError

    def store(self, side: str) -> TokenStore | StreamedStore:
        """The store of one side, found in the cache or built; training text may be streamed."""
        if self.streams(side):
            return stream_of(self.inputs()[side], self.settings)
        return store_of(self._together.get(side) or self.inputs()[side], self.settings)

    @cached_property
    def _together(self) -> dict[str, TokenStore]:
        """The sides that are stores already; opened at once, so that they are of one build."""
        return stores_together(self.inputs())

    def streams(self, side: str) -> bool:
        """Whether the text of one side is tokenized while it is read."""
        return self.streaming and side == "train"

    def windows(self, tokens: StreamLike | ArrayFile) -> Windows:
        """Rows of `max_length` tokens, the last one padded, in which every token is a target."""
        rows = Windows(tokens, self.max_length, tail="pad")
        # If the model shifts labels itself, every token is a target only if rows overlap.
        return rows if self.labels == "shifted" else rows.overlapping()

    def format_of(self, rows: ModuleRows) -> hf_format.RowFormat:
        """Return how batches of `rows` are made."""
        return hf_format.row_format(rows, None, self.labels)

    def prepare_data(self) -> None:
        """Tokenize the data, in one process of each node."""
        for side in self.inputs():
            # A stream is built by the processes that read it. Other ranks find finished stores.
            if not self.streams(side):
                self.store(side)

    def setup(self, stage: str | None = None) -> None:
        """Open the rows of a stage.

        "fit" opens train and val, "validate" opens val, "test" opens test, and None opens all.
        """
        if stage not in _STAGES:  # Lightning passes an enum, whose members equal these strings
            raise PlanError(f'stage={stage!r} is not "fit", "validate", "test" or None.')
        known = self.inputs()
        for side in _STAGES[stage]:
            # Trainer.fit, validate and test each call setup; rows that are open stay open.
            if side in known and vars(self)[f"{side}_dataset"] is None:
                setattr(self, f"{side}_dataset", self.rows(side))
                if self.topology()[0] == 0:
                    _log.info(self.report(side))

    def opened(self, side: str) -> ModuleRows:
        """Return the rows of one side; raise if `setup` has not opened them."""
        rows: ModuleRows | None = vars(self)[f"{side}_dataset"]
        if rows is None:
            stage = "test" if side == "test" else "fit"
            closed = " Streamed data is closed when training ends." if self.streams(side) else ""
            raise PlanError(f'The {side} data is not open: call setup("{stage}") first.{closed}')
        return rows

    def report(self, side: str) -> str:
        """Return a line for the log that describes the rows of one side."""
        return f"{side}: {self.opened(side)!r}."

    def train_dataloader(self) -> loaders.TrainingBatches:
        """Return the training loader: shuffled anew each epoch, from the position of the run."""
        rows, trainer = self.opened("train"), self.trainer
        self._follow_trainer()
        source = self.source(rows, self.shuffle)
        self.progress.train_on(source, self._global_batch_size)
        sized = self.progress.source.epoch_steps is not None
        if trainer is not None:  # some ranks may know the length of an epoch before others do
            sized = trainer.strategy.reduce_boolean_decision(sized, all=True)
        return loaders.TrainingBatches(self.progress, sized=sized)

    def val_dataloader(self) -> loaders.EvaluationBatches:
        """Return a loader of every validation row once, in order; none to fit without "val"."""
        is_missing = self.trainer is not None and "val" not in self.inputs()
        if is_missing and self.trainer.state.fn == "fit":
            if self.topology()[0] == 0:
                _log.info('data= has no "val", so the Trainer runs without validation.')
            # Lightning takes this as no loader. Users who loop over batches never get it.
            return []  # type: ignore[return-value]
        return loaders.EvaluationBatches(self.source(self.opened("val"), "none"))

    def test_dataloader(self) -> loaders.EvaluationBatches:
        """Return a loader that reads every test row once, in order."""
        return loaders.EvaluationBatches(self.source(self.opened("test"), "none"))

    def source(self, rows: ModuleRows, shuffle: Mode) -> BatchSource:
        """Return the order of `rows`, the share of this rank, and how batches are made."""
        rank, world_size = self.topology()
        made = self.format_of(rows)
        if self.labels == "shifted" and self.trainer is not None:
            hf_format.refuse_second_shift(self.trainer.lightning_module)
        given = self._global_batch_size
        if given is not None and given % world_size:
            raise PlanError(
                f"global_batch_size={given:,} does not divide over {world_size:,} devices. Use a "
                f"multiple of {world_size:,}."
            )
        # One of both was given, or `setup` has chosen a batch size.
        global_batch = given if self.batch_size is None else self.batch_size * world_size
        assert global_batch is not None
        return BatchSource(
            plan=plan_of(made.rows, self.seed, shuffle),
            global_batch=global_batch,
            rank=rank,
            world_size=world_size,
            to_batch=made.to_batch,
            format=made.format,
            flat=made.packed and self._needs_one_row(),
            workers=self._worker_options(shuffle),
            drop_last=self._drop_last,
        )

    def _needs_one_row(self) -> bool:
        """Test the Trainer's model with packed rows; return whether a batch must be one row."""
        model = None if self.trainer is None else self.trainer.lightning_module
        flat = needs_one_row(model)
        if model is not None and flat is None:
            warnings.warn(
                f"Rows of these batches hold several documents, and {type(model).__name__} "
                "contains no model of transformers, which alone is tested here. Keep documents "
                "apart in its attention by position_ids, which begin at 0 in each document, or use "
                "LLMDataModule(…, packing=False).",
                stacklevel=2,
            )
        return bool(flat)

    def topology(self) -> tuple[int, int]:
        """The rank of this process, and the number of ranks that read separate rows."""
        if self.trainer is None:
            return topology(None, None)
        # There are fewer ranks than processes if several processes share one model.
        found = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return int(found["rank"]), int(found["num_replicas"])

    def teardown(self, stage: str | None = None) -> None:
        """Stop the build of a streamed store in this process."""
        rows = self.train_dataset
        if rows is None or stage not in (None, "fit"):
            return
        # The build holds the lock of the store, and another process may wait to continue it.
        for store in rows.stream.members:
            if isinstance(store, Snapshot):
                store.source.close()
                self.train_dataset = None

    def state_dict(self) -> State:
        """Return the position of the training run, which is the same on every rank."""
        return self.progress.state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        """Continue from a state, also on another number of devices."""
        if state_dict:
            # Lightning restores states before it asks for the loaders of a new trainer.
            self._follow_trainer()
            self.progress.load_state_dict(state_dict)

    def _follow_trainer(self) -> None:
        # One data module may serve several trainers, one after the other. Each begins at 0, or
        # from the checkpoint that it loads.
        if self.trainer is not self.progress.trainer:
            self.progress = loaders.TrainerProgress(self.trainer, self._on_change)

    def _worker_options(self, shuffle: Mode) -> dict[str, Any]:
        """Return the arguments of a DataLoader for workers and pinned memory."""
        # A stream is read in the process that builds it, on a thread.
        num_workers = 0 if self.streaming and shuffle == "part" else self.num_workers
        ahead = self.prefetch_factor if num_workers else None
        workers = WorkerOptions(num_workers, ahead, num_workers > 0, 0, None, None).checked()
        pinned = torch.cuda.is_available() if self._pin_memory is None else self._pin_memory
        # The generator seeds the workers, which draw no random numbers. Without it, PyTorch would
        # draw the seed from its global generator, and loading data would change dropout.
        return {**workers._asdict(), "pin_memory": pinned, "generator": torch.Generator()}
