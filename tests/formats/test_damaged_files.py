"""Damaged token files give a clear error or equal tokens, and never ids beyond the vocabulary."""

import re
import shutil

import numpy as np
import pytest

import penstock as ps
from penstock import Windows
from penstock.errors import PenstockError
from penstock.formats import verify_tokens

LAYOUTS = ["llmc", "nanogpt", "olmo", "npy", "megatron", "old-megatron", "datatrove"]
VOCAB_SIZE = 50
COLUMNS = ["mds", "mds-zstd", "litdata", "litdata-zstd", "arrow", "parquet"]
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


def mutate_text(generator, text):
    """Return a JSON text with a number, a word or a bracket replaced."""
    words = re.findall(rb"[0-9]+|[a-z_]+|[^0-9a-z_]", text)
    at = int(generator.integers(len(words)))
    numbers = [number for number, word in enumerate(words) if word.isdigit()]
    if generator.integers(2):
        at = int(generator.choice(numbers))
    new = [b"-1", b"9" * 30, b"1e999", b"null", b"[]", b'"pkl"', b"../../x", b"NaN", b"true", b""]
    new += [str(each).encode() for each in EXTREMES] + [b"[" * 20_000]
    words[at] = new[int(generator.integers(len(new)))]
    return b"".join(words)


def survives_with_columns(layouts, layout, directory, seed):
    """Open a damaged set of a format that has ids and headers in one file.

    Return whether it was refused.
    """
    generator = np.random.default_rng(seed)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    documents = [*layouts.random_corpus(generator, VOCAB_SIZE, layout in layouts.NOT_EMPTY), [1, 2]]
    dtypes = layouts.LAYOUTS[layout][1]
    dtype = dtypes[seed % len(dtypes)]
    path, _ = layouts.write(layout, directory, documents, dtype)
    files = sorted(directory.iterdir())
    target = files[int(generator.integers(len(files)))]
    is_index = target.suffix == ".json"
    before = target.read_bytes()
    change = mutate_text if is_index and len(before) > 9 and seed % 3 else mutate
    target.write_bytes(change(generator, before))
    try:
        opened = ps.open_tokens(path, vocab_size=VOCAB_SIZE)
        verify_tokens(opened)
        found = [each.tolist() for each in opened]
        rows = Windows(opened, 4, tail="pad")
        rows.read(np.arange(len(rows)))
    except PenstockError:
        return True
    read = [token for each in found for token in each]
    assert read == layouts.all_ids(opened).tolist()
    assert all(0 <= token < VOCAB_SIZE for token in read)
    # What an index says is compared with the files. A changed id is no damage, and neither are the
    # ends of documents in Arrow and LitData, which nothing repeats.
    if is_index:
        assert read == [token for each in documents for token in each]
    if layout.startswith("mds"):
        assert [len(each) for each in found] == [len(each) for each in documents]
    return False


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


@pytest.mark.parametrize("layout", COLUMNS)
def test_40_damaged_sets_with_columns_are_refused_or_read_in_the_vocabulary(
    layouts, layout, tmp_path
):
    seeds = range(40)
    refused = sum(survives_with_columns(layouts, layout, tmp_path / "x", each) for each in seeds)
    assert refused > 8


@pytest.mark.torture
@pytest.mark.parametrize("layout", COLUMNS)
def test_1000_damaged_sets_with_columns_are_refused_or_read_in_the_vocabulary(
    layouts, layout, tmp_path
):
    seeds = range(1000, 2000)
    refused = sum(survives_with_columns(layouts, layout, tmp_path / "x", each) for each in seeds)
    assert refused > 200


@pytest.mark.parametrize("layout", LAYOUTS)
def test_60_damaged_sets_are_refused_or_read_equally(layouts, layout, tmp_path):
    refused = sum(survives(layouts, layout, tmp_path / "x", seed) for seed in range(60))
    assert refused > 6


@pytest.mark.torture
@pytest.mark.parametrize("layout", LAYOUTS)
def test_1000_damaged_sets_are_refused_or_read_equally(layouts, layout, tmp_path):
    refused = sum(survives(layouts, layout, tmp_path / "x", 1000 + seed) for seed in range(1000))
    assert refused > 100
