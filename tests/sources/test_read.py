"""What becomes of bytes: marks, line ends, bad UTF-8, long records; and that they all add up."""

import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SourceError
from penstock.sources.settings import Texts

HOW = st.sampled_from(["lines", "paragraphs", "file", "\n\n", "<|endoftext|>"])


def test_a_carriage_return_belongs_to_the_line_and_only_a_newline_ends_it(read, tmp_path):
    data = b"one\r\ntwo\rthree\nfour\x0bfive\x0c\xc2\x85\xe2\x80\xa8\xe2\x80\xa9six\x00seven\n"
    (tmp_path / "a.txt").write_bytes(data)

    assert read(tmp_path / "a.txt").texts == data.split(b"\n")[:-1]


def test_a_byte_order_mark_is_taken_off_the_start_of_a_file_and_nowhere_else(read, tmp_path):
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.txt").write_bytes(mark + mark + b"one\n" + mark + b"two\n")
    (tmp_path / "b.txt").write_bytes(mark + b"three")
    found = read(tmp_path)

    assert found.texts == [mark + b"one", mark + b"two", b"three"]
    assert found.places == [(0, 3), (0, 10), (1, 3)]
    assert found.tally.separator_bytes == 3 + 2 + 3


def test_a_file_of_a_byte_order_mark_holds_no_document(read, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf")

    assert read(tmp_path, documents="file").tally.total_bytes == 3


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_another_encoding_is_refused_with_the_command_that_converts_it(read, tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes("\ufeffone\ntwo".encode(encoding))

    with pytest.raises(
        SourceError, match=f"begins with the byte order mark of {encoding.upper()[:6]}.*iconv"
    ):
        read(tmp_path / "a.txt")


@given(mark=st.sampled_from([b"\xff\xfe", b"\xfe\xff"]), block=st.integers(1, 4))
def test_the_mark_of_another_encoding_is_seen_in_blocks_of_any_size(mark, block, read, scratch):
    (scratch / "mark.txt").write_bytes(mark + b"\na\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.sources.read.BLOCK_BYTES", block)
        with pytest.raises(SourceError, match="UTF-16"):
            read(scratch / "mark.txt")


@given(lines=st.lists(st.binary(max_size=12), max_size=12))
def test_strict_and_replace_differ_only_where_python_fails_to_decode(lines, read, scratch):
    data = b"\n".join(lines)
    (scratch / "bad.txt").write_bytes(b"#\n" + data)  # never a byte order mark
    pieces = [line for line in (b"#\n" + data).split(b"\n") if line.strip(b" \t\r")]
    mended = [piece.decode(errors="replace").encode() for piece in pieces]

    assert read(scratch / "bad.txt", errors="replace").texts == mended
    assert read(scratch / "bad.txt").texts == [
        piece for piece, whole in zip(pieces, mended, strict=True) if piece == whole
    ]


def test_a_record_longer_than_many_blocks_and_slices_is_one_document(read, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.sources.read.BLOCK_BYTES", 64)
    line = b"long " * 2_000
    (tmp_path / "a.txt").write_bytes(b"short\n" + line + b"\nshort\n")

    assert read(tmp_path / "a.txt", slice_bytes=100).texts == [b"short", line, b"short"]


def test_an_input_that_changes_while_it_is_read_is_refused(read, tmp_path):
    from penstock.options import ReadSettings
    from penstock.sources.listing import list_files
    from penstock.sources.read import read_slice
    from penstock.sources.slices import cut

    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    files = list_files(path, ReadSettings(documents="lines"))
    (piece,) = cut(files, ReadSettings(documents="lines"))
    for change in ("one\ntwo\nthree\n", "one\n", None):
        path.write_text(change) if change else path.unlink()
        with pytest.raises(
            SourceError, match=r"changed while|ended at byte|was removed while it was read"
        ):
            list(read_slice(files, piece, ReadSettings(documents="lines")))


def _parquet(texts):
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), sink, row_group_size=3)
    return sink.getvalue()


def gaps(data, found, record_end):
    """What is left of `data` when its documents and rejects are cut out, gap by gap."""
    places = [place for _, place in found.places] + [each.offset for each in found.rejects]
    last = 0
    for place in sorted(places):
        yield data[last:place]
        last = record_end(place)
    yield data[last:]


def check_tiles(data, found):
    """The counts say what the documents and rejects say, and nothing is counted twice."""
    tally = found.tally
    assert tally.total_bytes == len(data)
    assert tally.documents == len(found.texts) == len(found.places)
    assert tally.rejected == len(found.rejects)
    assert tally.rejected_bytes == sum(each.num_bytes for each in found.rejects)
    assert min(tally.separator_bytes, tally.skipped_bytes) >= 0


@given(raw=st.lists(st.binary(max_size=20), max_size=20), how=HOW, slice_bytes=st.integers(8, 200))
def test_every_byte_of_text_is_a_document_a_separator_a_blank_or_a_reject(
    raw, how, slice_bytes, read, scratch
):
    data = b"\n".join([b"#", *raw])
    separator = b"" if how in ("lines", "paragraphs", "file") else how.encode()
    places = {"tile.txt": data, "tile.txt.gz": gzip.compress(data, 1)}
    places["tile.txt.zst"] = zstandard.compress(data, 1)
    for name, contents in places.items():
        (scratch / name).write_bytes(contents)
        found = read(scratch / name, documents=how, slice_bytes=slice_bytes)
        lengths = {place: len(t) for t, (_, place) in zip(found.texts, found.places, strict=True)}
        lengths |= {each.offset: each.num_bytes for each in found.rejects}

        check_tiles(data, found)
        assert found.tally.document_bytes == sum(map(len, found.texts))
        for gap in gaps(data, found, lambda place, ends=lengths: place + ends[place]):
            assert not b"".join(gap.split(separator or None)).strip(b" \t\r\n")


@given(raw=st.lists(st.binary(max_size=20) | st.text(max_size=9).map(json.dumps), max_size=20))
def test_every_byte_of_json_lines_is_accounted_for(raw, read, scratch):
    data = b"\n".join(
        b'{"text": %b}' % each.encode() if isinstance(each, str) else b"#" + each for each in raw
    )
    (scratch / "tile.jsonl").write_bytes(data)
    found = read(scratch / "tile.jsonl", slice_bytes=50)

    check_tiles(data, found)
    ends = (data + b"\n").index
    for gap in gaps(data, found, lambda place: ends(b"\n", place)):
        for line in gap.split(b"\n"):
            assert not line.strip(b" \t\r") or not json.loads(line)["text"].strip(" \t\r\n")


@given(texts=st.lists(st.none() | st.text(max_size=9), max_size=20))
def test_every_row_of_a_table_and_every_text_is_accounted_for(texts, read, scratch):
    (scratch / "tile.parquet").write_bytes(_parquet(pa.array(texts, pa.string())))
    found = read(scratch / "tile.parquet", slice_bytes=50)
    full = [text for text in texts if text is not None]

    assert found.tally.total_bytes == sum(len(text.encode()) for text in full)
    assert len(found.texts) + found.tally.skipped + len(found.rejects) == len(texts)
    assert read(Texts(full), slice_bytes=50).tally.total_bytes == found.tally.total_bytes
