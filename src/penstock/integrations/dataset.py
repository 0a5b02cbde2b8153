"""The two datasets that people write by hand: dictionaries of JSON lines, pairs of a text file."""

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch.utils.data import Dataset

from penstock.errors import SourceError
from penstock.integrations.cache import cached_store
from penstock.integrations.encode import Encoder, encoder_of
from penstock.integrations.samples import Layout, TextFile
from penstock.integrations.windows import Batch, Labels, WindowTensors
from penstock.store.reader import TokenStore

__all__ = ["TextDataset", "TransformerDataset"]

PathLike = str | os.PathLike[str]
Pair = tuple[torch.Tensor, torch.Tensor]


class TransformerDataset(Dataset[dict[str, torch.Tensor]]):
    r"""Windows over the ids of all samples of a file, laid end to end.

    Item i is `{"input_ids", "labels"}`, two tensors of `seq_length` int64: the ids from
    `i * stride` on, and the ids one further. The samples are the field `text` of each JSON
    line, or the paragraphs of a text (`t.strip()` of `text.split("\n\n")`, where not empty);
    the ids are what `tokenizer.encode(sample)` gives, and nothing is put between them unless
    `eos=True`. Can be pickled, and used after a fork and from several threads.

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
        tokenizer: Any,
        seq_length: int = 128,
        is_jsonl: bool = True,
        *,
        stride: int = 1,
        eos: bool | int | str = False,
        labels: Labels = "shifted",
        cache_dir: PathLike | None = None,
    ) -> None:
        """Find the tokenized file, or tokenize it.

        Args:
            data_path: A file of JSON lines or of text, UTF-8.
            tokenizer: Any object with `encode`, or what `penstock.load_tokenizer` takes: a
                name ("gpt2"), a path.
            seq_length: Ids in the inputs of an item.
            is_jsonl: Whether the file holds JSON lines; else it is text.
            stride: How far apart windows begin; `seq_length` makes them disjoint.
            eos: Whether to put the tokenizer's end token after each sample, or the token.
            labels: "shifted", or "same" for models that shift by themselves.
            cache_dir: Where tokenized files are kept; see `penstock.integrations.cache`.
        """
        layout: Layout = "jsonl" if is_jsonl else "paragraphs"
        self._text = _Tokenized.of(data_path, layout, tokenizer, eos=eos, cache_dir=cache_dir)
        self._windows = WindowTensors(self._text.store, seq_length, stride=stride, labels=labels)
        self.seq_length = seq_length
        self.is_jsonl = is_jsonl
        self.stride = stride
        self.num_sequences = len(self._windows)

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return _named(*self._windows.one(idx))

    def __getitems__(self, indices: list[int]) -> Batch:
        """Many items at once, in one gather; a DataLoader asks for a batch this way."""
        return Batch(self._windows.many(indices), _named)

    def __getstate__(self) -> dict[str, Any]:
        # What a worker needs. A tokenizer may not pickle, and the samples may be many.
        kept = {name: value for name, value in self.__dict__.items() if name != "samples"}
        return kept | {"_text": self._text.without_tokenizer()}

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that was given; what a name stands for is loaded when asked for."""
        return self._text.tokenizer

    @cached_property
    def samples(self) -> list[str]:
        """The texts, read from the file when they are first asked for.

        Raises:
            SourceError: the file is not the one that was tokenized any more.
        """
        return self._text.samples()

    @property
    def tokenized_data(self) -> Any:
        """The ids of all samples: a read-only array over the file, uint16 or uint32."""
        return self._windows.tokens


class TextDataset(Dataset[Pair]):
    """Windows over the ids of a whole text file, taken as one document.

    Item i is `(x, y)`, two tensors of `sequence_length` int64: the ids from `i * stride` on,
    and the ids one further. Can be pickled, and used after a fork and from several threads.
    """

    def __init__(
        self,
        path: PathLike,
        sequence_length: int = 256,
        tokenizer: Any = "gpt2",
        *,
        stride: int = 1,
        eos: bool | int | str = False,
        labels: Labels = "shifted",
        cache_dir: PathLike | None = None,
    ) -> None:
        """Find the tokenized file, or tokenize it; arguments as of `TransformerDataset`."""
        self._text = _Tokenized.of(path, "file", tokenizer, eos=eos, cache_dir=cache_dir)
        self._windows = WindowTensors(
            self._text.store, sequence_length, stride=stride, labels=labels
        )
        self.sequence_length = sequence_length
        self.stride = stride

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, idx: int) -> Pair:
        return self._windows.one(idx)

    def __getitems__(self, indices: list[int]) -> Batch:
        """Many items at once, in one gather; a DataLoader asks for a batch this way."""
        return Batch(self._windows.many(indices), _paired)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name != "tokens"}
        return kept | {"_text": self._text.without_tokenizer()}

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that was given; what a name stands for is loaded when asked for."""
        return self._text.tokenizer

    @property
    def vocab_size(self) -> int:
        """How many ids there are; 50,257 for GPT-2."""
        return int(self._text.store.manifest.contents["tokenizer"]["vocab_size"])

    @property
    def tokenized_data(self) -> Any:
        """The ids of the file: a read-only array over it, uint16 or uint32."""
        return self._windows.tokens

    @cached_property
    def tokens(self) -> torch.Tensor:
        """All ids as a torch.long tensor, which takes 8 bytes a token from when it is asked for."""
        return torch.from_numpy(self._windows.tokens.astype("int64"))


@dataclass(frozen=True)
class _Tokenized:
    """A file and the store of its ids."""

    path: str
    layout: Layout
    store: TokenStore
    encoder: Encoder | None

    @classmethod
    def of(
        cls,
        path: PathLike,
        layout: Layout,
        tokenizer: Any,
        *,
        eos: bool | int | str,
        cache_dir: PathLike | None,
    ) -> Self:
        encoder = encoder_of(tokenizer)
        store = cached_store(path, layout, encoder, eos_id=encoder.eos(eos), cache_dir=cache_dir)
        return cls(os.fspath(path), layout, store, encoder)

    @property
    def tokenizer(self) -> Any:
        if self.encoder is None:
            raise AttributeError(
                "The tokenizer stayed in the process that made this dataset: many cannot be "
                "pickled, and a worker needs none."
            )
        return self.encoder.tokenizer

    def samples(self) -> list[str]:
        text = TextFile(self.path, self.layout)
        found = list(text.samples())
        told = self.store.manifest.contents["builds"][0]["reading"]["sha256"]
        if text.digest != told:
            raise SourceError(
                f"{self.path} has changed since it was tokenized (SHA-256 {told[:8]} then, "
                f"{text.digest[:8]} now), so its samples are not those of this dataset. Make the "
                "dataset again."
            )
        return found

    def without_tokenizer(self) -> Self:
        return replace(self, encoder=None)


def _named(inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": inputs, "labels": labels}


def _paired(inputs: torch.Tensor, labels: torch.Tensor) -> Pair:
    return inputs, labels
