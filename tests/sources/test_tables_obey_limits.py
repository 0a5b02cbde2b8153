"""A table of a few bytes that stands for gigabytes is refused before they are allocated."""

import contextlib
import io
import resource
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import SourceError
from penstock.sources.pages import column_pages, page_claims

# Text of 20 GB or more, so it cannot be expanded in the 2 GB that the process may allocate.
MEMORY = 2 << 30
BUILD = """
import sys
import penstock, penstock.store.build, penstock.sources.tables, penstock.tokenize.tokenizer
import pyarrow.parquet, pyarrow.compute
from penstock.errors import SourceError
from pathlib import Path

def memory(kind):
    # Not `ru_maxrss`, which a process inherits from the one that started it.
    status = Path("/proc/self/status").read_text()
    return int(status.partition(kind)[2].split()[0])

for name in sys.argv[2:]:
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS:")
    try:
        penstock.build(name, sys.argv[1], tokenizer="bytes", threads=1)
    except SourceError as error:
        print(error)
    print(name, "took", (memory("VmHWM:") - before) // 1024)
"""


def repeated(size, rows, index=None):
    """A column of one text, `rows` times, as a dictionary."""
    indices = pa.array([0] * rows, index or pa.int32())
    return pa.table({"text": pa.DictionaryArray.from_arrays(indices, pa.array(["x" * size]))})


def write_parquet(path, table, **options):
    # Without the schema of Arrow, the column is read as text.
    pq.write_table(table, path, store_schema=False, write_statistics=False, **options)


def forge_totals(path, target):
    """Copy a Parquet file whose footer claims 1,000 bytes of text; its pages stay as they are."""
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    total = pq.ParquetFile(path).metadata.row_group(0).total_byte_size
    # The same number of bytes: a varint may end with zeros.
    old, new = varint(2 * total), varint(2 * 1_000)
    new = new[:-1] + bytes([new[-1] | 0x80]) + b"\x80" * (len(old) - len(new) - 1) + b"\0"
    assert data[footer:].count(old) == 2
    target.write_bytes(data[:footer] + data[footer:].replace(old, new))
    assert pq.ParquetFile(target).metadata.row_group(0).total_byte_size == 1_000


def varint(value):
    """An integer as Thrift writes it, 7 bits in each byte."""
    groups = [value >> shift & 0x7F for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([group | 0x80 for group in groups[:-1]] + groups[-1:])


def write_arrow(path, table, compression=None):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(path, table.schema, options=options) as out:
        out.write_table(table)


@pytest.fixture(scope="module")
def bombs(tmp_path_factory):
    """Small files that stand for at least 20 GB of text; one buffer or page of 300 MB."""
    folder = tmp_path_factory.mktemp("bombs")
    write_parquet(folder / "runs.parquet", repeated(10_000, 2_000_000), compression="NONE")
    write_parquet(folder / "zstd.parquet", repeated(900_000, 30_000), compression="zstd")
    write_parquet(folder / "brotli.parquet", repeated(900_000, 30_000), compression="brotli")
    long = pa.table({"text": ["x" * 300_000_000]})
    write_parquet(folder / "page.parquet", long, compression="zstd", use_dictionary=False)
    forge_totals(folder / "page.parquet", folder / "forged.parquet")
    write_arrow(folder / "buffer.arrow", long, "zstd")
    write_arrow(folder / "dictionary.arrow", repeated(100_000, 200_000, pa.int8()))
    return folder


def test_a_bomb_is_refused_before_it_takes_memory(bombs, tmp_path):
    names = sorted(str(path) for path in bombs.iterdir())

    def limit():
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))

    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path / "store"), *names],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=limit,
    )
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == 2 * len(names)
    for name, refused, memory in zip(names, answers[::2], answers[1::2], strict=True):
        assert refused.startswith(name), refused
        assert "expands to more than" in refused
        # The limit of such a small file is 16 MiB. Batches of 64 MB are Arrow's, twice; a forged
        # page took 938 MB before its header was read. Python 3.13 with NumPy 2.5 took 284.
        assert int(memory.split()[-1]) < 320, memory  # MB


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_text_that_the_limit_allows_is_expanded_in_blocks(tmp_path, read, format):
    path = tmp_path / f"a.{format}"
    table = repeated(200_000, 100)
    write_parquet(path, table) if format == "parquet" else write_arrow(path, table)

    with pytest.raises(SourceError, match=r"expands to more than 16,777,216 bytes"):
        read(path, max_expansion=1)
    assert read(path, max_expansion=10**6).texts == [b"x" * 200_000] * 100


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


WRITERS = {
    "defaults": {},
    "brotli": {"compression": "brotli"},
    "no dictionary": {"use_dictionary": False, "compression": "NONE"},
    "version 2": {"data_page_version": "2.0", "compression": "zstd"},
    "page index": {"write_page_index": True, "write_page_checksum": True, "data_page_size": 500},
    "row groups": {"row_group_size": 30, "use_byte_stream_split": False},
    "bloom filters": {"store_schema": False, "write_statistics": False},
}


@pytest.fixture(scope="module")
def varied():
    """A table of columns of many types."""
    rows = range(300)
    columns = {
        "text": [None if row % 7 == 0 else f"word {row % 50} " * (row % 40) for row in rows],
        "number": list(rows),
        "list": [[row, 2] for row in rows],
        "struct": [{"a": "x", "b": row % 3 == 0} for row in rows],
        "map": pa.array([[("a", row)] for row in rows], pa.map_(pa.string(), pa.int64())),
    }
    return pa.table(columns)


@pytest.mark.parametrize("writer", WRITERS)
def test_pages_claim_what_the_footer_says(tmp_path, varied, writer):
    """The footer counts the headers too, 20 to 200 bytes for each of the pages."""
    pq.write_table(varied, tmp_path / "a.parquet", **WRITERS[writer])
    data = (tmp_path / "a.parquet").read_bytes()
    metadata = pq.ParquetFile(tmp_path / "a.parquet").metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    headers = 200 * len(data) // 500 if writer == "page index" else 400 * 7 * len(groups)
    total = sum(group.total_byte_size for group in groups)

    assert total - headers <= page_claims(data) < total


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_the_header_of_a_dictionary_says_how_long_it_is(tmp_path, varied, writer):
    pq.write_table(varied, tmp_path / "a.parquet", **writer)
    metadata, size = (
        pq.read_metadata(tmp_path / "a.parquet"),
        (tmp_path / "a.parquet").stat().st_size,
    )
    with (tmp_path / "a.parquet").open("rb") as stream:
        pages = column_pages(stream, size, ["text"])
        lengths = [each.longest_dictionary(stream) for each in pages]

    assert len(lengths) == metadata.num_row_groups
    texts, row = varied["text"], 0
    for number, length in enumerate(lengths):
        group = metadata.row_group(number)
        different = set(texts.slice(row, group.num_rows).to_pylist()) - {None}
        row += group.num_rows
        # Each entry is stored after its length, in four bytes.
        expected = sum(4 + len(text) for text in different)
        assert length == (expected if group.column(0).has_dictionary_page else 0)


def test_a_column_that_is_not_there_or_there_twice_has_no_known_dictionary(tmp_path):
    pq.write_table(pa.table({"text": ["a"], "b": ["c"]}), tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()

    for names in (["c"], ["text", "b"]):
        with pytest.raises(pa.ArrowInvalid, match="footer is damaged"):
            column_pages(io.BytesIO(data), len(data), names)
    with pytest.raises(pa.ArrowInvalid, match="footer is damaged"):
        column_pages(io.BytesIO(data[-4:]), 4, ["text"])


def test_texts_beside_a_long_dictionary_are_read_in_blocks(tmp_path, read):
    """5 MB of different texts in one dictionary, so that a dozen rows are read at a time."""
    texts = [f"{row} " * 5_000 for row in range(200)] * 2
    pq.write_table(
        pa.table({"text": texts}), tmp_path / "a.parquet", dictionary_pagesize_limit=1 << 24
    )
    with (tmp_path / "a.parquet").open("rb") as stream:
        (pages,) = column_pages(stream, (tmp_path / "a.parquet").stat().st_size, ["text"])
        assert pages.longest_dictionary(stream) > 3_000_000

    found = read(tmp_path / "a.parquet")
    assert found.texts == [text.encode() for text in texts]


def test_every_flip_in_footer_and_headers_is_an_error_or_a_number(varied):
    sink = pa.BufferOutputStream()
    pq.write_table(varied.slice(0, 40), sink, compression="snappy")
    whole = sink.getvalue().to_pybytes()
    outcomes = set()
    for place in range(0, len(whole), 2):
        data = whole[:place] + bytes([whole[place] ^ 0x95]) + whole[place + 1 :]
        try:
            assert page_claims(data) >= 0
            outcomes.add("number")
        except pa.ArrowInvalid:
            outcomes.add("error")
    assert outcomes == {"number", "error"}


def field(head, value):
    """A field of a struct; `head` is its distance from the field before, and its kind."""
    return bytes([head]) + varint(2 * value)


def parquet_file(pages, *columns):
    """A file of one row group, whose columns have this metadata."""
    struct, end = b"\x3c", b"\0\0"  # field 3 of a column, and the ends of both structs
    chunks = b"".join(struct + column + end for column in columns)
    # Field 4 of the footer, a list of one struct; its field 1, a list of the columns.
    data = b"\x49\x1c\x19" + bytes([len(columns) << 4 | 12]) + chunks + end
    return b"PAR1" + pages + data + len(data).to_bytes(4, "little") + b"PAR1"


def page(length, values=0):
    """A page that is empty as it is stored: kind, length, stored length, number of values."""
    head = field(0x15, 0) + field(0x15, length) + field(0x15, 0)
    return head + b"\x2c" + field(0x15, values) + b"\0\0"


SOME = field(0x56, 100)  # the number of values of a column


def test_a_field_of_another_kind_or_twice_hides_no_page():
    """Arrow ignores a field of another kind. Of a field that is there twice, it uses the last."""
    pages, second = page(7) + page(10**9), 4 + len(page(7))
    size, data = SOME + field(0x26, len(page(10**9))), field(0x26, second)
    short_dictionary, dictionary = field(0x25, 4), field(0x26, 4)

    assert page_claims(parquet_file(pages, size + data + short_dictionary)) == 10**9
    assert page_claims(parquet_file(pages, size + data + dictionary)) == 7 + 10**9
    with pytest.raises(pa.ArrowInvalid, match="field 9 is there twice"):
        page_claims(parquet_file(pages, size + data + field(0x06, 9) + varint(2 * 4)))


def test_columns_that_are_longer_than_the_file_are_refused():
    column = SOME + field(0x26, len(page(7))) + field(0x26, 4)
    assert page_claims(parquet_file(page(7), column, column)) == 14
    # Arrow stops after 100 values, and bytes may follow that are no page.
    last = SOME + field(0x26, len(page(7, 100)) + 9) + field(0x26, 4)
    assert page_claims(parquet_file(page(7, 100) + b"\xff" * 9, last)) == 7

    for odd in (
        SOME + field(0x26, 10**6) + field(0x26, 4),
        SOME + field(0x26, 30) + field(0x26, 10**9),
    ):
        with pytest.raises(pa.ArrowInvalid, match="the header of a page is damaged"):
            page_claims(parquet_file(page(7), odd))
    whole = SOME + field(0x26, len(20 * page(7))) + field(0x26, 4)
    with pytest.raises(pa.ArrowInvalid, match="its columns are longer than the file"):
        page_claims(parquet_file(20 * page(7), whole, whole, whole))


def test_every_cut_and_flip_of_the_metadata_of_a_compressed_stream_is_an_error_or_text(tmp_path):
    from penstock.sources.listing import list_files
    from penstock.sources.settings import ReadSettings
    from penstock.sources.tables import table_spans

    path = tmp_path / "a.arrow"
    write_arrow(path, repeated(10, 20), "zstd")
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        (file,) = list_files(path, ReadSettings())
        with contextlib.suppress(SourceError):
            list(table_spans(file, ReadSettings(), 1 << 20))
