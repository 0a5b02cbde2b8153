"""Inputs that make stores of many parts, a build that can be held up, and a watch on threads."""

import gc
import threading

import numpy as np
import pytest
import torch

import penstock
from penstock.sources.slices import cut

torch.set_num_threads(1)

SLICE_BYTES = 3_000
SLOW = "§"


class Held:
    """A bytewise tokenizer that waits at each line with a `§` until it is let on."""

    eos_token_id = 256
    vocab_size = 257

    def __init__(self):
        self.gate = threading.Semaphore(0)

    def __len__(self):
        return self.vocab_size

    def encode(self, text):
        if SLOW in text:
            assert self.gate.acquire(timeout=60)
            self.gate.release()
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode()

    def let_on(self):
        """From now on no line waits."""
        self.gate.release()


def lines(number=1_200, *, held_at=()):
    """Lines of different lengths, which begin with their numbers."""
    return "".join(
        f"{each} {SLOW if each in held_at else ''}some text {'and more ' * (each % 7)}\n"
        for each in range(number)
    )


@pytest.fixture
def held():
    tokenizer = Held()
    yield tokenizer
    tokenizer.let_on()


@pytest.fixture(scope="package", autouse=True)
def _few_objects_to_collect():
    """A collection after each test skips what was there before."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch):
    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", SLICE_BYTES)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of about 50 kB."""
    path = tmp_path_factory.mktemp("text") / "in.txt"
    path.write_text(lines())
    return path


@pytest.fixture(scope="session")
def finished(text, tmp_path_factory):
    """The finished store of the file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cut.__kwdefaults__, "slice_bytes", SLICE_BYTES)
        store = penstock.build(
            text, tmp_path_factory.mktemp("built") / "s", tokenizer="bytes", documents="lines"
        )
    assert len(store.manifest.parts) > 10
    return store


@pytest.fixture
def stream(text, tmp_path):
    """Begin a stream of the file; all are closed at the end."""
    streams = []

    def stream(inputs=text, store=None, **options):
        options = {"tokenizer": "bytes", "documents": "lines", "timeout": 200, **options}
        options = {"workers": 2, **options}
        streams.append(penstock.stream(inputs, store or tmp_path / "s", **options))
        return streams[-1]

    yield stream
    for each in streams:
        each.close()


@pytest.fixture(scope="session")
def same():
    """Whether two runs gave equal batches, in order."""

    def same(one, other):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert left.keys() == right.keys()
            for name in left:
                assert np.array_equal(left[name], right[name]), name
        return True

    return same


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    gc.collect()
    names = ("penstock-stream", "penstock-ahead")
    left = [each.name for each in threading.enumerate() if each.name in names]
    assert not left, f"threads outlived their streams: {left}"


@pytest.fixture(scope="session")
def conftest():
    """The helpers of this file, for tests that call them."""
    import types

    return types.SimpleNamespace(lines=lines, SLICE_BYTES=SLICE_BYTES, SLOW=SLOW)
