"""A merged store has the bytes that a build and appends would have given."""

import errno
import json
import os
import shutil
from itertools import count
from pathlib import Path

import pytest

import penstock
from penstock.errors import MissingStoreError, StoreError
from penstock.sources.settings import Texts
from penstock.sources.slices import cut
from penstock.store.manifest import manifest_bytes, read_manifest

pytestmark = pytest.mark.usefixtures("small_slices")
CHAT = {"chat": "chatml", "add_tokens": "auto"}
NAMES = ("in", "c.txt", "d.jsonl")


def build(inputs, store, **settings):
    settings = {"tokenizer": "bytes", "documents": "lines", "max_bad": 10, **settings}
    return penstock.build(inputs, store, **settings)


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """Four inputs; three stores, of which the second has an append; and one store of them all."""
    folder = tmp_path_factory.mktemp("kit")
    (folder / "in").mkdir()
    lines = [f"line {number}, naïve café {number * 7919}\n" for number in range(150)]
    (folder / "in" / "a.txt").write_bytes("".join(lines).encode() + b"bad \xff byte\n")
    (folder / "in" / "b.jsonl").write_text('{"text": "b"}\n' * 9)
    (folder / "c.txt").write_text("".join(f"more text, line {n}\n" for n in range(300)))
    rows = [json.dumps({"text": f"record {n} of d"}) for n in range(20)]
    (folder / "d.jsonl").write_text("\n".join([*rows, "not json"]))
    (folder / "e.txt").write_text("".join(f"appended {n}\n" for n in range(20)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cut.__kwdefaults__, "slice_bytes", 4_000)
        for number, name in enumerate(NAMES):
            build(folder / name, folder / f"store-{number}")
        build(folder / "e.txt", folder / "store-1", append=True)
        for name in ("in", "c.txt", "e.txt", "d.jsonl"):
            build(folder / name, folder / "whole", append=name != "in")
    return folder


@pytest.fixture
def files(kit):
    """Three of the inputs."""
    return [kit / name for name in NAMES]


@pytest.fixture
def stores(kit, tmp_path):
    """The three stores, which a test may change."""
    shutil.copytree(kit, tmp_path, dirs_exist_ok=True)
    return [tmp_path / f"store-{number}" for number in range(3)]


@pytest.fixture
def appended(stores, tmp_path):
    """The same inputs as one store, by a build and appends."""
    return tmp_path / "whole"


def flip(path):
    """Change the last byte of a file, also if it is a hard link: only under this name."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)


def linked(store, others):
    """The names of the files of a store that are also files of others."""
    known = {(p.stat().st_dev, p.stat().st_ino) for each in others for p in each.rglob("*.npy")}
    found = store.rglob("*.npy")
    return {p.name for p in found if (p.stat().st_dev, p.stat().st_ino) in known}


def test_a_merged_store_has_the_bytes_of_a_build_and_appends(stores, appended, tmp_path, sums):
    merged = penstock.merge(stores, tmp_path / "merged")

    assert sums(merged.path) == sums(appended)
    assert penstock.verify(merged.path).digest == merged.digest
    assert merged.origin(len(merged) - 1).file == "d.jsonl"


def test_tokens_are_linked_and_only_origins_are_written_again(stores, tmp_path):
    before = {path: path.stat().st_mtime_ns for each in stores for path in each.rglob("*")}

    merged = penstock.merge(stores, tmp_path / "merged").path

    own = {path.name for path in merged.rglob("*.npy")} - linked(merged, stores)
    assert own
    assert {name.split(".")[1] for name in own} == {"origin", "checks"}
    assert "part-00000.origin.npy" not in own
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_deleting_a_store_leaves_the_merged_one_whole(stores, tmp_path):
    merged = penstock.merge(stores, tmp_path / "merged").path
    for each in stores:
        shutil.rmtree(each)

    assert penstock.verify(merged)


def test_where_no_link_can_be_made_files_are_copied_and_compared(
    stores, appended, tmp_path, sums, monkeypatch
):
    def refuse(*arguments, **options):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    merged = penstock.merge(stores, tmp_path / "merged").path

    assert not linked(merged, stores)
    assert sums(merged) == sums(appended)
    flip(stores[2] / "part-00000.tokens.npy")
    with pytest.raises(StoreError, match=r"store-2/part-00000\.tokens\.npy is damaged: its SHA"):
        penstock.merge(stores, tmp_path / "another")


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no second file system")
def test_a_store_on_another_file_system_is_copied(stores, appended, sums):
    place = Path("/dev/shm") / f"penstock-merge-{os.getpid()}"
    try:
        assert sums(penstock.merge(stores, place / "merged").path) == sums(appended)
    finally:
        shutil.rmtree(place)


def test_both_sides_of_a_split_are_merged(files, tmp_path, sums):
    rule = {"split": "hash:0.2"}
    made = [build(each, tmp_path / f"split-{n}", **rule) for n, each in enumerate(files)]
    whole = tmp_path / "whole"
    for n, each in enumerate(files):
        build(each, whole, append=n > 0, **rule)

    merged = penstock.merge([each.path.parent for each in made], tmp_path / "merged")

    assert merged.path == tmp_path / "merged" / "train"
    assert sums(tmp_path / "merged") == sums(whole)
    assert penstock.store.open_sides(tmp_path / "merged")


def test_documents_in_pieces_stay_whole(tmp_path, sums):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {n}\n" for n in range(2_500)))
    stores = [build(tmp_path / f"{n}.txt", tmp_path / n, documents="auto").path for n in "abc"]
    whole = tmp_path / "whole"
    for name in "abc":
        build(tmp_path / f"{name}.txt", whole, documents="auto", append=name != "a")

    merged = penstock.merge(stores, tmp_path / "merged")

    assert sums(merged.path) == sums(whole)
    assert merged.manifest.num_documents == 3 < len(merged)


def test_chats_are_merged_with_their_loss(tmp_path, sums):
    paths = []
    for name in "ab":
        turns = [{"role": "user", "content": f"{name}?"}, {"role": "assistant", "content": "Yes."}]
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text(f"{json.dumps({'messages': turns})}\n" * 3)
    settings = {**CHAT, "documents": "auto"}
    stores = [build(path, tmp_path / path.stem, **settings).path for path in paths]
    for path in paths:
        build(path, tmp_path / "whole", append=path is not paths[0], **settings)

    assert sums(penstock.merge(stores, tmp_path / "merged").path) == sums(tmp_path / "whole")


def test_a_merged_store_is_appended_to_and_repaired(stores, appended, files, tmp_path, sums):
    merged = penstock.merge(stores, tmp_path / "merged").path
    last = max(merged.glob("part-*.origin.npy"))
    for path in (merged / "part-00000.tokens.npy", last, last.with_name("rejects-00003.jsonl")):
        flip(path)

    penstock.repair(merged)
    assert sums(merged) == sums(appended)
    (tmp_path / "f.txt").write_text("the last one\n")
    for each in (merged, appended):
        build(tmp_path / "f.txt", each, append=True)
    assert sums(merged) == sums(appended)


def test_the_same_merge_returns_at_once_and_another_is_refused(stores, tmp_path):
    reports = []
    merged = penstock.merge(stores, tmp_path / "merged", progress=lambda *now: reports.append(now))
    num_parts = len(merged.manifest.parts)

    assert reports == [(n + 1, num_parts) for n in range(num_parts)]
    again = penstock.merge(stores, tmp_path / "merged", progress=lambda *now: reports.append(now))
    assert again.digest == merged.digest
    assert len(reports) == num_parts
    with pytest.raises(StoreError, match=r"merged is not empty, and not the store that a merge"):
        penstock.merge(stores[:2], tmp_path / "merged")
    with pytest.raises(StoreError, match=r"store-0 is not empty"):
        penstock.merge(stores, stores[0])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"eos": False}, r"eos_id: 256 -> None"),
        ({"tokenizer": "gpt2"}, r"tokenizer: bytes [0-9a-f]{8} -> gpt2 [0-9a-f]{8}"),
        ({"split": "hash:0.5"}, r"split: None -> 'hash:0.5'"),
    ],
)
def test_stores_with_other_settings_are_refused_by_the_field(settings, named, files, tmp_path):
    build(files[0], tmp_path / "a")
    build(files[1], tmp_path / "b", **settings)

    with pytest.raises(StoreError, match=rf"a and .*b cannot be merged.*differ: .*{named}"):
        penstock.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_chat_store_is_not_merged_with_a_text_store(tmp_path):
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "Yes."}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}))
    build(tmp_path / "a.jsonl", tmp_path / "a", **CHAT)
    build(Texts(["b"]), tmp_path / "b", add_tokens=["<|im_start|>", "<|im_end|>"])

    with pytest.raises(StoreError, match="differ: chat: "):
        penstock.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")


def test_a_split_by_tail_and_a_single_side_are_refused(files, tmp_path):
    for name, split in (("tail", "tail:0.1"), ("hash", "hash:0.1")):
        build(files[0], tmp_path / name, split=split)
    build(files[1], tmp_path / "plain")

    with pytest.raises(StoreError, match=r'tail was built with split="tail:0.1"'):
        penstock.merge([tmp_path / "tail", tmp_path / "plain"], tmp_path / "merged")
    with pytest.raises(StoreError, match=r"train is one side.*Name the whole store, .*/hash:"):
        penstock.merge([tmp_path / "hash" / "train", tmp_path / "plain"], tmp_path / "merged")


def test_an_input_that_is_in_two_stores_is_refused(stores, tmp_path):
    shutil.copytree(stores[0], tmp_path / "copy")

    with pytest.raises(StoreError, match=r"a\.txt, b\.jsonl are in .*store-0 and in .*copy"):
        penstock.merge([*stores, tmp_path / "copy"], tmp_path / "merged")


@pytest.mark.parametrize("stores", [[], ["one"], "one"])
def test_one_store_is_not_a_merge(stores, tmp_path):
    with pytest.raises(StoreError, match="at least two stores, as a list of directories; got"):
        penstock.merge(stores, tmp_path / "merged")


def test_stores_in_object_storage_are_not_merged_or_repaired(stores, tmp_path):
    with pytest.raises(StoreError, match="s3://bucket/a is a URL, and this needs a directory"):
        penstock.merge([stores[0], "s3://me:secret@bucket/a"], tmp_path / "merged")
    with pytest.raises(StoreError, match=r"s3://bucket/a is a URL.*`penstock copy`"):
        penstock.merge(stores, "s3://bucket/a")
    with pytest.raises(StoreError, match="s3://bucket/a is a URL"):
        penstock.repair("s3://bucket/a")


@pytest.mark.parametrize("kind", ["origin", "checks"])
def test_damage_in_a_file_that_is_written_again_is_not_hidden(kind, stores, tmp_path):
    flip(stores[1] / f"part-00000.{kind}.npy")

    with pytest.raises(StoreError, match=rf"store-1/part-00000\.{kind}\.npy is damaged"):
        penstock.merge(stores, tmp_path / "merged")
    assert not any((tmp_path / "merged").iterdir())


def test_missing_and_cut_files_are_named(stores, tmp_path):
    os.truncate(stores[1] / "part-00000.tokens.npy", 5)
    with pytest.raises(StoreError, match=r"part-00000\.tokens\.npy has 5 bytes, but"):
        penstock.merge(stores, tmp_path / "merged")
    (stores[1] / "part-00000.tokens.npy").unlink()
    with pytest.raises(MissingStoreError, match=r"part-00000\.tokens\.npy is missing"):
        penstock.merge(stores, tmp_path / "merged")
    with pytest.raises(MissingStoreError, match="absent does not exist"):
        penstock.merge([stores[0], tmp_path / "absent"], tmp_path / "merged")


def test_a_store_that_changes_while_it_is_merged_is_refused(stores, tmp_path):
    (tmp_path / "f.txt").write_text("one more\n")

    def change(done, total):
        if done == 1:
            build(tmp_path / "f.txt", stores[2], append=True)

    with pytest.raises(StoreError, match="store-2 was changed while it was merged"):
        penstock.merge(stores, tmp_path / "merged", progress=change)
    assert penstock.merge(stores, tmp_path / "merged")


def test_parts_without_checksums_stay_without(stores, tmp_path):
    """As stores of version 1 are."""
    manifest = read_manifest(stores[1])
    parts = [penstock.store.PartRecord.of(part.to_json()) for part in manifest.parts]
    for part in parts:
        del part.files["checks"]
        (stores[1] / f"part-{part.number:05d}.checks.npy").unlink()
    contents = {key: manifest.contents[key] for key in manifest.contents if key != "digest"}
    (stores[1] / "penstock.json").write_bytes(manifest_bytes({**contents, "version": 1}, parts))

    merged = penstock.verify(penstock.merge(stores, tmp_path / "merged").path)

    assert merged.manifest.num_unchecked == len(parts)


def test_what_another_merge_left_is_removed(stores, appended, tmp_path, sums):
    left = tmp_path / ".merged.merge"
    left.mkdir()
    (left / "part-00099.tokens.npy").write_bytes(b"old")
    (left / "penstock.json").write_bytes(b"old")
    (left / "part-00000.tokens.npy").write_bytes(b"old")

    assert sums(penstock.merge(stores, tmp_path / "merged").path) == sums(appended)
    assert not left.exists()


@pytest.mark.parametrize(
    "every", [pytest.param(1, marks=pytest.mark.torture), 29], ids=["every", "some"]
)
@pytest.mark.parametrize("links", [True, False], ids=["links", "copies"])
def test_a_merge_that_is_killed_is_resumed_to_the_same_bytes(
    every, links, killed, stores, appended, tmp_path, sums, figure, monkeypatch
):
    def refuse(*arguments, **options):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    target, expected = tmp_path / "merged", sums(appended)
    for point in count(1, every):
        shutil.rmtree(target, ignore_errors=True)
        if not killed(lambda: penstock.merge(stores, target), point):
            break
        if (target / "penstock.json").exists():
            assert penstock.verify(target)
        else:
            with pytest.raises(MissingStoreError):
                penstock.TokenStore(target)
        assert sums(penstock.merge(stores, target).path) == expected
    assert point > every
    figure(f"merge killed before each of {point - 1} calls, every {every}")
