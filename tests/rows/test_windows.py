"""Rows against a naive twin, whatever the parts, the length and the stride."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import PlanError, StoreError
from penstock.rows.windows import Windows

# Parts of documents, by their lengths; some parts are shorter than any row.
PARTS = st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=6).filter(
    lambda parts: sum(map(sum, parts)) > 1
)


def numbered(parts):
    """Documents of these lengths, whose tokens count from 1 on without end."""
    count = iter(range(1, 10**6))
    return [[[next(count) for _ in range(size)] for size in part] for part in parts]


def naive_rows(num_tokens, length, stride, tail):
    """The tokens of each row, and how many targets it has."""
    flat = list(range(1, num_tokens + 1))
    rows = []
    start = 0
    while start + length + 1 <= num_tokens:
        rows.append((flat[start : start + length + 1], length))
        start += stride
    if tail == "pad" and start + 1 < num_tokens:
        rest = flat[start:]
        rows.append((rest + [0] * (length + 1 - len(rest)), len(rest) - 1))
    return rows


@settings(max_examples=60)
@given(parts=PARTS, length=st.integers(1, 20), stride=st.none() | st.integers(1, 25))
def test_rows_equal_slices_of_all_tokens(write_store, scratch, parts, length, stride):
    store = write_store(scratch / "rows", numbered(parts))
    expected = naive_rows(store.num_tokens, length, stride or length, "drop")
    if not expected:
        with pytest.raises(PlanError, match="do not make one row of"):
            Windows(store, length, stride=stride)
        return
    windows = Windows(store, length, stride=stride)
    order = np.random.default_rng(7).permutation(len(expected))

    assert len(windows) == len(expected)
    read = windows.read(order)
    assert list(read) == ["tokens"]
    assert read["tokens"].dtype == np.uint16
    assert read["tokens"].tolist() == [expected[row][0] for row in order]


@settings(max_examples=60)
@given(parts=PARTS, length=st.integers(1, 30))
def test_a_padded_tail_makes_every_token_but_the_first_a_target_once(
    write_store, scratch, parts, length
):
    store = write_store(scratch / "tail", numbered(parts))
    windows = Windows(store, length, tail="pad")
    expected = naive_rows(store.num_tokens, length, length, "pad")
    read = windows.read(np.arange(len(windows)))
    counts = read.get("num_targets", np.full(len(windows), length)).tolist()

    assert read["tokens"].tolist() == [row for row, _ in expected]
    assert counts == [count for _, count in expected]
    targets = [
        token
        for row, count in zip(read["tokens"].tolist(), counts, strict=True)
        for token in row[1 : count + 1]
    ]
    assert targets == list(range(2, store.num_tokens + 1))
    assert windows.num_tokens == len(targets)
    assert windows.unread_targets == 0


@given(parts=PARTS, length=st.integers(1, 12), stride=st.integers(1, 30))
def test_what_no_row_holds_is_counted_to_the_token(write_store, scratch, parts, length, stride):
    store = write_store(scratch / "lost", numbered(parts))
    expected = naive_rows(store.num_tokens, length, stride, "drop")
    if not expected:
        return
    windows = Windows(store, length, stride=stride)
    held = {token for row, _ in expected for token in row[1:]}

    assert windows.unread_targets == store.num_tokens - 1 - len(held)
    assert windows.tail_targets == store.num_tokens - expected[-1][0][-1]
    assert windows.num_tokens == len(expected) * length
    assert ("targets in no row" in repr(windows)) == (windows.unread_targets > 0)


@given(parts=PARTS, length=st.integers(1, 12), stride=st.none() | st.integers(1, 30))
def test_part_rows_count_the_rows_that_begin_in_each_part(
    write_store, scratch, parts, length, stride
):
    store = write_store(scratch / "parts", numbered(parts))
    tail = "drop" if stride else "pad"
    rows = naive_rows(store.num_tokens, length, stride or length, tail)
    if not rows:
        return
    ends = list(accumulate(sum(part) for part in parts))
    begins = [row * (stride or length) for row in range(len(rows))]
    expected = [sum(begin < end for begin in begins) for end in ends]

    windows = Windows(store, length, stride=stride, tail=tail)
    assert np.cumsum(windows.part_rows).tolist() == expected
    assert windows.part_rows.sum() == len(windows)


@settings(max_examples=60)
@given(parts=PARTS, length=st.integers(1, 20), tail=st.sampled_from(["drop", "pad"]))
def test_borders_equal_a_walk_over_the_documents(write_store, scratch, parts, length, tail):
    store = write_store(scratch / "borders", numbered(parts))
    sizes = [size for part in parts for size in part]
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    owners += [len(sizes)] * length  # what fills up the last row is a document of its own
    if tail == "drop" and store.num_tokens <= length:
        return
    windows = Windows(store, length, tail=tail, borders=True)
    read = windows.read(np.arange(len(windows)))

    for row in range(len(windows)):
        own = owners[row * length : (row + 1) * length]
        assert read["document_ids"][row].tolist() == [
            len(set(own[: column + 1])) - 1 for column in range(length)
        ]
        assert read["position_ids"][row].tolist() == [
            column - own.index(own[column]) for column in range(length)
        ]
    assert {read[name].dtype for name in ("document_ids", "position_ids")} == {np.dtype("int32")}


def test_parts_past_32_bits_are_read_at_their_places(sparse_store):
    """Three parts of 2^31 + 5 tokens, all zero but for a mark around each border."""
    store, size = sparse_store
    windows = Windows(store, 1000, stride=7, borders=True)
    assert len(windows) == (3 * size - 1001) // 7 + 1
    assert windows.part_rows.sum() == len(windows)
    for border in (size, 2 * size):
        row = (border - 500) // 7
        read = windows.read(np.array([row, 0, row + 1]))
        place = border - row * 7
        assert np.flatnonzero(read["tokens"][0]).tolist() == [place - 1, place]
        assert read["tokens"][0, place - 1 : place + 1].tolist() == [11, 7]
        assert read["position_ids"][0, place - 1 : place + 1].tolist() == [place - 1, 0]
        assert read["document_ids"][2, [place - 8, place - 7]].tolist() == [0, 1]


def test_a_stride_of_one_is_the_sliding_window(parted):
    windows = Windows(parted, 4, stride=1)

    assert len(windows) == 96
    assert windows.read(np.array([0, 1, 95]))["tokens"].tolist() == [
        [1, 2, 3, 4, 5],
        [2, 3, 4, 5, 6],
        [96, 97, 98, 99, 100],
    ]
    assert windows.unread_targets == 0


def test_rows_may_be_asked_for_twice_and_not_at_all(parted):
    windows = Windows(parted, 9, borders=True)

    assert windows.read(np.array([3, 0, 3]))["tokens"][:, 0].tolist() == [28, 1, 28]
    assert windows.read(np.array([], np.int64))["tokens"].shape == (0, 10)


@pytest.mark.parametrize("samples", [[-1], [0, 11], [10**12]])
def test_a_row_that_is_not_there_is_an_index_error(parted, samples):
    with pytest.raises(IndexError, match=r"were requested, but there are 11 rows"):
        Windows(parted, 9).read(np.array(samples))


def test_rows_are_new_arrays(parted):
    windows = Windows(parted, 9)
    read = windows.read(np.arange(11))["tokens"]
    read[:] = 0

    assert read.flags.owndata or read.base.flags.writeable
    assert windows.read(np.array([1]))["tokens"].tolist() == [list(range(10, 20))]


def test_the_digest_changes_with_every_setting_of_the_rows(parted, write_store, tmp_path):
    other = write_store(tmp_path / "other", [[[9, 9, 9, 9, 9, 9, 9, 9]]])
    made = [
        Windows(parted, 3),
        Windows(parted, 4),
        Windows(parted, 4, stride=3),
        Windows(parted, 4, tail="pad"),
        Windows(other, 4),
        Windows([parted, other], 4),
        Windows([other, parted], 4),
    ]

    assert len({windows.digest for windows in made}) == len(made)
    assert Windows(parted.path, 4).digest == made[1].digest
    assert Windows(parted, 4, stride=4, borders=True).digest == made[1].digest


def test_threads_read_the_same_rows(parted):
    windows = Windows(parted, 5, borders=True)
    expected = windows.read(np.arange(19))

    def read(seed):
        order = np.random.default_rng(seed).permutation(19)
        fresh = Windows(parted.path, 5, borders=True) if seed % 7 == 0 else windows
        return all(
            np.array_equal(values, expected[name][order])
            for name, values in fresh.read(order).items()
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(400)))


def test_pickled_windows_open_the_store_again(parted):
    windows = Windows([parted, parted.path], 5, stride=2, tail="drop", borders=True)
    data = pickle.dumps(windows)
    again = pickle.loads(data)

    assert len(data) < 2_000
    assert again.digest == windows.digest
    for name, values in windows.read(np.arange(90)).items():
        assert np.array_equal(values, again.read(np.arange(90))[name])


def test_a_store_that_changed_underneath_is_noticed(write_store, tmp_path):
    documents = [[[1, 2, 3, 4]], [[5, 6, 7, 8]]]
    windows = Windows(write_store(tmp_path / "s", documents), 2)
    pickled = pickle.dumps(windows)
    (tmp_path / "s" / "part-00001.tokens.npy").write_bytes(b"short")

    assert windows.read(np.array([0]))["tokens"].tolist() == [[1, 2, 3]]
    with pytest.raises(StoreError, match="has 5 bytes, but its manifest says 136"):
        windows.read(np.array([2]))
    write_store(tmp_path / "s", [[[1, 2, 3, 4]], [[5, 6, 7, 9]]])
    with pytest.raises(StoreError, match="changed after the store was pickled"):
        pickle.loads(pickled)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 0}, r"length=0 and stride=0 must be at least 1\."),
        ({"length": 4, "stride": 0}, r"length=4 and stride=0 must be at least 1\."),
        ({"length": 4, "tail": "keep"}, r"tail='keep' is not \"drop\" or \"pad\"\."),
        (
            {"length": 4, "stride": 5, "tail": "pad"},
            r'tail="pad" keeps the last tokens, but stride=5',
        ),
        ({"length": 4, "borders": "none"}, r"borders='none' is not True, False or"),
        (
            {"length": 100},
            r"100 tokens do not make one row of 100 inputs and their targets \(101 tokens\)\. Use",
        ),
    ],
)
def test_refuses_rows_that_cannot_be(parted, settings, message):
    with pytest.raises(PlanError, match=message):
        Windows(parted, **settings)


def test_one_token_has_no_target(write_store, tmp_path):
    store = write_store(tmp_path / "one", [[[7]]])

    with pytest.raises(PlanError, match="1 tokens do not make one row"):
        Windows(store, 4, tail="pad")


def test_reading_ahead_changes_nothing(parted):
    windows = Windows([parted, parted], 30, tail="pad")
    before = windows.read(np.arange(len(windows)))
    windows.read_ahead(np.arange(len(windows)))
    windows.read_ahead(np.array([], np.int64))

    for name, values in windows.read(np.arange(len(windows))).items():
        assert np.array_equal(values, before[name])


def test_windows_of_a_built_store_hold_its_text(tmp_path):
    texts = [f"line {number}" for number in range(50)]
    store = penstock.build(penstock.Texts(texts), tmp_path / "s", tokenizer="bytes")
    windows = penstock.Windows(tmp_path / "s", 20, tail="pad")
    read = windows.read(np.arange(len(windows)))
    text = bytes(token for row in read["tokens"][:, :-1] for token in row if token < 256)

    assert text.rstrip(b"\0").decode() == "".join(texts)
    assert windows.tokenizer_digest == store.manifest.contents["tokenizer"]["digest"]
