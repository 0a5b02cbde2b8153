"""Slices that other processes make: the same bytes, and no harm when a process dies."""

import gzip
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
from penstock.errors import StoreError, TokenizerError, WorkerError
from penstock.options import BuildOptions
from penstock.store import runners
from penstock.store.build import begin
from penstock.store.job import prepare
from penstock.store.memory import num_slots
from penstock.store.processes import ProcessRunner
from penstock.store.slice_work import Order, Watch
from penstock.store.threads import ThreadRunner

# A tokenizer of bytes. On threads of a build it calls `on_thread`, where tests do what they need.
TOKENIZER = """
import logging, os, signal, threading, time, warnings
from pathlib import Path

class Bytes:
    vocab_size, eos_token_id = 257, 256

    def __init__(self, folder, build, do):
        self.folder, self.build, self.do = Path(folder), build, do

    def encode(self, text):
        if threading.current_thread() is not threading.main_thread():
            getattr(self, self.do)(os.getpid() == self.build)
        return list(text.encode())

    def meet(self, is_build, number=0):
        "Wait until as many processes as the name says have begun a slice."
        (self.folder / str(os.getpid())).touch()
        until = time.monotonic() + 60
        while len(list(self.folder.iterdir())) < number and time.monotonic() < until:
            time.sleep(0.01)

    def meet_2(self, is_build):
        self.meet(is_build, 2)

    def meet_3(self, is_build):
        self.meet(is_build, 3)

    def fail(self, is_build):
        self.meet(is_build, 2)
        if not is_build:
            raise LookupError("no such word")

    def refuse(self, is_build):
        self.meet(is_build, 2)
        if not is_build:
            raise Refused("no such word", response=404)

    def die(self, is_build):
        self.meet(is_build, 2)
        if not is_build:
            os.kill(os.getpid(), signal.SIGKILL)

    def hang(self, is_build):
        self.meet(is_build, 2)
        time.sleep(600)

    def log(self, is_build):
        self.meet(is_build, 2)
        if not is_build:
            logging.getLogger("penstock").warning("a line from %d", os.getpid())
            warnings.warn("a warning of a library", stacklevel=1)

class Refused(OSError):
    "As errors of HTTP libraries are: pickle cannot make another one."

    def __init__(self, text, *, response):
        super().__init__(text)
"""


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    """A function that makes a tokenizer of bytes; `do` says what it does on threads of a build."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "tokenizer_of_bytes.py").write_text(TOKENIZER)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    module = importlib.import_module("tokenizer_of_bytes")
    (tmp_path / "met").mkdir()
    yield lambda do: module.Bytes(tmp_path / "met", os.getpid(), do)
    del sys.modules["tokenizer_of_bytes"]


def processes_met(tmp_path):
    return {int(path.name) for path in (tmp_path / "met").iterdir()}


@pytest.fixture
def mixed(inputs):
    """Text, JSON Lines, compressed text, CSV and Parquet: several slices of each."""
    texts = [f"record {number}, naïve café {number * 7919}" for number in range(300)]
    lines = "".join(f"{each}\n" for each in texts)
    (inputs / "c.txt.gz").write_bytes(gzip.compress(lines.encode()))
    (inputs / "d.csv").write_text("text\n" + "".join(f'"{each}"\n' for each in texts))
    pq.write_table(pa.table({"text": texts}), inputs / "e.parquet", row_group_size=100)
    return inputs


def job_of(inputs, directory, append=False, **options):
    """The job of a build, ready to make slices."""
    settings = {"tokenizer": "bytes", "documents": "lines", "max_bad": 10}
    options = BuildOptions(**{**settings, **options})
    job = begin(prepare(inputs, directory, options, append=append))
    for side in job.sides:
        (job.directory / side).mkdir(exist_ok=True)
    return job


def made(runner, slots, job):
    """All slices of a job, made by some slots of a runner."""
    orders = (Order(piece, piece.index == 0) for piece in job.slices())
    lock, advances, found = threading.Lock(), [], []
    watch = Watch(advances.append, lambda: False)

    def take():
        with lock:
            return next(orders, None)

    def work(slot):
        while (each := runner.make_next(slot, take, watch)) is not None:
            found.append(each)

    with ThreadPoolExecutor(len(slots)) as threads:
        list(threads.map(work, slots))
    assert sum(each.tally.total_bytes for each in advances) > 0
    return sorted(found, key=lambda each: each.record.number)


@pytest.mark.parametrize("kind", ["mixed", "split", "append", "chat"])
def test_a_slice_has_the_same_bytes_when_another_process_makes_it(
    kind, mixed, tmp_path, small_slices, gpt2_chat
):
    inputs, options = mixed, {}
    if kind == "split":
        options = {"split": "hash:0.3"}
    if kind == "append":
        for name in ("one", "two"):
            penstock.build(
                penstock.Texts(["first", "second"]), tmp_path / name, tokenizer="bytes", eos=True
            )
        options = {"append": True}
    if kind == "chat":
        turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
        inputs = tmp_path / "chats.jsonl"
        inputs.write_text(f"{json.dumps({'messages': turns})}\n" * 300 + "none\n")
        options = {"chat": "chatml", "tokenizer": gpt2_chat}
    job = job_of(inputs, tmp_path / "one", **options)
    expected = made(ThreadRunner(job, 1), [0], job)
    job = job_of(inputs, tmp_path / "two", **options)
    runner = ProcessRunner(job, 4)
    with closing(runner):
        # The last slots belong to the other process.
        found = made(runner, range(runner.num_slots)[-num_slots(2) :], job)

    assert [each.record for each in found] == [each.record for each in expected]
    assert len(found) >= 4
    if kind == "chat":
        assert [each.turns.num_conversations for each in found] == [
            each.turns.num_conversations for each in expected
        ]


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_a_build_has_the_same_bytes_with_any_number_of_processes(
    num_processes, mixed, tmp_path, small_slices, sums, tokenizer
):
    options = {"documents": "lines", "max_bad": 10}
    penstock.build(mixed, tmp_path / "threads", tokenizer=tokenizer("meet"), **options)
    (tmp_path / "met" / str(os.getpid())).unlink()
    reports = []
    penstock.build(
        mixed,
        tmp_path / "processes",
        tokenizer=tokenizer({1: "meet", 2: "meet_2", 3: "meet_3"}[num_processes]),
        workers=f"processes:{2 * num_processes}",
        progress=reports.append,
        **options,
    )

    assert sums(tmp_path / "processes") == sums(tmp_path / "threads")
    assert len(processes_met(tmp_path)) == num_processes
    store = penstock.TokenStore(tmp_path / "processes")
    assert reports[-1].done_bytes == reports[-1].total_bytes
    assert reports[-1].num_tokens == store.num_tokens
    assert reports[-1].num_documents == len(store)


def test_an_error_of_a_worker_process_is_raised_and_says_where_it_was(
    mixed, tmp_path, small_slices, tokenizer
):
    with pytest.raises(LookupError, match="no such word") as caught:
        penstock.build(
            mixed,
            tmp_path / "store",
            tokenizer=tokenizer("fail"),
            documents="lines",
            workers="processes:4",
        )

    assert "In a worker process:\nTraceback" in caught.value.__notes__[0]
    assert_gone(processes_met(tmp_path) - {os.getpid()})


def test_an_error_that_cannot_be_sent_from_a_worker_process_ends_the_build_with_its_text(
    mixed, tmp_path, small_slices, tokenizer
):
    with pytest.raises(RuntimeError, match="Refused: no such word\nIn a worker process:\nTrace"):
        penstock.build(
            mixed,
            tmp_path / "store",
            tokenizer=tokenizer("refuse"),
            documents="lines",
            workers="processes:4",
        )


def test_a_worker_process_that_is_killed_is_an_error_and_the_build_can_be_resumed(
    mixed, tmp_path, small_slices, sums, tokenizer
):
    options = {"documents": "lines", "max_bad": 10}
    with pytest.raises(WorkerError, match=r"was killed by SIGKILL .* run the same build again"):
        penstock.build(
            mixed,
            tmp_path / "store",
            tokenizer=tokenizer("die"),
            workers="processes:4",
            **options,
        )
    assert not list((tmp_path / "store").glob("*.tmp"))
    penstock.build(mixed, tmp_path / "store", tokenizer=tokenizer("meet"), **options)
    penstock.build(mixed, tmp_path / "clean", tokenizer=tokenizer("meet"), **options)

    assert sums(tmp_path / "store") == sums(tmp_path / "clean")


def test_log_lines_and_warnings_of_worker_processes_are_logged_here(
    mixed, tmp_path, small_slices, tokenizer, caplog
):
    penstock.build(
        mixed,
        tmp_path / "store",
        tokenizer=tokenizer("log"),
        documents="lines",
        max_bad=10,
        workers="processes:4",
    )
    (other,) = processes_met(tmp_path) - {os.getpid()}

    assert f"a line from {other}" in caplog.messages
    assert any("a warning of a library" in line for line in caplog.messages)


def assert_gone(processes):
    """All processes with these ids end within a minute."""
    until = time.monotonic() + 60
    while alive := [each for each in processes if is_alive(each)]:
        assert time.monotonic() < until, f"{alive} are left"
        time.sleep(0.01)


def is_alive(process):
    try:
        # A zombie has ended; whoever adopted it will notice.
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


SCRIPT = """
import os, sys
sys.path.insert(0, sys.argv[3])
import penstock
from penstock.sources.slices import cut
from tokenizer_of_bytes import Bytes
print("the script runs", flush=True)
cut.__kwdefaults__["slice_bytes"] = 4_000
penstock.build(
    sys.argv[1], sys.argv[2], tokenizer=Bytes(sys.argv[4], os.getpid(), sys.argv[5]),
    documents="lines", max_bad=10, workers="processes:4",
)
"""


@pytest.fixture
def script(tmp_path, mixed, tokenizer):
    """A function that starts a script, which does not guard itself against a second run."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)

    def start(do):
        arguments = [mixed, tmp_path / "store", tmp_path / "modules", tmp_path / "met", do]
        return subprocess.Popen(
            [sys.executable, str(path), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def test_worker_processes_do_not_run_the_users_script_again(script, tmp_path):
    child = script("meet_2")
    output, errors = child.communicate(timeout=120)

    assert child.returncode == 0, errors
    assert output == "the script runs\n"
    assert len(processes_met(tmp_path)) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "ctrl_c"])
def test_no_process_is_left_when_the_build_ends_and_the_build_can_be_resumed(
    number, script, tmp_path, sums, mixed, small_slices, tokenizer
):
    child = script("hang")
    until = time.monotonic() + 60
    while len(processes_met(tmp_path)) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(processes_met(tmp_path)) == 2
    child.send_signal(number)
    child.communicate(timeout=60)
    assert_gone(processes_met(tmp_path))

    for name in ("store", "clean"):
        options = {"documents": "lines", "max_bad": 10}
        penstock.build(mixed, tmp_path / name, tokenizer=tokenizer("meet"), **options)
    assert sums(tmp_path / "store") == sums(tmp_path / "clean")


class _Local:
    """A tokenizer that cannot be pickled."""

    vocab_size = 256
    eos_token_id = 0

    def __init__(self):
        self.encode = lambda text: list(text.encode())


def test_a_tokenizer_that_cannot_be_pickled_needs_threads(mixed, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    options = {"tokenizer": _Local(), "documents": "lines", "max_bad": 10}
    with pytest.raises(StoreError, match=r"cannot be pickled: .*Use workers=\"threads\""):
        penstock.build(mixed, tmp_path / "store", workers="processes", **options)

    monkeypatch.setattr(runners, "_MUCH_TEXT", 0)
    penstock.build(mixed, tmp_path / "store", workers=5, **options)
    assert any("cannot be pickled" in line for line in caplog.messages)


def test_a_tokenizer_of_the_script_itself_is_not_sent_to_processes(
    python, mixed, tmp_path, tokenizer
):
    done = python(
        TOKENIZER
        + """
import penstock, sys
penstock.build(sys.argv[1], sys.argv[2], tokenizer=Bytes(".", 0, "log"), workers="processes")
""",
        mixed,
        tmp_path / "store",
        check=False,
    )

    assert "StoreError: The build cannot be sent to worker processes" in done.stderr
    assert "Bytes is defined in the script itself" in done.stderr


def test_many_threads_and_much_text_are_needed_to_use_processes_by_default(
    mixed, tmp_path, monkeypatch
):
    job = job_of(mixed, tmp_path / "store", workers=5)
    monkeypatch.setattr(runners, "_MUCH_TEXT", 1)

    with closing(runners.runner_for(job)) as runner:
        assert isinstance(runner, ProcessRunner)
    few = job_of(mixed, tmp_path / "store", workers=4)
    assert isinstance(runners.runner_for(few), ThreadRunner)
    monkeypatch.setattr(runners, "_MUCH_TEXT", 1 << 30)
    assert isinstance(runners.runner_for(job), ThreadRunner)


def test_an_unknown_kind_of_workers_is_refused(mixed, tmp_path):
    with pytest.raises(
        StoreError, match=r"workers=\'gpus\' \(--workers\) is not .*threads:N, processes:N"
    ):
        penstock.build(mixed, tmp_path / "store", workers="gpus")


def test_a_mismatch_of_engines_in_a_worker_process_keeps_its_type():
    from multiprocessing.reduction import ForkingPickler

    error = ForkingPickler.loads(ForkingPickler.dumps(TokenizerError("one and two disagree")))
    assert type(error) is TokenizerError
