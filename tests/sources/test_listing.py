"""From what the user names to a sorted list of files: nothing guessed, nothing twice."""

import gzip
import os

import fsspec
import pytest

from penstock.errors import PenstockError, SourceError
from penstock.options import ReadSettings
from penstock.sources.listing import list_files


def names(inputs, **options):
    return [file.name for file in list_files(inputs, ReadSettings(**options))]


@pytest.fixture
def memory(request):
    """A folder of fsspec's memory:// file system that only this test uses."""
    filesystem = fsspec.filesystem("memory")
    folder = f"/{request.node.name}"
    filesystem.mkdir(folder)
    yield lambda name, data: filesystem.pipe(f"{folder}/{name}", data)
    filesystem.rm(folder, recursive=True)


def test_files_are_sorted_by_the_bytes_of_their_names(tmp_path):
    wanted = ["B.txt", "a.txt", "a/c.txt", "a10.txt", "a9.txt", "z.txt", "Ä.txt", "é.txt", "😀.txt"]
    (tmp_path / "a").mkdir()
    for name in wanted:
        (tmp_path / name).write_text("x")
    expected = sorted((str(tmp_path / name) for name in wanted), key=os.fsencode)

    assert names(tmp_path) == expected
    assert names([tmp_path / name for name in reversed(wanted)]) == expected
    assert names(str(tmp_path / "**" / "*.txt")) == expected


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("a.txt", "text", None),
        ("a.md", "text", None),
        ("A.TXT.GZ", "text", "gzip"),
        ("a.jsonl", "jsonl", None),
        ("a.ndjson.zst", "jsonl", "zstd"),
        ("a.json.bz2", "jsonl", "bz2"),
        ("a.b.c.text.xz", "text", "xz"),
        ("a.parquet", "parquet", None),
        ("who?.jsonl.gz", "jsonl", "gzip"),
        ("no suffix", "text", None),
        ("a.unknown", "text", None),
    ],
)
def test_format_and_compression_go_by_the_suffix(tmp_path, name, kind, compression):
    (tmp_path / name).write_bytes(b"x")
    (file,) = list_files(tmp_path / name, ReadSettings())

    assert (file.format, file.compression) == (kind, compression)


def test_a_named_format_overrules_the_suffix(tmp_path):
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(b'{"text": "a"}'))
    (file,) = list_files(tmp_path, ReadSettings(format="jsonl"))

    assert (file.format, file.compression) == ("jsonl", "gzip")


def test_unknown_suffixes_in_a_directory_are_refused_unless_a_format_is_named(tmp_path):
    for name in ("a.txt", "b.exe", "c", "d.gz"):
        (tmp_path / name).write_text("x")

    with pytest.raises(SourceError, match=r"3 of 4 files in .*b\.exe.*format=.text."):
        names(tmp_path)
    assert len(names(tmp_path, format="text")) == 4


@pytest.mark.parametrize("how", ["same", "relative", "symlink", "glob"])
def test_a_file_listed_twice_is_refused(tmp_path, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.txt"
    path.write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link.txt").symlink_to(path)
    again = {"same": path, "relative": "a.txt", "symlink": "folder", "glob": "*.txt"}[how]

    with pytest.raises(SourceError, match=r"listed twice \(also as .*trained on twice as often"):
        names([path, again])


def test_what_is_not_there_is_refused_with_what_is(tmp_path):
    (tmp_path / "tinyshakespeare.txt").write_text("x")
    for pattern in ("tinyshakespear.txt", "*.jsonl", "nul\0byte"):
        with pytest.raises(
            SourceError, match=r"matches no file .* (In|Did) .*tinyshakespeare\.txt"
        ):
            names(str(tmp_path / pattern))


def test_an_empty_directory_an_empty_list_and_a_dead_link_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead" / "link.txt").symlink_to(tmp_path / "gone.txt")

    with pytest.raises(SourceError, match="is a directory without files"):
        names(tmp_path / "empty")
    with pytest.raises(SourceError, match="No inputs were given"):
        names([])
    with pytest.raises(SourceError, match=r"is a broken link\. Check the name"):
        names(tmp_path / "dead")


def test_a_name_with_glob_characters_that_exists_is_that_file(tmp_path):
    for name in ("a[1].txt", "a1.txt", "b*.txt"):
        (tmp_path / name).write_text("x")

    assert names(str(tmp_path / "a[1].txt")) == [str(tmp_path / "a[1].txt")]
    assert names(str(tmp_path / "b*.txt")) == [str(tmp_path / "b*.txt")]


def test_remote_files_globs_and_folders_are_read(memory, read, request):
    memory("b.txt", b"three\nfour")
    memory("a.txt.gz", gzip.compress(b"one\ntwo\n"))
    memory("sub/c.jsonl", b'{"text": "five"}')
    folder = f"memory://{request.node.name}"

    assert read(folder).texts == [b"one", b"two", b"three", b"four", b"five"]
    assert read(f"{folder}/*.txt*").texts == [b"one", b"two", b"three", b"four"]
    assert read(f"{folder}/b.txt", slice_bytes=6).texts == [b"three", b"four"]
    assert read([f"{folder}/b.txt", f"{folder}/sub/c.jsonl"]).texts[-1] == b"five"


@pytest.mark.parametrize("pattern", ["", "/*.txt", "/a.txt"])
def test_files_of_a_folder_that_is_named_by_a_url_are_read(tmp_path, read, pattern):
    (tmp_path / "a.txt").write_text("one\ntwo\n")

    assert read(f"file://{tmp_path}{pattern}", documents="lines").texts == [b"one", b"two"]


def test_remote_tables_are_read(memory, read, request):
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    table, sink, stream = pa.table({"text": ["a", "b"]}), io.BytesIO(), io.BytesIO()
    pq.write_table(table, sink)
    with pa.ipc.new_stream(stream, table.schema) as out:
        out.write_table(table)
    memory("a.parquet", sink.getvalue())
    memory("b.arrow", stream.getvalue())

    assert read(f"memory://{request.node.name}").texts == [b"a", b"b", b"a", b"b"]


def test_a_remote_file_that_changes_or_goes_is_refused(memory, request):
    from penstock.sources.files import refuse_changed

    url = f"memory://{request.node.name}/a.txt"
    memory("a.txt", b"one")
    (file,) = list_files(url, ReadSettings())
    refuse_changed(file)

    memory("a.txt", b"two")
    with pytest.raises(SourceError, match="changed while it was read"):
        refuse_changed(file)
    fsspec.filesystem("memory").rm(f"/{request.node.name}/a.txt")
    with pytest.raises(SourceError, match="was removed while it was read"):
        refuse_changed(file)


def test_a_remote_file_that_is_not_there_is_refused(request):
    for url in ("memory://nowhere/a.txt", "memory://nowhere/*.txt"):
        with pytest.raises(SourceError, match=r"does not exist|matches no file"):
            names(url)


@pytest.mark.parametrize(
    "url",
    [
        "simplecache::memory://a.txt",
        "zip://a.txt::memory://b.zip",
        "reference://x",
        "jinja://x",
        "python://os.system",
        "github://org:repo@main/a.txt",
        "local://etc/passwd",
        "unknown://a.txt",
    ],
)
def test_chained_and_unknown_protocols_are_refused(url):
    with pytest.raises(SourceError, match=r"uses the protocol .* which penstock does not read"):
        names(url)


def test_a_server_that_is_not_there_is_named():
    pytest.importorskip("aiohttp")
    with pytest.raises(SourceError, match=r"http://localhost:1/x\.txt cannot be reached: "):
        names("http://localhost:1/x.txt")


@pytest.mark.parametrize(
    "url",
    [
        "nope://user:SECRET@host/a.txt",
        "nope://user:SEC@SECRET@host/a.txt",
        "nope://host/a.txt?sig=SECRET",
        "memory://user:SECRET@host/a.txt?token=SECRET",
    ],
)
def test_credentials_never_reach_a_message(url):
    with pytest.raises(PenstockError) as caught:
        names(url)

    assert "SECRET" not in str(caught.value)
    assert "host/a.txt" in str(caught.value)
