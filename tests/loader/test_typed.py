"""Batches are typed: the types of penstock.loader are those of the batches that loaders yield."""

import sys
from inspect import signature
from typing import get_type_hints

import pytest
from mypy import api

import penstock
from penstock import Documents, Loader, Packs, Windows
from penstock.loader import BatchFormat, LabelBatch, NarrowBatch, TargetBatch
from penstock.loader.arguments import LoaderOptions

TYPES = {"dict": TargetBatch, "hf": LabelBatch, "narrow": NarrowBatch}

PROGRAM = """
from torch import Tensor
from torch.utils.data import DataLoader
from typing import assert_type

from penstock.integrations.huggingface import StepLoader
from penstock.integrations.lightning import LLMDataModule
from penstock.integrations.pytorch import (
    TextDataset, TransformerDataset, create_dataloaders, create_text_dataloaders, pad_collate,
)
from penstock.loader import LabelBatch, Loader, NarrowBatch, PairBatch, TargetBatch
from penstock.rows import Windows


def loss(batch: TargetBatch) -> Tensor:
    return batch["inputs"] - batch["targets"]


rows = Windows("store", 8)
for batch in Loader(rows, 4, seed=3):
    assert_type(batch, TargetBatch)
    loss(batch)
assert_type(Loader(rows, 4)[0], TargetBatch)
for pair in Loader(rows, global_batch_size=4, rank=0, world_size=2, format="tuple"):
    assert_type(pair, PairBatch)
for labels in Loader(rows, 4, epochs=2, drop_last=False, format="hf"):
    assert_type(labels["labels"], Tensor)
for narrow in Loader(rows, 4, device="cpu", format="narrow"):
    assert_type(narrow, NarrowBatch)
for labelled in StepLoader(rows, 4):
    assert_type(labelled, LabelBatch)
    assert_type(labelled["labels"], Tensor)
train, val = create_dataloaders("train.txt", "val.txt", "gpt2")
assert_type(train, DataLoader[LabelBatch])
assert_type(create_text_dataloaders("train.txt", "val.txt")[1], DataLoader[PairBatch])
assert_type(TransformerDataset("train.txt", "gpt2")[0], LabelBatch)
assert_type(TextDataset("train.txt")[0], PairBatch)
assert_type(pad_collate([[1]], 0), LabelBatch)
LLMDataModule()


def wrong(batch: TargetBatch) -> object:
    return batch["input_ids"]
"""


@pytest.mark.parametrize("format", TYPES)
@pytest.mark.parametrize("ids", [False, True])
def test_batches_are_typed_with_the_fields_that_they_have(store, format, ids):
    typed = TYPES[format]
    rows = [
        Windows(store, 16, stride=8),
        Windows(store, 16, stride=8, borders=True),
        Windows(store, 16, stride=8, tail="pad"),
        Packs(store, 64),
        Documents(store, 64),
    ]
    for each in rows:
        for batch in Loader(
            each, 8, epochs=1, drop_last=False, format=BatchFormat(fields=format, ids=ids)
        ):
            assert typed.__required_keys__ <= set(batch)
            assert set(batch) <= typed.__required_keys__ | typed.__optional_keys__


def test_the_typed_signatures_of_a_loader_have_all_its_arguments():
    types = {name: each.annotation for name, each in signature(Loader).parameters.items()}
    for name in ("rows", "batch_size", "format"):  # these stand in each of the signatures
        del types[name]
    assert types == get_type_hints(LoaderOptions)


@pytest.mark.torture
def test_mypy_strict_accepts_a_program_with_the_types_of_batches_and_finds_a_wrong_name(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # without the settings of this repository
    monkeypatch.setenv("MYPYPATH", penstock.__path__[0].removesuffix("/penstock"))
    options = ["--strict", "--python-executable", sys.executable, "--ignore-missing-imports"]
    options += ["--follow-imports", "silent", "--disable-error-code", "misc"]
    report, _, _ = api.run([*options, "-c", PROGRAM])

    # One run, because each takes long: only the last function is wrong.
    assert 'TypedDict "TargetBatch" has no key "input_ids"' in report
    assert report.count("error:") == 1, report
