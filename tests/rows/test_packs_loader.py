"""Packs through a loader: every format, mixtures, transforms, and resumes."""

import itertools

import numpy as np
import pytest
import torch

import penstock
from penstock import Loader, Packs, Plan, Windows
from penstock.errors import ResumeError
from penstock.loader import BatchFormat
from penstock.testing import assert_resumable
from penstock.transforms import FillInTheMiddle, MaskTokens, Transformed

LENGTH = 24
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def documents():
    """Documents in three parts, of 1 to 70 tokens that never come again."""
    first, made = 1, []
    for number in range(150):
        size = number * 31 % 70 + 1
        made.append(list(range(first, first + size)))
        first += size
    return [made[:70], made[70:71], made[71:]]


@pytest.fixture(scope="module")
def store(write_store, tmp_path_factory, documents):
    return write_store(tmp_path_factory.mktemp("loader") / "store", documents)


@pytest.fixture(scope="module")
def pairs(documents):
    """Every token that is not a document's first, after the one before it."""
    return sorted(
        pair for part in documents for document in part for pair in itertools.pairwise(document)
    )


RUN = {"epochs": 1, "drop_last": False, "seed": 3}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_epoch_trains_on_every_target_once(store, pairs, prefetch):
    found = []
    for batch in Loader(Packs(store, LENGTH), 8, prefetch=prefetch, **RUN):
        assert batch["inputs"].shape == batch["targets"].shape == (8, LENGTH)
        assert batch["inputs"].dtype == batch["targets"].dtype == torch.int64
        counted = batch["targets"] != -100
        found += zip(
            batch["inputs"][counted].tolist(), batch["targets"][counted].tolist(), strict=True
        )

    assert sorted(found) == pairs


def test_the_unshifted_format_trains_on_the_same_targets_also_laid_end_to_end(store, pairs):
    found = []
    for batch in Loader(Packs(store, LENGTH), 8, format="hf", **RUN):
        assert batch.pop("use_cache") is False
        assert list(batch) == ["input_ids", "labels", "position_ids"]
        # What a model does with a batch laid end to end: predict each label from the token before.
        ids, labels, places = (each.reshape(-1) for each in batch.values())
        counted = labels[1:] != -100
        found += zip(ids[:-1][counted].tolist(), labels[1:][counted].tolist(), strict=True)
        assert (labels[places == 0] == -100).all()
        assert (labels[labels != -100] == ids[labels != -100]).all()

    assert sorted(found) == pairs


def test_a_tuple_needs_rows_without_borders(store):
    inputs, targets = Loader(Packs(store, LENGTH, borders=False), 8, format="tuple", seed=3)[0]
    named = Loader(Packs(store, LENGTH), 8, seed=3)[0]

    assert torch.equal(inputs, named["inputs"])
    assert torch.equal(targets, named["targets"])
    with pytest.raises(penstock.errors.PlanError, match="These rows also have document_ids, posi"):
        Loader(Packs(store, LENGTH), 8, format="tuple")[0]


def test_cu_seqlens_walk_over_documents_and_padding(store):
    for batch in Loader(Packs(store, LENGTH), 8, **RUN):
        edges = batch["cu_seqlens"]
        assert edges.dtype == torch.int32
        assert edges[0] == 0
        assert edges[-1] == 8 * LENGTH
        places = batch["position_ids"].flatten().tolist()
        assert places == [place for size in edges.diff().tolist() for place in range(size)]
        borders = batch["document_ids"].diff(dim=1) != 0
        assert (batch["targets"][:, :-1][borders] == -100).all()


def test_ids_name_the_rows_and_narrow_leaves_them(store):
    packs = Packs(store, LENGTH)
    batch = Loader(packs, 8, format=BatchFormat(fields="narrow", ids=True), seed=3)[2]
    fields = packs.read(batch["sample"].numpy())

    assert batch["tokens"].dtype == torch.uint16
    assert batch["tokens"].tolist() == fields["tokens"].tolist()
    assert batch["target_mask"].tolist() == fields["same_document"].tolist()


def test_rows_that_fill_up_the_last_batch_train_on_nothing(store):
    packs = Packs(store, LENGTH)
    last = Loader(packs, 64, epochs=1, drop_last=False, format=BatchFormat(ids=True))[-1]
    filled = last["position"] == -1

    assert 0 < filled.sum() < 64
    assert (last["targets"][filled] == -100).all()
    assert not last["inputs"][filled].any()


def test_packs_and_windows_share_batches(store, write_store, tmp_path):
    other = write_store(tmp_path / "other", [[list(range(30_000, 30_400))]])
    plan = Plan(
        {"packs": Packs(store, LENGTH), "windows": Windows(other, LENGTH)},
        weights={"packs": 2, "windows": 1},
        seed=5,
    )
    batch = Loader(plan, 30, format=BatchFormat(ids=True))[0]
    windows = batch["source"] == 1

    assert windows.sum() == 10
    assert (batch["inputs"][windows] >= 30_000).all()
    assert (batch["targets"][windows] == batch["inputs"][windows] + 1).all()
    assert (batch["position_ids"][windows] == torch.arange(LENGTH)).all()
    assert not batch["document_ids"][windows].any()
    assert (batch["targets"][~windows][:, -1] == -100).all()


@pytest.mark.parametrize(
    ("shuffle", "format"),
    [
        ("full", "dict"),
        ("part", "hf"),
        ("block", "dict"),
        pytest.param("full", "hf", marks=pytest.mark.torture),
        pytest.param("part", "dict", marks=pytest.mark.torture),
        pytest.param("block", "hf", marks=pytest.mark.torture),
    ],
)
def test_runs_resume_at_every_step_on_any_number_of_ranks(store, shuffle, format):
    def make(**where):
        plan = Plan(Packs(store, LENGTH), seed=7, shuffle=shuffle)
        more = {"format": BatchFormat(fields=format, ids=True, fingerprint="tokens")}
        return Loader(plan, global_batch_size=16, epochs=2, drop_last=False, **more, **where)

    assert_resumable(make, steps=12, prefetch=(0, 1))


def test_mixtures_with_transforms_resume_exactly(store):
    def make(**where):
        middle = FillInTheMiddle(prefix_id=60_001, middle_id=60_002, suffix_id=60_003, rate=0.5)
        sources = {
            "packs": Packs(store, LENGTH),
            "middle": Transformed(Packs(store, LENGTH), middle, seed=1),
            "windows": Windows(store, LENGTH, borders=True),
        }
        plan = Plan(sources, weights={"packs": 3, "middle": 2, "windows": 1}, seed=7)
        return Loader(plan, global_batch_size=8, steps=9, **where)

    assert_resumable(make, prefetch=(0, 1), world_sizes=(1, 4))


def test_documents_are_rearranged_inside_their_borders(store):
    middle = FillInTheMiddle(prefix_id=60_001, middle_id=60_002, suffix_id=60_003, rate=1)
    rows = Packs(store, LENGTH)
    plain = Loader(rows, 16, seed=3)[0]
    changed = Loader(Transformed(rows, middle, seed=1), 16, seed=3)[0]
    real = plain["inputs"] > 0

    assert torch.equal(plain["targets"] == -100, changed["targets"] == -100)
    assert torch.equal(plain["document_ids"], changed["document_ids"])
    assert (changed["inputs"] == 60_001).any()
    assert not changed["inputs"][~real].any()  # padding has nothing to rearrange


def test_masked_tokens_are_predicted_in_place_and_never_padding(store):
    masking = MaskTokens(mask_id=60_001, vocab_size=60_002, rate=0.5)
    rows = Packs(store, LENGTH)
    plain = Loader(rows, 32, seed=3)[0]["inputs"]
    batch = Loader(Transformed(rows, masking, seed=1), 32, seed=3, format="hf")[0]
    chosen = batch["labels"] != -100

    assert torch.equal(batch["labels"][chosen], plain[chosen])
    assert (plain[chosen] > 0).all()
    assert chosen[:, 0].any()
    assert chosen[:, -1].any()


def test_a_state_belongs_to_the_length_and_kind_of_rows(store):
    state = Loader(Packs(store, LENGTH), 8).state_dict()

    Loader(Packs(store, LENGTH, borders=False), 4).load_state_dict(state)
    with pytest.raises(ResumeError, match="length 24 -> 23"):
        Loader(Packs(store, 23), 8).load_state_dict(state)
    with pytest.raises(ResumeError, match="kind 'packs' -> 'windows'"):
        Loader(Windows(store, LENGTH), 8).load_state_dict(state)


def test_a_dataloader_gives_the_same_batches(store):
    loader = Loader(Packs(store, LENGTH), 8, **RUN)
    for right, found in zip(
        loader,
        Loader(loader.plan, 8, epochs=1, drop_last=False).as_dataloader(
            num_workers=1, multiprocessing_context="fork"
        ),
        strict=True,
    ):
        for name, values in right.items():
            assert np.array_equal(values, found[name])
