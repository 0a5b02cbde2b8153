"""Which pieces go into which row, against walks that know nothing of histograms."""

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.rows.packing import PACKING_FORMAT, best_fit, one_each, pack

lengths_of_documents = st.lists(st.integers(0, 40) | st.integers(0, 300), max_size=60)


def pieces_of(index):
    """The start and the size of each piece."""
    _, starts, sizes = index.spans(np.arange(index.num_rows))
    return starts, sizes


def rows_of(index):
    """Each row as a list of (start, size)."""
    pieces = list(zip(*(each.tolist() for each in pieces_of(index)), strict=True))
    edges = index.edges.tolist()
    return [pieces[low:high] for low, high in itertools.pairwise(edges)]


def naive_pieces(lengths, length):
    """The pieces of each document, one token after the other."""
    found, begin = [], 0
    for size in lengths:
        place = 0
        while size and (place == 0 or place < size - 1):
            found.append((begin + place, min(length, size - place)))
            place += length - 1
        begin += size
    return found


def first_fit(sizes, length):
    rooms = []
    for size in sizes:
        for number, room in enumerate(rooms):
            if size <= room:
                rooms[number] -= size
                break
        else:
            rooms.append(length - size)
    return len(rooms)


@given(lengths=lengths_of_documents, length=st.integers(2, 64))
@example(lengths=[], length=2)
@example(lengths=[0, 0], length=2)
@example(lengths=[1], length=2)
@example(lengths=[64, 63, 65, 127, 128, 1], length=64)
@example(lengths=[10_000], length=7)
def test_every_piece_is_in_one_row_and_every_row_has_room_for_its_own(lengths, length):
    index = pack(np.cumsum(lengths, dtype=np.uint64), length)
    rows = rows_of(index)

    assert sorted(piece for row in rows for piece in row) == sorted(naive_pieces(lengths, length))
    assert all(1 <= sum(size for _, size in row) <= length for row in rows)
    assert all(row == sorted(row) for row in rows)  # in the order of their documents
    assert index.num_empty == lengths.count(0)
    assert index.num_long == sum(size > length for size in lengths)
    assert index.num_cut == 0


@given(lengths=lengths_of_documents, length=st.integers(2, 64))
def test_rows_come_in_the_order_of_their_first_documents(lengths, length):
    edges = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    rows = rows_of(pack(edges[1:], length))
    first = [int(np.searchsorted(edges, row[0][0], side="right")) for row in rows]

    assert first == sorted(first)
    for row, other in itertools.pairwise(rows):  # and of one document, in its order
        if first[rows.index(row)] == first[rows.index(other)]:
            assert row[0] < other[0]


@given(lengths=st.lists(st.integers(1, 99), min_size=1, max_size=200))
def test_takes_less_than_twice_the_rows_that_are_needed(lengths):
    """A row is opened only where nothing has room, or where so many are needed in any case."""
    num_rows = len(pack(np.cumsum(lengths), 100).edges) - 1
    needed = max(-(-sum(lengths) // 100), sum(length > 50 for length in lengths))

    assert needed <= num_rows <= 2 * needed


def test_takes_fewer_rows_than_first_fit():
    lengths = np.random.default_rng(3).lognormal(3, 1, 3_000).astype(int).clip(1, 256)

    assert len(pack(np.cumsum(lengths), 256).edges) - 1 < first_fit(lengths.tolist(), 256)


@pytest.mark.parametrize(
    ("lengths", "num_rows"),
    [
        ([10] * 1000, 5),  # 204 a row
        ([1000] * 1000, 500),
        ([700] * 1000, 500),
        ([2047, 1] * 100, 100),
        ([1024] * 7, 4),
        ([1] * 4097, 3),
        ([1500] * 10 + [548] * 10, 10),
    ],
    ids=lambda value: None if isinstance(value, int) else f"{len(value)} of {value[0]}",
)
def test_packs_as_tight_as_possible_where_that_is_known(lengths, num_rows):
    assert len(pack(np.cumsum(lengths), 2048).edges) - 1 == num_rows


def test_short_documents_fill_rows_but_for_the_last():
    lengths = np.random.default_rng(1).integers(5, 300, 20_000)

    assert len(pack(np.cumsum(lengths), 2048).edges) - 1 == -(-lengths.sum() // 2048)


@given(
    histogram=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    more=st.integers(0, 5),
)
def test_best_fit_places_every_piece_of_the_histogram_once(histogram, more):
    histogram[0] = 0
    length = max(2, len(histogram) - 1 + more)
    firsts, runs, num_bins = best_fit(np.array(histogram), length)
    sizes = [size for size in range(len(histogram) - 1, 0, -1) for _ in range(histogram[size])]
    bins = [first + turn for first, run in zip(firsts, runs, strict=True) for turn in range(run)]

    assert len(bins) == len(sizes)
    assert set(bins) == set(range(num_bins))
    filled = np.bincount(bins, weights=sizes, minlength=num_bins)
    assert (filled <= length).all()


@given(lengths=lengths_of_documents, length=st.integers(2, 64))
def test_one_document_a_row_is_cut_off_or_split(lengths, length):
    bounds = np.cumsum(lengths, dtype=np.uint64)
    split, cut = (one_each(bounds, length, split=split) for split in (True, False))

    assert [row[0] for row in rows_of(split)] == naive_pieces(lengths, length)
    assert pieces_of(cut)[1].tolist() == [min(size, length) for size in lengths if size]
    assert cut.num_cut == sum(max(0, size - length) for size in lengths)
    assert split.num_cut == 0
    assert split.num_long == cut.num_long == sum(size > length for size in lengths)
    assert split.num_empty == cut.num_empty == lengths.count(0)


def test_the_packing_is_golden():
    """Another value needs another PACKING_FORMAT, and an entry in the changelog."""
    lengths = [number * 7919 % 613 + 1 for number in range(2_000)] + [5_000, 0, 257, 256, 1]
    index = pack(np.cumsum(lengths), 256)
    words = np.concatenate((index.edges.astype("<i8"), *pieces_of(index))).astype("<i8")

    assert PACKING_FORMAT == 1
    assert rows_of(pack(np.array([5, 7, 19, 22, 23]), 8)) == [
        [(0, 5), (19, 3)],
        [(5, 2), (14, 5), (22, 1)],
        [(7, 8)],
    ]
    assert len(index.edges) - 1 == 2424
    assert (
        hashlib.sha256(words.tobytes()).hexdigest()
        == "4b7256233d771d89f621efb5adfe374dd4009f4aeb54b50a6cbb88e4e9da8ea4"
    )


def test_a_hundred_thousand_documents_leave_less_than_a_hundredth_of_a_percent():
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(6.2, 1.1, 100_000)).astype(np.int64)
    index = pack(np.cumsum(lengths), 2048)
    places = (len(index.edges) - 1) * 2048

    assert 0 <= 1 - index.num_tokens / places < 1e-4
    assert index.num_tokens - index.num_pieces == (lengths - 1).sum()
