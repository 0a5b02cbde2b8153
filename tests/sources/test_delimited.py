"""CSV and TSV: quotes, line ends inside of them, rejects, and offsets, against Python's csv."""

import csv
import gzip
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SourceError

# Few characters, so that quotes, delimiters and line ends meet in all ways.
CELLS = st.text(alphabet='a,"\n\r\té ', max_size=8)


def written(rows, delimiter=",", end="\n", quoting=csv.QUOTE_MINIMAL):
    if delimiter == "\t":  # without quotes
        return "".join("\t".join(map(str, row)) + end for row in rows).encode()
    sink = io.StringIO()
    csv.writer(sink, delimiter=delimiter, lineterminator=end, quoting=quoting).writerows(rows)
    return sink.getvalue().encode()


@given(
    rows=st.lists(st.tuples(CELLS, CELLS, st.integers(0, 9)), max_size=12),
    tabs=st.booleans(),
    end=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    mark=st.booleans(),
    block=st.sampled_from([1, 7, 4 << 20]),
    slice_bytes=st.integers(1, 200),
)
def test_a_table_that_python_wrote_has_its_texts_whatever_the_blocks_and_slices(
    rows, tabs, end, quoting, mark, block, slice_bytes, read, scratch
):
    name, delimiter = ("a.tsv", "\t") if tabs else ("a.csv", ",")
    if tabs:  # a cell of a TSV file cannot hold these
        gone = str.maketrans("\t\n\r", "   ")
        rows = [(one.translate(gone), two.translate(gone), n) for one, two, n in rows]
    rows = [("id", "text", "n"), *rows]
    data = b"\xef\xbb\xbf" * mark + written(rows, delimiter, end, quoting)
    (scratch / name).write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.sources.read.BLOCK_BYTES", block)
        found = read(scratch / name, slice_bytes=slice_bytes)

    texts = [text.encode() for _, text, _ in rows[1:]]
    assert found.texts == [text for text in texts if text.strip(b" \t\r\n")]
    assert found.tally.total_bytes == len(data)
    assert not found.rejects
    # Each offset is the place where a record with that text begins. Python cannot read "\r" that
    # it wrote without quotes.
    if "\r" in data.decode().replace("\r\n", "") and quoting == csv.QUOTE_MINIMAL:
        return
    for text, (_, place) in zip(found.texts, found.places, strict=True):
        rest = io.StringIO(data[place:].decode(), newline="")
        read_as = csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL
        record = next(csv.reader(rest, delimiter=delimiter, quoting=read_as))
        assert record[1].encode() == text


def test_a_quote_that_is_never_closed_is_an_error_with_its_place(read, tmp_path):
    (tmp_path / "a.csv").write_bytes(b'id,text\n1,one\n2,"two\n3,three\n')

    with pytest.raises(SourceError, match=r"a\.csv cannot be read as CSV from byte 14 on: a quote"):
        read(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"id,body\n", r'has no column "text"; its first line names "id", "body".*field='),
        (b"text,text\n", r'has 2 columns "text"'),
        (b"id;text\n", r'its first line names "id;text"'),
    ],
)
def test_a_column_that_is_not_there_once_is_refused_with_the_names(header, message, read, tmp_path):
    (tmp_path / "a.csv").write_bytes(header + b"1,2\n")

    with pytest.raises(SourceError, match=message):
        read(tmp_path / "a.csv")


def test_a_compressed_table_and_one_with_a_text_above_the_limit_of_python(read, tmp_path):
    long = "x" * 300_000 + "\n" + "y" * 300_000
    data = written([("text", "id"), (long, 1), ("short", 2)])
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(data))

    assert read(tmp_path / "a.csv.gz", slice_bytes=1_000).texts == [long.encode(), b"short"]


def test_quotes_have_no_meaning_in_tsv(read, tmp_path):
    (tmp_path / "m.tsv").write_bytes(
        b'id\ttext\n1\tone\n2\t"Alas, poor Yorick!\n3\tI knew him, Horatio"\n4\t"four"\n'
    )
    found = read(tmp_path / "m.tsv")

    assert found.texts == [b"one", b'"Alas, poor Yorick!', b'I knew him, Horatio"', b'"four"']
    assert not found.rejects


@pytest.mark.parametrize(
    ("name", "header"), [("a.csv", b"id;text\n"), ("a.csv", b"id\ttext\n"), ("a.tsv", b"id,text\n")]
)
def test_a_header_with_another_delimiter_is_refused_with_advice(name, header, read, tmp_path):
    (tmp_path / name).write_bytes(header + b"1;2\n")

    with pytest.raises(
        SourceError, match=r"another character separates its columns, convert it to"
    ):
        read(tmp_path / name)
