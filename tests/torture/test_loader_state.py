"""A hundred thousand states with something changed: none loads as another.

pytest -m torture tests/torture/test_loader_state.py
"""

import json

import numpy as np
import pytest

from penstock.errors import ResumeError
from penstock.loader.loader import Loader
from penstock.order.plan import Plan
from penstock.rows.windows import Windows

pytestmark = pytest.mark.torture

MUTATIONS = 100_000


@pytest.fixture(scope="module")
def loaders(tmp_path_factory):
    """Two loaders that differ in their weights."""
    folder = tmp_path_factory.mktemp("tokens")
    for name in ("web", "code"):
        np.save(folder / f"{name}.npy", np.arange(len(name), 4_000, dtype="uint16"))
    rows = {name: Windows(folder / f"{name}.npy", 16) for name in ("web", "code")}
    return [
        Loader(Plan(rows, weights={"web": web, "code": 1}, seed=3), 8, steps=900) for web in (2, 3)
    ]


def other_text(text, random):
    """The text with a byte flipped, lost, doubled or put in, or two stretches exchanged."""
    data = bytearray(text.encode())
    place, end = sorted(random.integers(0, len(data), 2).tolist())
    how = random.integers(5)
    if how == 0:
        data[place] ^= int(random.integers(1, 256))
    elif how == 1:
        del data[place : place + int(random.integers(1, 9))]
    elif how == 2:
        data[place:place] = data[place : place + int(random.integers(1, 9))]
    elif how == 3:
        data[place:place] = str(random.integers(10**6)).encode()
    else:
        size = int(random.integers(1, 17))
        data[place : place + size], data[end : end + size] = (
            data[end : end + size],
            data[place : place + size],
        )
    return bytes(data)


def other_value(state, foreign, random):
    """The state with one field set, removed or taken from a foreign one, at any depth."""
    changed = json.loads(json.dumps(state))
    holder, source = changed, foreign
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = keys[random.integers(len(keys))]
        inner = holder[key]
        if isinstance(inner, dict | list) and len(inner) and random.integers(2):
            holder, source = inner, source[key]
            continue
        break
    values = [None, True, 0, -1, 2**63, 1.5, "", "x", [], {}, inner, source[key]]
    if isinstance(inner, int):
        values += [inner + 1, inner - 1, -inner, float(inner), str(inner)]
    how = random.integers(len(values) + 1)
    if how == len(values):
        del holder[key]
    else:
        holder[key] = values[how]
    return changed


def test_changed_states_never_load_as_another(loaders, figure):
    loader = loaders[0]
    for each in loaders:
        each.seek(4_000)
    state, other = (json.loads(json.dumps(each.state_dict())) for each in loaders)
    text = json.dumps(state)
    random = np.random.default_rng(5)
    refused = unreadable = equal = 0
    for number in range(MUTATIONS):
        if number % 2:
            changed = other_value(state, other, random)
        else:
            try:
                changed = json.loads(other_text(text, random))
            except (ValueError, RecursionError):
                unreadable += 1
                continue
        loader.seek(0)
        # A changed state may spell the same one: spaces, or a value set to what it was.
        same = json.dumps(changed, sort_keys=True) == json.dumps(state, sort_keys=True)
        try:
            loader.load_state_dict(changed)
        except ResumeError:
            assert not same
            assert loader.position == 0
            refused += 1
        else:
            assert same, changed
            assert loader.position == 4_000
            equal += 1
    figure(
        f"states: {MUTATIONS:,} mutations: {refused:,} refused, {unreadable:,} no JSON any more, "
        f"{equal:,} still equal, 0 loaded as another"
    )
