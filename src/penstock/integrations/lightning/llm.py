"""`LLMDataModule`: rows of text to padded batches, for Lightning's Trainer.

    data ── prepare_data ── store ── setup ── rows of documents ── loaders ──► Trainer
            once a node               every rank

A row of text is a row of a batch, padded to the longest row of the batch. Compared with
`dataset.map` and a collator: token ids are in a memory-mapped store that all ranks share, the
order is computed, so a run resumes at any batch, and truncated tokens are counted and reported.
"""

import logging
import multiprocessing
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.errors import PlanError, SourceError
from penstock.integrations.batches import BatchSource
from penstock.integrations.hf_format import (
    Labels,
    MaskedPacks,
    PaddedFormat,
    check_labels,
    hf_tokenizer,
)
from penstock.integrations.lightning.base import EvaluationBatches, ModuleRows, ResumableDataModule
from penstock.integrations.lightning.loaders import TrainingBatches
from penstock.integrations.pytorch.encoders import special_ids
from penstock.integrations.stores import StoreSettings, store_of, stream_of
from penstock.loader.packed import check_packed, prepare
from penstock.loader.run import plan_of
from penstock.order.shuffle import Mode
from penstock.rows.documents import Documents, Overflow
from penstock.rows.packs import Packs
from penstock.rows.windows import Windows
from penstock.store.reader import TokenStore
from penstock.tokenize.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from penstock.integrations.stores import Inputs

__all__ = ["LLMDataModule"]

PathLike = str | os.PathLike[str]
Side = Literal["train", "val", "test"]

# A child of Lightning's logger, so that these lines are shown.
_log = logging.getLogger("lightning.pytorch.penstock")

_SIDES: dict[str, Side] = {
    "train": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}
_MISSING = {
    "train": 'Add "train" to data=; for validation alone, call Trainer.validate.',
    "val": 'Add "val" to data=, or train without validation: Trainer(limit_val_batches=0).',
    "test": 'Add "test" to data=, which is what Trainer.test reads.',
}


class LLMDataModule(ResumableDataModule):
    """Batches of `input_ids`, `attention_mask` and `labels` for causal language models.

    `labels` are the `input_ids`, with -100 exactly where `attention_mask` is 0: models of
    `transformers` shift them themselves. A real end token keeps its label.

    With `packing=True` batches have `input_ids`, `labels` and `position_ids`. When the Trainer
    asks for a loader, the models of `transformers` in the LightningModule are prepared for them,
    as by `penstock.integrations.huggingface.keep_documents_apart`.
    """

    def __init__(  # noqa: PLR0913  (what people set, flat: Lightning's command line reads it)
        self,
        model_name: str = "gpt2",
        batch_size: int | None = 32,
        max_length: int = 128,
        *,
        num_workers: int | None = None,
        data: str | Mapping[str, Any] = "wikitext-2",
        data_dir: PathLike | None = None,
        source: PathLike | None = None,
        column: str = "text",
        documents: str = "lines",
        tokenizer: Any = None,
        eos: bool = False,
        overflow: Overflow = "cut",
        packing: bool = False,
        streaming: bool = False,
        labels: Labels = "same",
        pad_to_multiple_of: int = 1,
        padding_side: Literal["right", "left"] = "right",
        seed: int = 0,
        global_batch_size: int | None = None,
        drop_last: bool = False,
        pin_memory: bool | None = None,
        cache_dir: PathLike | None = None,
    ) -> None:
        """Set what to train on. Nothing but the tokenizer is read yet.

        Args:
            model_name: The tokenizer: "gpt2" (no network), a tokenizer.json, a directory with one,
                or a name on the Hugging Face Hub.
            batch_size: Rows of a batch on each device; None to set `global_batch_size` alone.
            max_length: The most tokens of a row.
            num_workers: Processes that make batches; one per core if not given. They are not
                needed for speed: with 0, a thread makes batches.
            data: A dataset of the catalog, or a mapping from "train", "val" and "test" to files,
                stores, `penstock.Texts` or Hugging Face datasets (a `DatasetDict` is one).
            data_dir: The directory of a dataset of the catalog; `data/NAME` if not given.
            source: Where it is fetched from instead of upstream: a directory or a mirror.
            column: The JSON field or table column that contains the text.
            documents: What a row is in text files: "lines", "paragraphs", "file", a separator.
            tokenizer: An object instead of `model_name`: a `transformers` tokenizer, or any with
                `encode`, `decode` and `eos_token_id`.
            eos: Whether to put the end token after each row.
            overflow: "cut" truncates rows of more than `max_length` tokens and reports how many;
                "split" makes several rows of them.
            packing: Whether a row is several whole documents, instead of one document and
                padding. Batches then have `position_ids` instead of `attention_mask`.
            streaming: Whether training begins while text is still being tokenized. Without
                `packing`, rows are then windows of the concatenated text, without padding.
            labels: "same", or "shifted" for models that do not shift labels themselves.
            pad_to_multiple_of: The width of a batch is a multiple of this.
            padding_side: The side of a row that is padded.
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
        if batch_size is None and global_batch_size is None:
            raise PlanError("batch_size=None needs global_batch_size=; give one of them.")
        check_labels(labels)
        if packing and overflow == "split":
            raise PlanError('packing=True truncates nothing; leave out overflow="split".')
        self.model_name = model_name
        self.max_length = max_length
        self.num_workers = multiprocessing.cpu_count() if num_workers is None else num_workers
        if tokenizer is not None:
            self.tokenizer = tokenizer  # replaces the cached property
        self.packing, self.streaming, self.overflow = packing, streaming, overflow
        self.labels, self.padding_side = labels, padding_side
        self.test_dataset: ModuleRows | None = None
        self._multiple = pad_to_multiple_of
        self._data = data if isinstance(data, str) else _known_sides(data)
        self._data_dir = Path(data_dir) if data_dir is not None else None
        self._source = source
        self._stores: dict[str, TokenStore] = {}
        self._settings = StoreSettings(
            tokenizer=load_tokenizer(model_name if tokenizer is None else tokenizer),
            # Windows of a stream run across documents, so a token must mark where one ends.
            eos=eos or (streaming and not packing),
            documents=documents,
            column=column,
            cache_dir=cache_dir,
        )

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer that was given; for a `model_name`, one of `transformers`."""
        return hf_tokenizer(self.model_name)

    @property
    def pad_id(self) -> int:
        """The id in padded places: that of the pad token, or else of the end token."""
        # Of a tokenizer that was given, or loaded and perhaps changed by the user. To load the one
        # of `transformers` for this number alone would take a second.
        loaded = "tokenizer" in self.__dict__
        found = special_ids(self.tokenizer if loaded else self._settings.tokenizer).pad_id
        return 0 if found is None else found

    def prepare_data(self) -> None:
        """Fetch and tokenize the data, in one process of each node."""
        for side, inputs in self._inputs(fetch=True).items():
            # A stream is built by the processes that read it. Other ranks find finished stores.
            if not (self.streaming and side == "train"):
                store_of(inputs, self._settings)

    def setup(self, stage: str | None = None) -> None:
        """Open what a stage needs: "fit" train and val, "validate" val, "test" test, None all."""
        inputs = self._inputs(fetch=False)
        for side in self.sides(stage):
            # Trainer.fit, validate and test each call setup; what is open stays open.
            if side in inputs and self._datasets()[side] is None:
                setattr(self, f"{side}_dataset", self._rows(inputs[side], side))
                if self.topology()[0] == 0:
                    _log.info(self.report(side))

    def train_dataloader(self) -> TrainingBatches:
        """Shuffled, in a new order each epoch, from the position of the run."""
        return self.training(self._opened("train"))

    def val_dataloader(self) -> EvaluationBatches:
        """Every row once, in order."""
        return self.evaluation(self._opened("val"))

    def test_dataloader(self) -> EvaluationBatches:
        """Every row once, in order."""
        return self.evaluation(self._opened("test"))

    def report(self, side: str) -> str:
        """The number of rows of one side, and how many rows and tokens were left out."""
        rows = self._opened(side)
        store = self._stores.get(side)
        if store is None:  # of a stream, the number of rows is not known yet
            return f"{side}: {rows!r}."
        parts = [f"{side}: {len(rows):,} rows"]
        blank = sum(int(each["counts"]["skipped"]) for each in store.manifest.contents["builds"])
        if blank:
            parts.append(f"{blank:,} blank rows of the text were skipped")
        if isinstance(rows, Documents) and rows.cut_documents:
            parts.append(
                f"{rows.cut_documents:,} rows were cut off after max_length={self.max_length:,} "
                f'tokens, which loses {rows.cut_tokens:,} tokens; overflow="split" or packing=True '
                "keeps them"
            )
        return "; ".join(parts) + "."

    def source(self, rows: ModuleRows, shuffle: Mode) -> BatchSource:
        """The rows of this rank, as padded batches."""
        rank, world_size = self.topology()
        windows = isinstance(rows, Windows)
        # See `row_format`; a window is text from its first token to its last.
        every_token = not self.packing and (windows or not rows.stream.has_loss)
        shifted = self.labels == "shifted"
        return BatchSource(
            plan=plan_of(rows, self.seed, shuffle),
            global_batch=self.device_rows * world_size,
            rank=rank,
            world_size=world_size,
            to_batch=PaddedFormat(self.pad_id, shifted=shifted, every_token=every_token),
            format="narrow",
            flat=self.packing and not shifted and self._prepare_model(),
            workers=self.worker_options(shuffle),
            drop_last=self._drop_last,
        )

    def _prepare_model(self) -> bool:
        """Prepare the Trainer's model for packed rows; whether it needs batches of one row."""
        # Without a Trainer the model is not known; `check_packed` then warns.
        flat = prepare(None if self.trainer is None else self.trainer.lightning_module)
        check_packed()
        return flat

    def _inputs(self, *, fetch: bool) -> "dict[str, Inputs]":
        """The inputs of each side."""
        if not isinstance(self._data, str):
            return self._data
        # The catalog is imported here: most modules are made with files.
        from penstock.catalog import find_entry

        directory = self._data_dir or Path("data") / self._data
        if fetch:
            from penstock.catalog import fetch as fetch_entry

            found = fetch_entry(self._data, directory, source=self._source)
            return dict(found.files)
        # Not fetched here: all ranks call setup, and only prepare_data runs once a node.
        files = {side: directory / f"{side}.txt" for side in find_entry(self._data).splits}
        missing = [str(path) for path in files.values() if not path.is_file()]
        if missing:
            raise SourceError(
                f"{missing[0]} does not exist (working directory: {Path.cwd()}). Call "
                "prepare_data() first, which fetches it, as Lightning's Trainer does; or fetch it: "
                f"penstock fetch {self._data} --output {directory}"
            )
        return dict(files)

    def _rows(self, inputs: "Inputs", side: str) -> ModuleRows:
        if self.streaming and side == "train":
            return self._streamed(inputs)
        store = self._stores[side] = store_of(inputs, self._settings)
        if self.packing:
            return MaskedPacks(Packs(store, self.max_length))
        return Documents(
            store,
            self.max_length,
            overflow=self.overflow,
            pad_to_multiple_of=self._multiple,
            side=self.padding_side,
            pad_id=self.pad_id,
        )

    def _streamed(self, inputs: "Inputs") -> ModuleRows:
        stream = stream_of(inputs, self._settings)
        if self.packing:
            return MaskedPacks(Packs(stream, self.max_length))
        rows = Windows(stream, self.max_length, tail="pad")
        # If the model shifts labels itself, every token is a target only if rows overlap.
        return rows if self.labels == "shifted" else rows.overlapping()

    def _datasets(self) -> dict[str, ModuleRows | None]:
        return {"train": self.train_dataset, "val": self.val_dataset, "test": self.test_dataset}

    def _opened(self, side: str) -> ModuleRows:
        rows = self._datasets()[side]
        if rows is not None:
            return rows
        if not isinstance(self._data, str) and side not in self._data:
            raise PlanError(
                f'There is no "{side}" in data=, which has {", ".join(self._data)}. '
                f"{_MISSING[side]}"
            )
        stage = "test" if side == "test" else "fit"
        raise PlanError(f'The {side} data is not open yet: call setup("{stage}") first.')


def _known_sides(data: "Mapping[str, Inputs]") -> "dict[str, Inputs]":
    """The sides of the data, each under one name: "train", "val", "test".

    >>> _known_sides({"train": "a.txt", "validation": "b.txt"})
    {'train': 'a.txt', 'val': 'b.txt'}
    """
    unknown = [name for name in data if name not in _SIDES]
    if unknown:
        raise SourceError(
            f"data= has no side {unknown[0]!r}; name train, val (or validation) and test."
        )
    return {_SIDES[name]: value for name, value in data.items()}
