"""Parquet files and Hugging Face datasets on disk, written by hand with pyarrow."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SourceError
from penstock.options import ReadSettings
from penstock.sources.listing import list_files
from penstock.sources.read import read_slice
from penstock.sources.slices import cut

TEXTS = ["one", "", None, "zwei\n", "  ", "três", "四", "five" * 10]
FULL = ["one", "zwei\n", "três", "四", "five" * 10]


def decoded(found):
    return [text.decode() for text in found.texts]


def write_dataset(folder, tables, **info):
    """The layout of `datasets.Dataset.save_to_disk`: Arrow streams and two JSON files."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(tables):05d}.arrow" for i in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with (
            pa.OSFile(str(folder / name), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as out,
        ):
            out.write_table(table, max_chunksize=2)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps(info))


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
        pa.string_view(),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["parquet", "arrow"])
def test_every_type_of_text_column_gives_the_same_documents(read, tmp_path, kind, layout):
    column = pa.array(TEXTS).cast(pa.string() if pa.types.is_dictionary(kind) else kind)
    table = pa.table({"id": range(len(TEXTS)), "text": column.cast(kind)})
    if layout == "parquet":
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
        found = read(tmp_path / "a.parquet")
    else:
        write_dataset(tmp_path / "set", [table])
        found = read(tmp_path / "set")

    assert decoded(found) == FULL
    assert found.places == [(0, 0), (0, 3), (0, 5), (0, 6), (0, 7)]
    assert found.reasons == ["not_a_string"]
    assert found.rejects[0].offset == 2
    assert found.tally.skipped == 2


@given(
    texts=st.lists(st.none() | st.text(max_size=12), max_size=30),
    group=st.integers(1, 9),
    slice_bytes=st.integers(1, 400),
)
def test_documents_do_not_depend_on_row_groups_or_slices(texts, group, slice_bytes, read, scratch):
    path = scratch / "groups.parquet"
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=group)
    found = read(path, slice_bytes=slice_bytes)
    full = [(i, text) for i, text in enumerate(texts) if text and text.strip(" \t\r\n")]

    assert decoded(found) == [text for _, text in full]
    assert found.places == [(0, i) for i, _ in full]


@pytest.mark.parametrize("layout", ["parquet", "arrow"])
def test_a_nested_column_is_named_with_a_dot(read, tmp_path, layout):
    rows = [{"b": "x", "c": 1}, {"b": None, "c": 2}, None, {"b": "y", "c": 3}]
    kind = pa.struct([("b", pa.string()), ("c", pa.int64())])
    table = pa.table({"a": pa.array(rows, kind), "text": ["no"] * 4})
    if layout == "parquet":
        pq.write_table(table, tmp_path / "set.parquet")
        found = read(tmp_path / "set.parquet", field="a.b")
    else:
        write_dataset(tmp_path / "set", [table])
        found = read(tmp_path / "set", field="a.b")

    assert decoded(found) == ["x", "y"]
    assert [reject.offset for reject in found.rejects] == [1, 2]


def test_a_column_whose_name_has_a_dot_is_found(read, tmp_path):
    pq.write_table(pa.table({"a.b": ["flat"]}), tmp_path / "a.parquet")

    assert decoded(read(tmp_path, field="a.b")) == ["flat"]


@pytest.mark.parametrize(
    ("column", "field", "message"),
    [
        (["a"], "body", r'no column "body"; it has "text"\. Name a column of strings with field='),
        (["a"], "text.body", r'no column "text.body"; it has no columns at that level'),
        ([1, 2], "text", r'column "text" holds int64, not text'),
        ([["a"]], "text", r'column "text" holds list<.*string>, not text'),
        ([{"b": "x"}], "text", r'column "text" holds struct<b: string>, not text'),
        ([{"b": "x"}], "text.c", r'no column "text.c"; it has "b"'),
    ],
)
@pytest.mark.parametrize("layout", ["parquet", "arrow"])
def test_a_wrong_column_is_refused(read, tmp_path, column, field, message, layout):
    if layout == "parquet":
        pq.write_table(pa.table({"text": column}), tmp_path / "set.parquet")
        inputs = tmp_path / "set.parquet"
    else:
        inputs = tmp_path / "set"
        write_dataset(inputs, [pa.table({"text": column})])

    with pytest.raises(SourceError, match=message):
        read(inputs, field=field)


def extension_tables():
    known = pa.array(['{"a": 1}']).cast(pa.json_())
    unknown = pa.field("text", pa.string(), metadata={"ARROW:extension:name": "evil.type"})
    return [
        pa.table({"text": known}),
        pa.table([pa.array(["x"])], schema=pa.schema([unknown])),
    ]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("layout", ["parquet", "arrow"])
def test_extension_types_are_refused_also_those_nobody_registered(read, tmp_path, number, layout):
    table = extension_tables()[number]
    if layout == "parquet":
        pq.write_table(table, tmp_path / "set.parquet")
        inputs = tmp_path / "set.parquet"
    else:
        inputs = tmp_path / "set"
        write_dataset(inputs, [table])

    with pytest.raises(SourceError, match=r"holds .*extension.*, not text"):
        read(inputs)


def test_a_damaged_page_is_found_by_its_checksum(read, tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"document {number}" for number in range(100)]})
    pq.write_table(table, path, write_page_checksum=True, compression="NONE", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[data.index(b"document 50") + 9] ^= 1
    path.write_bytes(data)

    with pytest.raises(SourceError, match=r"a\.parquet cannot be read as Parquet: .*(?i:crc)"):
        read(path)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"no table at all", b"PAR1" + bytes(99) + b"PAR1"])
def test_what_is_not_parquet_is_refused(read, tmp_path, data):
    (tmp_path / "a.parquet").write_bytes(data)

    with pytest.raises(SourceError, match=r"a\.parquet cannot be read as Parquet"):
        read(tmp_path)


def test_parquet_cut_anywhere_is_refused(read, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS}), path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(SourceError):
            read(path)


def test_a_table_without_rows_has_no_documents(read, tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    write_dataset(tmp_path / "set", [pa.table({"text": pa.array([], pa.string())})])

    assert read(tmp_path / "a.parquet").texts == []
    assert read(tmp_path / "set").texts == []


def test_only_the_one_column_is_read(read, tmp_path):
    """A damaged column beside the text costs nothing."""
    path = tmp_path / "a.parquet"
    table = pa.table({"other": ["x" * 50] * 20, "text": ["fine"] * 20})
    pq.write_table(table, path, write_page_checksum=True, compression="NONE", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[data.index(b"x" * 50)] ^= 1
    path.write_bytes(data)

    assert decoded(read(path)) == ["fine"] * 20


def test_a_dataset_of_several_files_is_read_in_their_order(read, tmp_path):
    tables = [pa.table({"text": [f"{file}-{row}" for row in range(5)]}) for file in range(12)]
    write_dataset(tmp_path / "set", tables)
    found = read(tmp_path / "set", slice_bytes=64)

    assert decoded(found) == [f"{file}-{row}" for file in range(12) for row in range(5)]
    assert found.places[7] == (1, 2)
    assert found.num_slices > 1


def test_a_dataset_dict_is_refused_by_the_names_of_its_splits(read, tmp_path):
    write_dataset(tmp_path / "set" / "train", [pa.table({"text": ["a"]})])
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')

    with pytest.raises(SourceError, match=r"DatasetDict with the splits train, test.*set/train"):
        read(tmp_path / "set")
    assert decoded(read(tmp_path / "set" / "train")) == ["a"]


@pytest.mark.parametrize(
    "name", ["../outside.arrow", "/tmp/outside.arrow", "a/../../outside.arrow"]
)
def test_a_dataset_cannot_name_a_file_outside_itself(read, tmp_path, name):
    write_dataset(tmp_path / "other", [pa.table({"text": ["secret"]})])
    (tmp_path / "other" / "data-00000-of-00001.arrow").rename(tmp_path / "outside.arrow")
    write_dataset(tmp_path / "set", [])
    (tmp_path / "set" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))

    with pytest.raises(SourceError, match=r"set/outside\.arrow"):
        read(tmp_path / "set")


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"_data_files": 7}', '{"_data_files": [{}]}'])
def test_a_dataset_with_a_damaged_state_is_refused(read, tmp_path, state):
    write_dataset(tmp_path / "set", [])
    (tmp_path / "set" / "state.json").write_text(state)

    with pytest.raises(SourceError, match=r"state\.json"):
        read(tmp_path / "set")


def test_an_arrow_stream_cut_inside_a_batch_is_refused(read, tmp_path):
    write_dataset(tmp_path / "set", [pa.table({"text": ["some text"] * 8})])
    path = tmp_path / "set" / "data-00000-of-00001.arrow"
    whole = path.read_bytes()
    for length in range(0, len(whole) - 200, 13):
        path.write_bytes(whole[:length])
        with pytest.raises(SourceError):
            read(tmp_path / "set")


def test_an_arrow_stream_that_is_truncated_while_it_is_read_is_a_clear_error(tmp_path):
    write_dataset(tmp_path / "set", [pa.table({"text": ["some text " * 1_000] * 100})])
    files = list_files(tmp_path / "set", ReadSettings())
    (piece,) = cut(files, ReadSettings())
    batches = read_slice(files, piece, ReadSettings())
    os.truncate(files[0].path, 400_000)

    with pytest.raises(SourceError, match=r"cannot be read as an Arrow stream|changed while"):
        list(batches)


def test_an_arrow_stream_that_lies_about_its_texts_is_refused(read, tmp_path):
    """Offsets past the end of the text must not be followed: that would end the process."""
    write_dataset(tmp_path / "set", [pa.table({"text": ["abcdefgh", "ijklmnop"]})])
    path = tmp_path / "set" / "data-00000-of-00001.arrow"
    data = path.read_bytes()
    honest = np.array([0, 8, 16], "<i4").tobytes()
    for lie in ([0, 8, 1 << 30], [0, -8, 16], [8, 0, 16], [1 << 30, 1 << 30, 1 << 30]):
        path.write_bytes(data.replace(honest, np.array(lie, "<i4").tobytes()))
        with pytest.raises(SourceError, match="cannot be read as an Arrow stream"):
            read(tmp_path / "set")


def test_no_flipped_bit_of_a_footer_ends_the_process(tmp_path, quick_python):
    """pyarrow 26 aborts when it is asked for the metadata of a column that are damaged."""
    code = """
import sys
from penstock.errors import PenstockError
from penstock.sources.listing import list_files
from penstock.sources.read import read_slice
from penstock.options import ReadSettings
from penstock.sources.slices import cut
path, reading = sys.argv[1], ReadSettings()
data = open(path, "rb").read()
length = int.from_bytes(data[-8:-4], "little")
for place in range(len(data) - 8 - length, len(data)):
    damaged = bytearray(data)
    damaged[place] ^= 1 << place % 8
    open(path, "wb").write(damaged)
    try:
        files = list_files(path, reading)
        for piece in cut(files, reading):
            for batch in read_slice(files, piece, reading):
                batch.texts.to_pylist()
    except PenstockError:
        pass
print("alive")
"""
    pq.write_table(pa.table({"text": TEXTS, "other": TEXTS}), tmp_path / "a.parquet")

    assert quick_python(code, tmp_path / "a.parquet").stdout == "alive\n"


def test_indices_of_dictionaries_are_checked_before_batches_are_joined(read, tmp_path, monkeypatch):
    """To join dictionaries, Arrow follows indices without a check: another text, or a crash."""
    right = pa.table({"text": pa.array(["one", "two"]).dictionary_encode()})
    pq.write_table(right, tmp_path / "a.parquet")

    def batches(*_, **__):
        for words in (["one", "two"], ["three", "four"]):
            indices = pa.array([len(words) + 3], pa.int32())
            text = pa.DictionaryArray.from_arrays(indices, pa.array(words), safe=False)
            yield pa.RecordBatch.from_arrays([text], ["text"])

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", batches)
    with pytest.raises(SourceError, match="Dictionary indices invalid"):
        read(tmp_path / "a.parquet")
