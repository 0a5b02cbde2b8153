"""The example runs with the commands of its docstring, with and without the real sets."""

import re
from pathlib import Path

import zygote

SCRIPT = Path(__file__).parents[2] / "examples" / "chat_sft_multiplex_example.py"


def test_it_trains_on_the_answers_only_and_the_loss_falls(tmp_path):
    done = zygote.run(
        ["-W", "error", str(SCRIPT), "--steps", "12"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    shown = done.stdout

    assert done.returncode == 0, done.stderr
    assert "Using made-up questions instead." in shown
    assert "<|assistant_start|>[[It is 1.<|assistant_end|>]]" in shown
    assert "Total examples: 500\n" in shown
    first, last = re.search(r"Loss over 12 steps: ([\d.]+) to ([\d.]+)\n", shown).groups()
    assert float(last) < float(first)
    assert re.search(r"The generator yields [\d,]+ conversations per second\n$", shown)


def test_it_trains_on_the_real_sets(tmp_path, data, run_here):
    (tmp_path / "data" / "arc").mkdir(parents=True)
    (tmp_path / "data" / "gsm8k").symlink_to(data / "gsm8k")
    (tmp_path / "data" / "arc" / "ARC-Easy-Train.jsonl").symlink_to(
        data / "arc" / "genmc_arc_easy_train.jsonl"
    )

    shown = run_here(SCRIPT, "--steps", "2", "--batch-size", "2").stdout

    assert "Total examples: 9,724\n" in shown
    assert "Loss over 2 steps" in shown
