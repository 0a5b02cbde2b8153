"""The thread that reads ahead: it ends, and its errors arrive."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
import zygote

from penstock.loader.loader import Loader
from penstock.loader.prefetch import Ahead
from penstock.rows.windows import Windows


def readers():
    return [each for each in threading.enumerate() if each.name == "penstock-ahead"]


class Failing:
    """Rows of which one cannot be read."""

    length = 4
    digest = "failing"

    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 10_000

    def read(self, samples):
        if (samples == self.bad).any():
            raise OSError(f"row {self.bad} is gone")
        return {"tokens": np.repeat(samples[:, None], 5, axis=1)}


def test_a_thread_reads_while_batches_are_taken(numbered):
    iterator = iter(Loader(numbered(100), 8, prefetch=1))
    assert readers() == []  # not before the first is wanted
    next(iterator)

    assert len(readers()) == 1
    iterator.close()
    assert readers() == []


def test_no_thread_without_prefetch(numbered):
    iterator = iter(Loader(numbered(100), 8, prefetch=0))
    next(iterator)

    assert readers() == []


def test_a_thread_ends_with_the_run(numbered):
    loader = Loader(numbered(100), 8, epochs=1)
    iterator = iter(loader)
    assert len(list(iterator)) == 12

    assert readers() == []
    assert next(iterator, None) is None


def test_a_thread_ends_when_the_loop_is_left(numbered):
    loader = Loader(numbered(100), 8)
    for _ in loader:
        break
    assert readers() == []
    try:
        for batch in loader:
            raise KeyError(batch)
    except KeyError:
        pass

    assert readers() == []


def test_a_thread_ends_when_its_iterator_is_forgotten(numbered):
    iterator = iter(Loader(numbered(100), 8))
    next(iterator)
    del iterator

    assert readers() == []


def test_a_thread_ends_when_it_is_overtaken(numbered):
    loader = Loader(numbered(100), 8)
    kept = []
    for _ in range(5):
        kept.append(iter(loader))
        next(kept[-1])
        assert len(readers()) == 1
    loader.seek(8)

    assert readers() == []


def test_a_hundred_loaders_leave_no_thread_and_no_file_open(store):
    def open_files():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    for number in range(101):
        loader = Loader(Windows(store.path, 16), 8, prefetch=3)
        for step, _ in enumerate(loader):
            if step == number % 3:
                break
        if number == 0:
            del loader
            before = open_files()
    del loader

    assert open_files() <= before
    assert readers() == []


def anonymous_bytes():
    """Memory that is not a mapped file."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024


@pytest.mark.parametrize("prefetch", [0, 2])
def test_twenty_thousand_batches_leave_no_trace(store, prefetch):
    """A million in `tests/torture/test_loader_soak.py`."""
    loader = Loader(Windows(store, 16), 2, prefetch=prefetch, steps=24_000)
    for step, _ in enumerate(loader, 1):
        if step == 4_000:
            before = anonymous_bytes()
    assert step == 24_000

    assert anonymous_bytes() - before <= 16 << 20


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_an_error_keeps_its_own_traceback_and_says_where(prefetch):
    loader = Loader(Failing(5_000), 8, shuffle="none", prefetch=prefetch)
    taken = []
    with pytest.raises(OSError, match="row 5000 is gone") as caught:
        taken.extend(batch["inputs"][0, 0].item() for batch in loader)
    found = len(taken)

    assert taken == list(range(0, 8 * found, 8))
    assert loader.position == 8 * found
    assert 5_000 - 64 * 8 < loader.position <= 5_000  # a block is read as one
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "read"
    assert caught.value.__notes__ == [
        f"While reading a block of steps from step {found:,} on (position {8 * found:,}), as rank "
        "0 of 1."
    ]
    assert readers() == []


def test_a_run_goes_on_after_an_error_that_passed():
    rows = Failing(5_000)
    loader = Loader(rows, 8, shuffle="none", steps=800)
    with pytest.raises(OSError, match="is gone"):
        list(loader)
    stopped = loader.position
    rows.bad = -1

    assert [batch["inputs"][0, 0].item() for batch in loader] == list(range(stopped, 6_400, 8))


def test_nothing_is_made_that_was_not_asked_to_be_ahead():
    made = []

    def items():
        for number in range(100):
            made.append(number)
            yield number

    ahead = Ahead(items, 3)
    for number in range(10):
        assert next(ahead) == number
        ahead.taken()
    deadline = time.monotonic() + 5
    while len(made) < 13 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)

    assert made == list(range(13))
    ahead.close()
    assert list(ahead) == []
    assert readers() == []


def test_prefetched_batches_do_not_move_the_state(numbered):
    loader = Loader(numbered(10_000), 8, prefetch=4)
    iterator = iter(loader)
    for step in range(1, 80):
        next(iterator)
        time.sleep(0.002 if step % 20 == 0 else 0)  # let it run ahead
        assert loader.position == loader.state_dict()["position"] == 8 * step
        assert loader.step == step
    iterator.close()


def test_an_iterator_of_the_parent_says_that_it_is_not_here(numbered):
    loader = Loader(numbered(100), 8)
    iterator = iter(loader)
    next(iterator)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            next(iterator)
            next(iterator)
            for _ in range(100):
                next(iterator)
        except RuntimeError as error:
            code = 0 if "Call iter(loader) again in this process" in str(error) else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20
    pid = 0
    while not pid and time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)

    assert pid == child
    assert os.waitstatus_to_exitcode(status) == 0
    iterator.close()


LEAVES = """
import sys, numpy as np
from penstock.loader.loader import Loader
from penstock.rows.windows import Windows
np.save(sys.argv[1], np.arange(60_000, dtype="uint16"))
iterator = iter(Loader(Windows(sys.argv[1], 64), 8, prefetch=4))
for _ in range(70):
    next(iterator)
print("reading", flush=True)
"""


def test_an_interpreter_ends_in_the_middle_of_an_iteration(python, tmp_path):
    done = python(LEAVES, tmp_path / "tokens.npy")

    assert (done.stdout, done.stderr) == ("reading\n", "")


def test_ctrl_c_ends_a_run_without_end(tmp_path):
    code = LEAVES + "for _ in iterator: pass"
    process = zygote.Popen(
        ["-c", code, tmp_path / "tokens.npy"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_many_switches_between_threads_change_nothing(store):
    windows = Windows(store, 16)
    expected = [batch["inputs"] for batch in Loader(windows, 8, epochs=2, prefetch=0)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for prefetch in (1, 2, 4):
            loader = Loader(windows, 8, epochs=2, prefetch=prefetch)
            for batch, right in zip(loader, expected, strict=True):
                assert torch.equal(batch["inputs"], right)
    finally:
        sys.setswitchinterval(interval)
