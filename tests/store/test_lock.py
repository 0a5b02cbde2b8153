"""One writer at a time: a second one gets an error, and a dead one blocks nobody."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import zygote

import penstock
from penstock.disk import lock_path, locked
from penstock.errors import StoreBusyError, StoreError
from penstock.sources.settings import Texts

HOLD = """
import pathlib, sys
from penstock.disk import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of a store."""
    child = zygote.Popen(
        ["-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.communicate()


def test_a_second_writer_learns_who_the_first_is(holder, tmp_path):
    with pytest.raises(StoreBusyError, match=rf"another process \(pid {holder.pid}\)"):
        penstock.build(Texts(["a"]), tmp_path, tokenizer="bytes")
    assert issubclass(StoreBusyError, StoreError)


def test_a_killed_writer_holds_nothing(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(timeout=10)

    assert len(penstock.build(Texts(["a"]), tmp_path, tokenizer="bytes")) == 1


def test_a_thread_of_the_same_process_is_a_second_writer_too(tmp_path):
    with locked(tmp_path), pytest.raises(StoreBusyError):
        penstock.build(Texts(["a"]), tmp_path, tokenizer="bytes")


def test_readers_need_no_lock(tmp_path):
    penstock.build(Texts(["a"]), tmp_path, tokenizer="bytes")
    with locked(tmp_path):
        assert penstock.verify(tmp_path).decode(0) == "a"


def test_of_two_builds_at_once_one_wins_and_the_store_is_whole(inputs, tmp_path):
    code = """
import sys, penstock
from penstock.errors import StoreBusyError
try:
    penstock.build(sys.argv[1], sys.argv[2], tokenizer="bytes", documents="lines", max_bad=10)
except StoreBusyError:
    sys.exit(3)
"""
    command = ["-c", code, str(inputs), str(tmp_path / "store")]
    children = [zygote.Popen(command) for _ in range(3)]
    ends = [child.wait(timeout=60) for child in children]

    assert 0 in ends
    assert set(ends) <= {0, 3}
    assert len(penstock.verify(tmp_path / "store")) == 500


def test_the_lock_is_beside_the_store_and_removed_with_the_build(tmp_path):
    store = tmp_path / "store"
    penstock.build(Texts(["a"]), store, tokenizer="bytes")
    with locked(store):
        assert (tmp_path / ".store.lock").read_text() == f"{os.getpid()}\n"

    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert not (store / ".lock").exists()


def test_deleting_the_store_does_not_split_its_lock(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    with locked(store):
        shutil.rmtree(store)
        with pytest.raises(StoreBusyError):
            penstock.build(Texts(["a"]), store, tokenizer="bytes")


def test_every_path_to_a_directory_has_the_same_lock(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "store")
    monkeypatch.chdir(tmp_path)

    paths = {lock_path(Path(each)) for each in ("store", "./store/", "other", tmp_path / "store")}
    monkeypatch.chdir(tmp_path / "store")
    assert paths | {lock_path(Path())} == {tmp_path / ".store.lock"}


def test_the_root_directory_has_no_parent_and_holds_the_lock_itself():
    root = Path(Path.cwd().anchor)

    assert lock_path(root) == root / ".lock"


def test_a_directory_whose_parent_cannot_be_written_holds_the_lock_itself(tmp_path, monkeypatch):
    store = tmp_path / "store"
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    penstock.build(Texts(["a"]), store, tokenizer="bytes")
    with locked(store):
        assert (store / ".lock").exists()
        with pytest.raises(StoreBusyError):
            penstock.build(Texts(["b"]), store, tokenizer="bytes", append=True)


def test_a_lock_of_an_earlier_version_inside_a_store_is_ignored(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / ".lock").write_text("123\n")

    store = penstock.build(Texts(["a"]), tmp_path / "store", tokenizer="bytes")
    assert penstock.verify(store.path).decode(0) == "a"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_neither_holds_nor_removes_the_lock(tmp_path, python):
    code = """
import os, pathlib, sys
from penstock.errors import StoreBusyError
from penstock.disk import lock_path, locked
store = pathlib.Path(sys.argv[1])
with locked(store):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        assert lock_path(store).exists()
        try:
            with locked(store):
                sys.exit("taken twice")
        except StoreBusyError:
            print("still held")
"""
    assert python(code, tmp_path).stdout == "still held\n"


def test_processes_that_make_and_remove_the_lock_never_hold_it_together(tmp_path):
    """Each round opens, locks and removes the file while the others try the same."""
    code = """
import os, pathlib, sys
from penstock.errors import StoreBusyError
from penstock.disk import locked
store, rounds = pathlib.Path(sys.argv[1]), 0
while rounds < 100:
    try:
        with locked(store):
            os.close(os.open(store / "held", os.O_CREAT | os.O_EXCL))
            (store / "held").unlink()
            rounds += 1
    except StoreBusyError:
        pass
"""
    command = ["-c", code, str(tmp_path)]
    children = [zygote.Popen(command) for _ in range(4)]

    assert [child.wait(timeout=120) for child in children] == [0] * 4
