"""The example runs with the commands of its docstring, with and without the real sets."""

import re
from pathlib import Path

import pytest
import zygote

SCRIPT = Path(__file__).parents[2] / "examples" / "multiplex_example.py"


def run(folder):
    done = zygote.run(
        ["-W", "error", str(SCRIPT)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("options", [(), ("--made-up", "--num-workers", "0")])
def test_without_the_files_it_uses_made_up_questions(tmp_path, run_here, options):
    shown = run_here(SCRIPT, *options).stdout if options else run(tmp_path)

    assert ("penstock fetch arc" in shown) == (not options)
    assert "One epoch: 230 of arc, 750 of gsm8k, 10 of mmlu" in shown
    assert "One epoch: 330 of arc, 330 of gsm8k, 330 of mmlu" in shown
    assert "One epoch: 495 of arc, 297 of gsm8k, 198 of mmlu" in shown
    assert "A batch of 4: 'What is " in shown
    assert "Early: 80 of easy, 20 of hard" in shown
    assert "Late: 20 of easy, 80 of hard" in shown
    assert "Stopped at example 80, resumed with the same batch: True" in shown
    assert "['question', 'choices', 'answer', 'messages', 'dataset_name', 'dataset_idx']" in shown


def test_it_mixes_the_real_sets(tmp_path, data, run_here):
    (tmp_path / "data" / "arc").mkdir(parents=True)
    (tmp_path / "data" / "gsm8k").symlink_to(data / "gsm8k")
    (tmp_path / "data" / "mmlu").symlink_to(data / "mmlu")
    (tmp_path / "data" / "arc" / "ARC-Easy-Train.jsonl").symlink_to(
        data / "arc" / "genmc_arc_easy_train.jsonl"
    )

    shown = run_here(SCRIPT).stdout

    assert "One epoch: 2,251 of arc, 7,473 of gsm8k, 100 of mmlu" in shown
    assert re.search(r"One epoch: 3,27[345] of arc, 3,27[345] of gsm8k, 3,27[345] of mmlu", shown)
    assert "resumed with the same batch: True" in shown
