"""The example runs with the commands of its docstring."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "prepare_data.py"


def run(directory, *arguments, **environment):
    command = [sys.executable, "-W", "error", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_downloads_splits_and_tokenizes(data, tmp_path):
    done = run(tmp_path, "--from", data / "tinyshakespeare")

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:6] == [
        "raw data: data/tinyshakespeare.txt, 1,115,394 bytes",
        "train: data/train.txt, 1,003,854 characters",
        "val: data/val.txt, 111,540 characters",
        "tokenizer: gpt2, vocabulary of 50,257",
        "train: 301,966 tokens in data/train",
        "val: 36,059 tokens in data/val",
    ]
    assert lines[6].startswith("x (1, 64): ")
    text = (data / "tinyshakespeare" / "input.txt").read_text()
    assert (tmp_path / "data" / "train.txt").read_text() == text[:1_003_854]
    assert (tmp_path / "data" / "val.txt").read_text() == text[1_003_854:]


def test_running_it_twice_changes_nothing(data, tmp_path, sums):
    first = run(tmp_path, "--from", data / "tinyshakespeare")
    before = sums(tmp_path / "data")
    again = run(tmp_path, "--from", "http://127.0.0.1:9")  # no download is needed

    assert again.stdout == first.stdout
    assert sums(tmp_path / "data") == before


def test_a_failed_download_is_reported_without_a_traceback(tmp_path):
    done = run(tmp_path, "--from", "http://127.0.0.1:9", http_proxy="", HTTP_PROXY="")

    assert done.returncode == 1
    assert "Connection refused" in done.stderr
    assert "penstock fetch tinyshakespeare --from DIRECTORY" in done.stderr
    assert "Traceback" not in done.stderr
