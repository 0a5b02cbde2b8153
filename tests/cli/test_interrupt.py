"""Ctrl-C ends a command at once, and the same command resumes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zygote
from tokenizers import Tokenizer, models

import penstock as ps
from penstock.sources.slices import cut

# Only against a hang. The native calls below would take longer than this if Ctrl-C waited for them.
TIMEOUT_SECONDS = 30

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """140 MB of lines of made-up words."""
    words = np.array([f"w{number:x} " for number in range(4_096)], "S6")
    picked = words[np.random.default_rng(0).integers(0, len(words), 400_000)]
    picked[::20] = b"end.\n"
    path = tmp_path_factory.mktemp("big") / "big.txt"
    path.write_bytes(picked.tobytes().replace(b"\0", b"") * 70)
    return path


# `python -m penstock` that cuts inputs into slices of 1.5 MB, as if they were 40 times as long.
SLICED = """
import penstock.cli
from penstock.sources.slices import cut
cut.__kwdefaults__["slice_bytes"] = 1_500_000
penstock.cli.main()
"""


def processor_seconds(process):
    """The processor time that a process has used: on a busy machine, the hour says nothing."""
    with Path(f"/proc/{process.pid}/stat").open() as stat:
        ticks = stat.read().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def interrupted(command, ready, directory, program=("-m", "penstock")):
    """Start `command`, press Ctrl-C when `ready(process)` is true; returns exit code and stderr."""
    running = zygote.Popen(
        [*program, *map(str, command)],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not ready(running) and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGINT)
    try:
        errors = running.communicate(timeout=TIMEOUT_SECONDS)[1]
    finally:
        running.kill()
        running.communicate()
    return running.returncode, errors


def assert_interrupted(outcome):
    code, errors = outcome

    assert code == 130, errors
    assert errors.count("\n") == 1
    assert errors.startswith("Interrupted: ")


@pytest.mark.slow
def test_a_build_resumes_to_the_same_bytes(big, tmp_path, sums, invoke, monkeypatch):
    store, text = tmp_path / "store", tmp_path / "text.txt"
    text.write_bytes(big.read_bytes()[:9_000_000])
    command = ["build", text, "--documents", "lines", "-o", store, "--workers", "1"]

    def ready(_):
        return any(store.glob(".slice-*.json"))

    outcome = interrupted(command, ready, tmp_path, ("-c", SLICED))
    assert_interrupted(outcome)
    assert "the same command resumes the build" in outcome[1]
    assert not (store / "penstock.json").exists()
    sealed = {path.name: path.stat().st_mtime_ns for path in store.glob("part-*.npy")}

    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", 1_500_000)
    shown = invoke(*command).stdout

    assert "resumed and finished in " in shown
    assert 0 < len(sealed) < len(list(store.glob("part-*.npy")))
    assert all((store / name).stat().st_mtime_ns == kept for name, kept in sealed.items())
    ps.build(str(text), tmp_path / "whole", documents="lines")
    assert sums(store) == sums(tmp_path / "whole")


@pytest.mark.slow
def test_a_build_inside_native_code_ends_at_once(big, tmp_path):
    """The reference engine takes seconds for one call, during which Python handles no signal."""
    store, slow = tmp_path / "store", tmp_path / "slow.json"
    pieces = [("<unk>", 0.0), *((letter, -1.0) for letter in " .0123456789abcdefnw")]
    Tokenizer(models.Unigram(pieces, 0)).save(str(slow))
    command = [
        "build",
        big,
        "--documents",
        "lines",
        "-o",
        store,
        "--tokenizer",
        slow,
        "--no-eos",
        "-q",
    ]

    def ready(process):
        return (store / ".building.json").exists() and processor_seconds(process) > 1.5

    assert_interrupted(interrupted(command, ready, tmp_path))


@pytest.mark.slow
def test_training_a_tokenizer_ends_at_once(big, tmp_path):
    command = ["tokenizer", "train", big, "-o", "tokenizer.json", "--vocab-size", "9000"]

    def ready(process):
        return processor_seconds(process) > 1.5

    assert_interrupted(interrupted(command, ready, tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seconds", [0.05, 0.3, 0.8])
def test_ctrl_c_at_any_time_leaves_no_traceback(corpus, tmp_path, seconds):
    """During imports, while the tokenizer is loaded, or after the build."""
    # The time counts from the moment when our code runs. While Python itself starts, which may
    # take long on a busy machine, nobody has set a handler.
    code = "import penstock.cli; print('started', flush=True); penstock.cli.main()"
    running = subprocess.Popen(  # a fresh one, which imports
        [sys.executable, "-c", code, "build", corpus, "--documents", "lines", "-o", "store"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout.readline() == "started\n"
    time.sleep(seconds)
    running.send_signal(signal.SIGINT)
    errors = running.communicate(timeout=TIMEOUT_SECONDS)[1]

    # Python removes all handlers when it ends, so a signal after the build can kill it.
    is_built = (tmp_path / "store" / "penstock.json").exists()
    assert running.returncode in ((0, 130, -signal.SIGINT) if is_built else (130,))
    assert "Traceback" not in errors


LOST = """
import signal, time
import penstock.cli
from penstock.cli import app

class Lost:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def run():
    Lost()
    try:
        time.sleep(20)
    except KeyboardInterrupt:
        print("interrupted")

app.run = run
penstock.cli.main()
"""


def test_ctrl_c_in_a_destructor_is_not_lost():
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
