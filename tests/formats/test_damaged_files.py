"""Damaged token files give a clear error or equal tokens, and never ids beyond the vocabulary."""

import shutil

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PenstockError

LAYOUTS = ["llmc", "nanogpt", "olmo", "npy", "megatron", "old-megatron", "datatrove"]
VOCAB_SIZE = 50
EXTREMES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]


def mutate(generator, data):
    """Return `data` truncated, extended, with bytes changed, or with an extreme number in it."""
    data = bytearray(data)
    kind, at = generator.integers(6), int(generator.integers(len(data) + 1))
    if kind == 0:
        return bytes(data[:at])
    if kind == 1:
        return bytes(data) + generator.bytes(int(generator.integers(1, 40)))
    if kind == 2:
        return bytes(data[:at]) + generator.bytes(int(generator.integers(1, 9))) + bytes(data[at:])
    if kind == 3:
        # Headers and indices begin at the front, where a change matters most.
        at = int(generator.integers(min(len(data), 64)))
    number = EXTREMES[int(generator.integers(len(EXTREMES)))].to_bytes(8, "little")
    size = int(generator.choice([1, 2, 4, 8]))
    new = generator.bytes(size) if kind == 4 else number[:size]
    data[at : at + size] = new
    return bytes(data)


def survives(layouts, layout, directory, seed):
    """Open a damaged set; return whether it was refused."""
    generator = np.random.default_rng(seed)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    documents = [*layouts.random_corpus(generator, VOCAB_SIZE), [1, 2, 3]]
    dtypes = layouts.LAYOUTS[layout][1]
    dtype = dtypes[seed % len(dtypes)]
    path, named = layouts.write(layout, directory, documents, dtype)
    files = sorted(directory.iterdir())
    # The file that holds nothing but ids is changed less often: a changed id is no damage.
    target = files[int(generator.integers(len(files)))]
    before = target.read_bytes()
    target.write_bytes(mutate(generator, before))
    ids_only = layout == "nanogpt" or (len(files) > 1 and target.suffix in (".bin", ".npy", ".ds"))
    with_header = {"llmc": 1024, "npy": 128}.get(layout)
    try:
        opened = ps.open_tokens(path, vocab_size=VOCAB_SIZE, **named)
        read = opened.part_ids(0)
        found = [each.tolist() for each in opened]
    except PenstockError:
        return True
    assert read.size == 0 or (read.min() >= 0 and read.max() < VOCAB_SIZE)
    changed = ids_only or (
        with_header and target.read_bytes()[:with_header] == before[:with_header]
    )
    if not changed and read.dtype == np.dtype(dtype):
        assert read.tolist() == [token for each in documents for token in each]
    if opened.has_documents:
        assert sum(map(len, found)) == len(read)
    return False


@pytest.mark.parametrize("layout", LAYOUTS)
def test_200_damaged_sets_are_refused_or_read_equally(layouts, layout, tmp_path):
    refused = sum(survives(layouts, layout, tmp_path / "x", seed) for seed in range(200))
    assert refused > 20


@pytest.mark.torture
@pytest.mark.parametrize("layout", LAYOUTS)
def test_1000_damaged_sets_are_refused_or_read_equally(layouts, layout, tmp_path):
    refused = sum(survives(layouts, layout, tmp_path / "x", 1000 + seed) for seed in range(1000))
    assert refused > 100
