"""Lightning's Trainer, killed in mid-epoch and resumed on another number of processes."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="needs penstock[lightning]")

pytestmark = pytest.mark.slow


def load(name):
    """A module that lies beside this one and is no test."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


runs = load("lightning_runs")


def test_a_killed_run_goes_on_exactly_on_two_processes(tmp_path):
    """One process is killed; two go on, with loaders that were made before progress was restored.

    Two epochs of 11 steps of 8 rows, and one of the 2 rows that are left.
    Lightning is left to its `use_distributed_sampler=True`.
    """
    data = runs.write_data(tmp_path / "data")
    first = runs.fit(data, tmp_path / "one", "padded", "--kill-after", 8, killed=True)
    checkpoint, step = runs.last_checkpoint(first)
    resumed = runs.fit(
        *(data, tmp_path / "two", "padded"),
        *("--devices", 2, "--resume", checkpoint, "--touch", "--validate"),
    )
    expected = runs.expected_steps(data, "padded", tmp_path / "store", global_batch=8)

    assert step == 6
    before = {number: rows for number, rows in runs.steps(first).items() if number < step}
    after = runs.steps(resumed)
    assert sorted(after) == list(range(6, 24))
    assert {**before, **after} == expected
    one, two = (
        [json.loads(line) for line in (out / "fingerprints.jsonl").read_text().splitlines()]
        for out in (first, resumed)
    )
    # Steps 7 and 8 were trained twice: by one process that was killed, then by two.
    assert one[step:] == two[: len(one) - step]
    assert len(one) == 8
    assert [each["step"] for each in one[:step] + two] == list(range(1, 25))
    assert two[12 - step - 1]["position"] == 90  # the end of the first epoch
    validated = [
        line for path in resumed.glob("val*.jsonl") for line in path.read_text().splitlines()
    ]
    assert len(validated) == 2 * 2  # 11 rows in one batch a rank, in each epoch
