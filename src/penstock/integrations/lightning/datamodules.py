"""Data modules for Lightning's Trainer: `LLMDataModule` and `LocalOpenWebTextDataModule`.

    data ── prepare_data ── store ── setup ── rows of documents ── loaders ──► Trainer
            once a node               every rank

In an `LLMDataModule`, a row of text is a row of a batch, padded to the longest row of the batch.
Token ids are in a memory-mapped store that all ranks share. Truncated tokens are reported.

    owt_train.txt ── streamed: training begins after the first 64 MB ──┐
    owt_train_preprocessed.npy ── mapped into memory ──────────────────┴─ windows ──► Trainer

In a `LocalOpenWebTextDataModule`, each line is a document. Documents are concatenated, with an end
token after each, and cut into rows of `max_length`. The last row is padded, so no token is lost.
"""

import multiprocessing
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from penstock.catalog.fetch import fetch
from penstock.errors import PlanError
from penstock.integrations.batch_size import largest_lightning_batch
from penstock.integrations.hf_format import Labels, MaskedPacks, PaddedFormat, RowFormat, row_format
from penstock.integrations.lightning import base
from penstock.integrations.lightning.loaders import EvaluationBatches
from penstock.integrations.lightning.sides import read_sides
from penstock.integrations.pytorch.encoders import special_ids
from penstock.integrations.stores import StoreSettings
from penstock.paths import expand_user
from penstock.rows.array_file import part_ends
from penstock.rows.documents import Documents, Overflow
from penstock.rows.packs import Packs
from penstock.rows.tokens import ArrayFile
from penstock.rows.windows import Windows
from penstock.store.reader import TokenStore
from penstock.tokenize.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from penstock.integrations.stores import Inputs

_MADE = {"owt_train.txt", "owt_valid.txt", "owt_train_preprocessed.npy", "owt_val_preprocessed.npy"}


class LLMDataModule(base.ResumableDataModule):
    """Batches of `input_ids`, `attention_mask` and `labels` for causal language models.

    `labels` are the `input_ids`, with -100 exactly where `attention_mask` is 0: models of
    `transformers` shift them themselves. A real end token keeps its label.

    With `packing=True` batches have `input_ids`, `labels`, `position_ids` and `use_cache=False`.
    When the Trainer asks for a loader, the models of `transformers` in the LightningModule are
    tested, as by `penstock.loader.keep_documents_apart`.
    """

    def __init__(  # noqa: PLR0913  (flat arguments: Lightning's command line reads them)
        self,
        model_name: str = "gpt2",
        batch_size: int | None = 32,
        max_length: int = 128,
        *,
        num_workers: int | None = None,
        data: str | Mapping[str, Any] = "wikitext-2",
        data_dir: base.PathLike | None = None,
        source: base.PathLike | None = None,
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
        **common: Unpack[base.CommonArguments],
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
                stores, `penstock.Texts` or Hugging Face datasets (a `DatasetDict` is one). A store
                must be of the same tokenizer; `column`, `documents` and `eos` do not change it.
            data_dir: The directory of a dataset of the catalog; `data/NAME` if not given.
            source: A directory or a mirror to fetch that dataset from, instead of upstream.
            column: The JSON field or table column that contains the text.
            documents: What a row is in text files: "lines", "paragraphs", "file", a separator.
            tokenizer: A tokenizer to use instead of `model_name`: one of `transformers`, or any
                object with `encode`, `decode` and `eos_token_id`.
            eos: Whether to put the end token after each row.
            overflow: "cut" truncates rows of more than `max_length` tokens and reports how many;
                "split" makes several rows of them.
            packing: Whether a row is several whole documents, instead of one document and
                padding. Batches then have `position_ids` and `use_cache=False` instead of
                `attention_mask`.
            streaming: Whether training begins while text is still being tokenized. Without
                `packing`, rows to train on are then windows of the concatenated text, without
                padding; rows to validate on are single documents, as without streaming. The
                order is then `shuffle="part"`; without streaming it is "full".
            labels: "same", or "shifted" for models that do not shift labels themselves.
            pad_to_multiple_of: The width of a batch is a multiple of this.
            padding_side: The side of a row that is padded.
            **common: `seed`, `shuffle`, `global_batch_size`, `drop_last`, `pin_memory`,
                `cache_dir`, `on_change`; see
                `penstock.integrations.lightning.base.CommonArguments`.
        """
        super().__init__(model_name, batch_size, max_length, labels, **common)
        if batch_size is None and self._global_batch_size is None:
            raise PlanError("batch_size and global_batch_size are both None. Pass one of them.")
        if packing and overflow == "split":
            raise PlanError('packing=True truncates nothing; leave out overflow="split".')
        self.model_name = model_name
        self.num_workers = multiprocessing.cpu_count() if num_workers is None else num_workers
        if tokenizer is not None:
            self.tokenizer = tokenizer  # replaces the cached property
        if padding_side not in ("right", "left"):
            raise PlanError(f'padding_side={padding_side!r} is not "right" or "left".')
        self.packing, self.streaming, self.overflow = packing, streaming, overflow
        self.check_shuffle()
        self.padding_side = padding_side
        self._multiple = pad_to_multiple_of
        self._entry = data if isinstance(data, str) else None
        self._directory = expand_user(data_dir or f"data/{self._entry}")
        self._source = source
        self._data = read_sides(data, self._directory)
        self.settings = StoreSettings(
            tokenizer=load_tokenizer(model_name if tokenizer is None else tokenizer),
            # Windows of a stream run across documents, so a token must mark where one ends.
            eos=eos or (streaming and not packing),
            documents=documents,
            column=column,
            cache_dir=self._cache_dir,
        )

    @property
    def pad_id(self) -> int:
        """The id in padded places: the id of the pad token, or else of the end token."""
        # Use `self.tokenizer` if the user passed it, or loaded and perhaps changed it. Otherwise
        # the tokenizer of the stores is enough: loading that of `transformers` takes a second.
        loaded = "tokenizer" in self.__dict__
        found = special_ids(self.tokenizer if loaded else self.settings.tokenizer).pad_id
        return 0 if found is None else found

    def report(self, side: str) -> str:
        """The number of rows of one side, and how many rows and tokens were left out."""
        rows = self.opened(side)
        store = rows.stream.members[0]
        if self.streams(side) or not isinstance(store, TokenStore):
            return super().report(side)  # of a stream, the number of rows is not known yet
        parts = [f"{side}: {len(rows):,} rows"]
        blank = sum(int(each["counts"]["skipped"]) for each in store.manifest.contents["builds"])
        if blank:
            parts.append(f"{blank:,} blank rows of the text were skipped")
        return "; ".join([*parts, *base.truncation(rows)]) + "."

    def format_of(self, rows: base.ModuleRows) -> RowFormat:
        """Return how padded or packed batches of `rows` are made."""
        if not isinstance(rows, Windows):
            return row_format(rows, self.pad_id, self.labels)
        # Windows of a stream have an attention_mask here, like the batches of other rows.
        shifted = self.labels == "shifted"
        to_batch = PaddedFormat(self.pad_id, shifted=shifted, every_token=True)
        return RowFormat(rows, to_batch, "narrow", packed=False)

    def prepare_data(self) -> None:
        """Fetch and tokenize the data, in one process of each node."""
        if self._entry is not None:
            fetch(self._entry, self._directory, source=self._source)
        super().prepare_data()

    def inputs(self) -> "Mapping[str, Inputs]":
        """Return the inputs of each side; raise if a catalog dataset was not fetched."""
        # Not fetched here: all ranks call setup, and only prepare_data runs once a node.
        for path in self._data.values() if self._entry is not None else ():
            base.check_exists(
                Path(str(path)),
                "Call prepare_data() first, which fetches it, as Lightning's Trainer does; or "
                f"fetch it: penstock fetch {self._entry} --output {self._directory}",
            )
        return self._data

    def rows(self, side: str) -> base.ModuleRows:
        """Return the rows of one side: documents or packs; windows, if it is streamed unpacked."""
        store = self.store(side)
        if self.packing:
            return MaskedPacks(Packs(store, self.max_length))
        if self.streams(side):
            return self.windows(store)
        return Documents(
            store,
            self.max_length,
            overflow=self.overflow,
            pad_to_multiple_of=self._multiple,
            side=self.padding_side,
            pad_id=self.pad_id,
        )

    def opened(self, side: str) -> base.ModuleRows:
        """Return the rows of one side; raise if `data=` lacks it or `setup` has not opened it."""
        if side not in self._data:
            without = " Trainer.validate and Trainer.test need no training data."
            raise PlanError(
                f'data= has no "{side}"; it has {", ".join(self._data)}. Add "{side}" to data=.'
                + without * (side == "train")
            )
        return super().opened(side)


class LocalOpenWebTextDataModule(base.ResumableDataModule):
    """Batches of `input_ids` and `labels`, int64 (batch, max_length), from local text files.

    Labels are shifted: `labels[i]` is `input_ids[i + 1]`, for `cross_entropy(logits, labels)`.
    `model(**batch).loss` of `transformers` shifts them again, which the Trainer's first step
    refuses; such a model needs `labels="same"`.
    """

    def __init__(  # noqa: PLR0913  (flat arguments: Lightning's command line reads them)
        self,
        train_file: base.PathLike = "training_data/owt_train.txt",
        val_file: base.PathLike = "training_data/owt_valid.txt",
        *,
        max_length: int = 1024,
        batch_size: int | None = None,
        num_workers: int = 8,
        prefetch_factor: int = 4,
        buffer_size: int = 50_000,
        chunk_size: int = 10_000,
        use_preprocessed: bool = False,
        preprocessed_train: base.PathLike | None = None,
        preprocessed_val: base.PathLike | None = None,
        labels: Labels = "shifted",
        tokenizer: str = "gpt2",
        documents: str = "lines",
        streaming: bool = True,
        **common: Unpack[base.CommonArguments],
    ) -> None:
        """Set what to train on. No file is opened yet.

        Args:
            train_file: Text to train on.
            val_file: Text to validate on.
            max_length: Tokens of a row.
            batch_size: Rows of a batch on each device. If neither it nor `global_batch_size` is
                given, `setup` finds the largest that fits the GPU by trial; without a GPU, 32.
            num_workers: Threads that tokenize while streaming; otherwise processes that make
                batches, which mapped files do not need. Rows do not depend on it.
            prefetch_factor: Batches that each process makes ahead.
            buffer_size: Accepted so that existing code runs, but has no effect: text is read in
                blocks of megabytes.
            chunk_size: Also accepted without effect.
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
            streaming: Whether training begins while text is still being tokenized. Rows are then
                shuffled inside each part of the text (`shuffle="part"`), because later rows are
                not known yet. Without streaming, and with `use_preprocessed`, all rows are
                shuffled (`shuffle="full"`), which mixes them better. So the same text gives the
                same rows in another order; with `shuffle="part"` the batches are equal.
            **common: `seed`, `shuffle`, `global_batch_size`, `drop_last`, `pin_memory`,
                `cache_dir`, `on_change`; see
                `penstock.integrations.lightning.base.CommonArguments`.
        """
        super().__init__(tokenizer, batch_size, max_length, labels, **common)
        # Two of these have no effect, but are checked: a wrong value is a mistake in the script.
        ahead = prefetch_factor if num_workers else None
        base.check_sizes(buffer_size=buffer_size, chunk_size=chunk_size, prefetch_factor=ahead)
        self.train_file, self.val_file = expand_user(train_file), expand_user(val_file)
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor
        self.buffer_size, self.chunk_size = buffer_size, chunk_size
        self.use_preprocessed = use_preprocessed
        train = preprocessed_train or self.train_file.with_name("owt_train_preprocessed.npy")
        val = preprocessed_val or self.val_file.with_name("owt_val_preprocessed.npy")
        self.preprocessed_train, self.preprocessed_val = expand_user(train), expand_user(val)
        if (preprocessed_train or preprocessed_val) and not use_preprocessed:
            warnings.warn(
                "preprocessed_train= and preprocessed_val= are not read, because use_preprocessed= "
                f"is False; {self.train_file} is. Pass use_preprocessed=True to read them.",
                stacklevel=2,
            )
        self.streaming = streaming and not use_preprocessed
        self.check_shuffle()
        self._documents = documents

    def prepare_data(self) -> None:
        """Check that the files exist; tokenize those that are not streamed, once a node."""
        if self.use_preprocessed:
            self.inputs()
        else:
            super().prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Open the rows of a stage; the validation file is the test file too."""
        super().setup("validate" if stage == "test" else stage)
        if self.batch_size is None and self._global_batch_size is None:
            self.batch_size = 32
            # Only here, and only with a Trainer, are a model and its device known.
            trainer = self.trainer
            model = None if trainer is None else trainer.lightning_module
            if model is not None and trainer.strategy.root_device.type == "cuda":
                self.batch_size = largest_lightning_batch(model, trainer, self.max_length)

    def test_dataloader(self) -> EvaluationBatches:
        """Return the loader of the validation rows."""
        return EvaluationBatches(self.source(self.opened("val"), "none"))

    @cached_property
    def settings(self) -> StoreSettings:  # type: ignore[override]
        """The settings of stores; the tokenizer is loaded when it is first needed."""
        return StoreSettings(
            tokenizer=load_tokenizer(self._tokenizer_name),
            eos=True,
            documents=self._documents,
            cache_dir=self._cache_dir,
            threads=max(1, self.num_workers),  # num_workers=0 is usual, and means one thread
        )

    def inputs(self) -> dict[str, Path]:
        """Return the training and the validation file; raise if one does not exist."""
        files = {"train": self.train_file, "val": self.val_file}
        command = "penstock fetch openwebtext --output"
        if self.use_preprocessed:
            files = {"train": self.preprocessed_train, "val": self.preprocessed_val}
            command = (
                f"python -m penstock.preprocess --train_file {self.train_file} --val_file "
                f"{self.val_file} --output_dir"
            )
        # Both files are checked, also the one that is streamed: an error comes before training.
        for side, path in files.items():
            argument = f"preprocessed_{side}" if self.use_preprocessed else f"{side}_file"
            is_made = path.name in _MADE  # neither command makes files with other names
            make = f"Make it with: {command} {path.parent}"
            base.check_exists(path, make if is_made else f"Name an existing file with {argument}=.")
        return files

    def rows(self, side: str) -> Windows:
        """Windows of the tokens of one file."""
        if self.use_preprocessed:
            path = self.inputs()[side]
            if path.suffix != ".npy":  # its header holds the dtype of the ids; nothing is copied
                raise PlanError(
                    f"preprocessed_{side}={str(path)!r} must be a .npy file. Write one of flat ids "
                    "with numpy.save, or read flat ids with penstock.Loader and ArrayFile."
                )
            rows = self.windows(ArrayFile(path))
            if self.shuffle == "part":
                rows.part_rows = rows.begin_between(part_ends(path, rows.stream.num_tokens))
            return rows
        return self.windows(self.store(side))
