"""A finished store's damaged files are made again, to the recorded digests or not at all."""

import gzip
import json
import os
import random
import shutil
from itertools import count

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
from penstock.disk import locked
from penstock.errors import StoreBusyError, StoreError
from penstock.sources.settings import Texts

pytestmark = pytest.mark.usefixtures("small_slices")


def build(inputs, store, **settings):
    settings = {"tokenizer": "bytes", "documents": "lines", "max_bad": 10, **settings}
    return penstock.build(inputs, store, **settings)


def parts(store, pattern="part-*"):
    return sorted(store.rglob(pattern))


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def store(built, tmp_path):
    return tmp_path / "store"


@pytest.mark.parametrize(
    "damage",
    [lambda path: path.unlink(), lambda path: os.truncate(path, 5)],
    ids=["missing", "cut"],
)
def test_any_file_is_made_again(damage, store, inputs, sums):
    before = sums(store)
    for path in [*parts(store)[::2], store / "rejects.jsonl"]:
        times = {each: each.stat().st_mtime_ns for each in parts(store) if each != path}
        damage(path)
        build(inputs, store)
        assert sums(store) == before
        # The other files were not written.
        assert times == {each: each.stat().st_mtime_ns for each in times}


def test_verify_names_damaged_files_and_what_to_do(store, inputs, sums):
    before = sums(store)
    damaged = [*parts(store)[1::4], store / "rejects.jsonl"]
    for path in damaged:
        flip(path)
    with pytest.raises(StoreError, match="penstock build") as raised:
        penstock.verify(store)
    assert all(str(path) in str(raised.value) for path in damaged)

    # The sizes are right, so nothing is read and nothing is made.
    build(inputs, store)
    assert sums(store) != before
    # If one file is missing, the others are compared too.
    damaged[0].unlink()
    build(inputs, store)
    assert sums(store) == before
    penstock.verify(store)


def test_all_files_but_the_manifest_and_its_table_are_made_again(store, inputs, sums, caplog):
    before = sums(store)
    for path in [*parts(store), store / "rejects.jsonl"]:
        path.unlink()
    reports = []
    build(inputs, store, progress=reports.append)

    assert sums(store) == before
    assert reports
    assert f"{len(before) - 2} damaged or missing files" in caplog.text


def test_an_intact_store_is_not_touched(store, inputs):
    before = {path: path.stat().st_mtime_ns for path in store.iterdir()}
    build(inputs, store)
    assert {path: path.stat().st_mtime_ns for path in store.iterdir()} == before


@pytest.mark.parametrize("split", ["hash:0.3", "tail:0.3"])
def test_both_sides_of_a_split_are_made_again(split, inputs, tmp_path, sums):
    store = tmp_path / "store"
    build(inputs, store, split=split)
    before = sums(store)
    parts(store / "train", "*.tokens.npy")[0].unlink()
    flip(parts(store / "val", "*.bounds.npy")[0])

    build(inputs, store, split=split)
    assert sums(store) == before


def test_every_build_of_an_appended_store_is_made_again(store, inputs, tmp_path, sums):
    more = tmp_path / "elsewhere" / "more.txt"
    more.parent.mkdir()
    more.write_text("".join(f"appended line {number}\n" for number in range(900)))
    more.write_bytes(more.read_bytes() + b"bad \xff\n")
    build(more, store, append=True)
    before, all_parts = sums(store), parts(store, "*.tokens.npy")
    for path in (all_parts[0], all_parts[-1], store / "rejects-00001.jsonl"):
        path.unlink()

    build(more, store)
    assert not all_parts[0].exists()
    build(inputs, store)
    assert sums(store) == before


def test_of_two_builds_of_equal_names_and_sizes_the_right_one_is_made_again(tmp_path, sums):
    folders = [tmp_path / name for name in ("one", "two")]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "a.txt").write_text(f"text {number}\n" * 500)
    store = tmp_path / "store"
    build(folders[0], store)
    build(folders[1], store, append=True)
    before, all_parts = sums(store), parts(store, "*.tokens.npy")
    for folder, path in zip(folders, (all_parts[0], all_parts[-1]), strict=True):
        path.unlink()
        build(folder, store)
        assert sums(store) == before


@pytest.mark.parametrize("kind", ["txt.gz", "jsonl", "parquet", "csv"])
def test_parts_of_every_kind_of_input_are_made_again(kind, tmp_path, sums):
    lines = [f"line {number} of some text" for number in range(900)]
    path = tmp_path / f"in.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"text": lines}), path, row_group_size=150)
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    elif kind == "csv":
        path.write_text("text\n" + "\n".join(lines))
    else:
        path.write_bytes(gzip.compress("\n".join(lines).encode(), 0, mtime=0))
    store = tmp_path / "store"
    build(path, store)
    before = sums(store)
    for each in parts(store)[1::4]:
        each.unlink()

    build(path, store)
    assert sums(store) == before


def test_pieces_of_one_document_are_made_again(tmp_path, sums):
    path, store = tmp_path / "one.txt", tmp_path / "store"
    path.write_text("".join(f"line {number} of one document\n" for number in range(700)))
    build(path, store, documents="auto")
    before = sums(store)
    assert penstock.TokenStore(store).manifest.num_documents == 1
    for each in parts(store)[::2]:
        each.unlink()

    build(path, store, documents="auto")
    assert sums(store) == before


def test_chats_are_made_again(tmp_path, sums):
    answer = {"role": "assistant", "content": "ok"}
    lines = [
        {"messages": [{"role": "user", "content": f"{each} + 1?"}, answer]} for each in range(300)
    ]
    lines[7] = {"messages": "none"}
    path, store = tmp_path / "chats.jsonl", tmp_path / "store"
    path.write_text("\n".join(map(json.dumps, lines)))
    settings = {"chat": penstock.Chat("chatml", "bytes", add_tokens="auto"), "max_bad": 10}
    penstock.build(path, store, **settings)
    before = sums(store)
    for damaged in [*parts(store)[::3], *parts(store, "*.loss.npy"), store / "rejects.jsonl"]:
        damaged.unlink(missing_ok=True)

    penstock.build(path, store, **settings)
    assert sums(store) == before


def test_texts_are_made_again(tmp_path, sums):
    texts, store = Texts([f"text {number}" for number in range(900)]), tmp_path / "store"
    build(texts, store)
    before = sums(store)
    parts(store, "*.tokens.npy")[1].unlink()

    build(texts, store)
    assert sums(store) == before


@pytest.mark.parametrize("workers", ["threads:2", "processes:2"])
def test_workers_of_every_kind_make_parts_again(workers, store, inputs, sums):
    before = sums(store)
    for path in parts(store, "*.tokens.npy"):
        path.unlink()
    build(inputs, store, workers=workers)

    assert sums(store) == before


def test_a_changed_input_changes_nothing(store, inputs, sums):
    """Its time is the old one, so only the digest of the part shows it."""
    parts(store, "*.tokens.npy")[0].unlink()
    damaged, path = sums(store), inputs / "a.txt"
    data, found = path.read_bytes(), path.stat()
    path.write_bytes(data.replace(b"line 1 ", b"LINE 1 "))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))

    with pytest.raises(StoreError, match=r"part-00000\.tokens\.npy.* would get other contents"):
        build(inputs, store)
    assert sums(store) == damaged
    os.utime(path)
    with pytest.raises(StoreError, match=r"a\.txt was changed or replaced"):
        build(inputs, store)
    path.write_bytes(data)
    build(inputs, store)
    penstock.verify(store)


def test_a_store_that_is_being_written_is_not_touched(store, inputs):
    parts(store)[0].unlink()
    with locked(store), pytest.raises(StoreBusyError):
        build(inputs, store)


def test_seeded_damage_is_made_again(store, inputs, sums):
    before, chance = sums(store), random.Random(5)
    for _ in range(10):
        for path in chance.sample(parts(store), chance.randrange(1, 5)):
            data = bytearray(path.read_bytes())
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
        path.unlink()
        build(inputs, store)
        assert sums(store) == before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.torture)])
def test_a_call_that_is_killed_can_be_repeated(
    every, killed, store, inputs, tmp_path, sums, figure
):
    """Killed before every n-th call that touches the disk; files are whole or still damaged."""
    before, kept = sums(store), tmp_path / "kept"
    for path in parts(store, "*.tokens.npy")[1:3]:
        os.truncate(path, 7)
    damaged = sums(store)
    shutil.copytree(store, kept)
    for point in count(1, every):
        shutil.rmtree(store)
        shutil.copytree(kept, store)
        if not killed(lambda: build(inputs, store), point):
            break
        now = {name: digest for name, digest in sums(store).items() if ".again" not in name}
        assert all(now[name] in (before[name], damaged[name]) for name in before)
        build(inputs, store)
        assert sums(store) == before, f"killed before call {point}"
    figure(
        f"parts made again, killed before every {every}. of {point - 1} calls that touch the disk"
    )
    assert point > 10
