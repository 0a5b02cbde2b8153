"""Inputs are compared by contents, and a finished store says nothing about a machine."""

import gzip
import json
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

import penstock
from penstock.errors import SourceError, StoreError
from penstock.sources.settings import Texts

pytestmark = pytest.mark.usefixtures("small_slices")

LINES = [f"line {number} of some text" for number in range(900)]


def write(folder, kind, lines=LINES):
    path = folder / f"in.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"text": lines}), path, row_group_size=150)
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    elif kind == "txt.gz":
        path.write_bytes(gzip.compress("\n".join(lines).encode(), 0, mtime=0))
    else:
        path.write_text("\n".join(lines))
    return path


def build(inputs, store, **options):
    return penstock.build(inputs, store, **{"tokenizer": "bytes", "documents": "lines", **options})


def stop(progress):
    raise KeyboardInterrupt


KINDS = ["txt", "txt.gz", "jsonl", "parquet"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"split": "tail:0.3"}, {"documents": "auto"}])
def test_touching_an_input_does_not_break_a_rerun(kind, options, tmp_path, sums):
    path = write(tmp_path, kind)
    built = build(path, tmp_path / "store", **options)
    before = sums(tmp_path / "store")
    for stamp in (1, 2):
        os.utime(path, ns=(stamp, stamp))
        assert build(path, tmp_path / "store", **options).digest == built.digest
    # The same size, and other contents.
    write(tmp_path, kind, [*LINES[:-1], LINES[-1].replace("text", "TEXT")])
    with pytest.raises(StoreError, match=r"in\.\S+ was changed or replaced after .*--overwrite"):
        build(path, tmp_path / "store", **options)
    assert sums(tmp_path / "store") == before
    build(path, tmp_path / "store", **options, overwrite=True)
    assert sums(tmp_path / "store") != before


@pytest.mark.parametrize("kind", KINDS)
def test_touching_an_input_does_not_break_a_rerun_of_a_killed_build(kind, tmp_path, sums):
    path = write(tmp_path, kind)
    clean = build(path, tmp_path / "clean")

    def stop_late(progress):
        if list((tmp_path / "store").glob(".slice-*.json")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(path, tmp_path / "store", progress=stop_late, workers=1)
    os.utime(path, ns=(1, 1))
    assert build(path, tmp_path / "store").digest == clean.digest


def test_without_stamps_the_contents_are_compared_and_the_times_remembered(tmp_path):
    path = write(tmp_path, "txt")
    build(path, tmp_path / "store")
    stamps = tmp_path / ".store.stamps.json"
    for contents in (None, b"", b"[1]", b'{"store": "another", "stamps": {}}'):
        stamps.unlink() if contents is None else stamps.write_bytes(contents)
        build(path, tmp_path / "store")
        assert str(path) in json.loads(stamps.read_bytes())["stamps"]
    stamps.unlink()
    path.write_text(path.read_text().replace("line 7 ", "LINE 7 "))
    with pytest.raises(StoreError, match="was changed or replaced"):
        build(path, tmp_path / "store")


def test_the_sealed_directory_holds_nothing_that_depends_on_the_machine(tmp_path, monkeypatch):
    stores = []
    for place in ("here", "there/deeper"):
        folder = tmp_path / place / "in"
        (folder / "web").mkdir(parents=True)
        for name in ("web/a.txt", "b.txt"):
            (folder / name).write_bytes(f"text of {name}\n".encode() + b"\xff\n")
        monkeypatch.chdir(folder.parent)
        given = [folder / "web" / "a.txt", folder / "b.txt"] if place == "here" else "in"
        stores.append(build(given, tmp_path / place / "store", max_bad=2))
        os.utime(folder / "b.txt", ns=(1, 1))
    files = [{path.name: path.read_bytes() for path in store.path.iterdir()} for store in stores]

    assert files[0] == files[1]
    assert not [name for name in files[0] if name.startswith(".")]
    assert not [name for name, data in files[0].items() if str(tmp_path).encode() in data]
    assert [each["name"] for each in stores[0].manifest.inputs] == ["b.txt", "web/a.txt"]
    assert stores[0].origin(1).file == "web/a.txt"
    log = (stores[0].path / "rejects.jsonl").read_text().splitlines()
    assert [json.loads(line)["file"] for line in log] == ["b.txt", "web/a.txt"]


def test_the_digest_of_an_input_is_that_of_its_file(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / "in" / name).write_text('{"text": "short"}\n')
    write(tmp_path / "in", "parquet")
    inputs = build(tmp_path / "in", tmp_path / "store").manifest.inputs

    files = (tmp_path / "in").iterdir()
    digests = {path.name: xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in files}
    assert {each["name"]: each["xxh3_128"] for each in inputs} == digests


def test_messages_name_files_as_the_user_did(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n\xff\n")

    with pytest.raises(SourceError, match=rf"{path}, offset 5: invalid_utf8"):
        build(path, tmp_path / "store")


def test_files_of_one_name_in_two_folders_can_be_appended(tmp_path):
    for number, folder in enumerate(("jan", "feb", "mar")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "log.txt").write_text(f"month {number}\n")
    store = tmp_path / "store"
    build(tmp_path / "jan", store)
    assert len(build(tmp_path / "feb", store, append=True)) == 2
    # Also where the times of the first ones are not known.
    (tmp_path / ".store.stamps.json").unlink()
    assert len(build(tmp_path / "mar", store, append=True)) == 3
    shutil.copytree(tmp_path / "feb", tmp_path / "copy")
    for folder in ("jan", "feb", "mar", "copy"):
        with pytest.raises(StoreError, match=r"in .*store already"):
            build(tmp_path / folder, store, append=True)
    for folder in ("jan", "feb", "mar"):
        assert len(build(tmp_path / folder, store)) == 3


def test_texts_in_memory_have_no_stamp(tmp_path):
    build(Texts(["one"]), tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    with pytest.raises(StoreError, match="already"):
        build(Texts(["one"]), tmp_path / "store", append=True)
