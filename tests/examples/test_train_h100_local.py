"""The example runs with the commands of its docstring, also without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import penstock as ps

SCRIPT = Path(__file__).parents[2] / "examples" / "train_h100_local.py"


pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
WORDS = ("--train_file", "t.txt", "--val_file", "v.txt", "--max_length", "16", "--batch_size", "2")


def run(directory, *command):
    text = "".join(f"Line {number}: the quick brown fox jumps.\n" for number in range(200))
    (directory / "t.txt").write_text(text)
    (directory / "v.txt").write_text(text[:2_000] + "\n\n<|endoftext|>\r\n  a last one  ")
    done = subprocess.run(
        [sys.executable, *map(str, command), *WORDS],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_penstock_train_file_and_the_script_read_the_same_documents(tmp_path):
    run(tmp_path, SCRIPT, "--steps", "1", "--output", "script")
    run(tmp_path, "-m", "penstock", "train", "--steps", "1", "--output", "command")

    for side in ("train", "val"):
        script, command = (
            ps.TokenStore(tmp_path / name / "stores" / side) for name in ("script", "command")
        )
        assert script.digest == command.digest
        assert [script.decode(i) for i in range(len(script))][:1] == [
            "Line 0: the quick brown fox jumps."
        ]


@pytest.mark.torture
def test_it_trains_on_two_files(tmp_path):
    done = run(tmp_path, "-W", "error", SCRIPT, "--steps", "10", "--output", "run")

    assert "train: 200 documents, " in done.stdout
    assert re.search(r"validation loss \d\.\d{4} after 320 tokens\n$", done.stdout)
    assert (tmp_path / "run" / "curve.svg").exists()
