"""metrics.jsonl, TensorBoard and W&B: a resumed run continues them, and no step is there twice."""

import json
import struct
import sys
from collections import Counter

import pytest

from penstock.errors import MissingExtraError
from penstock.train import RunProgress, TrainingConfig, read_metrics
from penstock.train.logs import Metrics


def open_logs(folder, step=0, validated=None, **config):
    progress = RunProgress(step=step, validated=validated)
    return Metrics(folder / "metrics.jsonl", progress, TrainingConfig(steps=9, **config))


def two_sessions(folder, **config):
    """A run that is killed after the validation of step 4, and resumes from step 4."""
    first = open_logs(folder, **config)
    for step in range(1, 5):
        first.add("step", step, loss=step / 3, fingerprint=1 << 63)
    first.sync()  # a checkpoint is saved here
    first.add("val", 4, val_loss=2.5)
    first.add("step", 5, loss=5 / 3, fingerprint=1 << 63)
    first.close()
    second = open_logs(folder, step=4, validated=0, **config)
    second.add("val", 4, val_loss=2.5)
    for step in (5, 6):
        second.add("step", step, loss=step / 3, fingerprint=1 << 63)
    second.close()


RIGHT = {
    **{("step/loss", step): step / 3 for step in range(1, 7)},
    ("val/val_loss", 4): 2.5,
}


def test_metrics_after_the_checkpoint_are_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = open_logs(tmp_path)
    for step in range(1, 6):
        first.add("step", step, loss=step / 3)
    first.close()
    with path.open("a") as stream:
        stream.write('{"kind": "step", "st')  # a kill in the middle of a line
    second = open_logs(tmp_path, step=3)
    second.add("step", 4, loss=1.5)
    second.close()

    assert [(each["step"], each["loss"]) for each in read_metrics(path)] == [
        (1, 1 / 3),
        (2, 2 / 3),
        (3, 1.0),
        (4, 1.5),
    ]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_lines_that_are_not_ours_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('[1]\n{"kind": "step", "step": 1, "loss": 2.0}\n{"other": 1}\n5\n')

    assert list(read_metrics(path)) == [{"kind": "step", "step": 1, "loss": 2.0}]


def test_a_validation_that_is_repeated_is_in_the_file_once(tmp_path):
    two_sessions(tmp_path)

    found = [(each["kind"], each["step"]) for each in read_metrics(tmp_path / "metrics.jsonl")]
    assert found == [
        *(("step", step) for step in range(1, 5)),
        ("val", 4),
        ("step", 5),
        ("step", 6),
    ]


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    two_sessions(tmp_path, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [
        (tag, each.step, each.value)
        for tag in events.Tags()["scalars"]
        for each in events.Scalars(tag)
    ]

    assert sorted(each[:2] for each in found) == sorted(RIGHT)
    assert all(value == pytest.approx(RIGHT[tag, step]) for tag, step, value in found)


def wandb_records(data):
    """The records of a .wandb file: those of LevelDB's log, after 7 bytes."""
    place, parts = 7, []
    while place < len(data):
        if (left := -place % (1 << 15)) < 7 and left:  # no header fits into the rest of the block
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        parts.append(data[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield b"".join(parts)
            parts = []


@pytest.mark.filterwarnings("default")  # those of wandb are its own
def test_wandb_offline_gets_each_step_of_a_resumed_run_once(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    two_sessions(tmp_path, wandb=True)
    wandb.teardown()  # ends the background process, which may still be writing
    found, ids = [], set()
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        ids.add(path.stem)
        for record in map(Record.FromString, wandb_records(path.read_bytes())):
            items = {(each.nested_key or [each.key])[0]: each for each in record.history.item}
            step = record.history.step.num
            found += [
                (name, step, json.loads(each.value_json))
                for name, each in items.items()
                if not name.startswith("_")
            ]

    assert ids == {f"run-{(tmp_path / 'wandb-id.txt').read_text()}"}
    assert Counter((name, step) for name, step, _ in found) == Counter(RIGHT.keys())
    assert all(value == RIGHT[name, step] for name, step, value in found)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_other_logs_are_optional(name, tmp_path, monkeypatch):
    module = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}[name]
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(MissingExtraError, match=rf'pip install "penstock\[{name}\]"'):
        open_logs(tmp_path, **{name: True})
