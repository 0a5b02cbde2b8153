"""`LLMDataModule`: rows of text to padded batches, for Lightning's Trainer.

    data ── prepare_data ── store ── setup ── rows of documents ── loaders ──► Trainer
            once a node               every rank

A row of text is a row of a batch, padded to the longest of the batch. What is different from
tokenizing with `dataset.map` and a collator: the ids lie in a memory-mapped store that all
ranks share, the order is computed, so a run resumes at any batch, and what truncation loses
is counted and told.
"""

import logging
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from penstock.errors import PlanError, SourceError
from penstock.integrations.data import Making, blank_rows, named_sides, store_of, streamed
from penstock.integrations.dress import MaskedPacks, OneRow, PaddedDress
from penstock.integrations.feed import EvaluationBatches, Feed, TrainingBatches
from penstock.integrations.module import ResumableDataModule
from penstock.integrations.tokenizer import named_tokenizer
from penstock.integrations.windows import Labels, check_labels
from penstock.loader.packed import check_packed, prepare
from penstock.rows.documents import Documents, Overflow
from penstock.rows.packs import Packs
from penstock.rows.windows import Windows
from penstock.store.reader import TokenStore
from penstock.tokenize.tokenizer import load_tokenizer

__all__ = ["LLMDataModule"]

PathLike = str | os.PathLike[str]

# A child of Lightning's logger, which shows such lines.
_log = logging.getLogger("lightning.pytorch.penstock")

_WITHOUT = {
    "train": 'Add "train" to data=; for validation alone, call Trainer.validate.',
    "val": 'Add "val" to data=, or train without validation: Trainer(limit_val_batches=0).',
    "test": 'Add "test" to data=, which is what Trainer.test reads.',
}


class LLMDataModule(ResumableDataModule):
    """Batches of `input_ids`, `attention_mask` and `labels` for causal language models.

    `labels` are the `input_ids`, with -100 exactly where `attention_mask` is 0: models of
    `transformers` shift them by themselves. A real end token keeps its label.

    With `packing=True` batches have `input_ids`, `labels` and `position_ids`. When the Trainer
    asks for a loader, the models of `transformers` in the LightningModule are made ready for
    them, as by `penstock.integrations.huggingface.keep_documents_apart`.
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
        """Say what to train on; nothing is read yet but the tokenizer.

        Args:
            model_name: The tokenizer: "gpt2" (no network), a tokenizer.json, a directory with one,
                or a name on the Hugging Face Hub.
            batch_size: Rows of a batch, on each device; None to say `global_batch_size` alone.
            max_length: Tokens of a row at most.
            num_workers: Processes that make batches; one a core if not given. They are not
                needed for speed: with 0, a thread does it.
            data: A dataset of the catalog, or a mapping from "train", "val" and "test" to files,
                stores, `penstock.Texts` or Hugging Face datasets (a `DatasetDict` is one).
            data_dir: Where a dataset of the catalog goes; `data/NAME` if not given.
            source: Where it comes from instead of upstream: a directory or a mirror.
            column: The JSON field or table column that holds the text.
            documents: What a row is in text files: "lines", "paragraphs", "file", a separator.
            tokenizer: An object instead of `model_name`: a `transformers` tokenizer, or any with
                `encode`, `decode` and `eos_token_id`.
            eos: Whether to put the end token after each row.
            overflow: Rows of more than `max_length` tokens are cut off, which is told; or "split".
            packing: Whether rows are whole documents fitted together, instead of one each with
                padding. Batches then have `position_ids` instead of `attention_mask`.
            streaming: Whether training begins while text is still being tokenized. Without
                `packing`, rows are then windows of the concatenated text, without padding.
            labels: "same", or "shifted" for models that do not shift by themselves.
            pad_to_multiple_of: Batches are as wide as a multiple of this.
            padding_side: Where padding stands.
            seed: Another seed, another order.
            global_batch_size: Rows of a training step on all devices together, instead of
                `batch_size`, which is then that of validation.
            drop_last: Leave out the last step of a training epoch where it is not full;
                otherwise it is smaller, and every row comes once an epoch.
            pin_memory: Whether batches lie in pinned memory; where there is a GPU if not given.
            cache_dir: Where stores are kept.
        """
        super().__init__(batch_size=batch_size, seed=seed, global_batch_size=global_batch_size)
        if batch_size is None and global_batch_size is None:
            raise PlanError("batch_size=None goes with global_batch_size=; give one of them.")
        check_labels(labels)
        if packing and overflow == "split":
            raise PlanError('packing=True loses nothing by itself; leave out overflow="split".')
        self.model_name = model_name
        self.max_length = max_length
        self.num_workers = multiprocessing.cpu_count() if num_workers is None else num_workers
        self.tokenizer = named_tokenizer(model_name) if tokenizer is None else tokenizer
        if getattr(self.tokenizer, "pad_token", "") is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.packing, self.streaming, self.overflow = packing, streaming, overflow
        self.labels, self.padding_side = labels, padding_side
        self.train_dataset: Any = None
        self.val_dataset: Any = None
        self.test_dataset: Any = None
        self._multiple = pad_to_multiple_of
        self._pin_memory = pin_memory
        self._drop_last = drop_last
        self._data = data if isinstance(data, str) else named_sides(data)
        self._data_dir = Path(data_dir) if data_dir is not None else None
        self._source = source
        self._stores: dict[str, TokenStore] = {}
        self._making = Making(
            tokenizer=load_tokenizer(model_name if tokenizer is None else tokenizer),
            eos=eos or (streaming and not packing),
            documents=documents,
            column=column,
            cache_dir=cache_dir,
        )

    @property
    def pad_id(self) -> int:
        """What rows are filled up with."""
        found = getattr(self.tokenizer, "pad_token_id", None)
        if found is None:
            found = getattr(self.tokenizer, "eos_token_id", None)
        return 0 if found is None else int(found)

    def prepare_data(self) -> None:
        """Fetch and tokenize, in one process of each node."""
        for side, inputs in self._inputs(fetch=True).items():
            if not (self.streaming and side == "train"):
                store_of(inputs, self._making)

    def setup(self, stage: str | None = None) -> None:
        """Open what a stage needs: "fit" train and val, "validate" val, "test" test, None all."""
        inputs = self._inputs(fetch=False)
        for side in self.sides(stage):
            if side in inputs and getattr(self, f"{side}_dataset") is None:
                setattr(self, f"{side}_dataset", self._rows(inputs[side], side))
                self._tell(self.report(side))

    def train_dataloader(self) -> TrainingBatches:
        """Shuffled, in a new order each epoch, from wherever training is."""
        rows = self._opened("train")
        return self.training(rows, shuffle="part" if self.streaming else "full")

    def val_dataloader(self) -> EvaluationBatches:
        """Every row once, in order."""
        return self.evaluation(self._opened("val"))

    def test_dataloader(self) -> EvaluationBatches:
        """Every row once, in order."""
        return self.evaluation(self._opened("test"))

    def report(self, side: str) -> str:
        """What became of the text of one side: rows, and what is in none of them."""
        rows = self._opened(side)
        store = self._stores.get(side)
        told = [f"{side}: {rows!r}" if store is None else f"{side}: {len(rows):,} rows"]
        if store is not None and (blank := blank_rows(store)):
            told.append(f"{blank:,} blank rows of the text were skipped")
        if isinstance(rows, Documents) and rows.cut_documents:
            told.append(
                f"{rows.cut_documents:,} rows were cut off after max_length={self.max_length:,} "
                f'tokens, which loses {rows.cut_tokens:,} tokens; overflow="split" or packing=True '
                "keeps them"
            )
        return "; ".join(told) + "."

    def feed(self, rows: Any, *, shuffle: Any) -> Feed:
        """The rows of this rank, as padded batches."""
        rank, world_size = self.topology()
        workers = 0 if self.streaming and shuffle == "part" else self.num_workers
        windows = isinstance(rows, Windows)
        exact = not self.packing and (windows or not rows.stream.has_loss)
        shifted = self.labels == "shifted"
        dress: Any = PaddedDress(self.pad_id, shifted=shifted, exact=exact)
        if self.packing and not shifted and self._prepare_model():
            dress = OneRow(dress)
        return Feed(
            plan=self.plan(rows, shuffle),
            global_batch=self.device_rows * world_size,
            rank=rank,
            world_size=world_size,
            dress=dress,
            narrow=True,
            workers=self.workers(workers, self._pin_memory),
            drop_last=self._drop_last,
        )

    def _prepare_model(self) -> bool:
        """Make the Trainer's model ready for packed rows; whether it wants one row a batch."""
        module = getattr(self.trainer, "lightning_module", None)
        flat = prepare(module)
        check_packed()
        return flat

    def _inputs(self, *, fetch: bool) -> dict[str, Any]:
        """What each side is made of."""
        if not isinstance(self._data, str):
            return self._data
        from penstock.catalog import find_entry

        directory = self._data_dir or Path("data") / self._data
        if fetch:
            from penstock.catalog import fetch as fetch_entry

            found = fetch_entry(self._data, directory, source=self._source)
            return dict(found.files)
        files = {side: directory / f"{side}.txt" for side in find_entry(self._data).splits}
        missing = [str(path) for path in files.values() if not path.is_file()]
        if missing:
            raise SourceError(
                f"{missing[0]} does not exist (working directory: {Path.cwd()}). Call "
                "prepare_data() first, which fetches it, as Lightning's Trainer does; or fetch it: "
                f"penstock fetch {self._data} --output {directory}"
            )
        return dict(files)

    def _rows(self, inputs: Any, side: str) -> Any:
        if self.streaming and side == "train":
            return self._streamed(inputs)
        store = self._stores[side] = store_of(inputs, self._making)
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

    def _streamed(self, inputs: Any) -> Any:
        stream = streamed(inputs, self._making)
        if self.packing:
            return MaskedPacks(Packs(stream, self.max_length))
        rows = Windows(stream, self.max_length, tail="pad")
        # Where the model shifts labels itself, every token is a target only if rows overlap.
        return rows if self.labels == "shifted" else rows.overlapping()

    def _opened(self, side: str) -> Any:
        rows = getattr(self, f"{side}_dataset")
        if rows is not None:
            return rows
        if not isinstance(self._data, str) and side not in self._data:
            raise PlanError(
                f'There is no "{side}" in data=, which has {", ".join(self._data)}. '
                f"{_WITHOUT[side]}"
            )
        stage = "test" if side == "test" else "fit"
        raise PlanError(f'The {side} data is not open yet: call setup("{stage}") first.')

    def _tell(self, message: str) -> None:
        if self.topology()[0] == 0:
            _log.info(message)
