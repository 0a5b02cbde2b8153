"""The example runs with the commands of its docstring."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="needs penstock[lightning]")

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "test_local_data.py"


def run(directory, *arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        cwd=directory,
        env={**os.environ, "PENSTOCK_CACHE": str(directory / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_six_checks_pass_and_batches_are_read(tmp_path):
    folder = tmp_path / "training_data"
    folder.mkdir()
    line = "The quick brown fox jumps over the lazy dog, number {}.\n"
    for name, count in (("owt_train.txt", 10_000), ("owt_valid.txt", 500)):
        (folder / name).write_text("".join(line.format(number) for number in range(count)))
    done = run(tmp_path)
    lines = done.stdout.splitlines()

    assert done.returncode == 0, done.stderr
    assert [each.partition(":")[0] for each in lines[:6]] == [
        "✅ File Existence PASSED",
        "✅ Single Dataset PASSED",
        "✅ DataLoader PASSED",
        "✅ Tokenization Quality PASSED",
        "✅ Performance PASSED (>100K tokens/sec)",
        "✅ Preprocessing PASSED",
    ]
    assert "batches of (32, 1024)" in lines[6]


def test_a_missing_file_fails_with_exit_code_one(tmp_path):
    done = run(tmp_path, "nowhere.txt", "either.txt")

    assert done.returncode == 1
    assert done.stdout.startswith("❌ File Existence FAILED: nowhere.txt does not exist")
