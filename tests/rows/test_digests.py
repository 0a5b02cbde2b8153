"""A law: what changes the rows or their order changes their digest, and nothing else does.

A state holds a position and digests. An argument that changes rows and no digest would let
a run go on in silence with other rows than it had. Every argument of every kind of rows
stands in one of two tables; a new one fails here until somebody says in which.
"""

import inspect

import numpy as np
import pytest

from penstock import Documents, Loader, Packs, Windows
from penstock.errors import ResumeError
from penstock.loader import BatchFormat

STORE = object()  # stands for the store of a test
OTHER = object()

# What each kind is made with, and for each argument another value.
GIVEN = {
    Windows: {"store": STORE, "length": 12},
    Packs: {"store": STORE, "length": 12},
    Documents: {"store": STORE, "max_length": 12},
}
CHANGES = [
    (Windows, "store", OTHER),
    (Windows, "length", 10),
    (Windows, "stride", 6),
    (Windows, "tail", "pad"),
    (Packs, "store", OTHER),
    (Packs, "length", 10),
    (Documents, "store", OTHER),
    (Documents, "max_length", 10),
    (Documents, "overflow", "split"),
]
KEEPS = [
    (Windows, "borders", True),
    (Packs, "borders", False),
    (Documents, "pad_to_multiple_of", 8),
    (Documents, "side", "left"),
    (Documents, "pad_id", 7),
]


@pytest.fixture(scope="module")
def made(write_store, tmp_path_factory):
    """Makes one of the kinds, with some arguments changed."""
    place = tmp_path_factory.mktemp("digests")
    documents = [list(range(1, 3 + number * 7 % 19)) for number in range(40)]
    stores = {
        STORE: write_store(place / "store", [documents[:25], documents[25:]]),
        OTHER: write_store(place / "other", [documents[::-1]]),
    }

    def make(kind, **changed):
        options = {**GIVEN[kind], **changed}
        return kind(stores[options.pop("store")], **options)

    return make


def seen(rows):
    """All rows in order, as a loader's batches hold them, without padding."""
    found = []
    loader = Loader(
        rows, 4, epochs=1, format=BatchFormat(ids=True), shuffle="none", drop_last=False
    )
    for batch in loader:
        real = batch.get("attention_mask", batch["inputs"] >= 0).bool()
        filled = np.flatnonzero(batch["position"].numpy() >= 0)
        found += [batch["inputs"][row][real[row]].tolist() for row in filled]
        found.append(len(filled))
    return found


@pytest.mark.parametrize("kind", GIVEN, ids=lambda kind: kind.__name__)
def test_every_argument_stands_in_one_of_the_tables(kind):
    arguments = list(inspect.signature(kind).parameters)

    assert sorted(arguments) == sorted(name for each, name, _ in CHANGES + KEEPS if each is kind)


@pytest.mark.parametrize(("kind", "name", "value"), CHANGES)
def test_what_changes_the_rows_changes_their_digest(made, kind, name, value):
    plain, changed = made(kind), made(kind, **{name: value})

    assert seen(plain) != seen(changed)
    assert plain.digest != changed.digest
    assert plain.describe() != changed.describe()
    refuses(plain, changed)


@pytest.mark.parametrize(("kind", "name", "value"), KEEPS)
def test_what_tells_more_or_pads_otherwise_keeps_the_digest(made, kind, name, value):
    plain, changed = made(kind), made(kind, **{name: value})

    assert seen(plain) == seen(changed)
    assert plain.digest == changed.digest
    assert plain.describe() == changed.describe()


def refuses(one, other):
    """A state of one run is refused by the other."""
    state = Loader(one, 4).state_dict()

    with pytest.raises(ResumeError, match="belongs to another order"):
        Loader(other, 4).load_state_dict(state)
