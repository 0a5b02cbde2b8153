"""The benchmark of packing runs from end to end, at a size that says nothing about speed."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.torture
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_packing_is_compared_and_what_cannot_be_is_named(tmp_path):
    sizes = ("--documents", 40_000, "--peer-documents", 3_000, "--repetitions", 1)
    sizes += ("--seconds", 0.05)
    places = ("--folder", tmp_path, "--json", tmp_path / "all.json")
    command = [sys.executable, ROOT / "benchmarks" / "packing.py", *sizes, *places]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=240
    )

    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "all.json").read_text())
    for name, (figure,) in figures["cases"].items():
        if "penstock" in name:
            assert figure["padding"] < 0.002
            assert figure["targets"] == figure["all_targets"]
            assert figure["lost"] == 0
    assert figures["cases"]["first-fit"][0]["padding"] > 0.002
    assert set(figures["loaders"]) >= {"windows", "packs", "documents"}
    if not find_spec("trl"):
        assert "not measured: TRL bfd: trl is not installed" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["all.json"], "a store was left behind"
