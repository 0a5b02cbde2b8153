"""Rows of different lengths to one rectangle.

    side="right"   a b c        side="left"    a b c       attention_mask   1 1 1
                   d e .                       . d e                        1 1 0

The mask comes from the lengths of the rows, never from comparing ids with the pad id. So a
tokenizer without a pad token, such as GPT-2's, can pad with its end token: a real end token keeps
its place in the mask and its label, and only padding gets -100.
"""

import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from penstock.errors import PlanError, TokenizerError
from penstock.integrations.hf_format import Labels
from penstock.integrations.pytorch.encoders import AnyTokenizer
from penstock.tokenize.objects import read_attribute
from penstock.tokenize.tokenizer import Tokenizer, load_tokenizer

__all__ = ["SpecialIds", "pad_collate", "special_ids"]

Row = tuple[torch.Tensor, torch.Tensor | None]
"""The ids of a row, and its labels if it has some."""

_IGNORED = -100
_PAD_TOKENS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")


class SpecialIds(NamedTuple):
    """The ids that begin, end and pad a row; None if the tokenizer has no such token."""

    bos_id: int | None
    eos_id: int | None
    pad_id: int | None


def special_ids(tokenizer: AnyTokenizer) -> SpecialIds:
    """The special ids of a tokenizer, with the end token as pad token if it has no other.

    >>> special_ids("gpt2")
    SpecialIds(bos_id=50256, eos_id=50256, pad_id=50256)
    """
    pad = None
    package = type(tokenizer).__module__.partition(".")[0]
    if package == "tokenizers":
        # The id that padding is set to, or else the first usual name that the vocabulary has.
        named = [tokenizer.token_to_id(name) for name in _PAD_TOKENS]
        pad = next((each for each in named if each is not None), None)
        pad = int(tokenizer.padding["pad_id"]) if tokenizer.padding else pad
    if isinstance(tokenizer, str | os.PathLike) or package == "tokenizers":
        tokenizer = load_tokenizer(tokenizer, engine="tokenizers")  # nothing is encoded
    if isinstance(tokenizer, Tokenizer):
        bos, eos = tokenizer.bos_id, tokenizer.eos_id
    else:
        bos = read_attribute(tokenizer, "bos_token_id")
        eos = read_attribute(tokenizer, "eos_token_id", "eot_token")
        pad = read_attribute(tokenizer, "pad_token_id")
    return SpecialIds(bos, eos, eos if pad is None else pad)


def pad_collate(  # noqa: PLR0913  (a function for DataLoader's collate_fn: flat keywords)
    batch: Sequence[Any],
    pad_id: int | None,
    *,
    side: Literal["right", "left"] = "right",
    multiple_of: int | None = None,
    max_length: int | None = None,
    overflow: Literal["refuse", "cut"] = "refuse",
    labels: Labels = "same",
    bos_id: int | None = None,
    eos_id: int | None = None,
) -> dict[str, torch.Tensor]:
    """Pad rows of ids to the longest: `input_ids`, `attention_mask` and `labels`, (rows, width).

    As a collate function: `functools.partial(pad_collate, pad_id=50256)`.

    Args:
        batch: Rows: lists, arrays, tensors or Encodings of ids, dictionaries with `input_ids`
            and perhaps `labels`, or pairs of inputs and labels. Given labels are kept, and
            padded with -100.
        pad_id: The id in padded places; see `special_ids`.
        side: The side to pad: "left" for generation, so that rows end together.
        multiple_of: Make the width a multiple of this; tensor cores are faster with some widths.
        max_length: The most tokens of a row, including its first and last token.
        overflow: "refuse" raises an error for a longer row, "cut" truncates it.
        labels: For rows without labels: "same" as the inputs, or "shifted" by one, with -100 for
            the last token.
        bos_id: Put before each row that does not begin with it.
        eos_id: Put after each row that does not end with it.

    >>> padded = pad_collate([[1, 2, 3], [4]], pad_id=0)
    >>> padded["input_ids"].tolist(), padded["labels"].tolist()
    ([[1, 2, 3], [4, 0, 0]], [[1, 2, 3], [4, -100, -100]])
    """
    if pad_id is None:
        raise TokenizerError(
            "pad_id=None: this tokenizer has no pad token, as GPT-2's has none. Pad with its end "
            "token, special_ids(tokenizer).pad_id: the mask marks padding, not the id."
        )
    _check_options(side, multiple_of, max_length, overflow, labels)
    # Tokens at the ends are added before rows are truncated, so that max_length includes them.
    rows = [_with_edges(*_row(item, number), bos_id, eos_id) for number, item in enumerate(batch)]
    if not rows:
        raise PlanError("A batch without rows cannot be padded.")
    if max_length is not None:
        rows = [_fitted(row, number, max_length, overflow) for number, row in enumerate(rows)]
    width = max(len(ids) for ids, _ in rows)
    if multiple_of is not None:
        width = -(-width // multiple_of) * multiple_of  # rounded up
    padded = {
        "input_ids": torch.full((len(rows), width), pad_id, dtype=torch.long),
        "attention_mask": torch.zeros((len(rows), width), dtype=torch.long),
        "labels": torch.full((len(rows), width), _IGNORED, dtype=torch.long),
    }
    for number, (ids, given) in enumerate(rows):
        columns = slice(width - len(ids), width) if side == "left" else slice(0, len(ids))
        padded["input_ids"][number, columns] = ids
        padded["attention_mask"][number, columns] = 1
        padded["labels"][number, columns] = _labels(ids, labels) if given is None else given
    return padded


def _row(item: Any, number: int) -> Row:
    """The ids of one item, and its labels if it has some."""
    ids, labels = item, None
    if isinstance(item, dict):
        if "input_ids" not in item:
            raise PlanError(f"Row {number} has {sorted(item)}, and no input_ids.")
        ids, labels = item["input_ids"], item.get("labels")
    # A tuple of two integers is a row of two ids, not a pair of inputs and labels.
    elif isinstance(item, tuple) and len(item) == 2 and not isinstance(item[0], int):
        ids, labels = item
    row = _tensor(ids, number)
    if labels is None:
        return row, None
    given = _tensor(labels, number)
    if len(given) != len(row):
        raise PlanError(f"Row {number} has {len(row):,} ids and {len(given):,} labels.")
    return row, given


def _tensor(ids: Any, number: int) -> torch.Tensor:
    """The ids of a row as a torch.long tensor."""
    encoded = read_attribute(ids, "ids")  # of an Encoding
    ids = ids if encoded is None else encoded
    if isinstance(ids, np.ndarray | np.generic):
        ids = ids.astype("int64")  # torch has no arithmetic for uint16 and uint32
    try:
        # torch makes an empty list a float tensor, which would look like a wrong type below.
        row = torch.as_tensor(ids, dtype=None if len(ids) else torch.long)
    except (TypeError, ValueError, RuntimeError):
        raise PlanError(f"Row {number} is {ids!r:.60}; it must be one row of integers.") from None
    if row.ndim != 1 or row.is_floating_point() or row.dtype == torch.bool:
        raise PlanError(
            f"Row {number} is {row.dtype} of the shape {tuple(row.shape)}; it must be one row of "
            "integers."
        )
    return row.long()


def _with_edges(
    ids: torch.Tensor, labels: torch.Tensor | None, bos_id: int | None, eos_id: int | None
) -> Row:
    """The row with its first and last token, neither of them twice."""
    if labels is not None and not (bos_id is None and eos_id is None):
        raise PlanError("bos_id and eos_id need rows without labels: they would need labels too.")
    if bos_id is not None and not (len(ids) and int(ids[0]) == bos_id):
        ids = torch.cat((ids.new_tensor([bos_id]), ids))
    if eos_id is not None and not (len(ids) and int(ids[-1]) == eos_id):
        ids = torch.cat((ids, ids.new_tensor([eos_id])))
    return ids, labels


def _fitted(row: Row, number: int, max_length: int, overflow: str) -> Row:
    """The row, truncated if that is allowed."""
    ids, labels = row
    if len(ids) <= max_length:
        return row
    if overflow == "refuse":
        raise PlanError(
            f"Row {number} has {len(ids):,} tokens, more than max_length={max_length:,}. Split "
            'it, leave max_length out, or truncate it with overflow="cut".'
        )
    return ids[:max_length], None if labels is None else labels[:max_length]


def _labels(ids: torch.Tensor, convention: Labels) -> torch.Tensor:
    if convention == "same":
        return ids
    return torch.cat((ids[1:], ids.new_full((min(1, len(ids)),), _IGNORED)))


def _check_options(
    side: str, multiple_of: int | None, max_length: int | None, overflow: str, labels: str
) -> None:
    for name, value, known in (
        ("side", side, ("right", "left")),
        ("overflow", overflow, ("refuse", "cut")),
        ("labels", labels, ("same", "shifted")),
    ):
        if value not in known:
            raise PlanError(f'{name}={value!r} is not "{known[0]}" or "{known[1]}".')
    for name, size in (("multiple_of", multiple_of), ("max_length", max_length)):
        if size is not None and size < 1:
            raise PlanError(f"{name}={size} must be at least 1.")
    # Otherwise a row of max_length tokens would be padded past max_length.
    if multiple_of is not None and max_length is not None and max_length % multiple_of:
        raise PlanError(f"max_length={max_length} is not a multiple of multiple_of={multiple_of}.")
