"""The example runs with the commands of its docstring."""

import os
import re
from pathlib import Path

import pytest
import zygote

pytest.importorskip("lightning", reason="needs penstock[lightning]")

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "test_local_data.py"


def test_six_checks_pass_and_batches_are_read(tmp_path):
    folder = tmp_path / "training_data"
    folder.mkdir()
    line = "The quick brown fox jumps over the lazy dog, number {}.\n"
    for name, count in (("owt_train.txt", 10_000), ("owt_valid.txt", 500)):
        (folder / name).write_text("".join(line.format(number) for number in range(count)))
    done = zygote.run(
        [str(SCRIPT)],
        cwd=tmp_path,
        env={**os.environ, "PENSTOCK_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
    )
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
    assert lines[6].startswith(
        "✅ LocalOpenWebTextDataModule PASSED: the first batch (32, 1024) came after "
    )


def test_the_script_reports_no_speed_below_the_one_it_just_passed(tmp_path, run_here):
    text = "The quick brown fox jumps over the lazy dog.\n"
    (tmp_path / "t.txt").write_text(text * 10_000)
    (tmp_path / "v.txt").write_text(text * 500)
    done = run_here(SCRIPT, "t.txt", "v.txt")

    assert done.returncode == 0, done.stderr
    (speeds,) = re.findall(r".*tokens/s.*", done.stdout)
    assert speeds.startswith("✅ Performance PASSED (>100K tokens/sec): ")
    assert int(re.search(r"([\d,]+) tokens/s loaded", speeds)[1].replace(",", "")) > 100_000


def test_less_text_than_one_batch_is_a_message_and_not_a_traceback(tmp_path, run_here):
    # Different texts: files with equal contents share a store in the cache, which the stream of one
    # and the build of the other would make at the same time.
    for name in ("t.txt", "v.txt"):
        (tmp_path / name).write_text(f"a few words of {name}\n" * 60)
    done = run_here(SCRIPT, "t.txt", "v.txt")

    assert done.returncode == 1
    assert "❌ LocalOpenWebTextDataModule FAILED: " in done.stdout
    assert "Use a smaller batch size, or more text." in done.stdout
    assert "Traceback" not in done.stderr


def test_a_missing_file_fails_with_exit_code_one(run_here):
    done = run_here(SCRIPT, "nowhere.txt", "either.txt")

    assert done.returncode == 1
    assert done.stdout.startswith("❌ File Existence FAILED: nowhere.txt does not exist")
