"""Rows of many pieces in one call are the rows of one array."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.loader import BatchFormat
from penstock.loader.loader import Loader
from penstock.order.plan import Plan
from penstock.rows.gather import gather
from penstock.rows.tokens import ArrayFile, Stream
from penstock.rows.windows import JoinedWindows, Windows


def files(folder, lengths, dtype="uint16"):
    """Token files of these lengths; ids count on from file to file."""
    made, first = [], 0
    for number, length in enumerate(lengths):
        path = folder / f"{number:03d}.npy"
        np.save(path, np.arange(first, first + length).astype(dtype))
        made.append(ArrayFile(path))
        first += length
    return made


def gathered(stream, starts, width):
    starts = np.array(starts, np.int64)
    return gather(stream, np.searchsorted(stream.ends, starts, side="right"), starts, width)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_rows_are_those_of_all_pieces_laid_end_to_end(tmp_path_factory, data):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=9))
    stream = Stream(files(tmp_path_factory.mktemp("pieces"), lengths))
    width = data.draw(st.integers(1, 50))
    starts = data.draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=30))
    whole = np.concatenate((np.arange(sum(lengths)), np.zeros(width, np.int64)))

    found = gathered(stream, starts, width)

    assert found.dtype == np.uint16
    assert found.tolist() == [whole[start : start + width].tolist() for start in starts]


def test_more_pieces_than_are_mapped_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.rows.gather._TOGETHER", 64)
    stream = Stream(files(tmp_path, [7] * 200))
    starts = np.random.default_rng(0).permutation(1_390)

    assert np.array_equal(gathered(stream, starts, 5), starts[:, None] + np.arange(5))


def test_pieces_of_two_widths(tmp_path):
    (tmp_path / "wide").mkdir()
    narrow = files(tmp_path, [10, 10])
    wide = files(tmp_path / "wide", [10], "uint32")
    stream = Stream([*narrow, *wide])

    assert gathered(stream, [0, 12, 21], 4).tolist() == [
        [0, 1, 2, 3],
        [12, 13, 14, 15],
        [1, 2, 3, 4],
    ]
    assert stream.dtype == np.uint32


def test_of_a_file_whose_ids_lie_at_odd_places_only_the_rows_are_copied(tmp_path):
    """NumPy copies all of an array that is not aligned, to the last row and what lies between."""
    ids = (np.arange(1 << 20) % 50_000).astype("<u2")
    header = repr({"descr": "<u2", "fortran_order": False, "shape": ids.shape}).encode()
    header = header.ljust(98) + b"\n"  # NumPy's own begin their ids at multiples of 64
    begin = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (tmp_path / "odd.npy").write_bytes(begin + ids.tobytes())
    file = ArrayFile(tmp_path / "odd.npy")
    assert not file.array().flags.aligned
    starts = [3, len(ids) - 9]

    tracemalloc.start()
    found = gathered(Stream([file]), starts, 8)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert found.tolist() == [ids[start : start + 8].tolist() for start in starts]
    assert peak < 200_000


@pytest.fixture
def stores(tmp_path):
    made = []
    for name, count in (("a", 40), ("b", 70), ("c", 9)):
        texts = penstock.Texts([f"{name} says {number}" for number in range(count)])
        made.append(penstock.build(texts, tmp_path / name, tokenizer="bytes", documents="lines"))
    return made


def test_sources_read_together_give_what_each_gives_alone(stores):
    sources = [Windows(stores[0], 8), Windows(stores[1], 8, stride=3), Windows(stores[2], 8)]
    generator = np.random.default_rng(1)
    numbers = generator.integers(0, 3, 500)
    samples = np.array([generator.integers(0, len(sources[number])) for number in numbers])

    found = JoinedWindows(sources).read(numbers, samples)

    for number, sample, row in zip(numbers, samples, found, strict=True):
        assert row.tolist() == sources[number].read(np.array([sample]))["tokens"][0].tolist()


@pytest.mark.parametrize("options", [{}, {"tail": "pad"}, {"borders": True}])
def test_a_mixture_holds_the_same_rows_whether_read_together_or_not(stores, options):
    """Padded tails and borders keep sources apart; plain windows are read in one call."""
    sources = {store.path.name: Windows(store, 8, **options) for store in stores}
    plan = Plan(sources, seed=3)
    for batch in Loader(plan, 4, epochs=1, drop_last=False, format=BatchFormat(ids=True)):
        for row in range(len(batch["inputs"])):
            if int(batch["position"][row]) < 0:
                continue
            source = sources[plan.names[int(batch["source"][row])]]
            tokens = source.read(np.array([int(batch["sample"][row])]))["tokens"][0]
            assert batch["inputs"][row].tolist() == tokens[:-1].tolist()
