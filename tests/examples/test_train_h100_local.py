"""The example runs with the commands of its docstring, also without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "train_h100_local.py"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_it_trains_on_two_files(tmp_path):
    text = "".join(f"Line {number}: the quick brown fox jumps.\n" for number in range(200))
    (tmp_path / "t.txt").write_text(text)
    (tmp_path / "v.txt").write_text(text[:2_000])
    words = ("--train_file", "t.txt", "--val_file", "v.txt", "--steps", "10")
    words += ("--max_length", "16", "--batch_size", "2", "--output", "run")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )

    assert done.returncode == 0, done.stderr
    assert "train: 200 documents, " in done.stdout
    assert re.search(r"validation loss \d\.\d{4} after 320 tokens\n$", done.stdout)
    assert (tmp_path / "run" / "curve.svg").exists()
