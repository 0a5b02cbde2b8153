"""Each benchmark runs from end to end, at a size that says nothing about speed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="they read /proc")


def run(name, *options):
    command = [sys.executable, ROOT / "benchmarks" / name, "--repetitions", "1", *options]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_build_compares_with_raw_gigatoken(tmp_path):
    size = ("--bytes", 200_000, "--data", tmp_path, "--roots", ROOT / "src")

    shown = run("build.py", *size, "--folder", tmp_path, "--no-peers")

    for kind in ("text", "JSONL", "Parquet"):
        assert f"penstock build, {kind}" in shown
    assert "peak anonymous memory, txt" in shown


def test_loader_measures_each_case_in_a_process_of_its_own(tmp_path):
    size = ("--tokens", 300_000, "--seconds", 0.05, "--folder", tmp_path)
    only = ("penstock", "penstock, narrow", "NumPy gather", "nanoGPT get_batch")

    shown = run("loader.py", *size, "--json", tmp_path / "all.json", "--only", *only)

    figures = json.loads((tmp_path / "all.json").read_text())
    assert figures["failed"] == {}
    assert list(figures["cases"]) == list(only)
    for told in figures["cases"].values():
        assert min(*told["speed"], *told["first"], told["cold"]["speed"]) > 0
    assert figures["cases"]["penstock"]["exact"]
    assert figures["cases"]["nanoGPT get_batch"]["resume"] is None
    assert "penstock ÷ fastest peer (nanoGPT get_batch)" in shown
    assert "penstock, narrow ÷ NumPy gather" in shown


def test_loader_names_a_peer_that_is_not_installed(tmp_path):
    size = ("--tokens", 100_000, "--seconds", 0.01, "--folder", tmp_path)

    shown = run("loader.py", *size, "--only", "LitData")

    assert "not measured: LitData: litdata is not installed" in shown


def test_scale_goes_through_its_sizes(tmp_path):
    size = ("--tokens", 10**7, "--resumes", 2, "--seconds", 0.05, "--folder", tmp_path)

    shown = run("scale.py", *size)

    assert "10^6, 1 part" in shown
    assert "10^7, 64 parts, 64 sources" in shown
    assert not list(tmp_path.iterdir()), "stores were left behind"
