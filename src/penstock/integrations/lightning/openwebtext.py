"""`LocalOpenWebTextDataModule`: large text files to windows, for Lightning's Trainer.

    owt_train.txt ── streamed: training begins after the first 64 MB ──┐
    owt_train_preprocessed.npy ── mapped into memory ──────────────────┴─ windows ──► Trainer

Each line is a document, and blank lines are skipped. Documents are concatenated, with an end
token after each, and cut into rows of `max_length` that do not overlap (with `labels="same"`, by
one token). The last row is padded, with -100 in its labels, so no token is lost.
"""

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import PlanError, SourceError
from penstock.integrations.batch_size import largest_lightning_batch
from penstock.integrations.batches import BatchSource
from penstock.integrations.hf_format import Labels, check_labels, hf_tokenizer, input_label_pair
from penstock.integrations.lightning.base import EvaluationBatches, ModuleRows, ResumableDataModule
from penstock.integrations.lightning.loaders import TrainingBatches
from penstock.integrations.stores import StoreSettings, store_of, stream_of
from penstock.loader.run import plan_of
from penstock.order.shuffle import Mode
from penstock.rows.tokens import ArrayFile
from penstock.rows.windows import Windows
from penstock.tokenize.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["LocalOpenWebTextDataModule"]

PathLike = str | os.PathLike[str]

_WITHOUT_CUDA = 32


class LocalOpenWebTextDataModule(ResumableDataModule):
    """Batches of `input_ids` and `labels`, int64 (batch, max_length), of local text files."""

    def __init__(  # noqa: PLR0913  (what people set, flat: Lightning's command line reads it)
        self,
        train_file: PathLike = "training_data/owt_train.txt",
        val_file: PathLike = "training_data/owt_valid.txt",
        *,
        max_length: int = 1024,
        batch_size: int | None = None,
        num_workers: int = 8,
        prefetch_factor: int = 4,
        buffer_size: int = 50_000,
        chunk_size: int = 10_000,
        use_preprocessed: bool = False,
        preprocessed_train: PathLike | None = None,
        preprocessed_val: PathLike | None = None,
        labels: Labels = "shifted",
        tokenizer: str = "gpt2",
        documents: str = "lines",
        streaming: bool = True,
        seed: int = 0,
        global_batch_size: int | None = None,
        drop_last: bool = False,
        pin_memory: bool | None = None,
        cache_dir: PathLike | None = None,
    ) -> None:
        """Set what to train on. No file is opened yet.

        Args:
            train_file: Text to train on.
            val_file: Text to validate on.
            max_length: Tokens of a row.
            batch_size: Rows of a batch on each device. If neither it nor `global_batch_size` is
                given, the largest that fits the GPU, found by trial when training is set up; 32
                without a GPU.
            num_workers: Threads that tokenize while streaming; otherwise processes that make
                batches, which mapped files do not need. Rows do not depend on it.
            prefetch_factor: Batches that each process makes ahead.
            buffer_size: Characters read at once. Text is read in blocks of megabytes here, so this
                is accepted for code that sets it, and has no effect.
            chunk_size: Lines given to the tokenizer at once. It has no effect either.
            use_preprocessed: Read the token files that `python -m penstock.preprocess` writes; the
                text files need not exist.
            preprocessed_train: The token file to train on; if not given,
                `owt_train_preprocessed.npy` beside `train_file`.
            preprocessed_val: The token file to validate on; if not given,
                `owt_val_preprocessed.npy` beside `val_file`.
            labels: "shifted", or "same" for models that shift labels themselves. With "same",
                rows overlap by one token, so that every token is a target.
            tokenizer: What `penstock.load_tokenizer` takes.
            documents: What a document is: "lines", "paragraphs", "file", or a separator.
            streaming: Whether training begins while text is still being tokenized. Otherwise all
                text is tokenized first, and shuffled as a whole.
            seed: Determines the order.
            global_batch_size: Rows of a training step on all devices together, instead of
                `batch_size`, which is then the batch size of validation.
            drop_last: Whether to leave out the last step of a training epoch if it is not full.
                Otherwise it is smaller, and every row comes once an epoch.
            pin_memory: Whether batches are in pinned memory; if not given, when there is a GPU.
            cache_dir: Where stores are kept.
        """
        super().__init__(
            batch_size=batch_size,
            seed=seed,
            global_batch_size=global_batch_size,
            drop_last=drop_last,
            pin_memory=pin_memory,
        )
        # Checked although they have no effect: a script with a wrong value has a mistake in it.
        sizes = {"buffer_size": buffer_size, "chunk_size": chunk_size}
        if num_workers and prefetch_factor is not None:
            sizes["prefetch_factor"] = prefetch_factor
        for name, value in sizes.items():
            if value < 1:
                raise PlanError(f"{name}={value} must be at least 1.")
        check_labels(labels)
        self.train_file, self.val_file = Path(train_file), Path(val_file)
        self.max_length, self.labels = max_length, labels
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor
        self.buffer_size, self.chunk_size = buffer_size, chunk_size
        self.use_preprocessed = use_preprocessed
        self.preprocessed_train = _beside(preprocessed_train, self.train_file, "owt_train")
        self.preprocessed_val = _beside(preprocessed_val, self.val_file, "owt_val")
        self.streaming = streaming and not use_preprocessed
        self._tokenizer = tokenizer
        self._documents = documents
        self._cache_dir = cache_dir

    def prepare_data(self) -> None:
        """Check that the files exist; tokenize those that are not streamed, once a node."""
        # Both files are checked, also the one that is streamed: an error comes before training.
        for side in ("train", "val"):
            path = self._file(side)
            if not self.use_preprocessed and not (self.streaming and side == "train"):
                store_of(path, self._settings)

    def setup(self, stage: str | None = None) -> None:
        """Open what a stage needs; the validation file is the test file too."""
        wanted = {"val" if side == "test" else side for side in self.sides(stage)}
        if "val" in wanted and self.val_dataset is None:
            self.val_dataset = self._rows("val")
        if "train" in wanted and self.train_dataset is None:
            self.train_dataset = self._rows("train")
        # Here and not in __init__: the model and its device are known only now.
        if self.batch_size is None and self._global_batch_size is None:
            self.batch_size = self._largest_batch()

    def train_dataloader(self) -> TrainingBatches:
        """Shuffled, from the position of the run; a stream is shuffled within parts of 64 MB."""
        return self.training(_opened(self.train_dataset))

    def val_dataloader(self) -> EvaluationBatches:
        """Every row once, in order."""
        return self.evaluation(_opened(self.val_dataset))

    def test_dataloader(self) -> EvaluationBatches:
        """The validation rows."""
        return self.val_dataloader()

    def source(self, rows: ModuleRows, shuffle: Mode) -> BatchSource:
        """The rows of this rank, as pairs of inputs and labels."""
        rank, world_size = self.topology()
        return BatchSource(
            plan=plan_of(rows, self.seed, shuffle),
            global_batch=self.device_rows * world_size,
            rank=rank,
            world_size=world_size,
            to_batch=input_label_pair,
            format="dict" if self.labels == "shifted" else "hf",
            workers=self.worker_options(shuffle),
            drop_last=self._drop_last,
        )

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The tokenizer, with Hugging Face's API."""
        return hf_tokenizer(self._tokenizer)

    @cached_property
    def _settings(self) -> StoreSettings:
        return StoreSettings(
            tokenizer=load_tokenizer(self._tokenizer),
            eos=True,
            documents=self._documents,
            cache_dir=self._cache_dir,
            threads=max(1, self.num_workers),  # num_workers=0 is usual, and means one thread
        )

    def _rows(self, side: str) -> Windows:
        path = self._file(side)
        if self.use_preprocessed:
            # The width of ids comes from the header of the .npy file; nothing is copied.
            rows = Windows(ArrayFile(path), self.max_length, tail="pad")
        else:
            make = stream_of if self.streaming and side == "train" else store_of
            rows = Windows(make(path, self._settings), self.max_length, tail="pad")
        # If the model shifts labels itself, every token is a target only if rows overlap.
        return rows if self.labels == "shifted" else rows.overlapping()

    def _file(self, side: str) -> Path:
        text = self.train_file if side == "train" else self.val_file
        tokens = self.preprocessed_train if side == "train" else self.preprocessed_val
        path = tokens if self.use_preprocessed else text
        if path.is_file():
            return path
        if self.use_preprocessed:
            command = (
                f"python -m penstock.preprocess --train_file {self.train_file} --val_file "
                f"{self.val_file} --output_dir {path.parent}"
            )
        else:
            command = f"penstock fetch openwebtext --output {path.parent}"
        raise SourceError(
            f"{path} does not exist (working directory: {Path.cwd()}). Make it with: {command}"
        )

    def _largest_batch(self) -> int:
        """The largest batch that fits the GPU; 32 without one."""
        trainer = self.trainer
        model = trainer.lightning_module if trainer is not None else None
        # Only with a Trainer is there a model to try; `setup` may be called without one.
        if model is None or trainer.strategy.root_device.type != "cuda":
            return _WITHOUT_CUDA
        return largest_lightning_batch(model, trainer, self.max_length)


def _opened(rows: ModuleRows | None) -> ModuleRows:
    if rows is None:
        raise PlanError('No data is open yet: call setup("fit") first.')
    return rows


def _beside(given: PathLike | None, text: Path, name: str) -> Path:
    return Path(given) if given is not None else text.with_name(f"{name}_preprocessed.npy")
