"""The GPU benchmark runs from end to end, on a CPU, at a size that says nothing about speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.torture
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_it_compares_feeds_and_modes(store, tmp_path):
    size = ("--size", "nano", "--length", "16", "--rows", "2", "--device", "cpu", "--warm-up", "1")
    steps = ("--steps", "1", "--repetitions", "1", "--mode-steps", "2")
    text = tmp_path / "some.txt"
    text.write_text("Some words, and some more of them.\n\n" * 500)
    only = ("--text", text, "--feeds", "store", "packed", "stream", "get_batch", "--modes")
    modes = ("eager", "masks (eager)", "fp8")
    words = (store.path, "--parts", "feeds", "modes", *size, *steps, *only, *modes)
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu.py", *words, "--json", tmp_path / "all.json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    figures = json.loads((tmp_path / "all.json").read_text())
    for cores in ("all cores", "one core"):
        feeds = figures["feeds"][cores]["feeds"]
        assert sorted(feeds) == ["get_batch", "packed", "store", "stream"]
        assert all(0 < each["ratio"][0] < 100 for each in feeds.values())
        assert feeds["get_batch"]["bytes"] == [16.0]
    assert {"eager", "masks (eager)"} <= set(figures["modes"])
    assert all(each["same_fingerprints"] for each in figures["modes"].values())
    assert ("fp8" in figures["modes"]) or "fp8" in done.stdout
