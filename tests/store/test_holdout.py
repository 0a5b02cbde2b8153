"""Held-out documents: disjoint, complete, about as many as asked, and the same ones next time."""

import gzip
import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import StoreError
from penstock.sources.settings import Texts

pytestmark = pytest.mark.usefixtures("small_slices")
TEXTS = [f"document {number} " + "x" * (number % 50) for number in range(1_000)]


def sides(place):
    return [
        [store.decode(number) for number in range(len(store))]
        for store in (penstock.TokenStore(place / "train"), penstock.TokenStore(place / "val"))
    ]


def write(folder, kind):
    lines = "\n".join(TEXTS).encode()
    rows = "\n".join(json.dumps({"text": text}) for text in TEXTS).encode()
    if kind == "texts":
        return Texts(TEXTS)
    if kind == "parquet":
        pq.write_table(pa.table({"text": TEXTS}), folder / "a.parquet", row_group_size=100)
        return folder / "a.parquet"
    name, data = {
        "text": ("a.txt", lines),
        "gz": ("a.txt.gz", gzip.compress(lines)),
        "jsonl": ("a.jsonl", rows),
    }[kind]
    (folder / name).write_bytes(data)
    return folder / name


@pytest.mark.parametrize("kind", ["text", "gz", "jsonl", "parquet", "texts"])
def test_a_tail_is_the_last_share_of_the_input(kind, tmp_path):
    penstock.build(
        write(tmp_path, kind),
        tmp_path / "s",
        tokenizer="bytes",
        split="tail:0.1",
        documents="lines",
    )
    train, val = sides(tmp_path / "s")

    assert train + val == TEXTS
    assert 90 <= len(val) <= 110


def test_a_tail_may_begin_in_any_of_many_files(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("\n".join(TEXTS[number * 100 : number * 100 + 100]))
    penstock.build(
        sorted(tmp_path.glob("*.txt")),
        tmp_path / "s",
        tokenizer="bytes",
        split="tail:0.35",
        documents="lines",
    )
    train, val = sides(tmp_path / "s")

    assert train + val == TEXTS
    assert 330 <= len(val) <= 370


@pytest.mark.parametrize("kind", ["text", "gz", "jsonl", "parquet", "texts"])
def test_a_hash_split_depends_on_the_texts_alone(kind, tmp_path):
    penstock.build(
        write(tmp_path, kind),
        tmp_path / "s",
        tokenizer="bytes",
        split="hash:0.1",
        documents="lines",
    )
    penstock.build(Texts(TEXTS[::-1]), tmp_path / "r", tokenizer="bytes", split="hash:0.1")
    train, val = sides(tmp_path / "s")

    assert sorted(train + val) == sorted(TEXTS)
    assert 70 <= len(val) <= 130
    assert [side[::-1] for side in sides(tmp_path / "r")] == [train, val]


def test_a_larger_share_holds_out_the_same_documents_and_more(tmp_path):
    for share in ("0.1", "0.3"):
        penstock.build(Texts(TEXTS), tmp_path / share, tokenizer="bytes", split=f"hash:{share}")

    assert set(sides(tmp_path / "0.1")[1]) < set(sides(tmp_path / "0.3")[1])


def test_the_first_held_out_documents_are_known():
    """A golden: whoever changes the digest moves documents between train and val."""
    from penstock.store.part import _hash

    held = [number for number, text in enumerate(TEXTS[:100]) if _hash(text.encode()) < 2**64 // 10]
    assert held[:6] == [3, 12, 16, 36, 39, 49]


@settings(max_examples=15)
@given(texts=st.lists(st.sampled_from(TEXTS[:20]), min_size=1, max_size=30))
def test_equal_documents_fall_on_the_same_side(texts, tmp_path_factory):
    place = tmp_path_factory.mktemp("equal")
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    held = [int.from_bytes(digest, "little") < 2**63 for digest in digests]
    if all(held) or not any(held):
        with pytest.raises(StoreError, match=r"The split leaves .*(train|val) empty"):
            penstock.build(Texts(texts), place / "s", tokenizer="bytes", split="hash:0.5")
        return
    penstock.build(Texts(texts), place / "s", tokenizer="bytes", split="hash:0.5")
    train, val = sides(place / "s")

    assert sorted(train + val) == sorted(texts)
    assert not set(train) & set(val)


def test_text_and_tables_have_no_common_measure_for_a_tail(tmp_path):
    inputs = [write(tmp_path, "text"), write(tmp_path, "parquet")]

    with pytest.raises(StoreError, match=r"bytes and tables in rows.*split=.hash."):
        penstock.build(
            inputs,
            tmp_path / "s",
            tokenizer="bytes",
            split="tail:0.1",
            documents="lines",
            max_bad=10,
        )
    penstock.build(
        inputs, tmp_path / "s", tokenizer="bytes", split="hash:0.1", documents="lines", max_bad=10
    )


def test_the_directory_of_a_split_says_where_its_stores_are(tmp_path):
    penstock.build(Texts(TEXTS), tmp_path / "s", tokenizer="bytes", split="hash:0.1")

    with pytest.raises(StoreError, match=r"built with a split. Open .*s/train instead"):
        penstock.TokenStore(tmp_path / "s")


def test_every_file_of_both_sides_is_in_a_manifest(tmp_path, sums):
    """Also where a slice has no document for one side."""
    penstock.build(Texts(TEXTS), tmp_path / "s", tokenizer="bytes", split="tail:0.1")
    for side in ("train", "val"):
        store = penstock.verify(tmp_path / "s" / side)
        assert len(list(store.path.glob("part-*.npy"))) == 4 * len(store.manifest.parts)
        assert store.manifest.contents["side"] == side


@pytest.mark.parametrize("share", ["nan", "inf", "1", "0", "-0.1", "", "a"])
def test_a_share_is_a_number_between_0_and_1(share, tmp_path):
    with pytest.raises(StoreError, match="with a share between 0 and 1"):
        penstock.build(Texts(TEXTS), tmp_path / "s", tokenizer="bytes", split=f"tail:{share}")


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (
            None,
            "tail:0.1",
            r"built without a split, and a split makes two stores.* or leave split out",
        ),
        (
            "hash:0.1",
            None,
            r"built with split='hash:0\.1'.* or call penstock.build with split='hash:0\.1'",
        ),
    ],
)
def test_a_finished_store_is_one_also_where_the_split_is_another(
    then, now, message, append, tmp_path
):
    penstock.build(Texts(TEXTS), tmp_path / "s", tokenizer="bytes", split=then)

    with pytest.raises(StoreError, match=f"is a finished store that was {message}"):
        penstock.build(
            Texts(TEXTS[:5]), tmp_path / "s", tokenizer="bytes", split=now, append=append
        )


def test_two_stores_side_by_side_are_no_split(tmp_path):
    for side in ("train", "val"):
        penstock.build(Texts(TEXTS), tmp_path / "s" / side, tokenizer="bytes")

    with pytest.raises(StoreError, match="not empty and not a store; it holds train, val"):
        penstock.build(Texts(TEXTS), tmp_path / "s", tokenizer="bytes")


def test_a_rule_that_is_none_is_told_before_the_directory_is_looked_at(tmp_path):
    penstock.build(Texts(TEXTS), tmp_path / "s", tokenizer="bytes")

    for place in ("s", "new"):
        with pytest.raises(StoreError, match="split='junk' must be"):
            penstock.build(Texts(TEXTS), tmp_path / place, tokenizer="bytes", split="junk")
    assert not (tmp_path / "new").exists()
