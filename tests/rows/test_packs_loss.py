"""Loss masks of a chat store, through packs, documents and windows."""

import itertools

import made_store
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import Documents, Loader, Packs, Plan, Windows
from penstock.disk import header
from penstock.errors import PlanError
from penstock.store.manifest import PartRecord, part_file, read_manifest
from penstock.transforms import MaskTokens, Transformed

chats = st.lists(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=8),
    min_size=1,
    max_size=3,
).filter(lambda parts: sum(len(document) for part in parts for document in part) > 12)


def add_loss(store, marks, *, parts=None):
    """The store with these marks, one for each token of each part, or of some parts."""
    manifest = read_manifest(store.path)
    records = []
    for record, each in zip(manifest.parts, marks, strict=True):
        files = dict(record.files)
        if parts is None or record.number in parts:
            array = np.array(each, np.uint8)
            data = header(array.dtype, array.shape) + array.tobytes()
            (store.path / part_file(record.number, "loss")).write_bytes(data)
            files["loss"] = (len(data), xxhash.xxh3_128(data).hexdigest())
        records.append(PartRecord(record.number, record.num_documents, record.num_tokens, files))
    entries = manifest.contents.items()
    contents = {name: value for name, value in entries if name != "digest"}
    made_store.write(store.path, contents, records)
    return penstock.TokenStore(store.path)


def chat_store(write_store, place, parts):
    """A store whose tokens are numbers that never come again, and the set of those trained on."""
    documents, marks, trained, first = [], [], set(), 1
    for part in parts:
        documents.append([])
        for document in part:
            tokens = list(range(first, first + len(document)))
            documents[-1].append(tokens)
            trained |= {token for token, mark in zip(tokens, document, strict=True) if mark}
            first += len(document)
        marks.append([mark for document in part for mark in document])
    store = write_store(place, documents, dtype="uint32")
    return add_loss(store, marks), documents, trained


def targets(loader):
    """Every (input, target) that counts, over the whole run."""
    found = []
    for batch in loader:
        counted = batch["targets"] != -100
        found += zip(
            batch["inputs"][counted].tolist(), batch["targets"][counted].tolist(), strict=True
        )
    return sorted(found)


def pairs(documents):
    return [pair for each in documents for pair in itertools.pairwise(each)]


@settings(max_examples=50)
@given(parts=chats, length=st.integers(2, 24))
def test_only_tokens_that_are_marked_are_targets(write_store, scratch, parts, length):
    store, documents, trained = chat_store(write_store, scratch / "chat", parts)
    whole = [document for part in documents for document in part]
    expected = [pair for pair in pairs(whole) if pair[1] in trained]
    run = {"epochs": 1, "drop_last": False, "prefetch": 0}

    assert targets(Loader(Packs(store, length), 4, **run)) == expected
    assert targets(Loader(Documents(store, length, overflow="split"), 4, **run)) == expected
    flat = [token for document in whole for token in document]
    windows = Windows(store, length, tail="pad")
    assert targets(Loader(windows, 4, **run)) == [p for p in pairs([flat]) if p[1] in trained]


def test_windows_that_overlap_and_span_parts_have_the_marks_of_their_targets(write_store, tmp_path):
    parts = [[[0, 1, 1], [1]], [[0, 1]], [[1] * 9, [0] * 9]]
    store, _, trained = chat_store(write_store, tmp_path / "chat", parts)
    fields = Windows(store, 7, stride=2).read(np.arange(8))

    expected = np.isin(fields["tokens"][:, 1:], list(trained))
    assert fields["target_mask"].tolist() == expected.tolist()


def test_parts_without_marks_are_trained_on_whole(write_store, tmp_path):
    store = write_store(tmp_path / "some", [[[1, 2, 3, 4]], [[5, 6, 7, 8]]])
    store = add_loss(store, [[0, 0, 0, 1], [0] * 4], parts=[0])
    run = {"epochs": 1, "drop_last": False}

    for rows in (Packs(store, 4), Documents(store, 4)):
        assert targets(Loader(rows, 2, **run)) == [(3, 4), (5, 6), (6, 7), (7, 8)]
    assert targets(Loader(Windows(store, 7), 1, **run)) == [(3, 4), *pairs([[4, 5, 6, 7, 8]])]


def test_a_chat_store_and_a_plain_one_share_a_plan(write_store, tmp_path):
    chat, _, trained = chat_store(write_store, tmp_path / "chat", [[[0, 1] * 8]])
    plain = write_store(tmp_path / "plain", [[list(range(100, 116))]], dtype="uint32")
    run = {"epochs": 1, "drop_last": False}
    for kinds in ((Packs, Packs), (Packs, Windows), (Windows, Packs), (Windows, Windows)):
        rows = {"chat": kinds[0](chat, 4), "plain": kinds[1](plain, 4)}
        found = {target for _, target in targets(Loader(Plan(rows), 2, **run))}
        whole = set(range(101, 116)) if kinds[1] is Packs else set(range(101, 113))
        seen = trained if kinds[0] is Packs else {each for each in trained if each <= 13}
        assert found == seen | whole


def test_unshifted_labels_carry_the_marks(write_store, tmp_path):
    store, _, _ = chat_store(write_store, tmp_path / "chat", [[[0, 0, 1, 1], [1, 1, 0]]])
    run = {"shuffle": "none", "format": "hf"}

    packed = Loader(Packs(store, 8), 1, **run)[0]
    assert packed["labels"].tolist() == [[-100, -100, 3, 4, -100, 6, -100, -100]]
    padded = Loader(Documents(store, 8), 2, **run)[0]
    assert padded["labels"].tolist() == [[-100, -100, 3, 4], [-100, 6, -100, -100]]


def test_a_transform_that_would_make_the_marks_wrong_is_refused(write_store, tmp_path):
    store, _, _ = chat_store(write_store, tmp_path / "chat", [[[0, 1] * 8]])
    masking = MaskTokens(mask_id=500, vocab_size=501)

    with pytest.raises(PlanError, match="which would make 'target_mask' of these rows wrong"):
        Loader(Transformed(Windows(store, 4), masking), 2)[0]
