"""The log of a run: the same on any number of ranks, and exact after a crash."""

import json

import pytest

import penstock as ps
from penstock.loader import BatchFormat
from penstock.loader.fingerprints import FingerprintLog, RowReader, read_fingerprints


@pytest.fixture(params=["windows", "packs", "mixture"])
def plan(request, store):
    return {
        "windows": lambda: ps.Plan(ps.Windows(store, 16, tail="pad"), seed=2),
        "packs": lambda: ps.Plan(ps.Packs(store, 32), seed=2),
        "mixture": lambda: ps.Plan(
            {"a": ps.Windows(store, 32), "b": ps.Packs(store, 32)}, weights={"a": 2, "b": 1}
        ),
    }[request.param]()


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_the_log_has_the_sums_of_the_batches_of_all_ranks(plan, tmp_path, world_size):
    log = FingerprintLog(tmp_path, plan)
    ranks = {
        kind: [
            ps.Loader(
                plan,
                16 // world_size,
                rank=rank,
                world_size=world_size,
                format=BatchFormat(fingerprint=kind),
            )
            for rank in range(world_size)
        ]
        for kind in ("samples", "tokens")
    }
    for step in range(1, 6):
        logged = log.add(step, (16 * (step - 1), 16 * step))
        sums = {
            kind: sum(loader.make(step - 1).fingerprint for loader in loaders) % 2**64
            for kind, loaders in ranks.items()
        }
        assert (logged.rows, logged.tokens) == (sums["samples"], sums["tokens"])
    assert [each.position for each in read_fingerprints(tmp_path / "fingerprints.jsonl")] == [
        16, 32, 48, 64, 80
    ]  # fmt: skip


def test_steps_add_up_to_larger_steps(plan):
    reader = RowReader(plan)
    parts = [reader.fingerprints(start, start + 5) for start in (0, 5, 10)]

    assert reader.fingerprints(0, 15) == tuple(
        sum(each) % 2**64 for each in zip(*parts, strict=True)
    )


def test_a_resumed_run_takes_its_last_steps_again(store, tmp_path):
    plan = ps.Plan(ps.Windows(store, 16))
    path = tmp_path / "fingerprints.jsonl"
    log = FingerprintLog(tmp_path, plan)
    for step in range(1, 7):
        log.add(step, (4 * (step - 1), 4 * step))
    log.sync()
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])  # killed while it wrote a line

    again = FingerprintLog(tmp_path, plan, position=12)
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:3])
    for step in range(4, 7):
        again.add(step, (4 * (step - 1), 4 * step))
    assert path.read_bytes() == whole


def test_lines_that_are_not_of_a_step_are_skipped(tmp_path):
    path = tmp_path / "log"
    good = {"step": 3, "position": 8, "rows": "0f", "tokens": "ff"}
    odd = ["", "[]", "3", '{"step": 1}', '{"step": 1, "position": 2, "rows": 7}', '{"st']
    path.write_text("\n".join([*odd, json.dumps(good), '{"step"']))

    assert list(read_fingerprints(path)) == [(3, 8, 15, 255)]
    assert list(read_fingerprints(tmp_path / "none")) == []
