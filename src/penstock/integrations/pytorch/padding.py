"""Rows of unequal length to one rectangle.

    side="right"   a b c        side="left"    a b c       attention_mask   1 1 1
                   d e .                       . d e                        1 1 0

The mask comes from the lengths, never from comparing ids with the pad id. So a tokenizer
without a pad token, as GPT-2's, may pad with its end token: a real end token keeps its place
in the mask and its label, and only pads get -100.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from penstock.errors import PlanError, TokenizerError
from penstock.integrations.hf_format import Labels
from penstock.tokenize.objects import end_id
from penstock.tokenize.tokenizer import Tokenizer, load_tokenizer

__all__ = ["SpecialIds", "pad_collate", "special_ids"]

IGNORED = -100


class SpecialIds(NamedTuple):
    """The ids that begin, end and fill up a row; None where the tokenizer has none."""

    bos_id: int | None
    eos_id: int | None
    pad_id: int | None


def special_ids(tokenizer: Any) -> SpecialIds:
    """The special ids of a tokenizer, with the end token as pad where it has no other.

    >>> special_ids("gpt2")
    SpecialIds(bos_id=50256, eos_id=50256, pad_id=50256)
    """
    if isinstance(tokenizer, str) or hasattr(tokenizer, "__fspath__"):
        tokenizer = load_tokenizer(tokenizer, engine="tokenizers")  # nothing is encoded
    if type(tokenizer).__module__.partition(".")[0] == "tokenizers":
        pad = _named_id(tokenizer, "<pad>", "[PAD]", "<|pad|>", "<|padding|>")
        loaded = load_tokenizer(tokenizer, engine="tokenizers")
        return SpecialIds(loaded.bos_id, loaded.eos_id, loaded.eos_id if pad is None else pad)
    if isinstance(tokenizer, Tokenizer):
        return SpecialIds(tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_id)
    eos, pad = end_id(tokenizer), getattr(tokenizer, "pad_token_id", None)
    return SpecialIds(getattr(tokenizer, "bos_token_id", None), eos, eos if pad is None else pad)


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
            and perhaps `labels`, or pairs of inputs and labels. Labels that are given are
            padded with -100 and else kept.
        pad_id: What to fill up with; see `special_ids`.
        side: Where the pads stand: "left" for generation, so that rows end together.
        multiple_of: Widen to a multiple of this, as tensor cores like it.
        max_length: No row may be longer, first and last tokens included.
        overflow: A longer row is refused, or cut after `max_length`.
        labels: Where none are given: "same" as the inputs, or "shifted" by one, with -100
            where nothing follows.
        bos_id: Put before each row that does not begin with it.
        eos_id: Put after each row that does not end with it.

    >>> padded = pad_collate([[1, 2, 3], [4]], pad_id=0)
    >>> padded["input_ids"].tolist(), padded["labels"].tolist()
    ([[1, 2, 3], [4, 0, 0]], [[1, 2, 3], [4, -100, -100]])
    """
    _check_options(pad_id, side, multiple_of, max_length, overflow, labels)
    assert pad_id is not None  # refused above
    rows = [_with_edges(*_row(item, number), bos_id, eos_id) for number, item in enumerate(batch)]
    if not rows:
        raise PlanError("A batch of no rows cannot be padded.")
    if max_length is not None:
        rows = [_fitted(row, number, max_length, overflow) for number, row in enumerate(rows)]
    width = max(len(ids) for ids, _ in rows)
    if multiple_of is not None:
        width = -(-width // multiple_of) * multiple_of
    padded = {
        "input_ids": torch.full((len(rows), width), pad_id, dtype=torch.long),
        "attention_mask": torch.zeros((len(rows), width), dtype=torch.long),
        "labels": torch.full((len(rows), width), IGNORED, dtype=torch.long),
    }
    for number, (ids, given) in enumerate(rows):
        place = slice(width - len(ids), width) if side == "left" else slice(0, len(ids))
        padded["input_ids"][number, place] = ids
        padded["attention_mask"][number, place] = 1
        padded["labels"][number, place] = _labels(ids, labels) if given is None else given
    return padded


Row = tuple[torch.Tensor, torch.Tensor | None]


def _row(item: Any, number: int) -> Row:
    """The ids of one item, and its labels if it has some."""
    ids, labels = item, None
    if isinstance(item, dict):
        if "input_ids" not in item:
            raise PlanError(f"Row {number} has {sorted(item)}, and no input_ids.")
        ids, labels = item["input_ids"], item.get("labels")
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
    ids = getattr(ids, "ids", ids)
    if hasattr(ids, "dtype") and not isinstance(ids, torch.Tensor):
        ids = ids.astype("int64")  # torch knows no arithmetic on uint16 and uint32
    try:
        row = torch.as_tensor(ids, dtype=None if len(ids) else torch.long)
    except (TypeError, ValueError, RuntimeError):
        raise PlanError(
            f"Row {number} is {ids!r:.60}; it must be one row of whole numbers."
        ) from None
    if row.ndim != 1 or row.is_floating_point() or row.dtype == torch.bool:
        raise PlanError(
            f"Row {number} is {row.dtype} of the shape {tuple(row.shape)}; it must be one row of "
            "whole numbers."
        )
    return row.long()


def _with_edges(
    ids: torch.Tensor, labels: torch.Tensor | None, bos_id: int | None, eos_id: int | None
) -> Row:
    """The row with its first and last token, none of them twice."""
    if labels is not None and not (bos_id is None and eos_id is None):
        raise PlanError("bos_id and eos_id go with rows without labels: they would need some.")
    if bos_id is not None and not (len(ids) and int(ids[0]) == bos_id):
        ids = torch.cat((ids.new_tensor([bos_id]), ids))
    if eos_id is not None and not (len(ids) and int(ids[-1]) == eos_id):
        ids = torch.cat((ids, ids.new_tensor([eos_id])))
    return ids, labels


def _fitted(row: Row, number: int, max_length: int, overflow: str) -> Row:
    ids, labels = row
    if len(ids) <= max_length:
        return row
    if overflow == "refuse":
        raise PlanError(
            f"Row {number} has {len(ids):,} tokens, more than max_length={max_length:,}. Split "
            'it, leave max_length out, or lose the rest with overflow="cut".'
        )
    return ids[:max_length], None if labels is None else labels[:max_length]


def _labels(ids: torch.Tensor, convention: Labels) -> torch.Tensor:
    if convention == "same":
        return ids
    return torch.cat((ids[1:], ids.new_full((min(1, len(ids)),), IGNORED)))


def _check_options(
    pad_id: int | None,
    side: str,
    multiple_of: int | None,
    max_length: int | None,
    overflow: str,
    labels: str,
) -> None:
    if pad_id is None:
        raise TokenizerError(
            "pad_id=None: this tokenizer has no pad token, as GPT-2's has none. Pad with its end "
            "token, special_ids(tokenizer).pad_id: pads are told by the mask, not by their id."
        )
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
    if multiple_of is not None and max_length is not None and max_length % multiple_of:
        raise PlanError(f"max_length={max_length} is no multiple of multiple_of={multiple_of}.")


def _named_id(tokenizer: Any, *names: str) -> int | None:
    """The id that padding is set to, or of the first usual name that the vocabulary has."""
    if tokenizer.padding:
        return int(tokenizer.padding["pad_id"])
    found = [tokenizer.token_to_id(name) for name in names]
    return next((each for each in found if each is not None), None)
