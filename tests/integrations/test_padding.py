"""Rectangles of rows that are not equally long."""

from functools import partial

import numpy as np
import pytest
import tiktoken
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from penstock.errors import PlanError, TokenizerError
from penstock.integrations.pytorch import SpecialIds, pad_collate, special_ids
from penstock.tokenize.definition import find_definition

ROWS = [[1, 2, 3], [4], [5, 6]]


def lists(padded):
    return {name: values.tolist() for name, values in padded.items()}


def test_rows_are_padded_on_the_right_to_the_longest():
    padded = pad_collate(ROWS, 9)

    assert list(padded) == ["input_ids", "attention_mask", "labels"]
    assert {values.dtype for values in padded.values()} == {torch.long}
    assert lists(padded) == {
        "input_ids": [[1, 2, 3], [4, 9, 9], [5, 6, 9]],
        "attention_mask": [[1, 1, 1], [1, 0, 0], [1, 1, 0]],
        "labels": [[1, 2, 3], [4, -100, -100], [5, 6, -100]],
    }


def test_rows_are_padded_on_the_left_where_asked():
    assert lists(pad_collate(ROWS, 9, side="left")) == {
        "input_ids": [[1, 2, 3], [9, 9, 4], [9, 5, 6]],
        "attention_mask": [[1, 1, 1], [0, 0, 1], [0, 1, 1]],
        "labels": [[1, 2, 3], [-100, -100, 4], [-100, 5, 6]],
    }


@given(
    rows=st.lists(st.lists(st.integers(0, 50_256), max_size=9), min_size=1, max_size=5),
    side=st.sampled_from(["left", "right"]),
    multiple_of=st.sampled_from([None, 1, 4, 8]),
    labels=st.sampled_from(["same", "shifted"]),
)
def test_any_rows_come_out_as_they_went_in(rows, side, multiple_of, labels):
    padded = pad_collate(rows, 50_256, side=side, multiple_of=multiple_of, labels=labels)
    width, longest = padded["input_ids"].shape[1], max(map(len, rows))

    assert longest <= width < longest + (multiple_of or 1)
    assert width % (multiple_of or 1) == 0
    for row, ids, mask, label in zip(rows, *padded.values(), strict=True):
        real = mask.bool()
        assert ids[real].tolist() == row
        assert (ids[~real] == 50_256).all()
        assert (label[~real] == -100).all()
        assert label[real].tolist() == (row if labels == "same" else [*row[1:], -100][: len(row)])
        assert real.tolist() == sorted(real.tolist(), reverse=side == "right")


def test_a_real_end_token_keeps_its_mask_and_label_where_pads_are_end_tokens():
    padded = pad_collate([[1, 50_256], [2, 3, 50_256]], 50_256)

    assert padded["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert padded["labels"].tolist() == [[1, 50_256, -100], [2, 3, 50_256]]


@pytest.mark.parametrize(
    "kind", [list, tuple, torch.tensor, np.array, lambda ids: np.array(ids, np.uint16)]
)
def test_rows_of_any_kind(kind):
    assert lists(pad_collate([kind(row) for row in ROWS], 9)) == lists(pad_collate(ROWS, 9))
    named = [{"input_ids": kind(row)} for row in ROWS]
    assert lists(pad_collate(named, 9)) == lists(pad_collate(ROWS, 9))


def test_labels_that_are_given_are_kept():
    named = [{"input_ids": [1, 2], "labels": [-100, 2]}, {"input_ids": [3], "labels": [7]}]
    pairs = [(torch.tensor([1, 2]), torch.tensor([-100, 2])), ([3], [7])]

    for batch in (named, pairs):
        assert pad_collate(batch, 0)["labels"].tolist() == [[-100, 2], [7, -100]]
    with pytest.raises(PlanError, match="Row 0 has 2 ids and 1 labels"):
        pad_collate([{"input_ids": [1, 2], "labels": [1]}], 0)


def test_edges_are_put_where_they_are_missing():
    padded = pad_collate([[1, 5], [5, 9], []], 0, bos_id=1, eos_id=9)

    assert padded["input_ids"].tolist() == [[1, 5, 9], [1, 5, 9], [1, 9, 0]]
    with pytest.raises(PlanError, match="cannot be added to rows that have labels"):
        pad_collate([([1], [1])], 0, eos_id=9)


def test_nothing_is_lost_unless_it_is_asked_for():
    with pytest.raises(PlanError, match="Row 0 has 3 tokens, more than max_length=2"):
        pad_collate(ROWS, 9, max_length=2)
    assert pad_collate(ROWS, 9, max_length=2, overflow="cut")["input_ids"].tolist() == [
        [1, 2], [4, 9], [5, 6],
    ]  # fmt: skip
    assert pad_collate(ROWS, 9, max_length=1024)["input_ids"].shape == (3, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"side": "top"}, 'side=\'top\' is not "right" or "left"'),
        ({"overflow": "wrap"}, "overflow='wrap' is not"),
        ({"labels": "hf"}, "labels='hf' is not"),
        ({"multiple_of": 0}, "multiple_of=0 must be at least 1"),
        ({"max_length": 0}, "max_length=0 must be at least 1"),
        ({"multiple_of": 8, "max_length": 12}, "max_length=12 is not a multiple"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(PlanError, match=message):
        pad_collate(ROWS, 9, **options)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([], "A batch without rows cannot be padded"),
        ([[0.5]], r"Row 0 is torch\.float32"),
        ([[[1]]], r"shape \(1, 1\)"),
        ([[1], 2], "Row 1 is 2; it must be one row of integers"),
        ([None], "Row 0 is None"),
        ([[None]], r"Row 0 is \[None\]"),
        ([["a"]], r"Row 0 is \['a'\]"),
        ([{"labels": [1]}], r"Row 0 has the keys \['labels'\], but needs input_ids"),
    ],
)
def test_rows_that_are_none_are_refused(batch, message):
    with pytest.raises(PlanError, match=message):
        pad_collate(batch, 0)


def test_gpt2_has_no_pad_token_and_pads_with_its_end_token():
    with pytest.raises(
        TokenizerError, match=r"no pad token, like GPT-2's\. Use pad_id=special_ids"
    ):
        pad_collate(ROWS, None)
    assert special_ids("gpt2") == SpecialIds(50_256, 50_256, 50_256)
    hugging_face = Tokenizer.from_str(find_definition("gpt2").text)
    assert special_ids(hugging_face).pad_id == 50_256
    hugging_face.add_special_tokens(["[PAD]"])
    assert special_ids(hugging_face).pad_id == 50_257
    hugging_face.enable_padding(pad_id=7)
    assert special_ids(hugging_face).pad_id == 7


def test_special_ids_of_other_objects():
    class Named:
        bos_token_id, eos_token_id, pad_token_id = 1, 2, 0

    ranks = {bytes([value]): value for value in range(256)}
    small = tiktoken.Encoding(
        "small", pat_str=".", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}
    )
    assert special_ids(Named()) == SpecialIds(1, 2, 0)
    assert special_ids(small) == SpecialIds(None, 256, 256)
    assert special_ids("bytes") == SpecialIds(None, 256, 256)
    assert special_ids(object()) == SpecialIds(None, None, None)


def test_it_is_a_collate_function_for_workers_too():
    loader = DataLoader(
        ROWS, batch_size=2, num_workers=1, collate_fn=partial(pad_collate, pad_id=0)
    )

    assert [batch["input_ids"].tolist() for batch in loader] == [[[1, 2, 3], [4, 0, 0]], [[5, 6]]]
