"""SIGKILL at any moment, and at every rename and fsync; input/output errors; Ctrl-C."""

import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from itertools import count, product

import pytest
import zygote

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
STATES = ("fresh", "begun", "sealed")


def each_with_each_state(faults):
    """A fault at the second call, with each fault and each state once; with `torture`, all."""
    marks = [pytest.mark.torture, pytest.mark.timeout(3_600)]
    some = [(fault, state, (2,)) for fault, state in zip(faults, STATES, strict=True)]
    every = product(faults, STATES)
    return some + [pytest.param(fault, state, None, marks=marks) for fault, state in every]


def killed_after(trial, seconds):
    """Start a build in another process and kill it; None if that hit, else how long it took."""
    child = zygote.Popen(trial.arguments(), stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "begin\n"
    begin = time.monotonic()
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=seconds)
    took = time.monotonic() - begin
    child.kill()
    child.communicate(timeout=60)
    committed = (trial.place / "penstock.json").exists()
    return None if child.returncode == -signal.SIGKILL and not committed else took


def duration(trial):
    trial.begin_at()
    return killed_after(trial, 120)


@pytest.mark.parametrize(
    "num_kills", [4, pytest.param(100, marks=[pytest.mark.torture, pytest.mark.timeout(3_600)])]
)
def test_builds_killed_at_random_times_go_on_to_the_same_bytes(long_trial, num_kills, figure):
    chance = random.Random(num_kills)
    length = min(duration(long_trial) for _ in range(2))
    hits = 0
    for _ in range(num_kills):
        long_trial.begin_at()
        took = killed_after(long_trial, chance.uniform(0, length))
        hits += took is None
        length = min(length, took or length)  # a machine that is less busy now builds faster
        assert long_trial.is_whole_or_unfinished()
        assert long_trial.goes_on_to_the_same_bytes()

    figure(f"random kills that hit before the end: {hits} of {num_kills} ({length:.2f} s a build)")
    assert hits >= 0.5 * num_kills if num_kills < 10 else hits >= 0.7 * num_kills


@pytest.mark.torture
@pytest.mark.timeout(3_600)
def test_builds_with_worker_processes_killed_at_random_times_go_on_to_the_same_bytes(
    long_trial, figure, monkeypatch
):
    """tests/store/test_process_workers.py kills a build once, when all processes are at work."""
    monkeypatch.setenv("WORKERS", "processes:6")
    chance = random.Random(5)
    length = min(duration(long_trial) for _ in range(2))
    hits = 0
    for _ in range(50):
        long_trial.begin_at()
        hits += killed_after(long_trial, chance.uniform(0, length)) is None
        assert long_trial.is_whole_or_unfinished()
        assert long_trial.goes_on_to_the_same_bytes()

    figure(f"builds of 3 processes, random kills that hit before the end: {hits} of 50")
    assert hits >= 25


def test_a_build_killed_many_times_gets_there(long_trial):
    chance = random.Random(3)
    length = duration(long_trial)
    long_trial.begin_at()
    for _ in range(6):
        killed_after(long_trial, chance.uniform(0, 0.4 * length))

    assert long_trial.goes_on_to_the_same_bytes()


@pytest.fixture(scope="module")
def states(short_trial):
    """Where a build may start: fresh; begun, with no part sealed; all parts sealed.

    strace counts the calls of each thread apart, so that the worker's calls would hide the
    last ones of the main thread. From these three states, with one part, every call is the
    first to be the k-th of its thread. tests/store/test_crash.py does the same for many parts.
    """
    return {
        "fresh": None,
        "begun": short_trial.left_by("begun", "part-"),
        "sealed": short_trial.left_by("sealed", "rejects"),
    }


def with_fault(trial, state, fault):
    """Build under strace with a fault; the exit status and what was written to stderr."""
    trial.begin_at(state)
    trace = ["strace", "-f", "-o", "/dev/null", "-e", f"trace={fault.partition(':')[0]}"]
    done = subprocess.run(
        [*trace, "-e", f"inject={fault}", *trial.command()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr


@needs_strace
@pytest.mark.parametrize(
    ("call", "state", "points"), each_with_each_state(["rename", "fsync", "unlink"])
)
def test_builds_killed_at_a_call_go_on_to_the_same_bytes(
    short_trial, states, call, state, points, figure
):
    fired = 0
    for number in points or count(1):
        status, _ = with_fault(short_trial, states[state], f"{call}:signal=KILL:when={number}")
        if status == 0:
            break
        fired += 1
        assert status == -signal.SIGKILL
        assert short_trial.is_whole_or_unfinished()
        assert short_trial.goes_on_to_the_same_bytes(), f"killed at {call} {number} from {state}"

    figure(f"killed at {fired} calls of {call}, {state}")
    assert fired or call == "unlink"


@needs_strace
@pytest.mark.parametrize(
    ("fault", "state", "points"),
    each_with_each_state(["fsync:error=EIO", "write:error=EIO", "write:error=ENOSPC"]),
)
def test_a_call_that_fails_is_an_error_and_never_a_wrong_store(
    short_trial, states, fault, state, points, figure
):
    fired = 0
    for number in points or count(1):
        status, told = with_fault(short_trial, states[state], f"{fault}:when={number}")
        if status == 0 and number > 3:
            break
        if status != 0:
            fired += 1
            assert "Input/output error" in told or "No room to write" in told or "No space" in told
        assert short_trial.is_whole_or_unfinished()
        assert short_trial.goes_on_to_the_same_bytes(), f"{fault} at {number} from {state}"

    figure(f"{fault} at {fired} calls, {state}")


def test_an_interrupted_build_ends_at_once_and_can_go_on(long_trial):
    length = duration(long_trial)
    long_trial.begin_at()
    child = zygote.Popen(
        long_trial.arguments(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "begin\n"
    time.sleep(length / 3)
    begin = time.monotonic()
    child.send_signal(signal.SIGINT)
    _, told = child.communicate(timeout=30)

    assert time.monotonic() - begin < 2
    assert "KeyboardInterrupt" in told or child.returncode == 0
    assert long_trial.goes_on_to_the_same_bytes()
