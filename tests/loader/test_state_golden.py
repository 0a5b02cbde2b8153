"""The JSON of a loader's state, for ever.

Changing `states.json` means that checkpoints of earlier versions cannot be resumed: it needs an
entry under "State format" in CHANGELOG.md.
"""

import json
from contextlib import closing
from pathlib import Path

import pytest

import penstock

STATES = json.loads((Path(__file__).parent / "states.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    base = tmp_path_factory.mktemp("stores")
    made = []
    for name in ("first", "second"):
        texts = [f"{name} {number} some text " + "more " * (number % 7) for number in range(300)]
        made.append(penstock.build(penstock.Texts(texts), base / name, tokenizer="bytes"))
    return made


def loaders(first, second):
    windows = penstock.Windows(first, length=32)
    packs = penstock.Packs(second, length=64)
    mixture = {"first": windows, "second": penstock.Windows(second, length=32)}
    yield "windows", penstock.Loader(windows, batch_size=4, seed=17)
    yield "packs", penstock.Loader(packs, batch_size=4, seed=17, epochs=2)
    documents = penstock.Documents(first, max_length=48)
    yield "documents", penstock.Loader(documents, batch_size=4, seed=17)
    yield "in order", penstock.Loader(windows, batch_size=4, seed=17, shuffle="part")
    mixed = penstock.Plan(mixture, weights={"first": 3, "second": 1}, seed=17)
    yield "mixture", penstock.Loader(mixed, batch_size=4)
    stages = {0: {"first": 3, "second": 1}, 64: {"first": 1, "second": 3}}
    scheduled = penstock.Plan(mixture, schedule=stages, seed=17)
    yield "schedule", penstock.Loader(scheduled, batch_size=4)
    continued = mixed.continued(12, weights={"first": 1, "second": 1})
    yield "continued", penstock.Loader(continued, batch_size=4)


def test_states_are_the_same_bytes_as_ever(stores):
    found = {}
    for name, loader in loaders(*stores):
        with closing(iter(loader)) as batches:
            for _ in range(5):
                next(batches)
        found[name] = json.dumps(loader.state_dict())

    assert found == STATES
