"""The benchmark runs from end to end, at a size that says nothing about speed."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.torture
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_the_benchmark_measures_a_stream_and_compares_rows(tmp_path):
    text = "".join(f"{number} " + "some words " * (number % 40) + "\n" for number in range(3_000))
    (tmp_path / "in.txt").write_text(text)
    options = ["--file", tmp_path / "in.txt", "--folder", tmp_path, "--repetitions", 1]
    options += ["--peer-seconds", 0.1]
    command = [sys.executable, "-W", "ignore", ROOT / "benchmarks" / "streaming.py", *options]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=280
    )

    assert done.returncode == 0, done.stderr
    for name in ("streaming", "whole documents", "preprocessed"):
        assert f"penstock, {name} " in done.stdout
    assert "equal, and each row once" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]
