"""Datasets of the catalog: from mirrors and copies, unpacked, split, and never overwritten."""

import gzip
import io
import multiprocessing
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.catalog import entries
from penstock.catalog import fetch as module
from penstock.catalog.download import Patience
from penstock.catalog.entries import ENTRIES, Entry, Remote, Text, find_entry
from penstock.catalog.fetch import build_stores, fetch
from penstock.digest import digest_bytes
from penstock.errors import FetchError, SourceError, StoreBusyError

QUICK = Patience(attempts=3, backoff_seconds=0.01, max_wait_seconds=1, stall_seconds=1)
PLAY = "To bé, or not to be:\r\nthat is the question.\n" * 500
BYTES = PLAY.encode()


def plain(data=BYTES, **settings):
    text = Text(name="play.txt", side=None, num_bytes=len(data), sha256=digest_bytes(data))
    remote = Remote(
        name="input.txt",
        urls=("http://127.0.0.1:9/input.txt",),
        num_bytes=len(data),
        sha256=digest_bytes(data),
        texts=(text,),
    )
    told = {"title": "A play", "home": "here", "licence": "none", "documents": "file", "eos": False}
    return Entry(name="play", split=0.9, remotes=(remote,), **told, **settings)


def packed(archive, packing, texts, name):
    remote = Remote(
        name=name,
        urls=(f"http://127.0.0.1:9/{name}",),
        packing=packing,
        num_bytes=len(archive),
        sha256=digest_bytes(archive),
        texts=tuple(texts),
    )
    return Entry(name="play", title="A play", home="here", licence="none", remotes=(remote,))


def zipped(members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return out.getvalue()


@pytest.fixture
def catalog(monkeypatch):
    """Put entries of our own in the place of the catalog's."""

    def catalog(*ours):
        monkeypatch.setattr(entries, "ENTRIES", ours)

    return catalog


@pytest.fixture
def play(catalog):
    entry = plain()
    catalog(entry)
    return entry


@pytest.fixture
def copies(tmp_path):
    """A directory with the file under its upstream name."""
    directory = tmp_path / "copies"
    directory.mkdir()
    (directory / "input.txt").write_bytes(BYTES)
    return directory


@pytest.fixture
def mirror(server):
    server.files["/mirror/input.txt"] = BYTES
    return f"http://{server.address}/mirror"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_entries_are_complete(entry):
    assert entry.title
    assert entry.licence
    assert entry.home.startswith("https://")
    assert entry.reader or {"train", "val"} <= set(entry.sides)
    for remote in entry.remotes:
        assert all(url.startswith("https://") for url in remote.urls)
        assert all(url.endswith(remote.name) for url in remote.urls)
    for each in [*entry.remotes, *entry.texts]:
        assert each.sha256 is None or re.fullmatch("[0-9a-f]{64}", each.sha256)


def test_files_on_the_hub_are_those_of_one_revision():
    """A branch may move, and then a checksum would be of another file."""
    urls = [url for entry in ENTRIES if entry.reader for r in entry.remotes for url in r.urls]

    assert len(urls) == 2 + 6 + 4
    assert all(re.search("/[0-9a-f]{40}/", url) for url in urls)
    assert sum(not text.sha256 for entry in ENTRIES if entry.reader for text in entry.texts) == 2


def test_the_entry_of_openwebtext_records_its_separator_and_the_names_of_its_files():
    entry = find_entry("openwebtext")

    assert entry.documents == "<|endoftext|>"
    assert [text.name for text in entry.texts] == ["owt_train.txt", "owt_valid.txt"]


def test_a_name_that_is_not_there_gets_the_nearest():
    with pytest.raises(SourceError, match=r"Did you mean tinyshakespeare\? See them with"):
        fetch("TinyShakespear")


def test_tinyshakespeare_from_a_copy_has_the_tokens_that_it_has(data, tmp_path):
    fetched = fetch("tinyshakespeare", tmp_path, source=data / "tinyshakespeare")
    stores = build_stores(fetched)

    assert {side: store.num_tokens for side, store in stores.items()} == {
        "train": 301_966,
        "val": 36_059,
    }
    assert fetched.raw == tmp_path / "tinyshakespeare.txt"
    assert fetched.received_bytes == 0
    assert [len(store) for store in stores.values()] == [1, 1]


def test_the_members_of_wikitext_2_are_those_that_are_recorded(data):
    """The copies at hand have CRLF line ends; without them they are the upstream files."""
    for text in find_entry("wikitext-2").texts[1:]:
        held = data / "wikitext-2-raw" / Path(text.member).name
        contents = held.read_bytes().replace(b"\r\n", b"\n")
        assert (len(contents), digest_bytes(contents)) == (text.num_bytes, text.sha256)


def test_a_copy_that_is_not_the_file_is_refused(data, tmp_path):
    """The copies at hand have CRLF line ends, and one file is missing."""
    with pytest.raises(FetchError, match=r"does not hold wikitext-2-raw-v1\.zip, nor what"):
        fetch("wikitext-2", tmp_path, source=data / "wikitext-2-raw")
    links = tmp_path / "links"
    links.mkdir()
    for side in ("valid", "test"):
        (links / f"wiki.{side}.raw").symlink_to(data / "wikitext-2-raw" / f"wiki.{side}.raw")
    (links / "wiki.train.raw").symlink_to(data / "wikitext-2-raw" / "train_first_1MB.txt")
    with pytest.raises(FetchError, match="1,000,000 bytes of text, and 10,940,747 are right"):
        fetch("wikitext-2", tmp_path / "out", source=links)


def test_a_text_is_split_between_characters(play, copies, tmp_path):
    fetched = fetch("play", tmp_path / "out", source=copies)
    border = int(len(PLAY) * 0.9)

    assert fetched.files["train"].read_bytes().decode() == PLAY[:border]
    assert fetched.files["val"].read_bytes().decode() == PLAY[border:]
    assert fetched.raw.read_bytes() == BYTES


@pytest.mark.parametrize("split", [0, 1, -0.5, float("nan")])
def test_a_split_leaves_something_on_both_sides(play, copies, tmp_path, split):
    with pytest.raises(SourceError, match="leaves one side empty"):
        fetch("play", tmp_path / "out", source=copies, split=split)


def test_what_comes_split_is_not_split_again():
    with pytest.raises(SourceError, match="wikitext-2 comes split into train, val, test"):
        fetch("wikitext-2", split=0.5)


def test_a_mirror_is_asked_once_and_never_again(play, mirror, server, tmp_path):
    first = fetch("play", tmp_path, source=mirror, patience=QUICK)
    stamps = {path: path.stat().st_mtime_ns for path in first.files.values()}
    again = fetch("play", tmp_path, source=mirror, patience=QUICK)

    assert first.received_bytes == len(BYTES)
    assert again.received_bytes == 0
    assert len(server.requests) == 1
    assert stamps == {path: path.stat().st_mtime_ns for path in again.files.values()}


def test_a_mirror_may_be_named_by_the_file_itself_and_keeps_its_query(
    play, mirror, server, tmp_path
):
    fetch("play", tmp_path, source=f"{mirror}/input.txt?key=1", patience=QUICK)

    assert server.requests[0][0] == "/mirror/input.txt?key=1"


@pytest.mark.parametrize("name", ["input.txt", "play.txt"])
def test_a_copy_may_have_either_name(play, tmp_path, name):
    (tmp_path / name).write_bytes(BYTES)

    assert fetch("play", tmp_path / "a", source=tmp_path).raw.read_bytes() == BYTES
    assert fetch("play", tmp_path / "b", source=tmp_path / name).raw.exists()
    assert fetch("play", tmp_path / "c", source=f"file://{tmp_path}").raw.exists()


def test_a_copy_with_a_wrong_byte_is_refused(play, copies, tmp_path):
    (copies / "input.txt").write_bytes(b"t" + BYTES[1:])
    with pytest.raises(FetchError, match=r"input\.txt has SHA-256 .* is right"):
        fetch("play", tmp_path / "out", source=copies)

    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere", "does not exist"),
        ("s3://bucket/x", "s3:// is not a place to fetch from"),
        ("https://me:secret@host/x?y", None),
    ],
)
def test_places_that_are_none(play, tmp_path, source, words):
    if words is None:
        with pytest.raises(FetchError) as caught:
            fetch("play", tmp_path, source="http://me:secret@127.0.0.1:9/x?y", patience=QUICK)
        assert "secret" not in str(caught.value) + str(caught.value.__notes__)
        return
    with pytest.raises(FetchError, match=words):
        fetch("play", tmp_path, source=source)


def test_an_empty_directory_says_what_was_looked_for(play, tmp_path):
    with pytest.raises(FetchError, match=r"looked for input.txt, play.txt. It holds out"):
        fetch("play", tmp_path / "out", source=tmp_path)


def test_no_network_names_the_next_step(play, tmp_path):
    with pytest.raises(FetchError, match="Connection refused") as caught:
        fetch("play", tmp_path, patience=QUICK)

    assert "penstock fetch play --from DIRECTORY" in caught.value.__notes__[0]
    assert "http://127.0.0.1:9/input.txt" in caught.value.__notes__[0]


def test_a_file_of_somebody_else_is_not_overwritten(play, copies, tmp_path):
    (tmp_path / "play.txt").write_text("mine")
    with pytest.raises(FetchError, match="is there already with other contents"):
        fetch("play", tmp_path, source=copies)

    assert (tmp_path / "play.txt").read_text() == "mine"


def test_neither_is_a_side_of_somebody_else(play, copies, tmp_path):
    (tmp_path / "val.txt").write_text("mine")
    with pytest.raises(FetchError, match=r"val\.txt is there already"):
        fetch("play", tmp_path, source=copies)

    assert (tmp_path / "val.txt").read_text() == "mine"


def test_another_split_replaces_what_a_fetch_wrote(play, copies, tmp_path):
    fetch("play", tmp_path, source=copies)
    fetched = fetch("play", tmp_path, source=copies, split=0.5)

    assert fetched.files["train"].read_bytes().decode() == PLAY[: len(PLAY) // 2]


def test_but_not_what_somebody_edited_since(play, copies, tmp_path):
    fetch("play", tmp_path, source=copies)
    (tmp_path / "train.txt").write_text("edited")
    with pytest.raises(FetchError, match=r"train\.txt is there already"):
        fetch("play", tmp_path, source=copies, split=0.5)


def test_a_damaged_receipt_is_as_none(play, copies, tmp_path):
    fetch("play", tmp_path, source=copies)
    (tmp_path / ".fetched.json").write_text("[]")

    assert fetch("play", tmp_path, source=copies).received_bytes == 0


def sides(*names, **sizes):
    return [
        Text(name=f"{side}.txt", side=side, member=f"play-raw/{side}.raw", **sizes)
        for side in names
    ]


def test_a_zip_is_unpacked_and_removed(catalog, server, tmp_path):
    archive = zipped([("play-raw/train.raw", "one\n" * 99), ("play-raw/val.raw", "two\n")])
    catalog(packed(archive, "zip", sides("train", "val"), "play.zip"))
    server.files["/play.zip"] = archive
    mirror = f"http://{server.address}"

    fetched = fetch("play", tmp_path, source=mirror, patience=QUICK)

    assert fetched.files["train"].read_text() == "one\n" * 99
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"train.txt", "val.txt", ".fetched.json", ".lock"}
    assert fetch("play", tmp_path, source=mirror, patience=QUICK).received_bytes == 0
    assert len(server.requests) == 1


def test_a_text_that_was_deleted_is_fetched_again_and_the_other_kept(catalog, server, tmp_path):
    archive = zipped([("play-raw/train.raw", "one\n"), ("play-raw/val.raw", "two\n")])
    catalog(packed(archive, "zip", sides("train", "val"), "play.zip"))
    server.files["/play.zip"] = archive
    mirror = f"http://{server.address}"
    fetched = fetch("play", tmp_path, source=mirror, patience=QUICK)
    fetched.files["val"].unlink()
    kept = fetched.files["train"].stat().st_mtime_ns

    again = fetch("play", tmp_path, source=mirror, patience=QUICK)

    assert again.files["val"].read_text() == "two\n"
    assert again.files["train"].stat().st_mtime_ns == kept


def test_names_inside_an_archive_are_no_paths(catalog, tmp_path):
    hostile = ["../evil.txt", "/tmp/evil-penstock.txt", "..\\evil.txt", "C:\\evil.txt"]
    members = [(name, "evil") for name in hostile]
    archive = zipped([("play-raw/train.raw", "one\n"), *members])
    catalog(packed(archive, "zip", sides("train"), "play.zip"))
    copies = tmp_path / "copies"
    copies.mkdir()
    (copies / "play.zip").write_bytes(archive)

    fetch("play", tmp_path / "in" / "out", source=copies)

    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {"play.zip", "train.txt", ".fetched.json", ".lock"}
    assert not Path("/tmp/evil-penstock.txt").exists()


def test_a_link_in_an_archive_is_no_text(catalog, tmp_path):
    link = zipfile.ZipInfo("play-raw/train.raw")
    link.external_attr = 0o120777 << 16
    archive = zipped([(link, "/etc/passwd")])
    catalog(packed(archive, "zip", sides("train"), "play.zip"))
    (tmp_path / "play.zip").write_bytes(archive)

    with pytest.raises(FetchError, match="is a link, a directory or encrypted"):
        fetch("play", tmp_path / "out", source=tmp_path)


def test_a_bomb_is_refused_before_it_grows(catalog, tmp_path):
    archive = zipped([("play-raw/train.raw", bytes(40_000_000))])
    catalog(packed(archive, "zip", sides("train"), "play.zip"))
    (tmp_path / "play.zip").write_bytes(archive)

    with pytest.raises(FetchError, match="would grow to 40,000,000 bytes"):
        fetch("play", tmp_path / "out", source=tmp_path)


@pytest.mark.parametrize("members", [[], ["play-raw/train.raw"] * 2])
@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_a_member_is_there_once(catalog, tmp_path, members):
    archive = zipped([(name, "x") for name in [*members, "other"]])
    catalog(packed(archive, "zip", sides("train"), "play.zip"))
    (tmp_path / "play.zip").write_bytes(archive)

    with pytest.raises(FetchError, match=rf"{len(members)} times, and once is right"):
        fetch("play", tmp_path / "out", source=tmp_path)


def test_a_zip_that_rotted_is_named(catalog, tmp_path):
    archive = bytearray(zipped([("play-raw/train.raw", os.urandom(5_000))]))
    archive[2_000] ^= 1
    catalog(packed(bytes(archive), "zip", sides("train"), "play.zip"))
    (tmp_path / "play.zip").write_bytes(archive)

    with pytest.raises(FetchError, match=r"cannot be unpacked at play-raw/train\.raw"):
        fetch("play", tmp_path / "out", source=tmp_path)
    assert not (tmp_path / "out" / "train.txt").exists()


def test_texts_that_somebody_unpacked_are_taken_as_they_lie(catalog, tmp_path):
    archive = zipped([("play-raw/train.raw", "one\n")])
    (text,) = sides("train")
    catalog(packed(archive, "zip", [replace(text, num_bytes=4)], "play.zip"))
    (tmp_path / "play-raw").mkdir()
    (tmp_path / "play-raw" / "train.raw").write_text("one\n")

    assert fetch("play", tmp_path / "out", source=tmp_path).files["train"].read_text() == "one\n"


def gz_entry(archive, num_bytes):
    text = Text(name="owt.txt", side="train", num_bytes=num_bytes)
    entry = packed(archive, "gzip", [text], "owt.txt.gz")
    return replace(entry, remotes=(replace(entry.remotes[0], sha256=None, num_bytes=None),))


def test_a_gz_of_unknown_digest_is_checked_by_its_own_and_its_size(catalog, server, tmp_path):
    archive = gzip.compress(b"one\n" * 50) + gzip.compress(b"two\n" * 50)
    catalog(gz_entry(archive, 400))
    server.files["/owt.txt.gz"] = archive

    fetched = fetch("play", tmp_path, source=f"http://{server.address}", patience=QUICK)

    assert fetched.files["train"].read_bytes() == b"one\n" * 50 + b"two\n" * 50
    assert not (tmp_path / "owt.txt.gz").exists()
    assert fetch("play", tmp_path, patience=QUICK).received_bytes == 0


@pytest.mark.parametrize("num_bytes", [399, 401])
def test_a_gz_of_another_length_is_refused(catalog, tmp_path, num_bytes):
    archive = gzip.compress(b"one\n" * 100)
    catalog(gz_entry(archive, num_bytes))
    (tmp_path / "owt.txt.gz").write_bytes(archive)

    with pytest.raises(FetchError, match=f"{num_bytes}"):
        fetch("play", tmp_path / "out", source=tmp_path)
    assert not (tmp_path / "out" / "owt.txt").exists()


def test_a_file_that_was_there_before_is_known_by_its_size(catalog, tmp_path):
    catalog(gz_entry(b"", 400))
    (tmp_path / "owt.txt").write_bytes(bytes(400))

    assert fetch("play", tmp_path, patience=QUICK).received_bytes == 0
    (tmp_path / "owt.txt").write_bytes(bytes(401))
    with pytest.raises(FetchError, match="is there already"):
        fetch("play", tmp_path, patience=QUICK)


def _race(number, data, address, directory, barrier, results):
    entries.ENTRIES = (plain(data),)
    barrier.wait(60)
    results.put(fetch("play", directory, source=f"http://{address}/mirror").received_bytes)


@pytest.mark.slow
def test_of_many_fetchers_one_downloads_and_all_have_it(server, mirror, tmp_path):
    context = multiprocessing.get_context("spawn")
    server.faults = [{"before": lambda: server.stop.wait(0.5)}]
    barrier, results = context.Barrier(6), context.Queue()
    arguments = (BYTES, server.address, tmp_path, barrier, results)
    racers = [context.Process(target=_race, args=(n, *arguments)) for n in range(6)]
    for racer in racers:
        racer.start()
    received = sorted(results.get(timeout=120) for _ in racers)
    for racer in racers:
        racer.join(60)

    assert received == [0] * 5 + [len(BYTES)]
    assert len(server.requests) == 1
    assert (tmp_path / "play.txt").read_bytes() == BYTES


def test_whoever_holds_the_lock_and_does_nothing_is_named(play, copies, tmp_path, monkeypatch):
    from penstock.store.lock import locked

    monkeypatch.setattr(module, "_BUSY_SECONDS", 0.3)
    with locked(tmp_path), pytest.raises(StoreBusyError, match=f"pid {os.getpid()}"):
        fetch("play", tmp_path, source=copies)


def test_what_a_killed_fetch_left_is_swept_and_nothing_else(play, copies, tmp_path):
    (tmp_path / "..train.txt.new.123.0.tmp").write_text("half")
    (tmp_path / ".mine.tmp").write_text("mine")
    fetch("play", tmp_path, source=copies)

    left = {path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")}
    assert left == {".mine.tmp"}


def test_progress_names_the_action(play, mirror, tmp_path):
    told = []
    fetch("play", tmp_path, source=mirror, patience=QUICK, progress=told.append)

    assert {(now.action, now.name) for now in told} == {("downloading", "input.txt")}
    assert told[-1].done_bytes == told[-1].total_bytes == len(BYTES)


def test_importing_the_catalog_loads_nothing_heavy():
    code = (
        "import sys, penstock.catalog.entries\n"
        "print({'torch', 'pyarrow', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "set()\n"
