"""The look at a DataLoader: what it prints, and what it does not let pass."""

import pytest
import torch

from penstock.errors import PlanError
from penstock.integrations.pytorch import check_dataloader, label_convention, test_dataloader

ROWS = torch.arange(12).reshape(2, 6)
SHIFTED = {"input_ids": ROWS[:, :-1], "labels": ROWS[:, 1:]}
SAME = {"input_ids": ROWS, "labels": ROWS.clone()}


def changed(batch, **fields):
    return {**{name: values.clone() for name, values in batch.items()}, **fields}


def test_both_conventions_are_detected_and_ignored_labels_do_not_count():
    padded = changed(SHIFTED)
    padded["labels"][0, 2:] = -100
    flat = torch.ones((2, 3), dtype=torch.long)

    assert label_convention(*SHIFTED.values()) == "shifted"
    assert label_convention(*padded.values()) == "shifted"
    assert label_convention(*SAME.values()) == "same"
    assert label_convention(flat, flat) == "either"
    assert label_convention(ROWS, ROWS.flip(1)) == "neither"


@pytest.mark.parametrize(
    ("batch", "aligned", "named"),
    [
        (
            SHIFTED,
            True,
            "shifted (a label is the next input): use cross_entropy(logits, labels), and not ",
        ),
        (tuple(SHIFTED.values()), True, "shifted (a label is"),
        ([*SHIFTED.values()], True, "shifted (a label is"),
        ({"inputs": ROWS[:, :-1], "targets": ROWS[:, 1:]}, True, "shifted (a label is"),
        (SAME, False, "same (a label is its input): use model(**batch).loss of transformers"),
        ({"input_ids": ROWS, "labels": ROWS.flip(1)}, False, "neither shifted nor the same"),
    ],
)
def test_the_lines_name_the_convention(batch, aligned, named, capsys):
    test_dataloader([batch] * 5)
    lines = capsys.readouterr().out.splitlines()

    assert lines[0] == "DataLoader has 5 batches"
    assert lines[4] == f"  Input and label alignment check: {aligned}"
    assert lines[5].startswith(f"  Labels: {named}")
    assert len(lines) == 1 + 3 * 5


def test_fewer_than_three_batches_are_fine(capsys):
    test_dataloader([SHIFTED])

    assert capsys.readouterr().out.count("Batch") == 1


def test_good_batches_pass_and_tell_their_convention():
    assert check_dataloader([SHIFTED] * 9) == "shifted"
    assert check_dataloader([SAME], labels="same", vocab_size=12) == "same"
    assert check_dataloader([tuple(SHIFTED.values())], labels="shifted") == "shifted"
    ones = torch.ones((1, 3), dtype=torch.long)
    assert check_dataloader([(ones, ones)], labels="same") == "either"
    assert check_dataloader([(ones, ones), SHIFTED]) == "shifted"


BAD = {
    "no batch": ([], "has no batch"),
    "no labels": (
        [{"input_ids": ROWS}],
        r"has the keys \['input_ids'\], but needs input_ids and labels",
    ),
    "a tensor": ([ROWS], "is a Tensor, not a dictionary or a pair"),
    "narrow": ([changed(SAME, labels=ROWS.int())], "labels is torch.int32; embeddings"),
    "a list": ([{"input_ids": [[1]], "labels": ROWS}], "input_ids is list; embeddings"),
    "flat": ([changed(SAME, input_ids=ROWS[0])], r"has the shape \(6,\), not \(rows, T\)"),
    "empty": ([changed(SAME, input_ids=ROWS[:0])], r"has the shape \(0, 6\)"),
    "unequal": ([changed(SAME, labels=ROWS[:, 1:])], r"\(2, 6\) and labels \(2, 5\)"),
    "negative": ([changed(SAME, input_ids=ROWS - 1)], "input_ids run from -1 to 10; ids are 0"),
    "all ignored": ([changed(SAME, labels=ROWS * 0 - 100)], "every label is -100"),
    "neither": ([changed(SAME, labels=ROWS.flip(1))], "neither shifted nor the same"),
    "both": ([SAME, SHIFTED], "Some batches have shifted labels, and others"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_batches_are_refused(name):
    batches, message = BAD[name]
    with pytest.raises(PlanError, match=message):
        check_dataloader(batches)


def test_what_was_asked_for_must_be_so():
    with pytest.raises(
        PlanError, match=r"The labels are same .*, but labels='shifted' is required"
    ):
        check_dataloader([SAME], labels="shifted")
    with pytest.raises(PlanError, match="input_ids run from 0 to 11; ids are 0 to 10"):
        check_dataloader([SAME], vocab_size=11)


def test_only_as_many_batches_as_asked_for_are_looked_at():
    assert check_dataloader([SAME, changed(SAME, labels=ROWS.flip(1))], num_batches=1) == "same"
