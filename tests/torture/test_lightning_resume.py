"""Kills and resumes of Lightning's Trainer over kinds of data, processes and workers."""

import importlib.util
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="needs penstock[lightning]")

HERE = Path(__file__).parent.parent / "integrations" / "lightning_runs.py"
SPEC = importlib.util.spec_from_file_location("lightning_runs", HERE)
runs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(runs)
SLICE = 700  # bytes: five parts of the small file


@pytest.mark.torture
@pytest.mark.parametrize(
    ("kind", "processes"), list(product(runs.KINDS, [(1, 2), (2, 1), (1, 1), (2, 2)]))
)
def test_killed_twice_and_resumed_elsewhere_the_rows_are_those_of_one_run(
    tmp_path, monkeypatch, figure, kind, processes
):
    """From one number of processes to another and back, killed by SIGKILL in both epochs."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    data = runs.write_data(tmp_path / "data")
    first, second = processes
    common = ("--slice-bytes", SLICE)
    size = 8 // first
    sizes = ("--batch-size", size)
    one = runs.fit(
        *(data, tmp_path / "one", kind, *common, *sizes, "--devices", first),
        *("--kill-after", 5),
        killed=True,
    )
    checkpoint, step = runs.last_checkpoint(one)
    two = runs.fit(
        *(data, tmp_path / "two", kind, *common, *sizes, "--devices", second),
        *("--resume", checkpoint, "--kill-after", 11, "--touch"),
        killed=True,
    )
    checkpoint, later = runs.last_checkpoint(two)
    three = runs.fit(
        *(data, tmp_path / "three", kind, *common, *sizes, "--devices", first),
        *("--resume", checkpoint, "--validate"),
    )
    seen = {number: rows for number, rows in runs.steps(one).items() if number < step}
    seen |= {number: rows for number, rows in runs.steps(two).items() if number < later}
    seen |= runs.steps(three)
    expected = runs.expected_steps(
        data,
        kind,
        tmp_path / "store",
        global_batch=8,
        slice_bytes=SLICE,
    )

    assert (step, later) == (3, 9)
    assert seen == expected
    figure(f"lightning {kind} {first}->{second}->{first} processes: {len(seen)} steps equal")


@pytest.mark.torture
def test_with_workers_it_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    data = runs.write_data(tmp_path / "data")
    one = runs.fit(data, tmp_path / "one", "padded", "--workers", 2, "--kill-after", 8, killed=True)
    checkpoint, step = runs.last_checkpoint(one)
    two = runs.fit(data, tmp_path / "two", "padded", "--workers", 1, "--resume", checkpoint)
    seen = {number: rows for number, rows in runs.steps(one).items() if number < step}
    expected = runs.expected_steps(data, "padded", tmp_path / "store", global_batch=8)

    assert seen | runs.steps(two) == expected
