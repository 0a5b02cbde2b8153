"""Token files without a store, several stores as one, and sizes past 32 bits."""

import pickle

import numpy as np
import pytest

from penstock.errors import PlanError, StoreError
from penstock.formats.open import open_tokens
from penstock.rows.tokens import ArrayFile, open_stream
from penstock.rows.windows import Windows

IDS = np.arange(1, 41)


@pytest.fixture
def files(tmp_path):
    """The ids 1 to 40 as files of every kind that is read."""
    np.save(tmp_path / "little.npy", IDS.astype("<u2"))
    np.save(tmp_path / "big.npy", IDS.astype(">u2"))
    np.save(tmp_path / "signed.npy", IDS.astype("int64"))
    IDS.astype("<u2").tofile(tmp_path / "nano.bin")
    IDS.astype("<u4").tofile(tmp_path / "wide.bin")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("little.npy", None, "uint16"),
        ("big.npy", None, "uint16"),
        ("signed.npy", None, "int64"),
        ("nano.bin", "uint16", "uint16"),
        ("wide.bin", "uint32", "uint32"),
    ],
)
def test_a_bare_file_gives_the_rows_of_its_ids(files, name, dtype, expected):
    windows = Windows(ArrayFile(files / name, dtype=dtype), 7, tail="pad")
    read = windows.read(np.array([5, 1]))

    assert read["tokens"].dtype == expected
    assert read["tokens"].dtype.isnative
    assert read["tokens"].tolist() == [[36, 37, 38, 39, 40, 0, 0, 0], list(range(8, 16))]
    assert read["num_targets"].tolist() == [4, 7]


def test_a_path_is_opened_by_what_it_is(files, parted):
    assert isinstance(open_stream(str(files / "little.npy")).members[0], ArrayFile)
    assert open_stream(parted.path).members[0].digest == parted.digest
    with pytest.raises(StoreError, match=r'open_tokens\(path, format="nanogpt", vocab_size=…'):
        open_stream(files / "nano.bin")


def test_several_are_read_as_one(files, parted):
    windows = Windows([parted.path, ArrayFile(files / "wide.bin", "uint32"), parted], 23, stride=1)
    flat = [*range(1, 101), *IDS.tolist(), *range(1, 101)]
    read = windows.read(np.arange(len(windows)))["tokens"]

    assert read.dtype == np.uint32
    assert read.tolist() == [flat[start : start + 24] for start in range(len(flat) - 23)]
    assert windows.part_rows.tolist() == [28, 7, 65, 40, 28, 7, 42]


def test_ids_of_two_kinds_share_a_type_that_holds_both(tmp_path):
    np.save(tmp_path / "a.npy", np.array([2**32 - 1, 2**32 - 2], "uint32"))
    np.save(tmp_path / "b.npy", np.array([5, 2**31 - 1], "int32"))

    wide = open_tokens(tmp_path / "a.npy", vocab_size=2**32)
    read = Windows([wide, tmp_path / "b.npy"], 3).read(np.array([0]))
    assert read["tokens"].tolist() == [[2**32 - 1, 2**32 - 2, 5, 2**31 - 1]]


def test_stores_of_two_tokenizers_do_not_share_a_row(write_store, tmp_path):
    one = write_store(tmp_path / "one", [[[1, 2, 3]]], tokenizer="one")
    two = write_store(tmp_path / "two", [[[1, 2, 3]]], tokenizer="two")

    with pytest.raises(StoreError) as caught:
        Windows([one, two], 2)
    assert str(caught.value) == (
        f"{tmp_path / 'two'} was tokenized with 'two' (digest 3fc4ccfe), {tmp_path / 'one'} with "
        "'one' (digest 7692c3ad). The same id would mean different text, so they cannot share a "
        "row. Build them with one tokenizer."
    )


def test_bare_files_have_no_borders(files, parted):
    with pytest.raises(PlanError, match="borders=True needs stores: bare token files do not"):
        Windows([parted, files / "little.npy"], 4, borders=True)
    with pytest.raises(StoreError, match="does not record where documents end"):
        open_stream(files / "little.npy").bounds(0)


def test_nothing_at_all_is_refused():
    with pytest.raises(StoreError, match="No store was given to read rows from"):
        Windows([], 4)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("none.npy", None, "does not exist"),
        ("none.bin", None, "does not exist"),
        ("empty.npy", b"", "cannot be read as an array"),
        ("text.npy", b"tokens", "cannot be read as an array"),
        ("zip.npy", b"PK\x03\x04" + b"\0" * 100, "cannot be read as an array"),
        (
            "cut.npy",
            b"\x93NUMPY\x01\x00\x20\x00{'descr': '<u2', 'shape': (4,\n   ",
            "cannot be read as an array",
        ),
        ("odd.bin", b"abc", "has 3 bytes, which is not a whole number of uint16 ids"),
        ("empty.bin", b"", r"empty\.bin is empty"),
    ],
)
def test_refuses_files_that_hold_no_ids(tmp_path, name, data, message):
    if data is not None:
        (tmp_path / name).write_bytes(data)

    with pytest.raises(StoreError, match=message):
        ArrayFile(tmp_path / name, dtype="uint16")


@pytest.mark.parametrize(
    "array", [np.zeros((2, 2), "uint16"), np.zeros(4, "float32"), np.array([None, {}], object)]
)
def test_refuses_arrays_that_are_not_a_row_of_whole_numbers(tmp_path, array):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)

    with pytest.raises(
        StoreError, match=r"holds a one-dimensional one|token ids are integers|Python objects"
    ):
        ArrayFile(tmp_path / "a.npy")


def test_a_cut_off_npy_is_refused(files):
    data = (files / "little.npy").read_bytes()
    (files / "little.npy").write_bytes(data[:-2])

    with pytest.raises(StoreError, match="truncated or damaged"):
        ArrayFile(files / "little.npy")


def test_the_digest_of_a_file_is_of_its_size_type_and_sampled_blocks(tmp_path):
    array = np.zeros(4_000_000, "uint16")
    array.tofile(tmp_path / "a.bin")
    first = ArrayFile(tmp_path / "a.bin", "uint16").digest

    assert ArrayFile(tmp_path / "a.bin", "uint16").digest == first
    assert ArrayFile(tmp_path / "a.bin", "uint32").digest != first
    for place in (0, 250_000, 2_000_000, len(array) - 1):
        array[place] = 1
        array.tofile(tmp_path / "a.bin")
        assert ArrayFile(tmp_path / "a.bin", "uint16").digest != first
        array[place] = 0
    array[:-1].tofile(tmp_path / "a.bin")
    assert ArrayFile(tmp_path / "a.bin", "uint16").digest != first


def test_a_pickled_file_is_its_name_and_digest(files):
    windows = Windows(ArrayFile(files / "nano.bin", "uint16"), 7)
    data = pickle.dumps(windows)

    assert len(data) < 1_000
    assert pickle.loads(data).read(np.array([1]))["tokens"].tolist() == [list(range(8, 16))]
    (IDS + 1).astype("<u2").tofile(files / "nano.bin")
    with pytest.raises(StoreError, match="was changed after it was pickled"):
        pickle.loads(data)


def test_a_file_that_was_cut_off_under_us_is_an_error_and_not_a_crash(files):
    """Touching a page that the file no longer has would end the process with SIGBUS."""
    windows = Windows(ArrayFile(files / "nano.bin", "uint16"), 7)
    (files / "nano.bin").write_bytes(b"")

    with pytest.raises(StoreError, match="has 0 bytes, but had 80 when it was opened"):
        windows.read(np.array([0]))


@pytest.mark.parametrize("num_tokens", [2**31 + 50, 2**32 + 50, 2**40])
def test_places_past_32_bits_are_exact(tmp_path, num_tokens):
    """Sparse: a file of 2^40 ids takes a few kilobytes of disk."""
    marks = {place: place % 251 + 1 for place in (0, 2**31, num_tokens // 2, num_tokens - 1)}
    with (tmp_path / "huge.bin").open("wb") as stream:
        for place, token in marks.items():
            stream.seek(place)
            stream.write(bytes([token]))
    windows = Windows(ArrayFile(tmp_path / "huge.bin", dtype="uint8"), 10, stride=1)

    assert len(windows) == num_tokens - 10
    for place, token in marks.items():
        start = max(0, min(place - 3, len(windows) - 1))
        row = windows.read(np.array([start]))["tokens"][0]
        assert row[place - start] == token
        assert np.count_nonzero(row) == 1
    assert windows.part_rows.tolist() == [num_tokens - 10]


def test_several_files_add_up_past_32_bits(tmp_path):
    with (tmp_path / "half.bin").open("wb") as stream:
        stream.seek(2**32)
        stream.write(b"\x07")
    half = ArrayFile(tmp_path / "half.bin", dtype="uint8")
    windows = Windows([half, half, half], 1024, stride=1, tail="drop")
    last = 2 * (2**32 + 1) + 2**32

    assert len(windows) == 3 * (2**32 + 1) - 1024
    assert windows.read(np.array([last - 1024]))["tokens"][0, -1] == 7
    across = windows.read(np.array([2 * (2**32 + 1) - 5]))["tokens"][0]
    assert np.flatnonzero(across).tolist() == [4]
