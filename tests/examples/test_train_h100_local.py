"""The example runs with the commands of its docstring, also without a GPU."""

import os
import re
from pathlib import Path

import pytest
import zygote
from typer.testing import CliRunner

import penstock as ps
from penstock.cli.app import app

SCRIPT = Path(__file__).parents[2] / "examples" / "train_h100_local.py"


WORDS = ("--train_file", "t.txt", "--val_file", "v.txt", "--max_length", "16", "--batch_size", "2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run of ten steps in a fresh process, and what it printed."""
    directory = tmp_path_factory.mktemp("trained")
    text = "".join(f"Line {number}: the quick brown fox jumps.\n" for number in range(200))
    (directory / "t.txt").write_text(text)
    (directory / "v.txt").write_text(text[:2_000] + "\n\n<|endoftext|>\r\n  a last one  ")
    done = zygote.run(
        ["-W", "error", SCRIPT, *WORDS, "--steps", "10", "--output", "script"],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return directory, done.stdout


def test_penstock_train_file_and_the_script_read_the_same_documents(trained, monkeypatch):
    directory, _ = trained
    monkeypatch.chdir(directory)
    words = ["train", *WORDS, "--steps", "1", "--output", "command", "--device", "cpu"]
    done = CliRunner().invoke(app, words)

    assert done.exit_code == 0, done.output
    for side in ("train", "val"):
        script, command = (
            ps.TokenStore(directory / name / "stores" / side) for name in ("script", "command")
        )
        assert script.digest == command.digest
        assert [script.decode(i) for i in range(len(script))][:1] == [
            "Line 0: the quick brown fox jumps."
        ]


def test_it_trains_on_two_files(trained):
    directory, shown = trained

    assert "train: 200 documents, " in shown
    assert re.search(r"validation loss \d\.\d{4} after 320 tokens\n$", shown)
    assert (directory / "script" / "curve.svg").exists()
