"""A disk that is full: at fifty different moments, in a real file system of fifty sizes."""

import json
import shutil
import subprocess
import sys

import pytest

# Runs as root of a user namespace of its own, where it may mount a tmpfs of any size.
STARVED = """
import hashlib, json, pathlib, subprocess, sys
import penstock
from penstock.errors import DiskFullError, StoreError
from penstock.sources.slices import cut
cut.__kwdefaults__["slice_bytes"] = 6_000
inputs, folder, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
store = pathlib.Path(folder, "store")

def mount(size, *more):
    options = ",".join([f"size={size}", *more])
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)

def build():
    return penstock.build(
        inputs, store, tokenizer="bytes", documents="lines", workers=2, max_bad=2
    )

for size in sizes:
    mount(size)
    told = "room"
    try:
        build()
    except DiskFullError as error:
        told = str(error)
        try:
            penstock.verify(store)
            told = "verified"
        except StoreError:
            pass
    mount(64 << 20, "remount")
    build()
    sums = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(store.iterdir())
    }
    print(json.dumps([size, told, sums]), flush=True)
    subprocess.run(["umount", folder], check=True)
"""


def may_mount():
    if shutil.which("unshare") is None:
        return False
    tried = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return subprocess.run(tried, capture_output=True).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="unshare and mount are not allowed here")
@pytest.mark.parametrize(
    "num_sizes", [10, pytest.param(50, marks=[pytest.mark.torture, pytest.mark.timeout(3_600)])]
)
def test_a_full_disk_is_told_and_the_build_goes_on_when_there_is_room(
    trial, num_sizes, tmp_path, figure
):
    needed = sum(path.stat().st_blocks * 512 for path in trial.clean.iterdir()) + (16 << 10)
    sizes = [max(4096, needed * (step + 1) // (num_sizes + 4)) for step in range(num_sizes)]
    folder = tmp_path / "small"
    folder.mkdir()
    command = [sys.executable, "-c", STARVED, str(trial.inputs), str(folder), json.dumps(sizes)]
    done = subprocess.run(["unshare", "-rm", *command], capture_output=True, text=True, timeout=600)
    results = [json.loads(line) for line in done.stdout.splitlines()]

    assert done.returncode == 0, done.stderr
    assert [size for size, _, _ in results] == sizes
    for _, told, found in results:
        assert found == trial.expected
        assert told == "room" or "No room to write" in told
    full = sum(told != "room" for _, told, _ in results)
    figure(f"full disks gone on from: {full} of {num_sizes}, {sizes[0]:,} to {sizes[-1]:,} bytes")
    assert full >= 0.8 * num_sizes
