"""A small store of many parts, rows that are nothing but numbers, and a watch on threads."""

import gc
import threading

import numpy as np
import pytest
import torch

import penstock
from penstock.sources.slices import cut

torch.set_num_threads(1)

TEXTS = [f"document {number}: " + "some words " * (number % 9) for number in range(120)]


class Numbered:
    """Rows whose every token is the number of the row: no files, any size."""

    def __init__(self, num_rows, length=2, *, name="numbered"):
        self._num_rows = num_rows
        self.length = length
        self.digest = f"{name} {num_rows} {length}"

    def __len__(self):
        return self._num_rows

    def read(self, samples):
        assert 0 <= samples.min() <= samples.max() < self._num_rows
        return {"tokens": np.repeat(samples[:, None], self.length + 1, axis=1)}


@pytest.fixture(scope="session")
def numbered():
    return Numbered


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """About 7,000 bytewise tokens in a dozen parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cut.__kwdefaults__, "slice_bytes", 600)
        built = penstock.build(
            penstock.Texts(TEXTS), tmp_path_factory.mktemp("loader") / "store", tokenizer="bytes"
        )
    assert len(built.manifest.parts) > 8
    return built


@pytest.fixture(scope="session")
def flat(store):
    """All tokens of the store, one after the other."""
    return [token for document in store for token in document.tolist()]


@pytest.fixture(scope="session")
def other_store(tmp_path_factory):
    texts = [f"another {number * 7919} text" for number in range(60)]
    return penstock.build(
        penstock.Texts(texts), tmp_path_factory.mktemp("other") / "store", tokenizer="bytes"
    )


@pytest.fixture(scope="session")
def naive(flat):
    """The rows that a plan of windows over the store has at positions, one by one."""

    def naive(plan, positions, length):
        samples = [plan.samples(position, position + 1)[0].sample for position in positions]
        return [flat[sample * length : (sample + 1) * length + 1] for sample in samples]

    return naive


def readers():
    """The threads that read ahead."""
    return [each for each in threading.enumerate() if each.name == "penstock-ahead"]


@pytest.fixture(autouse=True)
def _no_thread_reads_on():
    yield
    if readers():
        gc.collect()  # an iterator that a traceback holds
    assert not readers(), f"threads outlived their loaders: {readers()}"
