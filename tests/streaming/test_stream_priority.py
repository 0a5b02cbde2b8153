"""A build in the background takes no more of the machine than its readers want of it."""

import os
import sys
import threading
import time

import pytest

import penstock as ps
from penstock.store.journal import Journal
from penstock.store.waiting import WaitingReaders


class Noted:
    """A bytewise tokenizer that takes its time, and notes which threads called it."""

    eos_token_id = 256
    vocab_size = 257

    def __init__(self):
        self.callers = {}

    def __len__(self):
        return self.vocab_size

    def encode(self, text):
        priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.callers[threading.current_thread().name.split("_")[0]] = priority
        time.sleep(0.001)
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode()


@pytest.fixture
def noted():
    return Noted()


@pytest.fixture
def long_text(tmp_path, conftest):
    path = tmp_path / "long.txt"
    path.write_text(conftest.lines(3_000))
    return path


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities")


def test_one_worker_goes_on_while_nobody_waits(long_text, tmp_path, noted):
    with ps.stream(
        long_text, tmp_path / "store", tokenizer=noted, workers=6, documents="lines"
    ) as streamed:
        while not streamed.sealed:
            time.sleep(0.05)

    workers = {name: nice for name, nice in noted.callers.items() if name.startswith("build-")}
    workers.pop("build-help", None)
    assert set(workers) <= {"build-0", "build-1"}
    assert workers["build-0"] >= 10  # the other one makes a single slice


def test_all_workers_join_in_when_somebody_waits(long_text, tmp_path, noted):
    with ps.stream(
        long_text, tmp_path / "store", tokenizer=noted, workers=6, documents="lines"
    ) as streamed:
        num_tokens = sum(len(tokens) for tokens in streamed)

    assert {"build-2", "build-3", "build-4", "build-5"} <= set(noted.callers)
    assert num_tokens == long_text.stat().st_size


def test_a_reader_that_waits_is_seen_for_half_a_second(tmp_path):
    journal = Journal(tmp_path)
    readers = WaitingReaders(journal)
    assert not readers.hurry()

    time.sleep(0.02)  # the clock of a file system goes in steps of some milliseconds
    journal.ask()
    assert readers.hurry()
    assert readers.hurry()
    time.sleep(0.6)
    assert not readers.hurry()


def test_nothing_of_it_is_left_in_a_finished_store(long_text, tmp_path):
    with ps.stream(long_text, tmp_path / "store", tokenizer="bytes", documents="lines") as streamed:
        assert sum(len(tokens) for tokens in streamed)

    assert not (tmp_path / "store" / ".awaited").exists()
    Journal(tmp_path / "store").ask()
    assert not (tmp_path / "store" / ".awaited").exists()
