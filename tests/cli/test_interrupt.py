"""Ctrl-C ends in under two seconds, and the same command goes on."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import penstock as ps

LIMIT_SECONDS = 2.0

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals of Windows are others")


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """140 MB of lines of made-up words: three slices."""
    words = np.array([f"w{number:x} " for number in range(4_096)], "S6")
    path = tmp_path_factory.mktemp("big") / "big.txt"
    with path.open("wb") as stream:
        for seed in range(70):
            picked = words[np.random.default_rng(seed).integers(0, len(words), 400_000)]
            picked[::20] = b"end.\n"
            stream.write(picked.tobytes().replace(b"\0", b""))
    return path


def interrupted(command, ready, directory):
    """Start `command`, press Ctrl-C when `ready()` holds; returns exit code, stderr and seconds."""
    running = subprocess.Popen(
        [sys.executable, "-m", "penstock", *map(str, command)],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not ready() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    begun = time.monotonic()
    os.killpg(running.pid, signal.SIGINT)
    try:
        errors = running.communicate(timeout=60)[1]
    finally:
        running.kill()
        running.communicate()
    return running.returncode, errors, time.monotonic() - begun


def assert_left_politely(outcome):
    code, errors, seconds = outcome

    assert code == 130, errors
    assert errors.count("\n") == 1
    assert errors.startswith("Interrupted: ")
    assert seconds < LIMIT_SECONDS


@pytest.mark.slow
def test_a_build_goes_on_to_the_same_bytes(big, tmp_path, sums, penstock):
    store = tmp_path / "store"
    command = ["build", big, "--documents", "lines", "-o", store, "--threads", "1"]

    outcome = interrupted(command, lambda: any(store.glob(".slice-*.json")), tmp_path)
    assert_left_politely(outcome)
    assert "the same command goes on where it stopped" in outcome[1]
    assert not (store / "penstock.json").exists()
    sealed = {path.name: path.stat().st_mtime_ns for path in store.glob("part-*.npy")}

    shown = penstock(*command).stdout.decode()

    assert "finished, from where an earlier run stopped," in shown
    assert all((store / name).stat().st_mtime_ns == kept for name, kept in sealed.items())
    ps.build(str(big), tmp_path / "whole", documents="lines")
    assert sums(store) == sums(tmp_path / "whole")


@pytest.mark.slow
def test_a_build_deep_in_native_code_ends_as_fast(big, tmp_path):
    """The reference engine takes seconds for one call, and hears no signal in it."""
    store = tmp_path / "store"
    command = ["build", big, "--documents", "lines", "-o", store, "--engine", "tokenizers"]
    begun = time.monotonic()

    def ready():
        return (store / ".building.json").exists() and time.monotonic() - begun > 2

    assert_left_politely(interrupted(command, ready, tmp_path))


@pytest.mark.slow
def test_training_a_tokenizer_ends_as_fast(big, tmp_path):
    begun = time.monotonic()
    command = ["tokenizer", "train", big, "-o", "tokenizer.json", "--vocab-size", "9000"]

    assert_left_politely(interrupted(command, lambda: time.monotonic() - begun > 2, tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seconds", [0.15, 0.4, 0.8])
def test_ctrl_c_at_any_time_leaves_no_traceback(corpus, tmp_path, seconds):
    """While modules load, while the tokenizer does, or when all is over."""
    begun = time.monotonic()
    command = ["build", corpus, "--documents", "lines", "-o", "store"]

    code, errors, _ = interrupted(command, lambda: time.monotonic() - begun > seconds, tmp_path)

    assert code in (0, 130)
    assert "Traceback" not in errors
