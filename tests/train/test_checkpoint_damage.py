"""Damage in a checkpoint, and odd fields in one, end in an error that names the file."""

import os
import pickle
import random

import pytest
import torch

from penstock.errors import TrainError
from penstock.train.checkpoint import Checkpoints
from penstock.train.config import ModelConfig

MODEL = ModelConfig(layers=1, heads=1, width=8, length=8, vocab_size=8)
FIELDS = {"progress": {"step": 5}, "data": {"position": 40}, "optimizers": [{}]}


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints of a run."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=2)
    for step in (4, 5):
        save(checkpoints, step)
    return checkpoints


def save(checkpoints, step, **fields):
    config = {"layers": 1, "heads": 1, "width": 8}
    contents = {**FIELDS, "model_config": config, "model": {"weight": torch.ones(64)}}
    checkpoints.save(step, {**contents, **fields})


def flips(checkpoints, places):
    """Flip a bit at each place in turn; returns how many were refused."""
    path = checkpoints.paths()[5]
    whole = path.read_bytes()
    refused = 0
    for place in places:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(
            TrainError, match=r"step-00000005\.pt .*Remove it to resume after step 4"
        ):
            checkpoints.load(MODEL)
        refused += 1
    path.write_bytes(whole)
    assert checkpoints.load(MODEL)["progress"] == {"step": 5}
    return refused


def test_a_flipped_bit_is_an_error_that_names_the_file(saved):
    size = saved.paths()[5].stat().st_size
    ends = [0, 7, size * 8 - 1, (size - 82) * 8, (size - 83) * 8 + 3, (size - 20) * 8]

    flips(saved, [*ends, *random.Random(15).sample(range(size * 8), 60)])


@pytest.mark.torture
def test_every_byte_of_a_checkpoint_is_guarded(saved, figure):
    size = saved.paths()[5].stat().st_size

    refused = flips(saved, [place * 8 + place % 8 for place in range(size)])
    figure(f"checkpoints: {refused:,} of {size:,} bytes flipped, each was refused by name")


def test_a_checkpoint_that_is_cut_off_is_refused(saved):
    path = saved.paths()[5]
    whole = path.read_bytes()
    for size in (0, 1, 81, 82, len(whole) // 2, len(whole) - 82, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(TrainError, match=r"step-00000005\.pt "):
            saved.load(MODEL)


def test_torch_loads_a_checkpoint_without_penstock(saved):
    loaded = torch.load(saved.paths()[5], weights_only=True)

    assert loaded["step"] == 5


def test_a_checkpoint_of_the_format_before_is_still_read(saved):
    path = saved.paths()[5]
    contents = torch.load(path, weights_only=True)
    torch.save({**contents, "format": 2}, path)

    assert saved.load(MODEL)["progress"] == {"step": 5}


@pytest.mark.parametrize("name", ["data", "model", "model_config", "progress"])
@pytest.mark.parametrize("odd", [None, 5, "x", []])
def test_an_odd_field_is_named(name, odd, saved):
    save(saved, 6, **{name: odd})

    with pytest.raises(TrainError, match=rf"step-00000006\.pt: {name} is .*, not a dict\. Remove"):
        saved.load(MODEL)


@pytest.mark.parametrize(
    "odd", [{"format": torch.ones(3)}, {"model_config": {"width": torch.ones(3)}}]
)
def test_a_tensor_in_the_place_of_a_number_is_named(odd, saved):
    save(saved, 6, **odd)

    with pytest.raises(TrainError, match=r"step-00000006\.pt has a missing or odd field"):
        saved.load(MODEL)


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return (os.mkdir, (str(self.canary),))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", ["field", "field without digest", "pickle"])
def test_code_in_a_checkpoint_is_never_run(kind, saved, tmp_path):
    canary = tmp_path / "canary"
    save(saved, 6, progress={"step": Payload(canary)})
    path = saved.paths()[6]
    if kind == "field without digest":
        path.write_bytes(path.read_bytes()[:-82])
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Payload(canary)))

    with pytest.raises(TrainError, match=r"step-00000006\.pt cannot be read as a checkpoint"):
        saved.load(MODEL)
    assert not canary.exists()
    pickle.loads(pickle.dumps(Payload(canary)))
    assert canary.exists(), "the payload would have worked"


def test_odd_values_inside_a_field_name_the_file(saved):
    for error in (KeyError("step"), TypeError("unexpected 'x'"), RuntimeError("size mismatch")):
        with (
            pytest.raises(TrainError, match=r"step-00000005\.pt has a missing or odd field"),
            saved.refuse_odd_fields(),
        ):
            raise error
