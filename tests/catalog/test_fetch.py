"""Datasets of the catalog: from mirrors and copies, unpacked, split, and never overwritten."""

import gzip
import io
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.catalog import (
    ENTRIES,
    DownloadLimits,
    Entry,
    build_stores,
    entries,
    fetch,
    find_entry,
    receipt,
)
from penstock.catalog.entries import EntryFile, RemoteFile
from penstock.digest import digest_bytes
from penstock.errors import FetchError, SourceError, StoreBusyError

QUICK = DownloadLimits(attempts=3, backoff_seconds=0.01, max_wait_seconds=1, stall_seconds=1)
PLAY = "To bé, or not to be:\r\nthat is the question.\n" * 500
BYTES = PLAY.encode()


def plain(data=BYTES, **settings):
    file = EntryFile(name="play.txt", split=None, num_bytes=len(data), sha256=digest_bytes(data))
    remote = RemoteFile(
        name="input.txt",
        urls=("http://127.0.0.1:9/input.txt",),
        num_bytes=len(data),
        sha256=digest_bytes(data),
        files=(file,),
    )
    about = {"title": "A play", "home": "here", "licence": "none"}
    how = {"documents": "file", "eos": False, "train_ratio": 0.9}
    return Entry(name="play", remotes=(remote,), **about, **how, **settings)


def packed(archive, packing, files, name):
    remote = RemoteFile(
        name=name,
        urls=(f"http://127.0.0.1:9/{name}",),
        packing=packing,
        num_bytes=len(archive),
        sha256=digest_bytes(archive),
        files=tuple(files),
    )
    return Entry(name="play", title="A play", home="here", licence="none", remotes=(remote,))


def names_in(directory):
    """The names of all files; where a lock is kept is decided elsewhere."""
    files = (path.name for path in directory.rglob("*") if path.is_file())
    return {name for name in files if not name.endswith(".lock")}


def zipped(members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return out.getvalue()


@pytest.fixture
def catalog(monkeypatch):
    """Replace the entries of the catalog."""

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
    assert entry.reader or {"train", "val"} <= set(entry.splits)
    for remote in entry.remotes:
        assert all(url.startswith("https://") for url in remote.urls)
        assert all(url.endswith(remote.name) for url in remote.urls)
    for each in [*entry.remotes, *entry.files]:
        assert each.sha256 is None or re.fullmatch("[0-9a-f]{64}", each.sha256)


def test_files_on_the_hub_are_those_of_one_revision():
    """A branch may move, and then a checksum would be of another file."""
    urls = [url for entry in ENTRIES if entry.reader for r in entry.remotes for url in r.urls]

    assert len(urls) == 2 + 6 + 4
    assert all(re.search("/[0-9a-f]{40}/", url) for url in urls)
    assert sum(not file.sha256 for entry in ENTRIES if entry.reader for file in entry.files) == 2


def test_the_entry_of_openwebtext_records_its_separator_and_the_names_of_its_files():
    entry = find_entry("openwebtext")

    assert entry.documents == "<|endoftext|>"
    assert [file.name for file in entry.files] == ["owt_train.txt", "owt_valid.txt"]


def test_a_name_that_is_not_there_gets_the_nearest():
    with pytest.raises(SourceError, match=r"Did you mean tinyshakespeare\? List them with"):
        fetch("TinyShakespear")


def test_tinyshakespeare_from_a_copy_has_the_known_numbers_of_tokens(data, tmp_path):
    fetched = fetch("tinyshakespeare", tmp_path, source=data / "tinyshakespeare")
    stores = build_stores(fetched)

    assert {split: store.num_tokens for split, store in stores.items()} == {
        "train": 301_966,
        "val": 36_059,
    }
    assert fetched.raw == tmp_path / "tinyshakespeare.txt"
    assert fetched.received_bytes == 0
    assert [len(store) for store in stores.values()] == [1, 1]


def test_the_members_of_wikitext_2_match_the_recorded_checksums(data):
    """The shared copies have CRLF line ends; with LF they equal the upstream files."""
    for file in find_entry("wikitext-2").files[1:]:
        copy = data / "wikitext-2-raw" / Path(file.member).name
        contents = copy.read_bytes().replace(b"\r\n", b"\n")
        assert (len(contents), digest_bytes(contents)) == (file.num_bytes, file.sha256)


def test_a_copy_that_is_not_the_file_is_refused(data, tmp_path):
    """The shared copies have CRLF line ends, and one file is missing."""
    with pytest.raises(
        FetchError, match=r"does not hold wikitext-2-raw-v1\.zip or the files in it"
    ):
        fetch("wikitext-2", tmp_path, source=data / "wikitext-2-raw")
    links = tmp_path / "links"
    links.mkdir()
    for side in ("valid", "test"):
        (links / f"wiki.{side}.raw").symlink_to(data / "wikitext-2-raw" / f"wiki.{side}.raw")
    (links / "wiki.train.raw").symlink_to(data / "wikitext-2-raw" / "train_first_1MB.txt")
    with pytest.raises(FetchError, match="1,000,000 bytes, but 10,940,747 are expected"):
        fetch("wikitext-2", tmp_path / "out", source=links)


def test_a_text_is_split_between_characters(play, copies, tmp_path):
    fetched = fetch("play", tmp_path / "out", source=copies)
    border = int(len(PLAY) * 0.9)

    assert fetched.files["train"].read_bytes().decode() == PLAY[:border]
    assert fetched.files["val"].read_bytes().decode() == PLAY[border:]
    assert fetched.raw.read_bytes() == BYTES


@pytest.mark.parametrize("split", [0, 1, -0.5, float("nan")])
def test_a_split_must_leave_both_parts_nonempty(play, copies, tmp_path, split):
    with pytest.raises(SourceError, match="split must be between 0 and 1"):
        fetch("play", tmp_path / "out", source=copies, split=split)


def test_a_dataset_with_splits_is_not_split_again():
    with pytest.raises(SourceError, match="wikitext-2 comes split into train, val, test"):
        fetch("wikitext-2", split=0.5)


def test_a_mirror_is_asked_once_and_never_again(play, mirror, server, tmp_path):
    first = fetch("play", tmp_path, source=mirror, limits=QUICK)
    stamps = {path: path.stat().st_mtime_ns for path in first.files.values()}
    again = fetch("play", tmp_path, source=mirror, limits=QUICK)

    assert first.received_bytes == len(BYTES)
    assert again.received_bytes == 0
    assert len(server.requests) == 1
    assert stamps == {path: path.stat().st_mtime_ns for path in again.files.values()}


def test_a_mirror_may_be_named_by_the_file_itself_and_keeps_its_query(
    play, mirror, server, tmp_path
):
    fetch("play", tmp_path, source=f"{mirror}/input.txt?key=1", limits=QUICK)

    assert server.requests[0][0] == "/mirror/input.txt?key=1"


@pytest.mark.parametrize("name", ["input.txt", "play.txt"])
def test_a_copy_may_have_either_name(play, tmp_path, name):
    (tmp_path / name).write_bytes(BYTES)

    assert fetch("play", tmp_path / "a", source=tmp_path).raw.read_bytes() == BYTES
    assert fetch("play", tmp_path / "b", source=tmp_path / name).raw.exists()
    assert fetch("play", tmp_path / "c", source=f"file://{tmp_path}").raw.exists()


def test_a_copy_with_a_wrong_byte_is_refused(play, copies, tmp_path):
    (copies / "input.txt").write_bytes(b"t" + BYTES[1:])
    with pytest.raises(FetchError, match=r"input\.txt has SHA-256 .*, but .* is expected"):
        fetch("play", tmp_path / "out", source=copies)

    assert names_in(tmp_path / "out") == set()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere", "does not exist"),
        ("s3://bucket/x", "s3:// is not supported"),
        ("https://me:secret@host/x?y", None),
    ],
)
def test_other_sources_are_refused(play, tmp_path, source, words):
    if words is None:
        with pytest.raises(FetchError) as caught:
            fetch("play", tmp_path, source="http://me:secret@127.0.0.1:9/x?y", limits=QUICK)
        assert "secret" not in str(caught.value) + str(caught.value.__notes__)
        return
    with pytest.raises(SourceError, match=words):
        fetch("play", tmp_path, source=source)


def test_a_directory_without_the_files_reports_the_names(play, tmp_path):
    with pytest.raises(FetchError, match=r"looked for input.txt, play.txt. It holds out"):
        fetch("play", tmp_path / "out", source=tmp_path)


def test_without_a_network_the_next_step_is_reported(play, tmp_path):
    with pytest.raises(FetchError, match="Connection refused") as caught:
        fetch("play", tmp_path, limits=QUICK)

    assert "penstock fetch play --from DIRECTORY" in caught.value.__notes__[0]
    assert "http://127.0.0.1:9/input.txt" in caught.value.__notes__[0]


def test_a_file_of_the_user_is_not_overwritten(play, copies, tmp_path):
    (tmp_path / "play.txt").write_text("mine")
    with pytest.raises(FetchError, match="already exists with other contents"):
        fetch("play", tmp_path, source=copies)

    assert (tmp_path / "play.txt").read_text() == "mine"


def test_a_fetched_file_that_was_edited_is_not_said_to_be_unknown(play, copies, tmp_path):
    (tmp_path / fetch("play", tmp_path, source=copies).files["train"].name).write_text("edited")
    with pytest.raises(FetchError, match="with other contents than the dataset's, so") as caught:
        fetch("play", tmp_path, source=copies)

    assert "no fetch wrote it" not in str(caught.value)


def test_a_split_of_the_user_is_not_overwritten(play, copies, tmp_path):
    (tmp_path / "val.txt").write_text("mine")
    with pytest.raises(FetchError, match=r"val\.txt already exists"):
        fetch("play", tmp_path, source=copies)

    assert (tmp_path / "val.txt").read_text() == "mine"


def test_another_split_replaces_the_files_of_a_fetch(play, copies, tmp_path):
    fetch("play", tmp_path, source=copies)
    fetched = fetch("play", tmp_path, source=copies, split=0.5)

    assert fetched.files["train"].read_bytes().decode() == PLAY[: len(PLAY) // 2]


def test_another_split_does_not_replace_edited_files(play, copies, tmp_path):
    fetch("play", tmp_path, source=copies)
    (tmp_path / "train.txt").write_text("edited")
    with pytest.raises(FetchError, match=r"train\.txt already exists"):
        fetch("play", tmp_path, source=copies, split=0.5)


def test_a_damaged_receipt_is_ignored(play, copies, tmp_path):
    fetch("play", tmp_path, source=copies)
    (tmp_path / ".fetched.json").write_text("[]")

    assert fetch("play", tmp_path, source=copies).received_bytes == 0


def splits(*names, **sizes):
    return [
        EntryFile(name=f"{split}.txt", split=split, member=f"play-raw/{split}.raw", **sizes)
        for split in names
    ]


def test_a_zip_is_unpacked_and_removed(catalog, server, tmp_path):
    archive = zipped([("play-raw/train.raw", "one\n" * 99), ("play-raw/val.raw", "two\n")])
    catalog(packed(archive, "zip", splits("train", "val"), "play.zip"))
    server.files["/play.zip"] = archive
    mirror = f"http://{server.address}"

    fetched = fetch("play", tmp_path, source=mirror, limits=QUICK)

    assert fetched.files["train"].read_text() == "one\n" * 99
    assert names_in(tmp_path) == {"train.txt", "val.txt", ".fetched.json"}
    assert fetch("play", tmp_path, source=mirror, limits=QUICK).received_bytes == 0
    assert len(server.requests) == 1


def test_a_text_that_was_deleted_is_fetched_again_and_the_other_kept(catalog, server, tmp_path):
    archive = zipped([("play-raw/train.raw", "one\n"), ("play-raw/val.raw", "two\n")])
    catalog(packed(archive, "zip", splits("train", "val"), "play.zip"))
    server.files["/play.zip"] = archive
    mirror = f"http://{server.address}"
    fetched = fetch("play", tmp_path, source=mirror, limits=QUICK)
    fetched.files["val"].unlink()
    kept = fetched.files["train"].stat().st_mtime_ns

    again = fetch("play", tmp_path, source=mirror, limits=QUICK)

    assert again.files["val"].read_text() == "two\n"
    assert again.files["train"].stat().st_mtime_ns == kept


def test_names_inside_an_archive_are_not_used_as_paths(catalog, tmp_path):
    hostile = ["../evil.txt", "/tmp/evil-penstock.txt", "..\\evil.txt", "C:\\evil.txt"]
    members = [(name, "evil") for name in hostile]
    archive = zipped([("play-raw/train.raw", "one\n"), *members])
    catalog(packed(archive, "zip", splits("train"), "play.zip"))
    copies = tmp_path / "copies"
    copies.mkdir()
    (copies / "play.zip").write_bytes(archive)

    fetch("play", tmp_path / "in" / "out", source=copies)

    assert names_in(tmp_path) == {"play.zip", "train.txt", ".fetched.json"}
    assert not Path("/tmp/evil-penstock.txt").exists()


def test_a_link_in_an_archive_is_refused(catalog, tmp_path):
    link = zipfile.ZipInfo("play-raw/train.raw")
    link.external_attr = 0o120777 << 16
    archive = zipped([(link, "/etc/passwd")])
    catalog(packed(archive, "zip", splits("train"), "play.zip"))
    (tmp_path / "play.zip").write_bytes(archive)

    with pytest.raises(FetchError, match="is a link, a directory or encrypted"):
        fetch("play", tmp_path / "out", source=tmp_path)


def test_a_zip_bomb_is_refused_before_it_is_unpacked(catalog, tmp_path):
    archive = zipped([("play-raw/train.raw", bytes(40_000_000))])
    catalog(packed(archive, "zip", splits("train"), "play.zip"))
    (tmp_path / "play.zip").write_bytes(archive)

    with pytest.raises(FetchError, match="would unpack to 40,000,000 bytes"):
        fetch("play", tmp_path / "out", source=tmp_path)


@pytest.mark.parametrize("members", [[], ["play-raw/train.raw"] * 2])
@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_a_member_must_be_there_once(catalog, tmp_path, members):
    archive = zipped([(name, "x") for name in [*members, "other"]])
    catalog(packed(archive, "zip", splits("train"), "play.zip"))
    (tmp_path / "play.zip").write_bytes(archive)

    with pytest.raises(FetchError, match=rf"once, but holds it {len(members)} times"):
        fetch("play", tmp_path / "out", source=tmp_path)


def test_a_damaged_zip_is_reported(catalog, tmp_path):
    archive = bytearray(zipped([("play-raw/train.raw", os.urandom(5_000))]))
    archive[2_000] ^= 1
    catalog(packed(bytes(archive), "zip", splits("train"), "play.zip"))
    (tmp_path / "play.zip").write_bytes(archive)

    with pytest.raises(FetchError, match=r"is damaged: play-raw/train\.raw cannot be unpacked"):
        fetch("play", tmp_path / "out", source=tmp_path)
    assert not (tmp_path / "out" / "train.txt").exists()


def test_files_that_are_already_unpacked_are_copied(catalog, tmp_path):
    archive = zipped([("play-raw/train.raw", "one\n")])
    (file,) = splits("train")
    catalog(packed(archive, "zip", [replace(file, num_bytes=4)], "play.zip"))
    (tmp_path / "play-raw").mkdir()
    (tmp_path / "play-raw" / "train.raw").write_text("one\n")

    assert fetch("play", tmp_path / "out", source=tmp_path).files["train"].read_text() == "one\n"


def gz_entry(archive, num_bytes):
    file = EntryFile(name="owt.txt", split="train", num_bytes=num_bytes)
    entry = packed(archive, "gzip", [file], "owt.txt.gz")
    return replace(entry, remotes=(replace(entry.remotes[0], sha256=None, num_bytes=None),))


def test_a_gz_of_unknown_digest_is_checked_by_its_crc_and_size(catalog, server, tmp_path):
    archive = gzip.compress(b"one\n" * 50) + gzip.compress(b"two\n" * 50)
    catalog(gz_entry(archive, 400))
    server.files["/owt.txt.gz"] = archive

    fetched = fetch("play", tmp_path, source=f"http://{server.address}", limits=QUICK)

    assert fetched.files["train"].read_bytes() == b"one\n" * 50 + b"two\n" * 50
    assert not (tmp_path / "owt.txt.gz").exists()
    assert fetch("play", tmp_path, limits=QUICK).received_bytes == 0


@pytest.mark.parametrize("num_bytes", [399, 401])
def test_a_gz_of_another_length_is_refused(catalog, tmp_path, num_bytes):
    archive = gzip.compress(b"one\n" * 100)
    catalog(gz_entry(archive, num_bytes))
    (tmp_path / "owt.txt.gz").write_bytes(archive)

    with pytest.raises(FetchError, match=f"{num_bytes}"):
        fetch("play", tmp_path / "out", source=tmp_path)
    assert not (tmp_path / "out" / "owt.txt").exists()


def test_an_existing_file_of_unknown_digest_is_recognised_by_its_size(catalog, tmp_path):
    catalog(gz_entry(b"", 400))
    (tmp_path / "owt.txt").write_bytes(bytes(400))

    assert fetch("play", tmp_path, limits=QUICK).received_bytes == 0
    (tmp_path / "owt.txt").write_bytes(bytes(401))
    with pytest.raises(FetchError, match="already exists"):
        fetch("play", tmp_path, limits=QUICK)


def test_a_damaged_gz_is_reported(catalog, tmp_path):
    whole = gzip.compress(os.urandom(5_000))
    for archive in (whole[:-100], whole[:2_000] + b"?" + whole[2_001:], b"no gzip"):
        catalog(gz_entry(archive, 5_000))
        (tmp_path / "owt.txt.gz").write_bytes(archive)
        with pytest.raises(FetchError, match=r"owt\.txt\.gz is damaged: owt\.txt cannot be"):
            fetch("play", tmp_path / "out", source=tmp_path)
        assert names_in(tmp_path / "out") == set()


def test_a_gz_bomb_of_unknown_size_is_refused(catalog, tmp_path):
    catalog(gz_entry(b"", None))
    (tmp_path / "owt.txt.gz").write_bytes(gzip.compress(bytes(40_000_000)))
    with pytest.raises(FetchError, match="unpacks to more than 16,777,216 bytes"):
        fetch("play", tmp_path / "out", source=tmp_path)


def unknown(entry):
    """The same entry without sizes and checksums."""
    free = {"num_bytes": None, "sha256": None}
    remotes = [
        replace(each, files=tuple(replace(file, **free) for file in each.files), **free)
        for each in entry.remotes
    ]
    return replace(entry, remotes=tuple(remotes))


def test_a_file_of_the_user_is_not_overwritten_by_a_file_of_unknown_digest(
    catalog, mirror, tmp_path
):
    catalog(unknown(plain()))
    (tmp_path / "play.txt").write_text("mine")
    with pytest.raises(FetchError, match=r"play\.txt already exists"):
        fetch("play", tmp_path, source=mirror, limits=QUICK)
    assert (tmp_path / "play.txt").read_text() == "mine"

    (tmp_path / "play.txt").write_bytes(BYTES)
    fetch("play", tmp_path, source=mirror, limits=QUICK)
    assert fetch("play", tmp_path, source=mirror, limits=QUICK).received_bytes == 0


def test_a_wrong_file_is_never_under_its_name(play, mirror, server, tmp_path):
    server.files["/mirror/input.txt"] = b"t" + BYTES[1:]
    with pytest.raises(FetchError, match="is expected"):
        fetch("play", tmp_path, source=mirror, limits=QUICK)

    assert names_in(tmp_path) == set()


def test_a_cut_download_is_resumed_by_the_next_fetch(play, mirror, server, tmp_path):
    server.faults = [{"cut": 10_000}, *[{"status": 503}] * 3]
    with pytest.raises(FetchError, match="10,000 bytes are kept"):
        fetch("play", tmp_path, source=mirror, limits=QUICK)

    again = fetch("play", tmp_path, source=mirror, limits=QUICK)
    assert again.received_bytes == len(BYTES) - 10_000
    assert server.ranges[-1] == "bytes=10000-"


def _race(number, data, address, directory, barrier, results):
    entries.ENTRIES = (plain(data),)
    barrier.wait(60)
    results.put(fetch("play", directory, source=f"http://{address}/mirror").received_bytes)


@pytest.mark.slow
def test_of_many_processes_one_downloads_and_all_have_the_file(
    server, mirror, tmp_path, imported_once
):
    context = imported_once
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


def test_a_process_that_holds_the_lock_and_does_nothing_is_reported(
    play, copies, tmp_path, monkeypatch
):
    from penstock.disk import locked

    monkeypatch.setattr(receipt, "_BUSY_SECONDS", 0.3)
    with locked(tmp_path), pytest.raises(StoreBusyError, match=f"pid {os.getpid()}"):
        fetch("play", tmp_path, source=copies)


def test_only_temporary_files_of_a_killed_fetch_are_removed(play, copies, tmp_path):
    (tmp_path / "..train.txt.new.123.0.tmp").write_text("half")
    (tmp_path / ".mine.tmp").write_text("mine")
    fetch("play", tmp_path, source=copies)

    left = {path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")}
    assert left == {".mine.tmp"}


def test_progress_names_the_action(play, mirror, tmp_path):
    seen = []
    fetch("play", tmp_path, source=mirror, limits=QUICK, progress=seen.append)

    assert {(now.action, now.name) for now in seen} == {("downloading", "input.txt")}
    assert seen[-1].done_bytes == seen[-1].total_bytes == len(BYTES)


def test_importing_the_catalog_loads_nothing_heavy():
    code = (
        "import sys, penstock.catalog\n"
        "penstock.catalog.find_entry('arc')\n"
        "print({'torch', 'pyarrow', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "set()\n"
