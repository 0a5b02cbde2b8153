"""`LocalOpenWebTextDataModule`: big text files to windows, for Lightning's Trainer.

    owt_train.txt ── streamed: training begins after the first 64 MB ──┐
    owt_train_preprocessed.npy ── mapped into memory ──────────────────┴─ windows ──► Trainer

One document a line, blank lines skipped, an end token after each, all of it concatenated and
cut into rows of `max_length` that do not overlap (with `labels="same"`, by one token). The last
row is filled up, with -100 in its labels, so no token is lost.
"""

import os
from pathlib import Path
from typing import Any

from penstock.errors import PlanError, SourceError
from penstock.integrations.capacity import largest_batch
from penstock.integrations.data import Making, store_of, streamed
from penstock.integrations.dress import named_pair
from penstock.integrations.feed import EvaluationBatches, Feed, TrainingBatches
from penstock.integrations.module import ResumableDataModule
from penstock.integrations.tokenizer import named_tokenizer
from penstock.integrations.windows import Labels, check_labels
from penstock.rows.tokens import ArrayFile
from penstock.rows.windows import Windows
from penstock.tokenize.tokenizer import load_tokenizer

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
        """Say what to train on; no file is opened yet.

        Args:
            train_file: Text to train on.
            val_file: Text to validate on.
            max_length: Tokens of a row.
            batch_size: Rows of a batch, on each device. If neither it nor `global_batch_size` is
                given, the largest that fits the GPU, found by trial when training is set up; 32
                where there is none.
            num_workers: How many threads tokenize while streaming; else processes that make
                batches, which mapped files do not need. Rows are the same for any number.
            prefetch_factor: Batches that each process makes ahead.
            buffer_size: Characters read at once. Text is read in blocks of megabytes here, so this
                is kept for code that sets it, and changes no row.
            chunk_size: Lines given to the tokenizer at once; likewise.
            use_preprocessed: Read the token files that `python -m penstock.preprocess` writes; the
                text files need not exist.
            preprocessed_train: That of training; `owt_train_preprocessed.npy` beside `train_file`.
            preprocessed_val: That of validation; `owt_val_preprocessed.npy` beside `val_file`.
            labels: "shifted", or "same" for models that shift by themselves; rows then overlap by
                one token, so that every token is a target.
            tokenizer: As `penstock.load_tokenizer` takes it.
            documents: What a document is: "lines", "paragraphs", "file", or a separator.
            streaming: Whether training begins while text is still tokenized; otherwise all of it is
                first, and shuffled as a whole.
            seed: Another seed, another order.
            global_batch_size: Rows of a training step on all devices together, instead of
                `batch_size`, which is then that of validation.
            drop_last: Leave out the last step of a training epoch where it is not full;
                otherwise it is smaller, and every row comes once an epoch.
            pin_memory: Whether batches lie in pinned memory; where there is a GPU if not given.
            cache_dir: Where stores are kept.
        """
        super().__init__(batch_size=batch_size, seed=seed, global_batch_size=global_batch_size)
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
        self.train_dataset: Windows | None = None
        self.val_dataset: Windows | None = None
        self._pin_memory = pin_memory
        self._drop_last = drop_last
        self._tokenizer = tokenizer
        self._documents = documents
        self._cache_dir = cache_dir
        self._made: Making | None = None

    def prepare_data(self) -> None:
        """Look that the files are there; tokenize those that are not streamed, once a node."""
        sides = ("val",) if self.streaming else ("train", "val")
        for side in ("train", "val"):
            self._file(side)
        if not self.use_preprocessed:
            for side in sides:
                store_of(self._file(side), self._making)

    def setup(self, stage: str | None = None) -> None:
        """Open what a stage needs; the validation file stands for a test file too."""
        wanted = {"val" if side == "test" else side for side in self.sides(stage)}
        if "val" in wanted and self.val_dataset is None:
            self.val_dataset = self._rows("val")
        if "train" in wanted and self.train_dataset is None:
            self.train_dataset = self._rows("train")
        if self.batch_size is None and self._global_batch_size is None:
            self.batch_size = self._chosen()

    def train_dataloader(self) -> TrainingBatches:
        """Shuffled, from wherever training is; while streaming, within parts of 64 MB of text."""
        rows = self._opened(self.train_dataset)
        return self.training(rows, shuffle="part" if self.streaming else "full")

    def val_dataloader(self) -> EvaluationBatches:
        """Every row once, in order."""
        return self.evaluation(self._opened(self.val_dataset))

    def test_dataloader(self) -> EvaluationBatches:
        """The validation rows."""
        return self.val_dataloader()

    def feed(self, rows: Any, *, shuffle: Any) -> Feed:
        """The rows of this rank, as pairs of inputs and labels."""
        rank, world_size = self.topology()
        workers = 0 if self.streaming and shuffle == "part" else self.num_workers
        return Feed(
            plan=self.plan(rows, shuffle),
            global_batch=self.device_rows * world_size,
            rank=rank,
            world_size=world_size,
            dress=named_pair,
            format="dict" if self.labels == "shifted" else "hf",
            workers=self.workers(workers, self._pin_memory, self.prefetch_factor),
            drop_last=self._drop_last,
        )

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, with Hugging Face's names for things."""
        return named_tokenizer(self._tokenizer)

    @property
    def _making(self) -> Making:
        if self._made is None:
            self._made = Making(
                tokenizer=load_tokenizer(self._tokenizer),
                eos=True,
                documents=self._documents,
                cache_dir=self._cache_dir,
                threads=max(1, self.num_workers),
            )
        return self._made

    def _rows(self, side: str) -> Windows:
        path = self._file(side)
        if self.use_preprocessed:
            rows = Windows(ArrayFile(path), self.max_length, tail="pad")
        else:
            make = streamed if self.streaming and side == "train" else store_of
            rows = Windows(make(path, self._making), self.max_length, tail="pad")
        # Where the model shifts labels itself, every token is a target only if rows overlap.
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

    def _opened(self, rows: Windows | None) -> Windows:
        if rows is None:
            raise PlanError('No data is open yet: call setup("fit") first.')
        return rows

    def _chosen(self) -> int:
        """The largest batch that the GPU takes, or 32."""
        trainer = self.trainer
        model = trainer.lightning_module if trainer is not None else None
        if model is None or trainer.strategy.root_device.type != "cuda":
            return _WITHOUT_CUDA
        return largest_batch(model, trainer, self.max_length)


def _beside(given: PathLike | None, text: Path, name: str) -> Path:
    return Path(given) if given is not None else text.with_name(f"{name}_preprocessed.npy")
