"""Errors of a background build are raised in the loop, or another process continues; no hangs."""

import os
import resource
import signal
import subprocess
import threading
import time
import traceback

import pytest
import zygote

import penstock
from penstock.errors import DiskFullError, SourceError, StoreBusyError, StoreError
from penstock.loader import BatchFormat
from penstock.loader.loader import Loader
from penstock.rows.windows import Windows
from penstock.streaming.waits import StallTimer

DEADLINE = 240

# Streams argv[1] into argv[2]; lines with a § take a while. Then does what argv[3] says.
CHILD = """
import sys, time
import penstock
from penstock.sources.slices import cut
cut.__kwdefaults__["slice_bytes"] = 3_000

class Slow:
    eos_token_id, vocab_size = 256, 257
    def __len__(self): return 257
    def encode(self, text):
        if "§" in text:
            time.sleep(0.02)
        return list(text.encode())
    def decode(self, ids): return bytes(ids).decode()

def stream(**options):
    options |= {"tokenizer": Slow(), "workers": 2, "documents": "lines"}
    return penstock.stream(sys.argv[1], sys.argv[2], **options)

"""


def child(code, text, store, **options):
    command = ["-c", CHILD + code, str(text), str(store)]
    return zygote.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


class Slow:
    """The tokenizer of the children, which does not wait."""

    eos_token_id, vocab_size = 256, 257

    def __len__(self):
        return self.vocab_size

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode()


@pytest.fixture
def slow_text(tmp_path, conftest):
    """A file that takes the children some seconds, except its beginning."""
    path = tmp_path / "slow.txt"
    path.write_text(conftest.lines(held_at=range(300, 1_200, 2)))
    return path


@pytest.fixture
def endless_text(tmp_path, conftest):
    """A file that takes the children a minute, except its beginning."""
    path = tmp_path / "endless.txt"
    path.write_text(conftest.lines(12_000, held_at=range(300, 12_000, 2)))
    return path


def finished(store):
    return (store / "penstock.json").exists()


def slowly(iterator, found):
    """Read to the end as slowly as a training loop, adding what is read to `found`."""
    for batch in iterator:
        found.append(batch)
        time.sleep(0.02)


def test_a_build_that_fails_raises_in_the_loop_with_its_traceback(stream, held, tmp_path, conftest):
    path = tmp_path / "in.txt"
    text = conftest.lines(held_at=[900]).encode()
    path.write_bytes(text + b"bad \xff\n" * 100)
    loader = Loader(Windows(stream(path, tokenizer=held), 32), 1)
    iterator = iter(loader)
    next(iterator)
    held.let_on()

    with pytest.raises(SourceError, match="records were rejected") as caught:
        slowly(iterator, [])

    assert "refuse_bad" in "".join(traceback.format_exception(caught.value))
    assert loader.position < 1_000


def test_an_error_stays_told(stream, tmp_path, conftest):
    (tmp_path / "in.txt").write_bytes(b"bad \xff\n" * 100)
    loader = Loader(Windows(stream(tmp_path / "in.txt"), 32), 1)

    for _ in range(2):
        with pytest.raises(SourceError, match="records were rejected"):
            next(iter(loader))


def test_an_input_that_changes_under_the_stream_is_an_error(stream, held, tmp_path, conftest):
    path = tmp_path / "in.txt"
    path.write_text(conftest.lines(held_at=[600]))
    loader = Loader(Windows(stream(path, tokenizer=held), 32), 8, epochs=1)
    iterator = iter(loader)
    next(iterator)
    path.write_text(conftest.lines(held_at=[600]).replace("some", "same"))
    held.let_on()

    with pytest.raises(SourceError, match=r"changed while it was read|ended at byte"):
        list(iterator)


def test_a_full_disk_is_told_in_the_loop_and_the_run_goes_on_when_there_is_room(
    stream, held, tmp_path, conftest, same
):
    """RLIMIT_FSIZE fails a write as a full disk does."""
    path = tmp_path / "in.txt"
    path.write_text(conftest.lines(held_at=[600]))
    first = stream(path, tokenizer=held, timeout=10)
    loader = Loader(Windows(first, 32), 8, epochs=1)
    iterator = iter(loader)
    found = [next(iterator) for _ in range(4)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, limits[1]))
    try:
        held.let_on()
        with pytest.raises(DiskFullError, match="No room to write"):
            slowly(iterator, found)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    state = loader.state_dict()
    first.close()

    again = Loader(Windows(stream(path, tokenizer=held), 32), 8, epochs=1)
    again.load_state_dict(state)
    found += list(again)
    whole = Loader(Windows(tmp_path / "s", 32), 8, epochs=1, shuffle="part")
    assert same(found, list(whole))


def test_a_reader_gives_up_after_its_deadline_and_says_on_what(stream, held, tmp_path, conftest):
    path = tmp_path / "in.txt"
    path.write_text(conftest.lines(held_at=[600]))
    builds = stream(path, tokenizer=held)
    builds.await_parts(1)  # or the other one might be the first to get the lock
    waiting = stream(path, tokenizer=held, timeout=0.5)
    loader = Loader(Windows(waiting, 32), 8, epochs=1)

    with pytest.raises(StoreBusyError, match=rf"while part \d+ was awaited.* is {os.getpid()}\."):
        list(loader)


def test_a_process_that_was_stopped_has_not_waited(monkeypatch):
    clock = iter([0.0, 0.5, 1.0, 1_000.0, 1_000.1, 1_000.2])
    monkeypatch.setattr("penstock.streaming.waits.time.monotonic", lambda: next(clock))
    timer = StallTimer()

    assert [timer.seconds(7) for _ in range(3)] == [0.0, 0.5, 1.5]
    assert timer.seconds(7) == pytest.approx(1.6)
    assert timer.seconds(8) == 0


def test_another_process_continues_when_the_builder_is_killed(slow_text, tmp_path, same):
    store = tmp_path / "s"
    code = "streamed = stream(); time.sleep(0.3); print('begun', flush=True); time.sleep(60)"
    builder = child(code, slow_text, store)
    assert builder.stdout.readline() == "begun\n"
    with penstock.stream(
        slow_text, store, tokenizer=Slow(), timeout=30, workers=2, documents="lines"
    ) as streamed:
        loader = Loader(Windows(streamed, 32), 8, epochs=1)
        iterator = iter(loader)
        found = [next(iterator) for _ in range(5)]
        sealed = streamed.sealed
        builder.kill()
        builder.communicate(timeout=DEADLINE)
        found += list(iterator)

    assert not sealed, "the child had finished before it was killed"
    assert same(found, list(Loader(Windows(store, 32), 8, epochs=1, shuffle="part")))


def test_ranks_that_start_apart_share_one_build(slow_text, tmp_path):
    code = """
streamed = stream(timeout=30)
time.sleep(float(sys.argv[3]))
import penstock.loader
format = penstock.loader.BatchFormat(fingerprint="tokens")
loader = penstock.Loader(penstock.Windows(streamed, 32), 8, epochs=1, format=format)
total = 0
for batch in loader:
    total = (total * 31 + loader.fingerprint) % 2**64
print(total, loader.position, flush=True)
"""
    store = tmp_path / "s"
    ranks = []
    for delay in ("0", "0.5"):
        command = ["-c", CHILD + code, str(slow_text), str(store), delay]
        ranks.append(zygote.Popen(command, stdout=subprocess.PIPE, text=True))
        time.sleep(float(delay) + 0.2)
    printed = [each.communicate(timeout=DEADLINE)[0] for each in ranks]

    loader = Loader(
        Windows(store, 32), 8, epochs=1, shuffle="part", format=BatchFormat(fingerprint="tokens")
    )
    total = 0
    for _ in loader:
        total = (total * 31 + loader.fingerprint) % 2**64
    assert printed == [f"{total} {loader.position}\n"] * 2


def test_a_run_that_is_killed_resumes_exactly(slow_text, tmp_path, same):
    """SIGKILL to builder and reader at once, in the middle of the build; the state survives."""
    code = """
import json
loader = penstock.Loader(penstock.Windows(stream(), 32), 8, epochs=1)
for batch in loader:
    print(json.dumps([loader.state_dict(), batch["inputs"].tolist()]), flush=True)
"""
    import json

    store = tmp_path / "s"
    killed = child(code, slow_text, store)
    kept = [json.loads(killed.stdout.readline()) for _ in range(20)]
    killed.kill()
    killed.communicate(timeout=DEADLINE)
    unfinished = not finished(store)
    with penstock.stream(
        slow_text, store, tokenizer=Slow(), timeout=30, workers=2, documents="lines"
    ) as streamed:
        loader = Loader(Windows(streamed, 32), 8, epochs=1)
        loader.load_state_dict(kept[-1][0])
        found = [batch["inputs"].tolist() for batch in loader]

    alone = Loader(Windows(store, 32), 8, epochs=1, shuffle="part")
    assert unfinished
    assert [rows for _, rows in kept] + found == [batch["inputs"].tolist() for batch in alone]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("streamed = stream()", 0),
        ("i = iter(penstock.Loader(penstock.Windows(stream(), 32), 8)); next(i)", 0),
        ("streamed = stream(); next(iter(streamed)); raise SystemExit(3)", 3),
    ],
)
def test_a_process_ends_without_waiting_for_its_build(endless_text, tmp_path, code, status):
    process = child(code + "\nsys.stderr.write('last line')", endless_text, tmp_path / "s")
    _, errors = process.communicate(timeout=DEADLINE)

    assert process.returncode == status, errors
    if not status:
        assert errors == "last line"
    assert not finished(tmp_path / "s")


def test_ctrl_c_ends_a_loop_that_waits_for_a_part(endless_text, tmp_path):
    code = """
print("begun", flush=True)
loader = penstock.Loader(penstock.Windows(stream(), 32), 8)
for batch in loader:
    if loader.position == 8:
        print("first", flush=True)
"""
    process = child(code, endless_text, tmp_path / "s")
    assert process.stdout.readline() == "begun\n"
    assert process.stdout.readline() == "first\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=DEADLINE)

    assert "KeyboardInterrupt" in errors
    assert not finished(tmp_path / "s")


def test_leaving_a_loop_that_waits_does_not_wait(stream, held, tmp_path, conftest):
    path = tmp_path / "in.txt"
    path.write_text(conftest.lines(held_at=[600]))
    loader = Loader(Windows(stream(path, tokenizer=held), 32), 8, prefetch=4)
    iterator = iter(loader)
    next(iterator)
    time.sleep(0.2)
    iterator.close()

    # The part is still held, so a thread that waited for it would still be alive.
    assert "penstock-ahead" not in {each.name for each in threading.enumerate()}


def test_a_fork_beside_a_thread_that_waits_for_a_part(stream, held, tmp_path, conftest):
    path = tmp_path / "in.txt"
    path.write_text(conftest.lines(held_at=[600]))
    streamed = stream(path, tokenizer=held)
    loader = Loader(Windows(streamed, 32), 8, prefetch=50)
    iterator = iter(loader)
    next(iterator)
    time.sleep(0.3)  # the thread has read all rows of the sealed parts
    process = os.fork()
    if process == 0:
        fine = loader[3]["inputs"].shape == (8, 32) and not streamed.sealed
        os._exit(0 if fine else 1)
    _, status = os.waitpid(process, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    # The build is still held. A fork that had waited for the part would have lasted until the
    # tokenizer gave up, which is an error of the build.
    streamed.check()
    iterator.close()


def test_a_forked_child_does_not_keep_the_lock(stream, held, tmp_path, conftest):
    """Otherwise no process could continue the build while the child lives."""
    path = tmp_path / "in.txt"
    path.write_text(conftest.lines(held_at=[600]))
    first = stream(path, tokenizer=held)
    next(iter(Loader(Windows(first, 32), 8, prefetch=0)))
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.read(reading, 1)  # lives until the parent writes
        os._exit(0)
    first.close()
    held.let_on()

    second = stream(path, tokenizer=held)
    assert len(list(Loader(Windows(second, 32), 8, epochs=1))) > 100
    os.write(writing, b"x")
    os.waitpid(process, 0)
    os.close(reading)
    os.close(writing)


def test_a_stream_that_was_closed_says_so(stream, held, tmp_path, conftest):
    path = tmp_path / "in.txt"
    path.write_text(conftest.lines(held_at=[600]))
    streamed = stream(path, tokenizer=held)
    iterator = iter(Loader(Windows(streamed, 32), 8, prefetch=0))
    next(iterator)
    streamed.close()

    with pytest.raises(StoreError, match="the stream was closed"):
        list(iterator)


def test_a_stream_that_is_dropped_stops_building(stream, held, tmp_path, conftest):
    import gc

    path = tmp_path / "in.txt"
    path.write_text(conftest.lines(held_at=[600]))
    streamed = penstock.stream(path, tmp_path / "s", tokenizer=held, documents="lines")
    held.let_on()
    del streamed
    gc.collect()

    assert not [each for each in threading.enumerate() if each.name == "penstock-stream"]


def test_a_directory_with_something_else_is_refused(stream, tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.txt").write_text("mine")

    with pytest.raises(StoreError, match="not empty and not a store"):
        next(iter(Loader(Windows(stream(), 32), 8)))
