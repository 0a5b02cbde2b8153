"""The example runs with the commands of its docstring."""

from pathlib import Path

import zygote

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "prepare_data.py"


def test_it_downloads_splits_and_tokenizes(data, tmp_path):
    words = ["-W", "error", str(SCRIPT), "--from", str(data / "tinyshakespeare")]
    done = zygote.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)

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


def test_running_it_twice_changes_nothing(data, tmp_path, sums, run_here):
    first = run_here(SCRIPT, "--from", data / "tinyshakespeare")
    before = sums(tmp_path / "data")
    again = run_here(SCRIPT, "--from", "http://127.0.0.1:9")  # no download is needed

    assert again.returncode == 0
    assert again.stdout == first.stdout
    assert sums(tmp_path / "data") == before


def test_a_failed_download_is_reported_without_a_traceback(run_here, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "")
    done = run_here(SCRIPT, "--from", "http://127.0.0.1:9")

    assert done.returncode == 1
    assert "Connection refused" in done.stderr
    assert "penstock fetch tinyshakespeare --from DIRECTORY" in done.stderr
    assert "Traceback" not in done.stderr
