"""Threads without a slice do a part of the work on the slices of others."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

import penstock as ps
from penstock.sources.batch import Batch, binary_array
from penstock.store.idle import IdleThreads
from penstock.store.part import PartBuilder


def batches_of(*texts):
    for number, text in enumerate(texts):
        place = np.array([number], np.uint64)
        yield Batch(binary_array([text]), np.zeros(1, np.uint64), place)


@pytest.fixture
def helped():
    """Idle threads, two of which wait for work as long as the test runs."""
    idle = IdleThreads()
    with ThreadPoolExecutor(2) as threads, idle.open_slice():
        helpers = [threads.submit(idle.help) for _ in range(2)]
        yield idle
        idle.close()
        for each in helpers:
            each.result(timeout=10)


def test_an_idle_thread_does_offered_work(helped):
    assert helped.offer(threading.get_ident).result(timeout=10) != threading.get_ident()


def test_without_an_idle_thread_the_caller_does_the_work():
    idle = IdleThreads()

    assert idle.result(idle.offer(threading.get_ident)) == threading.get_ident()


@pytest.mark.parametrize("num_idle", [0, 2])
def test_batches_come_in_order_with_the_tokens_that_one_thread_would_give(helped, num_idle):
    idle = helped if num_idle else IdleThreads()
    tokenizer = ps.load_tokenizer("bytes")
    texts = [bytes([65 + number]) * (1 + number % 5) for number in range(26)]
    builder = PartBuilder(tokenizer, 256, None)

    found = list(idle.encode(builder, batches_of(*texts)))

    assert [batch.offsets.tolist() for batch, _ in found] == [[number] for number in range(26)]
    assert [tokens.tolist() for _, (tokens, *_) in found] == [[*text, 256] for text in texts]


def test_an_error_of_an_idle_thread_is_raised_where_the_result_is_needed(helped):
    def fail():
        raise ValueError("no tokens")

    with pytest.raises(ValueError, match="no tokens"):
        helped.result(helped.offer(fail))


def test_batches_that_nobody_needs_after_an_error_are_not_encoded():
    idle, encoded = IdleThreads(), []

    class Recorder(PartBuilder):
        def encode(self, batch):
            encoded.append(int(batch.offsets[0]))
            return super().encode(batch)

    def broken():
        yield from batches_of(b"a", b"b", b"c")
        raise OSError("the disk is gone")

    builder = Recorder(ps.load_tokenizer("bytes"), 256, None)
    idle._num_idle = 8  # as if threads were about to take work
    with pytest.raises(OSError, match="the disk is gone"):
        list(idle.encode(builder, broken()))
    with ThreadPoolExecutor(1) as threads, idle.open_slice():
        helper = threads.submit(idle.help)
        idle.offer(lambda: None).result(timeout=10)
        idle.close()
        helper.result(timeout=10)

    assert encoded == []


def test_an_idle_thread_returns_when_no_slice_is_open():
    idle = IdleThreads()
    with ThreadPoolExecutor(1) as threads:
        with idle.open_slice():
            helper: Future[None] = threads.submit(idle.help)
            idle.offer(lambda: None).result(timeout=10)
            assert not helper.done()

        helper.result(timeout=10)


class Recording:
    """A tokenizer that records which threads call it."""

    vocab_size, eos_token_id = 2, 1

    def __init__(self):
        self.threads = set()

    def encode(self, text):
        self.threads.add(threading.current_thread().name)
        time.sleep(0.03)  # lets the other threads begin
        return [0] * (len(text) % 7 + 1)


def test_all_threads_encode_the_only_slice_of_a_build(tmp_path):
    source = tmp_path / "long.txt"
    source.write_text("\n".join(f"{number} " * (1 << 20) for number in range(10, 20)))
    stores, threads = [], []
    for num_threads in (1, 2):
        tokenizer = Recording()
        store = ps.build(
            source,
            tmp_path / str(num_threads),
            tokenizer=tokenizer,
            documents="lines",
            threads=num_threads,
        )
        stores.append((store.num_tokens, store.digest))
        threads.append(len(tokenizer.threads - {"MainThread"}))

    assert threads == [1, 2]
    assert stores[0] == stores[1]
