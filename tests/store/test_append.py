"""Stores that grow: old files stay as they are, and what cannot be mixed is refused."""

import json
import os

import pytest
import zygote

import penstock
from penstock.errors import MissingStoreError, StoreError

pytestmark = pytest.mark.usefixtures("small_slices")


@pytest.fixture
def more(tmp_path):
    """Two further inputs."""
    paths = []
    for name in ("c.txt", "d.jsonl"):
        lines = [f"{name} {number} appended" for number in range(200)]
        if name.endswith("jsonl"):
            lines = [json.dumps({"text": line}) for line in lines]
        paths.append(tmp_path / name)
        paths[-1].write_text("\n".join([*lines, "bad"] if name == "d.jsonl" else lines))
    return paths


def texts(store):
    return [store.decode(number) for number in range(len(store))]


def test_appending_leaves_old_files_alone_and_adds_documents_at_the_end(built, more, sums):
    before, old = sums(built.path), texts(built)
    grown = penstock.build(
        more[0], built.path, tokenizer="bytes", append=True, documents="lines", max_bad=10
    )
    after = sums(built.path)

    kept = {name: digest for name, digest in before.items() if name.startswith(("part-", "rej"))}
    assert len(kept) == len(before) - 2  # the manifest and its table of parts are new
    assert after | kept == after
    assert texts(grown)[: len(old)] == old
    assert texts(grown)[len(old) :] == [f"c.txt {number} appended" for number in range(200)]
    penstock.verify(built.path)


def test_appending_twice_keeps_every_build_with_its_origins_and_rejects(inputs, built, more):
    for path in more:
        grown = penstock.build(
            path, built.path, tokenizer="bytes", append=True, documents="lines", max_bad=10
        )
    builds = grown.manifest.contents["builds"]

    assert [len(each["inputs"]) for each in builds] == [2, 1, 1]
    assert [each["counts"]["documents"] for each in builds] == [500, 200, 200]
    assert grown.origin(0).file == "a.txt"
    assert grown.origin(500).file == more[0].name
    assert grown.origin(-1).file == more[1].name
    assert grown.origin(-1).offset == more[1].read_text().index('{"text": "d.jsonl 199')
    assert json.loads((built.path / "rejects-00002.jsonl").read_text())["reason"] == "bad_json"
    penstock.verify(built.path)


def test_two_appends_give_the_documents_of_one_build(inputs, built, more, tmp_path):
    for path in more:
        grown = penstock.build(
            path, built.path, tokenizer="bytes", append=True, documents="lines", max_bad=10
        )
    whole = penstock.build(
        [inputs, *more], tmp_path / "whole", tokenizer="bytes", documents="lines", max_bad=10
    )

    assert sorted(texts(grown)) == sorted(texts(whole))


def test_the_same_input_is_not_appended_twice(inputs, built, more, sums):
    penstock.build(
        more[0], built.path, tokenizer="bytes", append=True, documents="lines", max_bad=10
    )
    before = sums(built.path)
    for again in ([more[0]], [inputs], more):
        with pytest.raises(StoreError, match=r"in .*store already. If they were appended again"):
            penstock.build(again, built.path, tokenizer="bytes", append=True, documents="lines")

    assert sums(built.path) == before


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tokenizer": "gpt2"}, "tokenizer"),
        ({"eos": False}, "eos_id"),
        ({"split": "hash:0.1"}, "built without a split"),
    ],
)
def test_ids_of_two_kinds_cannot_share_a_store(change, field, built, more, sums):
    before = sums(built.path)
    with pytest.raises(StoreError, match=field):
        penstock.build(
            more[0],
            built.path,
            **{"tokenizer": "bytes", **change},
            append=True,
            documents="lines",
            max_bad=10,
        )

    assert {name: d for name, d in sums(built.path).items() if name in before} == before


def test_only_a_finished_store_can_grow(more, tmp_path):
    for name in ("nothing", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(StoreError, match=r"does not exist|has no penstock\.json"):
            penstock.build(
                more[0],
                tmp_path / name,
                tokenizer="bytes",
                append=True,
                documents="lines",
                max_bad=10,
            )


def test_a_reader_that_was_open_before_an_append_goes_on_with_what_it_saw(built, more):
    before = texts(built)
    grown = penstock.build(
        more[0], built.path, tokenizer="bytes", append=True, documents="lines", max_bad=10
    )

    assert texts(built) == before
    assert (len(built), len(grown)) == (500, 700)


def test_a_store_can_be_read_while_it_grows(built, more, python, tmp_path):
    """A reader in another process opens and reads the store all the time an append runs."""
    import subprocess

    code = """
import sys, penstock
while True:
    store = penstock.TokenStore(sys.argv[1])
    sizes = {500: 500, 700: 700, 900: 900}
    assert len(store) == sizes[len(store)] and len(list(store)) == len(store)
    assert store.tokens(0, store.num_tokens)[-1] == 256
    if len(store) == 900:
        break
    print(len(store), flush=True)
"""
    reader = zygote.Popen(["-c", code, str(built.path)], stdout=subprocess.PIPE, text=True)
    reader.stdout.readline()
    for path in more:
        penstock.build(
            path, built.path, tokenizer="bytes", append=True, documents="lines", max_bad=10
        )

    assert reader.wait(timeout=30) == 0
    reader.stdout.close()


def test_documents_appended_to_a_hash_split_stay_on_their_side(inputs, more, tmp_path):
    place = tmp_path / "split"
    penstock.build(
        inputs, place, tokenizer="bytes", split="hash:0.2", documents="lines", max_bad=10
    )
    old = {side: set(texts(penstock.TokenStore(place / side))) for side in ("train", "val")}
    penstock.build(
        more, place, tokenizer="bytes", split="hash:0.2", append=True, documents="lines", max_bad=10
    )
    new = {side: set(texts(penstock.TokenStore(place / side))) for side in ("train", "val")}

    assert all(old[side] < new[side] for side in old)
    assert not new["train"] & new["val"]
    assert len(new["train"] | new["val"]) == 900
    for side in old:
        penstock.verify(place / side)


def test_a_tail_split_cannot_grow(inputs, more, tmp_path):
    penstock.build(
        inputs,
        tmp_path / "split",
        tokenizer="bytes",
        split="tail:0.2",
        documents="lines",
        max_bad=10,
    )

    with pytest.raises(StoreError, match=r'cannot be appended .*split="tail".*split="hash"'):
        penstock.build(
            more,
            tmp_path / "split",
            tokenizer="bytes",
            split="tail:0.2",
            append=True,
            documents="lines",
            max_bad=10,
        )


def test_what_was_appended_is_not_called_new(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"text of {name}\n")
    files = [tmp_path / f"{name}.txt" for name in "abc"]
    penstock.build(files[0], tmp_path / "s", tokenizer="bytes", documents="lines")
    penstock.build(files[1], tmp_path / "s", tokenizer="bytes", append=True, documents="lines")

    with pytest.raises(
        StoreError,
        match=r"built differently: by 2 builds, of which the later ones appended inputs\. Replace",
    ):
        penstock.build(files[:2], tmp_path / "s", tokenizer="bytes", documents="lines")
    with pytest.raises(
        StoreError, match=r"differently: inputs: \S*c\.txt is new\. .* add \S*c\.txt"
    ):
        penstock.build(files, tmp_path / "s", tokenizer="bytes", documents="lines")


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "dots", "linked folder", "copy"])
def test_the_same_file_by_another_name_is_not_appended_twice(kind, built, inputs, tmp_path):
    """A copy is another file, and the same document may well be in two files on purpose."""
    other = tmp_path / "other"
    other.mkdir()
    first, again = inputs / "a.txt", other / "again.txt"
    if kind == "symbolic link":
        again.symlink_to(first)
    elif kind == "hard link":
        os.link(first, again)
    elif kind == "dots":
        again = f"{other}/../in/./a.txt"
    elif kind == "linked folder":
        (tmp_path / "linked").symlink_to(inputs)
        again = tmp_path / "linked" / "a.txt"
    else:
        again.write_bytes(first.read_bytes())

    def append():
        options = {"tokenizer": "bytes", "documents": "lines", "max_bad": 10}
        return penstock.build(again, built.path, append=True, **options)

    if kind == "copy":
        assert len(append()) > len(built)
        return
    with pytest.raises(StoreError, match=r"in .*store already. If they were appended again"):
        append()


def test_an_append_to_nothing_leaves_nothing_behind(tmp_path):
    with pytest.raises(MissingStoreError, match="does not exist, so nothing can be appended"):
        penstock.build(penstock.Texts(["a"]), tmp_path / "s", tokenizer="bytes", append=True)
    assert not list(tmp_path.iterdir())
