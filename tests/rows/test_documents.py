"""One document a row: padded to the widest of a step, cut off or split, nothing silent."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Documents, Loader, Packs, Plan, Windows
from penstock.errors import PlanError, ResumeError
from penstock.loader import BatchFormat
from penstock.testing import assert_resumable

torch.set_num_threads(1)

RUN = {"epochs": 1, "drop_last": False}
part_lengths = st.lists(
    st.lists(st.integers(0, 12) | st.integers(0, 70), max_size=12), min_size=1, max_size=3
).filter(lambda parts: any(map(sum, parts)))


def numbered(parts):
    first, made = 1, []
    for lengths in parts:
        documents = []
        for length in lengths:
            documents.append(list(range(first, first + length)))
            first += length
        made.append(documents)
    return made


@pytest.fixture(scope="module")
def store(write_store, tmp_path_factory):
    """96 documents of 1 to 40 tokens in three parts; they end with tokens of their own."""
    lengths = [number * 17 % 40 + 1 for number in range(96)]
    parts = numbered([lengths[:50], lengths[50:60], lengths[60:]])
    return write_store(tmp_path_factory.mktemp("documents") / "store", parts)


def real_rows(batch, name="inputs"):
    """The tokens of each row, without padding."""
    rows = zip(batch[name], batch["attention_mask"].bool(), strict=True)
    return [row[mask].tolist() for row, mask in rows]


@settings(max_examples=60)
@given(
    parts=part_lengths,
    max_length=st.integers(2, 40),
    side=st.sampled_from(["right", "left"]),
    overflow=st.sampled_from(["cut", "split"]),
    multiple=st.sampled_from([1, 8]),
)
def test_rows_are_documents_and_targets_are_what_follows(
    write_store, scratch, parts, max_length, side, overflow, multiple
):
    documents = [document for part in numbered(parts) for document in part]
    store = write_store(scratch / "documents", numbered(parts), dtype="uint32")
    rows = Documents(
        store, max_length, overflow=overflow, side=side, pad_to_multiple_of=multiple, pad_id=77_777
    )
    found, targets = [], []
    for batch in Loader(rows, 5, shuffle="none", format=BatchFormat(ids=True), prefetch=0, **RUN):
        real = batch["position"] >= 0
        batch = {name: values[real] for name, values in batch.items()}
        found += real_rows(batch)
        counted = batch["targets"] != -100
        targets += batch["targets"][counted].tolist()
        assert (batch["targets"][counted] == batch["inputs"][counted] + 1).all()
        assert (batch["inputs"][batch["attention_mask"] == 0] == 77_777).all()
        widest = max(map(len, real_rows(batch)))
        assert batch["inputs"].shape[1] == -(-widest // multiple) * multiple

    whole = [document for document in documents if document]
    if overflow == "cut":
        assert found == [document[:max_length] for document in whole]
        assert targets == [token for each in whole for token in each[1:max_length]]
        assert rows.cut_tokens == sum(max(0, len(each) - max_length) for each in whole)
        assert rows.cut_documents == sum(len(each) > max_length for each in whole)
        assert rows.num_split == 0
    else:
        assert targets == [token for each in whole for token in each[1:]]
        assert {token for row in found for token in row} == {t for each in whole for t in each}
        assert rows.cut_tokens == rows.cut_documents == 0
        assert rows.num_split == sum(len(each) > max_length for each in whole)
    assert rows.num_empty == len(documents) - len(whole)
    assert rows.num_tokens == len(targets)


def test_the_unshifted_format_is_what_models_of_hugging_face_take(store):
    batch = Loader(Documents(store, 16), 8, format="hf")[0]
    real = batch["attention_mask"].bool()
    first = torch.zeros_like(real)
    first[:, 0] = True

    assert list(batch) == ["input_ids", "labels", "attention_mask"]
    assert {values.dtype for values in batch.values()} == {torch.int64}
    assert torch.equal(batch["labels"] != -100, real & ~first)
    assert torch.equal(batch["labels"][real & ~first], batch["input_ids"][real & ~first])


def test_padding_is_the_end_token_where_nothing_else_is_said(write_store, tmp_path):
    store = write_store(tmp_path / "store", [[[5, 6, 7], [8]]])
    batch = Loader(Documents(store, 4, pad_id=9), 2, shuffle="none")[0]

    assert Documents(store, 4).pad_id == store.manifest.contents["eos_id"] == 0
    assert batch["inputs"].tolist() == [[5, 6, 7], [8, 9, 9]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_all_ranks_have_batches_of_one_width(store, side):
    rows = Documents(store, 40, side=side)
    whole = Loader(rows, global_batch_size=12, seed=3)
    ranks = [
        Loader(rows, global_batch_size=12, seed=3, rank=rank, world_size=4) for rank in range(4)
    ]
    for step in range(8):
        joined = [loader[step] for loader in ranks]
        for name, values in whole[step].items():
            assert torch.equal(torch.cat([batch[name] for batch in joined]), values)


@pytest.mark.parametrize("side", ["right", "left"])
def test_runs_resume_at_every_step_on_any_number_of_ranks(store, side):
    def make(**where):
        rows = Documents(store, 24, overflow="split", side=side, pad_to_multiple_of=8)
        return Loader(
            rows, global_batch_size=8, seed=3, format=BatchFormat(ids=True), **RUN, **where
        )

    assert_resumable(make, steps=9, prefetch=(0, 1))


def test_documents_of_several_sources_share_a_batch(store, write_store, tmp_path):
    other = write_store(tmp_path / "other", [[list(range(9_000, 9_030))] * 20])
    plan = Plan({"a": Documents(store, 32), "b": Documents(other, 32)}, weights={"a": 1, "b": 1})
    batch = Loader(plan, 16, format=BatchFormat(ids=True))[0]

    assert 30 <= batch["inputs"].shape[1] <= 32
    assert (batch["inputs"][batch["source"] == 1][:, :30] >= 9_000).all()


def test_rows_that_cannot_share_a_batch_are_refused(store):
    with pytest.raises(PlanError, match="are padded on the left and others on the right"):
        Loader(Plan({"a": Documents(store, 8), "b": Documents(store, 8, side="left")}), 4)
    for other in (Packs(store, 8), Windows(store, 8)):
        with pytest.raises(PlanError, match="Some sources of this plan give 'attention_mask' and"):
            Loader(Plan({"a": Documents(store, 8), "b": other}), 32)[0]
    with pytest.raises(PlanError, match="These rows also have attention_mask"):
        Loader(Documents(store, 8), 4, format="tuple")[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overflow": "drop"}, 'overflow=\'drop\' is not "cut" or "split"'),
        ({"side": "middle"}, 'side=\'middle\' is not "right" or "left"'),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of=0 must be at least 1"),
        ({"pad_id": 70_000}, "pad_id=70,000 does not fit the ids of the store, which are uint16"),
        ({"pad_id": -1}, "pad_id=-1 does not fit the ids of the store, which are uint16"),
        ({"max_length": 1}, "must be from 2 tokens"),
    ],
)
def test_settings_that_make_no_sense_are_refused(store, settings, message):
    with pytest.raises(PlanError, match=message):
        Documents(store, **{"max_length": 8, **settings})


def test_says_what_it_is_and_what_it_loses(store):
    rows = Documents(store, 16)
    place = repr(str(rows.stream.members[0].path))
    lost = sum(max(0, number * 17 % 40 + 1 - 16) for number in range(96))

    assert repr(rows) == f"Documents({place}: 96 rows of at most 16 tokens; {lost} tokens cut off)"
    assert repr(Documents(store, 40)) == f"Documents({place}: 96 rows of at most 40 tokens)"


def test_copies_and_digests_are_of_what_is_in_the_rows(store):
    rows = Documents(store, 16, side="left", pad_id=3)
    restored = pickle.loads(pickle.dumps(rows))
    samples = np.arange(len(rows))

    for name, values in rows.read(samples).items():
        assert values.tolist() == restored.read(samples)[name].tolist()
    assert restored.digest == rows.digest == Documents(store, 16).digest
    assert Documents(store, 16, overflow="split").digest != rows.digest
    rows.read_ahead(samples)


def test_a_state_belongs_to_the_length_and_what_becomes_of_longer_ones(store):
    state = Loader(Documents(store, 16), 8).state_dict()

    Loader(Documents(store, 16, side="left"), 4).load_state_dict(state)
    with pytest.raises(ResumeError, match="overflow 'cut' -> 'split'"):
        Loader(Documents(store, 16, overflow="split"), 8).load_state_dict(state)
