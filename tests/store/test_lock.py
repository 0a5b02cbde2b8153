"""One writer at a time; the second is told at once, and a dead one is never waited for."""

import os
import signal
import subprocess
import sys
import time

import pytest

import penstock
from penstock.errors import StoreBusyError, StoreError
from penstock.sources.texts import Texts
from penstock.store.lock import locked

HOLD = """
import pathlib, sys
from penstock.store.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of a store."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.communicate()


def test_a_second_writer_is_told_at_once_who_the_first_is(holder, tmp_path):
    begin = time.monotonic()
    with pytest.raises(StoreBusyError, match=rf"another process \(pid {holder.pid}\)"):
        penstock.build(Texts(["a"]), tmp_path, tokenizer="bytes")

    assert time.monotonic() - begin < 2
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
        assert penstock.verify(tmp_path).text(0) == "a"


def test_of_two_builds_at_once_one_wins_and_the_store_is_whole(inputs, tmp_path):
    code = """
import sys, penstock
from penstock.errors import StoreBusyError
try:
    penstock.build(sys.argv[1], sys.argv[2], tokenizer="bytes", documents="lines")
except StoreBusyError:
    sys.exit(3)
"""
    command = [sys.executable, "-c", code, str(inputs), str(tmp_path / "store")]
    children = [subprocess.Popen(command) for _ in range(3)]
    ends = [child.wait(timeout=60) for child in children]

    assert 0 in ends
    assert set(ends) <= {0, 3}
    assert len(penstock.verify(tmp_path / "store")) == 500


@pytest.mark.parametrize("kind", ["link", "hard link", "dead link"])
def test_a_lock_that_is_another_file_leaves_that_file_alone(tmp_path, kind):
    store = tmp_path / "store"
    penstock.build(Texts(["a"]), store, tokenizer="bytes")
    precious = tmp_path / "precious.txt"
    precious.write_text("not to be lost")
    (store / ".lock").unlink()
    if kind == "hard link":
        os.link(precious, store / ".lock")
        penstock.build(Texts(["b"]), store, tokenizer="bytes", append=True)
    else:
        target = precious if kind == "link" else tmp_path / "made.txt"
        (store / ".lock").symlink_to(target)
        with pytest.raises(StoreError, match=r"\.lock is a link to another file.*delete the link"):
            penstock.build(Texts(["b"]), store, tokenizer="bytes", append=True)

    assert precious.read_text() == "not to be lost"
    assert not (tmp_path / "made.txt").exists()


def test_a_lock_that_became_a_link_after_it_was_looked_at_is_not_followed(tmp_path, monkeypatch):
    """Two processes: one replaces the lock between our look at it and our opening it."""
    precious = tmp_path / "precious.txt"
    precious.write_text("not to be lost")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / ".lock").symlink_to(precious)
    monkeypatch.setattr("pathlib.Path.is_symlink", lambda path: False)

    with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / "store"):
        pass
    assert precious.read_text() == "not to be lost"
