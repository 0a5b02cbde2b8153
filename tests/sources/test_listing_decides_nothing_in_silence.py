"""What a listing leaves out is counted, logged and recorded; everything else is read or refused."""

import json
import logging
import os
import socket
import sys
from pathlib import Path

import fsspec
import pytest
import zygote

import penstock
from penstock.errors import SourceError
from penstock.options import ReadSettings
from penstock.sources.listing import list_files, list_inputs

LIST = """
import sys
from penstock.errors import SourceError
from penstock.sources.listing import list_files
from penstock.options import ReadSettings
for inputs in sys.argv[1:]:
    try:
        print(len(list_files(inputs, ReadSettings())))
    except SourceError as error:
        print("SourceError", error)
"""


def listed(inputs, **options):
    """The names below the current directory, and the counts of what was left out."""
    found = list_inputs(inputs, ReadSettings(**options))
    return [file.name for file in found.files], found.skipped


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A directory with hidden names, and links to directories inside and outside of it."""
    monkeypatch.chdir(tmp_path)
    for name in ("d/1.txt", "d/.h.txt", "d/.git/2.txt", "d/sub/3.txt", "e/4.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    for name, target in (("out", "../e"), ("a", "sub"), ("sub/up", "..")):
        (tmp_path / "d" / name).symlink_to(target)
    return tmp_path


def test_links_to_directories_are_followed_and_every_directory_is_read_once(tree):
    names, skipped = listed("d")

    assert names == ["d/1.txt", "d/out/4.txt", "d/sub/3.txt"]
    # "a" leads to "sub", and "sub/up" leads back to "d".
    assert skipped == {"hidden": 2, "linked": 2}


def test_the_names_do_not_depend_on_the_order_in_which_the_system_lists(tree, monkeypatch):
    first, real = listed("d"), os.scandir

    class Reversed:
        def __init__(self, path):
            self.entries = list(real(path))[::-1]

        def __enter__(self):
            return self.entries

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(os, "scandir", Reversed)
    assert listed("d") == first


@pytest.mark.parametrize(
    ("pattern", "names", "skipped"),
    [
        ("d/*.txt", ["d/1.txt"], {"hidden": 1}),
        ("d/*", ["d/1.txt"], {"hidden": 2, "directories": 3}),
        ("d/sub/*.txt", ["d/sub/3.txt"], {}),
        ("e/**/*.txt", ["e/4.txt"], {}),
    ],
)
def test_a_glob_counts_hidden_names_and_directories_that_it_matches(tree, pattern, names, skipped):
    assert listed(pattern) == (names, skipped)


def test_a_glob_that_leads_back_through_a_link_counts_it(tree):
    (tree / "d" / "a").unlink()

    assert listed("d/**/3.txt") == (["d/sub/3.txt"], {"hidden": 1, "linked": 1})


@pytest.mark.parametrize("inputs", ["d", "d/*", "d/*.txt", "d/1.txt"])
def test_a_file_url_lists_what_its_path_lists(tree, inputs):
    url = f"file://{tree}/{inputs}"

    assert listed(url) == listed(str(tree / inputs))


def test_hidden_files_and_folders_of_a_remote_folder_are_counted(request):
    filesystem, folder = fsspec.filesystem("memory"), f"/{request.node.name}"
    for name in ("a.txt", ".b.txt", ".git/c.txt", ".git/d.txt", "e/f.txt"):
        filesystem.pipe(f"{folder}/{name}", b"x")
    names, skipped = listed(f"memory:/{folder}")
    filesystem.rm(folder, recursive=True)

    assert [Path(name).name for name in names] == ["a.txt", "f.txt"]
    assert skipped == {"hidden": 2}


def special(path, kind):
    """Make something that is not a file."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.txt").write_text("one")
    special(Path("d/b.txt"), kind)
    inputs = ["d", "d/*.txt", "d/b.txt", f"file://{tmp_path}/d", f"file://{tmp_path}/d/b.txt"]
    command = ["-c", LIST, *inputs]
    done = zygote.run(command, capture_output=True, text=True, timeout=60)

    answers = done.stdout.splitlines()
    assert len(answers) == len(inputs), done
    for answer in answers:
        assert answer.startswith("SourceError"), answer
        assert "b.txt is not a regular file" in answer


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("how", ["/proc/self/status", "file:///proc/self/status", "link"])
def test_a_file_with_contents_whose_size_is_given_as_0_is_refused(tmp_path, how):
    if how == "link":
        (tmp_path / "status.txt").symlink_to("/proc/self/status")
        how = str(tmp_path)
    with pytest.raises(SourceError, match=r"has contents, but .* size as 0 bytes.* Copy it"):
        list_files(how, ReadSettings())


def test_an_empty_file_stays_an_input(tmp_path):
    (tmp_path / "a.txt").write_text("")

    assert listed(str(tmp_path)) == ([str(tmp_path / "a.txt")], {})


@pytest.mark.parametrize("how", ["{}", "{}/*.txt", "file://{}", "file://{}/*.txt"])
def test_a_link_to_nothing_and_a_link_to_itself_are_errors(tmp_path, how):
    for target in ("gone", "b.txt"):
        (tmp_path / "b.txt").symlink_to(target)
        with pytest.raises(SourceError, match=r"b\.txt"):
            list_files(how.format(tmp_path), ReadSettings())
        (tmp_path / "b.txt").unlink()


def test_the_log_names_what_is_left_out_and_what_is_guessed(tree, caplog):
    (tree / "d" / "x.log").write_text("x")
    with caplog.at_level(logging.WARNING, "penstock"):
        list_files("d/*", ReadSettings())

    assert "read as text: 1 of 2 (d/x.log)" in caplog.text
    assert "Not read: 2 hidden (d/.git, d/.h.txt); 3 directories" in caplog.text
    caplog.clear()
    list_files("d/*", ReadSettings(format="text"))
    assert "read as text" not in caplog.text


@pytest.mark.parametrize("how", ["build", "stream", "command"])
def test_a_build_records_and_prints_what_was_left_out(tree, how):
    if how == "build":
        store = penstock.build("d", "store", tokenizer="bytes")
    elif how == "stream":
        with penstock.stream("d", "store", tokenizer="bytes") as stream:
            assert len(list(stream)) == 3  # waits for the end
        store = penstock.TokenStore("store")
    else:
        command = ["-m", "penstock", "build", "d", "-o", "store", "--tokenizer", "bytes"]
        done = zygote.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done
        assert "Not read: 2 hidden (d/.git, d/.h.txt)" in done.stderr
        assert "2 hidden; 2 directories that a link" in " ".join(done.stdout.split())
        store = penstock.TokenStore("store")

    assert store.manifest.builds[-1]["skipped_files"] == {"hidden": 2, "linked": 2}
    assert len(store) == 3


def test_a_hidden_file_that_appears_later_does_not_make_another_build(tree):
    first = penstock.build("d", "store", tokenizer="bytes")
    (tree / "d" / ".DS_Store").write_text("x")

    assert penstock.build("d", "store", tokenizer="bytes").digest == first.digest


def test_a_manifest_says_nothing_if_nothing_was_left_out(tree):
    store = penstock.build("e", "store", tokenizer="bytes")

    assert (
        "skipped_files" not in json.loads((store.path / "penstock.json").read_bytes())["builds"][0]
    )
