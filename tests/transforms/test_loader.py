"""Transformed rows through the loader, on every road that a batch can take."""

import numpy as np
import pytest
import torch

import penstock
from penstock.loader import BatchFormat
from penstock.testing import assert_resumable
from penstock.transforms import (
    Chain,
    FillInTheMiddle,
    MaskTokens,
    TokenDropout,
    Transformed,
    collate_masked,
)

MASKING = MaskTokens(49, 50, rate=0.4)
MIDDLE = FillInTheMiddle(prefix_id=51, middle_id=52, suffix_id=53, rate=0.8)
DROPOUT = TokenDropout(0.3, replace_with=48)


def read(loader, batch):
    """What the rows of a batch are, read from the rows themselves."""
    rows = loader.plan.sources["data"]
    return rows.read_epochs(batch["sample"].numpy(), batch["epoch"].numpy())


@pytest.mark.parametrize("format", ["dict", "hf"])
def test_masked_tokens_are_predicted_in_their_own_places(made, format):
    loader = penstock.Loader(
        Transformed(made(), MASKING, seed=3),
        8,
        epochs=3,
        format=BatchFormat(fields=format, ids=True),
    )
    names = ("input_ids", "labels") if format == "hf" else ("inputs", "targets")
    epochs = set()
    for batch in loader:
        expected = collate_masked(read(loader, batch))
        assert batch[names[0]].numpy().tolist() == expected["input_ids"].tolist()
        assert batch[names[1]].numpy().tolist() == expected["labels"].tolist()
        assert {batch[name].dtype for name in names} == {torch.int64}
        assert not {"labels", "targets", "target_mask"} & (batch.keys() - set(names))
        epochs |= set(batch["epoch"].tolist())
    assert epochs == {0, 1, 2}


def test_masked_tokens_make_a_tuple_of_two(made):
    inputs, targets = next(iter(penstock.Loader(Transformed(made(), MASKING), 8, format="tuple")))
    kept = (targets != -100) & (inputs != 49)

    assert 0 < kept.sum() < (targets != -100).sum() < targets.numel()


def test_dropped_tokens_are_still_targets(made):
    rows = made()
    shifted = penstock.Loader(Transformed(rows, DROPOUT), 8, format=BatchFormat(ids=True))[0]
    unshifted = penstock.Loader(
        Transformed(rows, DROPOUT), 8, format=BatchFormat(fields="hf", ids=True)
    )[0]
    clean = rows.fields["tokens"][shifted["sample"].numpy()].astype(np.int64)

    assert np.array_equal(shifted["targets"].numpy(), clean[:, 1:])
    assert np.array_equal(unshifted["labels"].numpy()[:, 1:], clean[:, 1:-1])
    assert (shifted["inputs"] == 48).any()


def test_a_transform_of_one_source_leaves_the_others_alone(made):
    code, web = made(30, 12, documents=True), made(30, 12, seed=1, documents=True)
    plan = penstock.Plan({"code": Transformed(code, Chain(MIDDLE, DROPOUT)), "web": web})
    for batch in penstock.Loader(plan, 10, epochs=2, format=BatchFormat(ids=True)):
        of_web = (batch["source"] == 1).numpy()
        tokens = web.fields["tokens"][batch["sample"].numpy()[of_web]]
        assert np.array_equal(batch["inputs"].numpy()[of_web], tokens[:, :-1])
        assert np.array_equal(batch["targets"].numpy()[of_web], tokens[:, 1:])
        assert (batch["inputs"].numpy()[~of_web] == 48).any()


def test_a_batch_that_is_filled_up_predicts_nothing_in_the_rows_that_fill_it(made):
    rows = Transformed(made(10), MASKING)
    last = penstock.Loader(rows, 8, epochs=1, drop_last=False)[1]

    assert (last["targets"][2:] == -100).all()
    assert (last["targets"][:2] != -100).any()


@pytest.mark.parametrize("transform", [MASKING, Chain(MIDDLE, DROPOUT)], ids=repr)
def test_a_run_goes_on_exactly_at_any_world_size(made, transform):
    rows = Transformed(made(30, documents=True), transform, seed=2)

    def make_loader(**topology):
        return penstock.Loader(
            rows,
            global_batch_size=12,
            epochs=3,
            format=BatchFormat(ids=True, fingerprint="tokens"),
            **topology,
        )

    assert_resumable(make_loader, steps=8)


def test_a_state_of_another_transform_is_refused_with_its_name(made):
    state = penstock.Loader(Transformed(made(), MASKING), 8).state_dict()
    loader = penstock.Loader(Transformed(made(), MaskTokens(49, 50, rate=0.5)), 8)

    with pytest.raises(penstock.errors.ResumeError, match="transform 'masked-tokens "):
        loader.load_state_dict(state)
