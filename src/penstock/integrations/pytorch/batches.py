"""Pad rows of different lengths to a batch, and check the batches of any DataLoader.

    side="right"   a b c        side="left"    a b c       attention_mask   1 1 1
                   d e .                       . d e                        1 1 0

The mask comes from the lengths of the rows, never from comparing ids with the pad id. So a
tokenizer without a pad token, such as GPT-2's, can pad with its end token: a real end token keeps
its place in the mask and its label, and only padding gets -100.

There are two conventions for labels, which have the same shape and different losses:

    shifted   labels[i] is input_ids[i + 1]; the training loop computes the loss directly
    same      labels[i] is input_ids[i]; the model shifts them (Hugging Face models do)

If a model shifts labels that are shifted already, it learns to predict two tokens ahead, without an
error. `check_dataloader` detects such batches.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch

from penstock.errors import PlanError, TokenizerError
from penstock.integrations.hf_format import Convention, Labels
from penstock.integrations.hf_format import label_convention as label_convention
from penstock.loader.batch_format import LabelBatch
from penstock.tokenize.engines import read_attribute

Row = tuple[torch.Tensor, torch.Tensor | None]
"""The ids of a row, and its labels if it has some."""

_IGNORED = -100

_NUM_BATCHES = 3
_MEANINGS = {
    "shifted": (
        "shifted (a label is the next input): use cross_entropy(logits, labels), and not "
        "model(**batch).loss of transformers, which shifts labels again"
    ),
    "same": (
        "same (a label is its input): use model(**batch).loss of transformers, which shifts "
        "labels, and not cross_entropy(logits, labels)"
    ),
    "either": "shifted or same (these rows match both)",
    "neither": "neither shifted nor the same as the inputs",
}


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
) -> LabelBatch:
    """Pad rows of ids to the longest: `input_ids`, `attention_mask` and `labels`, (rows, width).

    As a collate function: `functools.partial(pad_collate, pad_id=50256)`.

    Args:
        batch: Rows: lists, arrays, tensors or Encodings of ids, dictionaries with `input_ids`
            and perhaps `labels`, or pairs of inputs and labels. Given labels are kept, and
            padded with -100.
        pad_id: The id in padded places; see `special_ids`.
        side: The side to pad: "left" for generation, so that rows end together.
        multiple_of: Make the width a multiple of this; tensor cores are faster with some widths.
        max_length: The most tokens of a row, including `bos_id` and `eos_id` if they are added.
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
            "pad_id is None: this tokenizer has no pad token, like GPT-2's. Use "
            "pad_id=special_ids(tokenizer).pad_id, which is its end token. This is safe, because "
            "the attention mask and the labels mark padding by position."
        )
    _check_options(side, multiple_of, max_length, overflow, labels)
    # `bos_id` and `eos_id` are added before rows are truncated, so that max_length includes them.
    rows = [_row(item, number, bos_id, eos_id) for number, item in enumerate(batch)]
    if not rows:
        raise PlanError("A batch without rows cannot be padded.")
    longest = max(len(ids) for ids, _ in rows)
    if max_length is not None and longest > max_length:
        if overflow == "refuse":
            number = next(number for number, (ids, _) in enumerate(rows) if len(ids) > max_length)
            raise PlanError(
                f"Row {number} has {len(rows[number][0]):,} tokens, more than "
                f"max_length={max_length:,}. Split it, leave max_length out, or truncate it with "
                'overflow="cut".'
            )
        longest = max_length
    width = -(-longest // (multiple_of or 1)) * (multiple_of or 1)  # rounded up
    padded: LabelBatch = {
        "input_ids": torch.full((len(rows), width), pad_id, dtype=torch.long),
        "attention_mask": torch.zeros((len(rows), width), dtype=torch.long),
        "labels": torch.full((len(rows), width), _IGNORED, dtype=torch.long),
    }
    for number, (every_id, given) in enumerate(rows):
        ids = every_id[:longest]
        columns = slice(width - len(ids), width) if side == "left" else slice(0, len(ids))
        padded["input_ids"][number, columns] = ids
        padded["attention_mask"][number, columns] = 1
        if given is not None:
            padded["labels"][number, columns] = given[:longest]
        elif labels == "same":
            padded["labels"][number, columns] = ids
        else:  # the last token has no label
            padded["labels"][number, columns][:-1] = ids[1:]
    return padded


def _row(item: Any, number: int, bos_id: int | None, eos_id: int | None) -> Row:
    """The ids of one item with its first and last token, and its labels if it has some."""
    ids, labels = item, None
    if isinstance(item, dict):
        if "input_ids" not in item:
            raise PlanError(f"Row {number} has the keys {sorted(item)}, but needs input_ids.")
        ids, labels = item["input_ids"], item.get("labels")
    # A tuple of two integers is a row of two ids, not a pair of inputs and labels.
    elif isinstance(item, tuple) and len(item) == 2 and not isinstance(item[0], int):
        ids, labels = item
    row = _tensor(ids, number)
    if labels is not None:
        given = _tensor(labels, number)
        if len(given) != len(row):
            raise PlanError(f"Row {number} has {len(row):,} ids and {len(given):,} labels.")
        if not (bos_id is None and eos_id is None):
            raise PlanError(
                "bos_id and eos_id cannot be added to rows that have labels, because the added "
                "tokens would have none. Leave out bos_id and eos_id, or the labels."
            )
        return row, given
    # Neither of them is added twice.
    if bos_id is not None and row[:1].tolist() != [bos_id]:
        row = torch.cat((row.new_tensor([bos_id]), row))
    if eos_id is not None and row[-1:].tolist() != [eos_id]:
        row = torch.cat((row, row.new_tensor([eos_id])))
    return row, None


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


def test_dataloader(data_loader: Any) -> None:
    """Print the shapes of the first three batches, and the convention of their labels."""
    print(f"DataLoader has {len(data_loader)} batches")  # noqa: T201  (its purpose)
    for number, batch in enumerate(islice(data_loader, _NUM_BATCHES)):
        input_ids, labels = _fields(batch, number)
        match = input_ids.shape == labels.shape and (input_ids[:, 1:] == labels[:, :-1]).all()
        lines = [
            f"Batch {number}:",
            f"  Input shape: {input_ids.shape}",
            f"  Label shape: {labels.shape}",
            f"  Input and label alignment check: {bool(match)}",
        ]
        if input_ids.shape == labels.shape:
            lines.append(f"  Labels: {_MEANINGS[label_convention(input_ids, labels)]}")
        print("\n".join(lines))  # noqa: T201


test_dataloader.__test__ = False  # type: ignore[attr-defined]  # pytest would run it as a test


def check_dataloader(
    data_loader: Iterable[Any],
    *,
    labels: Literal["shifted", "same"] | None = None,
    vocab_size: int | None = None,
    num_batches: int = _NUM_BATCHES,
) -> Convention:
    """Check the first batches, and return the convention of their labels.

    Args:
        data_loader: Its batches are dictionaries with `input_ids` and `labels`, or pairs.
        labels: The convention that labels must follow; either one if not given.
        vocab_size: The number of ids, if ids are to be checked against it.
        num_batches: The number of batches to check.

    Raises:
        PlanError: there is no batch, or a batch cannot be trained on; the message names it.
    """
    found = {
        _checked(*_fields(batch, number), number, vocab_size)
        for number, batch in enumerate(islice(data_loader, num_batches))
    }
    if not found:
        raise PlanError(
            "The DataLoader has no batch: there is too little text, or it was iterated to its end."
        )
    # No single setting of the model would be right for both conventions.
    if {"shifted", "same"} <= found:
        raise PlanError(
            "Some batches have shifted labels, and others have labels equal to the inputs. Make "
            "them all alike: the model expects one of the two."
        )
    # A batch that fits both conventions says nothing; any other one decides.
    convention: Convention = next((each for each in found if each != "either"), "either")
    if labels is not None and convention not in (labels, "either"):
        raise PlanError(
            f"The labels are {_MEANINGS[convention]}, but labels={labels!r} is required."
        )
    return convention


def _fields(batch: object, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of a batch, in any of the formats that language models use."""
    if isinstance(batch, dict):
        for inputs, labels in (("input_ids", "labels"), ("inputs", "targets")):
            if inputs in batch and labels in batch:
                return batch[inputs], batch[labels]
        raise PlanError(
            f"Batch {number} has the keys {sorted(batch)}, but needs input_ids and labels."
        )
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise PlanError(f"Batch {number} is a {type(batch).__name__}, not a dictionary or a pair.")


def _checked(
    input_ids: torch.Tensor, labels: torch.Tensor, number: int, vocab_size: int | None
) -> Convention:
    where = f"Batch {number}"
    for name, values in (("input_ids", input_ids), ("labels", labels)):
        kind = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
        if kind != torch.long:
            raise PlanError(f"{where}: {name} is {kind}; embeddings and losses need torch.long.")
        if values.ndim != 2 or not values.numel():
            raise PlanError(f"{where}: {name} has the shape {tuple(values.shape)}, not (rows, T).")
    if input_ids.shape != labels.shape:
        raise PlanError(
            f"{where}: input_ids has the shape {tuple(input_ids.shape)} and labels "
            f"{tuple(labels.shape)}."
        )
    targets = labels[labels != _IGNORED]
    if not targets.numel():
        raise PlanError(f"{where}: every label is -100, so there is nothing to learn.")
    # The model would fail on an id outside the vocabulary, and on a GPU the error would not name
    # the id.
    for name, values in (("input_ids", input_ids), ("labels", targets)):
        low, high = int(values.min()), int(values.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            limit = "" if vocab_size is None else f" to {vocab_size - 1:,}"
            raise PlanError(f"{where}: {name} run from {low:,} to {high:,}; ids are 0{limit}.")
    convention = label_convention(input_ids, labels)
    if convention == "neither":
        raise PlanError(f"{where}: the labels are {_MEANINGS['neither']}; were they shifted twice?")
    return convention
