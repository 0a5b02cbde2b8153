"""Masking, fill-in-the-middle and dropout over TextDataset, create_dataloaders and their like."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from penstock import Loader, Windows
from penstock.errors import PlanError
from penstock.integrations.pytorch import (
    TextDataset,
    TransformerDataset,
    create_dataloaders,
    create_text_dataloaders,
)
from penstock.transforms import Chain, FillInTheMiddle, MaskTokens, TokenDropout, Transformed

TEXT = "".join(f"Line {number}: the quick brown fox jumps over it. " for number in range(40))
LENGTH = 16
TRANSFORMS = {
    "masking": MaskTokens(256, 257, rate=0.3),
    "fill in the middle": FillInTheMiddle(prefix_id=257, middle_id=258, suffix_id=259),
    "fill in whole rows": FillInTheMiddle(
        prefix_id=257, middle_id=258, suffix_id=259, within="row"
    ),
    "dropout": TokenDropout(0.2, replace_with=256),
    "dropout of the loss": TokenDropout(0.2),
    "both": Chain(MaskTokens(256, 257), TokenDropout(0.2, replace_with=256)),
}


@pytest.fixture
def text(write):
    return write("text.txt", TEXT)


def pairs(batches):
    """Inputs and labels of each batch as lists."""
    values = (tuple(b.values()) if isinstance(b, dict) else b for b in batches)
    return [(inputs.tolist(), labels.tolist()) for inputs, labels in values]


def made(text, transform, create=create_text_dataloaders, **options):
    named = "sequence_length" if create is create_text_dataloaders else "seq_length"
    options = {"tokenizer": "bytes", "batch_size": 8, named: LENGTH, "stride": 5, **options}
    return create(text, text, transform=transform, **options)


def loader_pairs(cache, transform, *, format, epochs):
    """The batches of a penstock.Loader over the same windows, epoch by epoch."""
    (store,) = (path.parent for path in cache.glob("stores/*/penstock.json"))
    borders = transform is TRANSFORMS["fill in the middle"]
    rows = Transformed(Windows(store, LENGTH, stride=5, borders=borders), transform, seed=7)
    loader = Loader(rows, 8, seed=7, epochs=1, format=format)
    return [pairs([tuple(batch.values())[:2] for batch in loader]) for _ in range(epochs)]


@pytest.mark.parametrize("labels", ["shifted", "same"])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("create", [create_dataloaders, create_text_dataloaders])
def test_masking_filling_and_dropout_work_over_create_dataloaders(
    create, name, labels, text, cache
):
    """Each epoch is that of a penstock.Loader over the same windows."""
    transform = TRANSFORMS[name]
    train, _ = made(text, transform, create, seed=7, labels=labels)
    format = "dict" if labels == "shifted" else "hf"
    epochs = [pairs(train) for _ in range(2)]

    assert epochs == loader_pairs(cache, transform, format=format, epochs=2)
    assert epochs[0] != epochs[1]
    plain = made(text, None, create, seed=7, labels=labels)[0]
    assert pairs(plain) != epochs[0]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_masking_filling_and_dropout_work_over_text_dataset(name, write):
    transform, text = TRANSFORMS[name], write("text.txt", TEXT[:500])
    options = {"transform": transform, "seed": 7, "stride": 5, "tokenizer": "bytes"}
    for dataset in (
        TextDataset(text, LENGTH, **options),
        TransformerDataset(text, seq_length=LENGTH, is_jsonl=False, **options),
    ):
        plain = TextDataset(text, LENGTH, "bytes", stride=5)
        first = pairs([dataset[number] for number in range(len(dataset))])
        assert len(dataset) == len(plain)
        assert first != pairs([plain[number] for number in range(len(plain))])
        assert first[3] == pairs([dataset[3]])[0] == pairs([dataset[3 - len(dataset)]])[0]
        dataset.set_epoch(1)
        second = pairs([dataset[number] for number in range(len(dataset))])
        assert first != second
        again = pickle.loads(pickle.dumps(dataset))
        assert pairs([again[number] for number in range(len(again))]) == second
        again.set_epoch(0)
        assert pairs([again[number] for number in range(len(again))]) == first
        with pytest.raises(PlanError, match="An epoch must be 0 or more; got -1"):
            dataset.set_epoch(-1)
        with pytest.raises(IndexError):
            dataset[len(dataset)]
        for batch in DataLoader(dataset, 4):
            inputs, labels = batch.values() if isinstance(batch, dict) else batch
            assert inputs.is_contiguous()
            assert labels.is_contiguous()
            assert inputs.dtype == labels.dtype == torch.long


def test_masked_labels_are_those_of_masked_tokens_alone(text):
    plain = TextDataset(text, LENGTH, "bytes", labels="same", stride=LENGTH)
    masked = TextDataset(
        text, LENGTH, "bytes", stride=LENGTH, transform=MaskTokens(256, 257, masked=1, random=0)
    )
    hidden = 0
    for (whole, _), (inputs, labels) in zip(plain, masked, strict=True):
        selected = labels != -100
        assert torch.equal(selected, inputs == 256)
        assert torch.equal(labels[selected], whole[selected])
        assert torch.equal(inputs[~selected], whole[~selected])
        hidden += int(selected.sum())
    assert 0.1 < hidden / (len(plain) * LENGTH) < 0.2


def test_writing_into_labels_does_not_change_inputs(text):
    inputs, labels = TextDataset(text, LENGTH, "bytes", transform=TRANSFORMS["dropout"])[0]
    before = inputs.clone()
    labels[:] = -100

    assert torch.equal(inputs, before)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.torture)])
def test_workers_that_stay_alive_change_windows_as_one_process_does(method, text):
    alone, _ = made(text, TRANSFORMS["masking"])
    workers, _ = made(text, TRANSFORMS["masking"], num_workers=2, multiprocessing_context=method)

    for _ in range(3):
        assert pairs(workers) == pairs(alone)


def test_a_run_with_a_transform_resumes_at_any_epoch_and_on_any_ranks(text):
    train, _ = made(text, TRANSFORMS["fill in the middle"])
    epochs = [pairs(train) for _ in range(4)]
    resumed, _ = made(text, TRANSFORMS["fill in the middle"])
    resumed.sampler.set_epoch(2)
    next(iter(resumed))  # a loop that is left early has had its epoch
    assert pairs(resumed) == epochs[3]
    ranks = [
        made(text, TRANSFORMS["fill in the middle"], batch_size=4, rank=rank, world_size=2)[0]
        for rank in (0, 1)
    ]
    for epoch in epochs:
        taken = [pairs(loader) for loader in ranks]
        for (inputs, labels), first, second in zip(epoch, *taken, strict=True):
            assert (first[0] + second[0], first[1] + second[1]) == (inputs, labels)


def test_validation_is_masked_as_training_is_but_nothing_is_dropped_from_it(text):
    plain = pairs(made(text, None)[1])
    for name, transform in TRANSFORMS.items():
        _, validation = made(text, transform)
        first = pairs(validation)
        assert pairs(validation) == first  # the same in every epoch
        assert (first != plain) == (name in ("masking", "both"))
    _, validation = made(text, TRANSFORMS["dropout"], val_transform=TRANSFORMS["masking"])
    assert pairs(validation) == pairs(made(text, TRANSFORMS["masking"])[1])
    # A rank with fewer windows is filled up as without a transform.
    sizes = [
        [len(x) for x, _ in made(text, TRANSFORMS["masking"], rank=r, world_size=3)[1]]
        for r in range(3)
    ]
    assert sizes[0] == sizes[1] == sizes[2]


def test_what_is_no_transform_is_refused(text):
    with pytest.raises(PlanError, match=r"transform=<function .* has no apply\(\) and describe\("):
        TextDataset(text, LENGTH, "bytes", transform=lambda item: item)


def test_a_transform_that_adds_a_field_is_refused_where_a_pair_cannot_hold_it(text):
    class Weighted:
        def apply(self, fields, keys, length=None):
            return {**fields, "weights": np.ones((len(keys), length))}

        def describe(self):
            return {"kind": "weighted"}

    with pytest.raises(PlanError, match="adds 'weights' to the windows, and an item holds inputs"):
        TextDataset(text, LENGTH, "bytes", transform=Weighted())[0]
