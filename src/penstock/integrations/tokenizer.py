"""A tokenizer with the names that `transformers` gives to things, without that package.

    tokenizer = named_tokenizer("gpt2")          # no network, no transformers
    tokenizer.pad_token = tokenizer.eos_token    # as people write it
    tokenizer("To be,")                          # {"input_ids": [2514, 307, 11], …}

What is here is what training scripts use of `AutoTokenizer.from_pretrained`: special tokens by
name and id, `encode`, `decode`, calls with padding and truncation. As there, text that spells a
special token is that token; stores that a data module builds take it as text.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from penstock.errors import TokenizerError
from penstock.tokenize.tokenizer import Tokenizer, load_tokenizer

__all__ = ["NamedTokenizer", "named_tokenizer"]


def named_tokenizer(name: str) -> "NamedTokenizer":
    """The tokenizer that `name` means, as `penstock.load_tokenizer` takes it."""
    if name == "bytes":
        return NamedTokenizer(load_tokenizer(name), name)
    return NamedTokenizer(load_tokenizer(name, special_tokens="parse"), name)


class NamedTokenizer:
    """Text to ids and back, under Hugging Face's names.

    >>> tokenizer = named_tokenizer("gpt2")
    >>> tokenizer.pad_token = tokenizer.eos_token
    >>> padded = tokenizer(["To be,", "or not to be."], padding=True)
    >>> padded["attention_mask"], tokenizer.decode(padded["input_ids"][0])
    ([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], 'To be,<|endoftext|><|endoftext|>')
    """

    is_fast = True
    padding_side = "right"
    model_max_length = 10**30  # as transformers says "not known"

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self.tokenizer = tokenizer
        self.name_or_path = name
        told = tokenizer.definition
        self.eos_token: str | None = told.eos_token if told else None
        self.bos_token: str | None = told.bos_token if told else None
        self._pad_token: str | None = None

    def __repr__(self) -> str:
        return f"NamedTokenizer({self.name_or_path!r}, vocab_size={len(self):,})"

    def __len__(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def vocab_size(self) -> int:
        """How many ids there are."""
        return len(self)

    @property
    def pad_token(self) -> str | None:
        """What rows are filled up with; GPT-2 has none until one is set."""
        return self._pad_token

    @pad_token.setter
    def pad_token(self, token: str | None) -> None:
        if token is not None:
            self.tokenizer.token_id(token)  # raises where the vocabulary has no such token
        self._pad_token = token

    @property
    def eos_token_id(self) -> int | None:
        """The id of `eos_token`."""
        return self.tokenizer.eos_id

    @property
    def bos_token_id(self) -> int | None:
        """The id of `bos_token`."""
        return self.tokenizer.bos_id

    @property
    def pad_token_id(self) -> int | None:
        """The id of `pad_token`."""
        return None if self._pad_token is None else self.tokenizer.token_id(self._pad_token)

    @property
    def all_special_tokens(self) -> list[str]:
        """Tokens that stand for no text, each once."""
        named = (self.bos_token, self.eos_token, self._pad_token)
        return list(dict.fromkeys(token for token in named if token is not None))

    @property
    def all_special_ids(self) -> list[int]:
        """Their ids."""
        return [self.tokenizer.token_id(token) for token in self.all_special_tokens]

    def encode(
        self, text: str, *, truncation: bool = False, max_length: int | None = None
    ) -> list[int]:
        """The ids of one text; nothing is put around it."""
        ids: list[int] = self.tokenizer.encode(text).tolist()
        return ids[:max_length] if truncation else ids

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        """The text of some ids: a list, an array or a tensor of them, or one."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [ids] if isinstance(ids, int) else list(ids)
        if skip_special_tokens:
            left_out = set(self.all_special_ids)
            ids = [each for each in ids if each not in left_out]
        return self.tokenizer.decode(ids).decode("utf-8", "replace")

    def batch_decode(self, sequences: Iterable[Any], **options: Any) -> list[str]:
        """The texts of several rows of ids."""
        return [self.decode(each, **options) for each in sequences]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or of each of several."""
        if isinstance(tokens, str):
            return self.tokenizer.token_id(tokens)
        return [self.tokenizer.token_id(each) for each in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """The token of an id, or of each of several, as the vocabulary spells it."""
        if isinstance(ids, int):
            return self._tokens[ids]
        return [self._tokens[each] for each in ids]

    @cached_property
    def _tokens(self) -> dict[int, str]:
        if self.tokenizer.definition is None:
            raise TokenizerError(f"{self.name_or_path} has no names for its ids.")
        config = self.tokenizer.definition.config
        added = {token["content"]: token["id"] for token in config.get("added_tokens") or []}
        return {number: token for token, number in {**config["model"]["vocab"], **added}.items()}

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        truncation: bool = False,
        max_length: int | None = None,
        padding: bool | str = False,
        return_tensors: str | None = None,
    ) -> dict[str, Any]:
        """`input_ids` and `attention_mask` of a text, or of each of several."""
        texts = [text] if isinstance(text, str) else list(text)
        cut = {"truncation": truncation, "max_length": max_length}
        rows = [self.encode(each, **cut) for each in texts]  # type: ignore[arg-type]
        found: dict[str, Any] = {
            "input_ids": rows,
            "attention_mask": [[1] * len(ids) for ids in rows],
        }
        if padding:
            found = self.pad(found, padding=padding, max_length=max_length)
        if isinstance(text, str) and return_tensors is None:
            return {name: values[0] for name, values in found.items()}
        return self._as(found, return_tensors)

    def pad(
        self,
        encoded: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        padding: bool | str = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        return_tensors: str | None = None,
    ) -> dict[str, Any]:
        """Rows of unequal length filled up to the longest, or to `max_length`."""
        if not isinstance(encoded, Mapping):
            encoded = {name: [each[name] for each in encoded] for name in encoded[0]}
        if self.pad_token_id is None:
            raise TokenizerError(
                f"{self.name_or_path} has no pad token. Set one: tokenizer.pad_token = "
                "tokenizer.eos_token"
            )
        rows = [list(ids) for ids in encoded["input_ids"]]
        width = max(map(len, rows), default=0)
        if padding == "max_length" and max_length is not None:
            width = max(width, max_length)
        multiple = pad_to_multiple_of or 1
        width = -(-width // multiple) * multiple
        fill = {"input_ids": self.pad_token_id, "attention_mask": 0}
        given = {"attention_mask": [[1] * len(ids) for ids in rows], **encoded, "input_ids": rows}
        padded = {
            name: [list(row) + [fill.get(name, 0)] * (width - len(row)) for row in values]
            for name, values in given.items()
        }
        return self._as({name: padded[name] for name in ("input_ids", *padded)}, return_tensors)

    @staticmethod
    def _as(found: dict[str, Any], kind: str | None) -> dict[str, Any]:
        if kind is None:
            return found
        if kind == "pt":
            import torch

            return {name: torch.tensor(values) for name, values in found.items()}
        if kind == "np":
            import numpy as np

            return {name: np.array(values) for name, values in found.items()}
        raise TokenizerError(f'return_tensors={kind!r} is not "pt" or "np".')
