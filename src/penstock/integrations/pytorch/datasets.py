r"""Two Datasets that replace hand-written ones: over JSON lines or paragraphs, and over one text.

    tokens     t0 t1 t2 t3 t4        length=4
    inputs     t0 t1 t2 t3
    labels        t1 t2 t3 t4        labels="shifted": the token after each input
    labels     t0 t1 t2 t3           labels="same": for models that shift labels themselves

The text is what `open(path, encoding="utf-8")` returns: `\r\n` and `\r` become `\n`, and nothing
else changes. It is tokenized once and kept as a store (see `penstock.integrations.stores`).

Inputs and labels are separate, contiguous tensors. Code that was written for a hand-made Dataset
calls `.view(-1)` on them and writes -100 into the labels.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from operator import index
from pathlib import Path
from typing import Any, Generic

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch.utils.data import Dataset

from penstock.errors import PlanError, SourceError
from penstock.integrations.hf_format import Labels, check_labels
from penstock.integrations.pytorch.encoders import (
    UNKNOWN_VOCABULARY,
    AnyTokenizer,
    GivenTokenizer,
    as_given,
)
from penstock.integrations.pytorch.samples import (
    Layout,
    SpooledTexts,
    read_samples,
    refuse_no_file,
    refuse_no_length,
    warn_of_records,
)
from penstock.integrations.pytorch.windows import EPOCH, FILLER, Item, WindowBatch, read_changed
from penstock.integrations.stores import cached_store, digest_contents, store_name, store_root
from penstock.loader.batch_format import LabelBatch, PairBatch
from penstock.paths import expand_user
from penstock.rows.windows import Windows
from penstock.store.build import build
from penstock.store.cuts import cut_safety
from penstock.store.reader import TokenStore
from penstock.tokenize.engines import ObjectEngine
from penstock.transforms.transform import Transform, Transformed, needs_borders

PathLike = str | os.PathLike[str]
_IGNORED = -100
_NOT_PICKLED = ("samples", "tokens", "_view")


class _WindowDataset(Dataset[Item], Generic[Item]):
    """Windows over the tokens of one file; a subclass decides the format of an item.

    Can be pickled, and used after a fork and from several threads.
    """

    def __init__(  # noqa: PLR0913  (the arguments of its subclasses)
        self,
        path: PathLike,
        layout: Layout,
        tokenizer: AnyTokenizer,
        length: int,
        stride: int,
        eos: bool | int | str,
        labels: Labels,
        transform: Transform | None,
        seed: int,
        cache_dir: PathLike | None,
    ) -> None:
        check_labels(labels)
        self.length, self.stride = index(length), index(stride)
        if self.length < 1 or self.stride < 1:
            raise PlanError(
                "The length of a window and stride must be at least 1; got "
                f"{self.length} and {self.stride}."
            )
        self._file, self._layout, self._shifted = expand_user(path), layout, labels == "shifted"
        # None after unpickling; see __getstate__.
        self._tokenizer: GivenTokenizer | None = (given := as_given(tokenizer))
        self._root = store_root(cache_dir)
        refuse_no_file(path)
        self._digest = digest_contents(self._file, self._root)
        end_id = given.end_id(eos)
        encodes = (given.encodes.digest, given.special_tokens)
        name = store_name(self._digest, encodes, end_id, layout)
        self._store = cached_store(name, self._root, partial(self._build, given, end_id))
        # `Windows` refuses a store that is too short for one row. A hand-written Dataset would be
        # empty, so this one is empty too.
        enough = self._store.num_tokens > self.length
        self._windows = Windows(self._store, self.length, stride=self.stride) if enough else None
        self._changed: Transformed | None = None
        if transform is not None and self._windows is not None:
            borders = needs_borders(transform)
            known = Windows(self._store, self.length, stride=self.stride, borders=borders)
            self._changed = Transformed(known, transform, seed=seed)
        self._epoch = 0

    def _build(self, given: GivenTokenizer, end_id: int | None, directory: Path) -> TokenStore:
        tokenizer = given.tokenizer
        is_object = isinstance(tokenizer.engine, ObjectEngine)
        # Without end tokens, windows do not depend on where a document ends, so a long text is
        # stored in pieces. The text for a user's object is not cut, because the ids that it returns
        # may depend on text further back than the check of a cut reads.
        is_whole = is_object or end_id is not None
        is_cut_safe = None if is_whole else cut_safety(tokenizer.engine, tokenizer.reference)
        texts = SpooledTexts(self._file, self._layout, self._digest, directory.parent, is_cut_safe)
        # The store is named after the digest of the file, so the file must still have that digest.
        self._refuse_changed()
        return build(
            texts,
            directory,
            # `build` takes True or a token's text, so a chosen id becomes the end token.
            tokenizer=tokenizer if end_id is None else replace(tokenizer, eos_id=end_id),
            eos=end_id is not None,
            # An object is called from one thread: it may not be safe to use from several.
            workers=1 if is_object else None,
        )

    def _refuse_changed(self) -> None:
        found = digest_contents(self._file, self._root)
        if found != self._digest:
            raise SourceError(
                f"{self._file} has changed since this dataset was made (SHA-256 "
                f"{self._digest[:8]} then, {found[:8]} now). Make the dataset again when nothing "
                "writes to the file."
            )

    def __repr__(self) -> str:
        windows = f"{len(self):,} windows of {self.length:,} tokens, {self.stride:,} apart"
        return f"{type(self).__name__}({str(self._file)!r}: {windows})"

    def __len__(self) -> int:
        return 0 if self._windows is None else len(self._windows)

    def __getitem__(self, idx: int | slice) -> Item:
        if isinstance(idx, slice):  # stacked, as in PyTorch's TensorDataset
            return self.__getitems__(range(len(self))[idx]).stacked
        number = index(idx)
        if not -len(self) <= number < len(self):
            raise IndexError(f"window {number:,} does not exist; there are {len(self):,} windows")
        inputs, labels = self._pairs([number])
        return self.item(inputs[0], labels[0])

    def __getitems__(self, indices: Sequence[int]) -> "WindowBatch[Item]":
        """Many items, read together; a DataLoader asks for a batch this way."""
        return WindowBatch(self.item, *self._pairs(indices))

    def set_epoch(self, epoch: int) -> None:
        """Make the random choices of `transform` those of `epoch`; call it before each epoch.

        The loaders of `create_dataloaders` do it themselves. Persistent workers keep the epoch
        with which they were started.
        """
        if index(epoch) < 0:
            raise PlanError(f"An epoch must be 0 or more; got {epoch}.")
        self._epoch = index(epoch)

    def __getstate__(self) -> dict[str, object]:
        # A worker reads tokens from the store. Tokenizers often cannot be pickled, and samples
        # and tokens may be many.
        kept = {name: value for name, value in self.__dict__.items() if name not in _NOT_PICKLED}
        return {**kept, "_tokenizer": None}

    def item(self, inputs: torch.Tensor, labels: torch.Tensor) -> Item:
        """Return the inputs and labels of one window or of a batch in the user's format."""
        raise NotImplementedError

    @cached_property
    def _view(self) -> NDArray[Any] | None:
        """All windows as a view, twice as fast to read; None if the store has several parts."""
        if self._windows is None or len(self._store.manifest.parts) > 1:
            return None
        return sliding_window_view(self.tokenized_data, self.length + 1)[:: self.stride]

    def _pairs(self, numbers: Sequence[int]) -> PairBatch:
        """Inputs and labels of some windows, (windows, length) each."""
        # One read for the whole batch. PyTorch would otherwise read and stack window by window.
        wanted = np.array(numbers, np.int64)
        filled = wanted == FILLER
        wanted[filled] = 0
        wanted[wanted < 0] += len(self)  # as in a list, they count from the end
        epochs = np.full(len(wanted), self._epoch)
        if self._changed is not None:
            epochs += wanted // EPOCH
            wanted %= EPOCH
        if self._windows is None or wanted.min(initial=0) < 0 or wanted.max(initial=0) >= len(self):
            shown = list(numbers)[:5]
            raise IndexError(f"windows {shown} do not all exist; there are {len(self):,} windows")
        if self._changed is not None:
            inputs, labels = read_changed(self._changed, wanted, epochs, shifted=self._shifted)
        else:
            view = self._view
            rows = self._windows.read(wanted)["tokens"] if view is None else view[wanted]
            # int64, because embeddings and losses need it, and new arrays, because the store is
            # mapped read-only and users write into the labels.
            inputs = torch.from_numpy(rows[:, :-1].astype(np.int64))
            columns = rows[:, 1:] if self._shifted else rows[:, :-1]
            labels = torch.from_numpy(columns.astype(np.int64))
        if filled.any():
            inputs[torch.from_numpy(filled)] = 0
            labels[torch.from_numpy(filled)] = _IGNORED
        return inputs, labels

    @property
    def tokenizer(self) -> AnyTokenizer:
        """The tokenizer that was given, or the one that its name stands for."""
        if self._tokenizer is None:
            raise AttributeError(
                "This copy of the dataset was unpickled, and tokenizers are not pickled. Use the "
                "tokenizer in the process that created the dataset."
            )
        return self._tokenizer.given

    @cached_property
    def samples(self) -> list[str]:
        """The texts, read from the file when they are first used.

        Raises:
            SourceError: the file was changed after it was tokenized.
        """
        found = list(read_samples(self._file, self._layout))
        # Samples of another text would not belong to the tokens of this dataset.
        self._refuse_changed()
        return ["".join(found)] if self._layout == "file" else found

    @property
    def tokenized_data(self) -> NDArray[Any]:
        """All token ids, uint16 or uint32: a read-only view of the store.

        A large file (64 MB and more) is stored in several parts; for it, a copy is returned.
        """
        return self._store.tokens(0, self._store.num_tokens)

    @property
    def vocab_size(self) -> int:
        """The number of ids: 50,257 for GPT-2."""
        # An object without a digest may return any id, so the largest one in the file counts.
        size = self._store.vocab_size
        return size if size < UNKNOWN_VOCABULARY else int(self.tokenized_data.max(initial=-1)) + 1


class TransformerDataset(_WindowDataset[LabelBatch]):
    r"""Windows over the concatenated token ids of all samples of a file.

    Item i is `{"input_ids", "labels"}`, two tensors of `seq_length` int64: the ids from
    `i * stride` on, and the ids from `i * stride + 1` on, for `cross_entropy(logits, labels)`.
    `model(**batch).loss` of `transformers` would shift the labels again, so that the model learns
    the token after the next one; such a model needs `labels="same"`. The samples are the field
    `text` of each JSON line, or the paragraphs of a text (`t.strip()` of `text.split("\n\n")`,
    where not empty). The ids are those that `tokenizer.encode(sample)` returns. Nothing is put
    between samples unless `eos=True`. Can be pickled, and used after a fork and from several
    threads.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "input.txt")
    ...     _ = path.write_text("To be,\n\nor not to be.")
    ...     dataset = TransformerDataset(path, "gpt2", 4, is_jsonl=False, cache_dir=folder)
    ...     len(dataset), dataset.samples, dataset[0]["labels"].tolist()
    (4, ['To be,', 'or not to be.'], [307, 11, 273, 407])
    """

    def __init__(  # noqa: PLR0913  (a drop-in: the arguments of the code it replaces)
        self,
        data_path: PathLike,
        tokenizer: AnyTokenizer,
        seq_length: int = 128,
        is_jsonl: bool = True,
        *,
        stride: int = 1,
        eos: bool | int | str = False,
        labels: Labels = "shifted",
        transform: Transform | None = None,
        seed: int = 0,
        cache_dir: PathLike | None = None,
    ) -> None:
        """Open the tokenized file, or tokenize it.

        Args:
            data_path: A file of JSON lines or of text, UTF-8. It may be larger than memory.
            tokenizer: Any object with `encode`, or a name ("gpt2") or path as for
                `penstock.load_tokenizer`.
            seq_length: Ids in the inputs of an item.
            is_jsonl: Whether the file contains JSON lines; otherwise it is text.
            stride: The distance between windows; `seq_length` makes them disjoint.
            eos: Whether to put the tokenizer's end token after each sample; or a token, by its
                id or its text.
            labels: "shifted", or "same" for models that shift labels themselves.
            transform: Changes the windows: one of `penstock.transforms`, such as `MaskTokens`,
                whose labels are of the masked tokens alone. See `set_epoch`.
            seed: Determines the random choices of `transform`, with the epoch and the window.
            cache_dir: Where tokenized files are kept; see `penstock.integrations.stores`.
        """
        layout: Layout = "jsonl" if is_jsonl else "paragraphs"
        if not is_jsonl:
            warn_of_records(data_path)
        windows = (seq_length, stride, eos, labels, transform, seed)
        super().__init__(data_path, layout, tokenizer, *windows, cache_dir)
        self.seq_length = seq_length
        self.is_jsonl = is_jsonl
        self.num_sequences = len(self)

    def item(self, inputs: torch.Tensor, labels: torch.Tensor) -> LabelBatch:
        """A dict of `input_ids` and `labels`."""
        return {"input_ids": inputs, "labels": labels}


class TextDataset(_WindowDataset[PairBatch]):
    """Windows over the token ids of a text file, taken as one document.

    Item i is `(x, y)`, two tensors of `sequence_length` int64: the ids from `i * stride` on, and
    the ids from `i * stride + 1` on. Can be pickled, and used after a fork and from threads.
    """

    def __init__(  # noqa: PLR0913  (a drop-in: the arguments of the code it replaces)
        self,
        path: PathLike,
        sequence_length: int = 256,
        tokenizer: AnyTokenizer = "gpt2",
        *,
        stride: int = 1,
        eos: bool | int | str = False,
        labels: Labels = "shifted",
        transform: Transform | None = None,
        seed: int = 0,
        cache_dir: PathLike | None = None,
    ) -> None:
        """Open or tokenize the file; `TransformerDataset` describes the arguments."""
        refuse_no_length(sequence_length)
        warn_of_records(path)
        windows = (sequence_length, stride, eos, labels, transform, seed)
        super().__init__(path, "file", tokenizer, *windows, cache_dir)
        self.sequence_length = sequence_length

    def item(self, inputs: torch.Tensor, labels: torch.Tensor) -> PairBatch:
        """Return the pair unchanged."""
        return inputs, labels

    @cached_property
    def tokens(self) -> torch.Tensor:
        """All ids as a torch.long tensor, made on first use; it takes 8 bytes a token."""
        return torch.from_numpy(self.tokenized_data.astype(np.int64))
