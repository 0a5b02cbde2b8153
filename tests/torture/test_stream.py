"""Streams that are killed again and again, that starve, and whose builders die in turn."""

import json
import random
import shutil
import subprocess
import sys
import time

import pytest

import penstock
from penstock.loader import BatchFormat
from penstock.loader.loader import Loader
from penstock.rows.windows import Windows
from penstock.sources.slices import cut

SLICE_BYTES = 6_000
DEADLINE = 120

# Trains on argv[1] through argv[2] from the state in argv[3], and appends the fingerprint of each
# step with the state after it to argv[4].
CHILD = f"""
import json, pathlib, sys
import penstock
from penstock.sources.slices import cut
cut.__kwdefaults__["slice_bytes"] = {SLICE_BYTES}
options = {{"tokenizer": "bytes", "workers": 2, "timeout": 30}}
streamed = penstock.stream(sys.argv[1], sys.argv[2], documents="lines", **options)
import penstock.loader
format = penstock.loader.BatchFormat(fingerprint="tokens")
loader = penstock.Loader(penstock.Windows(streamed, 64), 8, epochs=2, format=format)
state = json.loads(sys.argv[3])
if state:
    loader.load_state_dict(state)
with open(sys.argv[4], "a") as log:
    print("begin", flush=True)
    for batch in loader:
        log.write(json.dumps([loader.fingerprint, loader.state_dict()]) + "\\n")
        log.flush()
print("end", flush=True)
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("stream") / "in.txt"
    path.write_text("".join(f"line {n} of some text {n * 7919}\n" for n in range(9_000)))
    return path


@pytest.fixture(scope="module")
def expected(text, tmp_path_factory):
    """The fingerprint of each step of the run that was never stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cut.__kwdefaults__, "slice_bytes", SLICE_BYTES)
        store = penstock.build(
            text, tmp_path_factory.mktemp("built") / "s", tokenizer="bytes", documents="lines"
        )
    loader = Loader(
        Windows(store, 64), 8, epochs=2, format=BatchFormat(fingerprint="tokens"), shuffle="part"
    )
    return [loader.fingerprint for _ in loader]


def begin(text, store, state, log):
    arguments = [text, store, json.dumps(state), log]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def told(log):
    """The lines that are whole."""
    if not log.exists():
        return []
    return [
        json.loads(line) for line in log.read_text().splitlines(keepends=True) if line[-1] == "\n"
    ]


@pytest.mark.torture
@pytest.mark.timeout(3_600)
def test_runs_killed_at_any_moment_resume_exactly(text, expected, tmp_path, figure):
    chance = random.Random(5)
    kills = steps = trial = 0
    while kills < 25:
        trial += 1
        store, state, found = tmp_path / f"{trial}", None, []
        while True:
            log = tmp_path / f"{trial}-{kills}.log"
            child = begin(text, store, state, log)
            assert child.stdout.readline() == "begin\n"
            try:
                child.wait(chance.uniform(0.05, 0.5))
            except subprocess.TimeoutExpired:
                child.kill()
            child.communicate(timeout=DEADLINE)
            lines = told(log)
            found += [fingerprint for fingerprint, _ in lines]
            state = lines[-1][1] if lines else state
            # It may be killed after its last step; a later loop would read further epochs.
            if child.returncode == 0 or len(found) >= len(expected):
                break
            kills += 1
        assert found == expected
        steps += len(found)
        shutil.rmtree(store)

    figure(f"streams killed {kills} times, {steps:,} steps each the right one")


@pytest.mark.torture
@pytest.mark.timeout(3_600)
def test_of_four_ranks_whose_builders_die_one_after_the_other_the_last_ends_right(
    text, expected, tmp_path, figure
):
    chance = random.Random(6)
    for trial in range(3):
        store = tmp_path / f"{trial}"
        logs = [tmp_path / f"{trial}-{rank}.log" for rank in range(4)]
        ranks = [begin(text, store, None, log) for log in logs]
        for rank in ranks[:3]:
            assert rank.stdout.readline() == "begin\n"
            time.sleep(chance.uniform(0, 0.2))
            rank.kill()
        for rank in ranks:
            rank.communicate(timeout=DEADLINE)
        assert ranks[3].returncode == 0
        for log in logs:
            found = [fingerprint for fingerprint, _ in told(log)]
            assert found == expected[: len(found)]
        assert len(found) == len(expected)

    figure("9 of 12 ranks killed, 3 runs of the rest ended right")


# Runs as root of a user namespace of its own, where it may mount a tmpfs of any size.
STARVED = f"""
import json, pathlib, subprocess, sys
import penstock
from penstock.errors import DiskFullError
from penstock.loader import BatchFormat
from penstock.sources.slices import cut
cut.__kwdefaults__["slice_bytes"] = {SLICE_BYTES}
inputs, folder, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

def mount(size, *more):
    options = ",".join([f"size={{size}}", *more])
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)

def run(state):
    found = []
    with penstock.stream(
        inputs, folder + "/store", tokenizer="bytes", documents="lines", workers=2, timeout=30
    ) as streamed:
        format = BatchFormat(fingerprint="tokens")
        loader = penstock.Loader(penstock.Windows(streamed, 64), 8, epochs=2, format=format)
        if state:
            loader.load_state_dict(state)
        try:
            for batch in loader:
                found.append(loader.fingerprint)
        except DiskFullError as error:
            return found, str(error), loader.state_dict()
        return found, "room", None

for size in sizes:
    mount(size)
    found, told, state = run(None)
    if told != "room":
        mount(64 << 20, "remount")
        more, again, _ = run(state)
        assert again == "room"
        found += more
    print(json.dumps([size, told, found]), flush=True)
    subprocess.run(["umount", "-l", folder], check=True)
"""


def may_mount():
    if shutil.which("unshare") is None:
        return False
    tried = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return subprocess.run(tried, capture_output=True).returncode == 0


@pytest.mark.torture
@pytest.mark.timeout(3_600)
@pytest.mark.skipif(not may_mount(), reason="unshare and mount are not allowed here")
def test_a_full_disk_raises_in_the_loop_and_the_run_continues(text, expected, tmp_path, figure):
    sizes = [(40 + 60 * step) << 10 for step in range(12)]
    folder = tmp_path / "small"
    folder.mkdir()
    command = [sys.executable, "-c", STARVED, str(text), str(folder), json.dumps(sizes)]
    done = subprocess.run(["unshare", "-rm", *command], capture_output=True, text=True, timeout=600)

    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [size for size, _, _ in results] == sizes
    full = [size for size, told, _ in results if told != "room"]
    for _, told, found in results:
        assert found == expected
        assert told == "room" or "No room to write" in told
    figure(f"disks of {full} bytes were full, and the run went on")
    assert full
