"""Records that are no documents, in every format: the reason, the place, and their neighbours."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.sources.settings import Texts

RECORDS = [{"text": "good"}, {"text": "bad \ud800"}, {"t": 1}, {"text": 7}, "x", {"text": "last"}]
LINES = [json.dumps(each).encode() for each in RECORDS]
LINES[1] = b'{"text": "bad \xff"}'
REASONS = ["invalid_utf8", "missing_field", "not_a_string", "not_an_object"]


def write_table(path, texts, *, arrow):
    table = pa.table({"text": pa.array(texts, pa.binary())})
    if not arrow:
        pq.write_table(table, path, row_group_size=2)
        return
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


# The name of the file, its bytes, and the offset, length and reason of each rejected record.
FILES = {
    "a.txt": (b"good\nbad \xff\n \nlast", [(5, 5, "invalid_utf8")]),
    "a.jsonl": (
        b"\n".join(LINES) + b"\n\n{",
        [*zip((17, 35, 44, 56), (17, 8, 11, 3), REASONS, strict=True), (78, 1, "bad_json")],
    ),
    "a.json": (
        b"[" + b",".join(LINES) + b',{"text": NaN}]',
        [*zip((18, 36, 45, 57), (17, 8, 11, 3), REASONS, strict=True), (78, 13, "bad_json")],
    ),
    "a.csv": (
        b'id,text\n1,good\n2,bad \xff\n3\n4,"fo"ur\n5,last\n',
        [(15, 7, "invalid_utf8"), (23, 1, "bad_csv"), (25, 8, "bad_csv")],
    ),
    "a.tsv": (
        b"text\tid\ngood\t1\n\xff\t2\n3\nlast\t4",
        [(15, 3, "invalid_utf8"), (19, 1, "bad_csv")],
    ),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("slice_bytes", [7, 64_000_000])
def test_a_record_that_is_no_document_is_rejected_and_its_neighbours_are_not(
    name, slice_bytes, read, tmp_path
):
    data, rejects = FILES[name]
    (tmp_path / name).write_bytes(data)
    found = read(tmp_path / name, slice_bytes=slice_bytes)

    assert found.texts == [b"good", b"last"]
    assert [(each.offset, each.num_bytes, each.reason) for each in found.rejects] == rejects
    assert found.tally.total_bytes == len(data)
    assert found.tally.rejected_bytes == sum(each.num_bytes for each in found.rejects)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "texts"])
def test_a_row_that_is_no_text_is_rejected_by_its_number(name, read, tmp_path):
    if name == "texts":
        inputs = Texts(["good", "bad \ud800", " ", "last"])
        expected = [(1, "invalid_utf8")]
    else:
        inputs = tmp_path / name
        write_table(inputs, [b"good", b"\xff", None, b"last"], arrow=name == "a.arrow")
        expected = [(1, "invalid_utf8"), (2, "not_a_string")]
    found = read(inputs)

    assert found.texts == [b"good", b"last"]
    assert [(each.offset, each.reason) for each in found.rejects] == expected


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.tsv"])
def test_invalid_bytes_can_be_replaced_and_are_counted(name, read, tmp_path):
    (tmp_path / name).write_bytes(FILES[name][0])
    found = read(tmp_path / name, errors="replace")

    assert len(found.texts) == 3
    assert "\ufffd" in found.texts[1].decode()
    assert found.tally.replaced == 1
    assert "invalid_utf8" not in found.reasons
