"""A bit of every byte of a store, flipped: `verify` finds each one."""

import random

import pytest

import penstock
from penstock.errors import StoreError


@pytest.mark.parametrize(
    "num_flips",
    [
        200,
        pytest.param(1_000, marks=pytest.mark.torture),
        pytest.param(None, marks=[pytest.mark.torture, pytest.mark.timeout(3_600)]),
    ],
)
def test_every_flipped_bit_is_found(trial, num_flips, figure):
    files = {path: path.read_bytes() for path in trial.clean.glob("[!.]*")}
    places = [(path, place) for path, data in files.items() for place in range(len(data))]
    chance = random.Random(num_flips)
    missed = []
    chosen = places if num_flips is None else chance.choices(places, k=num_flips)
    for path, place in chosen:
        with path.open("r+b") as stream:
            stream.seek(place)
            stream.write(bytes([files[path][place] ^ 1 << chance.randrange(8)]))
        try:
            penstock.verify(trial.clean)
            missed.append((path.name, place))
        except StoreError:
            pass
        path.write_bytes(files[path])

    figure(f"flipped bits found by verify: {len(chosen) - len(missed):,} of {len(chosen):,}")
    assert missed == []
    penstock.verify(trial.clean)
