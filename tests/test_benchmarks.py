"""Each benchmark runs from end to end, at a size that says nothing about speed."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = [
    pytest.mark.torture,
    pytest.mark.skipif(sys.platform != "linux", reason="they read /proc"),
]


def run(name, *options):
    command = [sys.executable, ROOT / "benchmarks" / name, "--repetitions", "1", *options]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_build_compares_with_raw_gigatoken(tmp_path):
    size = ("--bytes", 200_000, "--data", tmp_path, "--roots", ROOT / "src")

    shown = run("build.py", *size, "--folder", tmp_path, "--no-peers")

    for kind in ("text", "JSONL", "Parquet"):
        assert f"penstock build, {kind}" in shown
    assert "peak anonymous memory, txt" in shown


def test_loader_measures_each_case_and_names_those_it_cannot(tmp_path):
    size = ("--tokens", 300_000, "--seconds", 0.05, "--folder", tmp_path)
    only = ("penstock", "nanoGPT get_batch", "LitData")

    shown = run("loader.py", *size, "--json", tmp_path / "all.json", "--only", *only)

    figures = json.loads((tmp_path / "all.json").read_text())
    for name in only[:2]:
        told = figures["cases"][name]
        cold = [each["speed"] for each in told["cold"]]
        assert min(*told["speed"], *told["first"], *cold) > 0
    assert figures["cases"]["penstock"]["exact"]
    assert figures["cases"]["nanoGPT get_batch"]["resume"] is None
    assert "penstock ÷ nanoGPT get_batch" in shown
    if not find_spec("litdata"):
        assert "not measured: LitData: litdata is not installed" in shown


def test_inspect_runs_measures_both_commands(tmp_path):
    shown = run("inspect_runs.py", "--tokens", 10**6, "--folder", tmp_path)

    assert "inspect        median" in shown
    assert "when           median" in shown


def test_scale_goes_through_its_sizes(tmp_path):
    size = ("--tokens", 10**6, "--parts", 20, "--sources", 4, "--records", 20, "--steps", 2)

    shown = run("scale.py", *size, "--repetitions", 1, "--resumes", 1, "--folder", tmp_path)

    for name in ("| 10^6 | 1 |", "| 16,384 |", "| manifest |", "| remove that journal |"):
        assert name in shown
    page = (ROOT / "docs" / "scale.md").read_text()
    for line in shown.splitlines():
        if line.startswith(("| tokens |", "| ranks |")):
            assert line in page, "docs/scale.md has another table"
    assert not list(tmp_path.iterdir()), "stores were left behind"


def test_multiplex_compares_with_a_generator():
    assert "dict of lists" in run("multiplex.py", "--examples", 200)


def test_formats_compares_with_a_store_and_with_the_loaders_that_are_installed():
    shown = run("formats.py", "--tokens", 400_000, "--seconds", 0.01)

    for name in ("native store", "llm.c", "Megatron", "nanoGPT", "npy", "datatrove", "OLMo"):
        assert f"\n{name}" in shown
    for name, package in (("LitData", "litdata"), ("datasets", "datasets")):
        expected = f"\n{name}" if find_spec(package) else f"not measured: {name} is not installed"
        assert expected in shown
    # Loaders without a package are always measured.
    for name in ("nanoGPT's get_batch", "llm.c's DistributedDataLoader", "modded-nanogpt's"):
        assert f"\n{name}" in shown


def test_report_measures_time_and_memory_and_says_what_was_sampled(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra report is not installed")
    shown = run("report.py", "--tokens", 2_000_000, "--folder", tmp_path)

    assert "peak anonymous, MB" in shown
    assert "Counted in all 2,000,000 tokens." in shown
    assert not list(tmp_path.iterdir())
