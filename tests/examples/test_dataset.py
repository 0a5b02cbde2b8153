"""The example runs with the commands of its docstring."""

import os
import re
from pathlib import Path

import zygote

SCRIPT = Path(__file__).parents[2] / "examples" / "dataset.py"


def test_it_goes_from_two_files_to_batches(tmp_path):
    text = "".join(f"Line {number}: the quick brown fox jumps.\n" for number in range(200))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text(text)
    (tmp_path / "data" / "val.txt").write_text(text[:2_000])
    done = zygote.run(
        ["-W", "error", str(SCRIPT), "--sequence-length", "64"],
        cwd=tmp_path,
        env={**os.environ, "PENSTOCK_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=280,
    )

    assert done.returncode == 0, done.stderr
    assert "x as text: 'Line 0: the quick" in done.stdout
    assert "  Input shape: torch.Size([32, 64])\n" in done.stdout
    assert "  Input and label alignment check: True\n" in done.stdout
    assert re.search(r"[\d.,]+ million tokens per second\n$", done.stdout)
