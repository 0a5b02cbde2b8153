"""JSON arrays: the same documents as JSON Lines, in any layout, against Python's json."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SourceError

TEXTS = st.text(alphabet='a,"\\[]{}\n é', max_size=8)
OTHER = st.recursive(
    st.none() | st.booleans() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=6,
)


@given(
    records=st.lists(st.tuples(TEXTS, OTHER), max_size=10),
    indent=st.sampled_from([None, 1]),
    around=st.sampled_from([b"", b" \n", b"\xef\xbb\xbf\n"]),
    block=st.sampled_from([1, 7, 4 << 20]),
    slice_bytes=st.integers(1, 200),
)
def test_an_array_has_the_documents_of_its_records_whatever_the_blocks_and_slices(
    records, indent, around, block, slice_bytes, read, scratch
):
    rows = [{"other": other, "text": text} for text, other in records]
    data = around + json.dumps(rows, indent=indent, ensure_ascii=not indent).encode() + b"\n"
    (scratch / "a.json").write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.sources.read.BLOCK_BYTES", block)
        found = read(scratch / "a.json", slice_bytes=slice_bytes)

    assert found.texts == [text.encode() for text, _ in records if text.strip(" \t\r\n")]
    assert found.tally.total_bytes == len(data)
    assert not found.rejects
    for text, (_, place) in zip(found.texts, found.places, strict=True):
        record, _ = json.JSONDecoder().raw_decode(data[place:].decode())
        assert record["text"].encode() == text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'[{"text": "a"}, {"text": "b"}', r"from byte 29 on: it was cut off"),
        (b'[{"text": "a"},', r"it was cut off; no \] closes the array"),
        (b'[{"text": "a"}, {"text": ["b"]', r"from byte 16 on: a comma or bracket is missing"),
        (b'[{"text": "a"}] [{"text": "b"}]', r"from byte 14 on: the array ends here"),
        (b'[{"text": "a"},, {"text": "b"}]', r"from byte 15 on: a value or name is missing"),
    ],
)
def test_an_array_that_is_damaged_is_refused_with_the_place(data, message, read, tmp_path):
    (tmp_path / "a.json").write_bytes(data)

    with pytest.raises(SourceError, match=message):
        read(tmp_path / "a.json")


def test_a_json_file_that_begins_with_an_object_is_read_as_lines(read, tmp_path):
    (tmp_path / "a.json").write_bytes(b'{"text": "one"}\n["x"]\n{"text": "two"}\n')
    assert read(tmp_path / "a.json").texts == [b"one", b"two"]

    with pytest.raises(
        SourceError, match=r"as a JSON array from byte 0 on: it does not begin with"
    ):
        read(tmp_path / "a.json", format="json")
