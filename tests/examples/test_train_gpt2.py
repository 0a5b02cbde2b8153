"""The example runs with the commands of its docstring."""

import os
import re
from pathlib import Path

import zygote

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt2.py"


def test_it_trains_on_two_files(tmp_path):
    text = "".join(f"Line {number}: the quick brown fox jumps.\n" for number in range(200))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text(text)
    (tmp_path / "data" / "val.txt").write_text(text[:2_000])
    small = ("--steps", "20", "--sequence-length", "32", "--layers", "1", "--width", "16")
    done = zygote.run(
        ["-W", "error", str(SCRIPT), *small],
        cwd=tmp_path,
        env={**os.environ, "PENSTOCK_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )

    assert done.returncode == 0, done.stderr
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[0] > 10 > losses[-1]
    assert re.search(r"[\d,]+ tokens per second\n$", done.stdout)
