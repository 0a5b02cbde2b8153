"""Texts of dictionaries are expanded in blocks, and damaged streams are errors or text."""

import contextlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import SourceError


def repeated(size, rows, index=None):
    """A column of one text, `rows` times, as a dictionary."""
    indices = pa.array([0] * rows, index or pa.int32())
    return pa.table({"text": pa.DictionaryArray.from_arrays(indices, pa.array(["x" * size]))})


def write_parquet(path, table, **options):
    # Without the schema of Arrow, the column is read as text.
    pq.write_table(table, path, store_schema=False, write_statistics=False, **options)


def write_arrow(path, table, compression=None):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(path, table.schema, options=options) as out:
        out.write_table(table)


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_repeated_text_is_expanded_in_blocks(tmp_path, read, format):
    path = tmp_path / f"a.{format}"
    table = repeated(200_000, 100)
    write_parquet(path, table) if format == "parquet" else write_arrow(path, table)

    assert read(path).texts == [b"x" * 200_000] * 100


def test_nulls_empty_texts_and_views_have_the_right_lengths(tmp_path, read):
    texts = ["a", None, "bcd", "a"]
    dictionary = pa.array(texts).dictionary_encode()
    for number, column in enumerate(
        [dictionary, pa.array(texts, pa.string_view()), pa.array(texts, pa.large_string())]
    ):
        write_arrow(tmp_path / f"{number}.arrow", pa.table({"text": column}), "lz4")
        found = read(tmp_path / f"{number}.arrow")
        assert found.texts == [b"a", b"bcd", b"a"]
        assert [reject.offset for reject in found.rejects] == [1]


def test_texts_beside_a_long_dictionary_are_read_in_blocks(tmp_path, read):
    """5 MB of different texts in one dictionary, which Arrow expands with each batch."""
    texts = [f"{row} " * 5_000 for row in range(200)] * 2
    pq.write_table(
        pa.table({"text": texts}), tmp_path / "a.parquet", dictionary_pagesize_limit=1 << 24
    )

    found = read(tmp_path / "a.parquet")
    assert found.texts == [text.encode() for text in texts]


def test_every_cut_and_flip_of_the_metadata_of_a_compressed_stream_is_an_error_or_text(tmp_path):
    from penstock.options import ReadSettings
    from penstock.sources.listing import list_files
    from penstock.sources.tables import row_group_sizes

    path = tmp_path / "a.arrow"
    write_arrow(path, repeated(10, 20), "zstd")
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        (file,) = list_files(path, ReadSettings())
        with contextlib.suppress(SourceError):
            row_group_sizes(file, "text")
