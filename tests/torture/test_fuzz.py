"""Readers on mutated bytes: only errors of ours, and every byte accounted for.

40 cases for each kind of file in the default run, and 10,000 with `make torture`.
"""

import bz2
import csv
import gzip
import io
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError

LINES = [
    "plain text",
    "naïve café \u2028 你好 😀",
    "<|endoftext|>",
    "",
    " \t\r",
    "x" * 70,
    "\x00\x01",
    '{"text": "a"}',
]
TEXT = "\n".join(LINES * 3).encode()
ROWS = [{"text": line, "id": i, "a": {"b": line}} for i, line in enumerate(LINES)]
JSONL = b"\n".join(
    json.dumps(row, ensure_ascii=i % 2 == 0).encode() for i, row in enumerate(ROWS * 2)
)
ARRAY = json.dumps(ROWS * 2).encode()


def table(delimiter, **options):
    sink = io.StringIO()
    writer = csv.DictWriter(sink, ["id", "text", "a.b"], delimiter=delimiter, **options)
    writer.writeheader()
    writer.writerows({"id": i, "text": line, "a.b": line} for i, line in enumerate(LINES * 2))
    return sink.getvalue().encode()


def parquet(**options):
    sink = io.BytesIO()
    rows = {"text": [*LINES, None], "a": [{"b": line} for line in LINES] + [None]}
    pq.write_table(pa.table(rows), sink, row_group_size=4, **options)
    return sink.getvalue()


def arrow():
    sink = io.BytesIO()
    table = pa.table({"text": [*LINES, None], "a": [{"b": line} for line in LINES] + [None]})
    with pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table, max_chunksize=4)
    return sink.getvalue()


SEEDS = {
    "a.txt": [TEXT, b"\xef\xbb\xbf" + TEXT, TEXT.decode().encode("utf-16")],
    "a.jsonl": [JSONL, JSONL.replace(b"\n", b"\r\n"), b'{"text":"a"}' * 3],
    "a.json": [ARRAY, b"\xef\xbb\xbf" + json.dumps(ROWS, indent=1).encode(), b"[]"],
    "a.json.gz": [gzip.compress(ARRAY, mtime=0)],
    "a.csv": [table(","), table(",", quoting=csv.QUOTE_ALL), b"\xef\xbb\xbftext\n1\n"],
    "a.tsv": [table("\t"), table("\t", lineterminator="\n")],
    "a.csv.xz": [lzma.compress(table(","))],
    "a.parquet": [
        parquet(),
        parquet(compression="zstd", write_page_checksum=True),
        parquet(use_dictionary=False, compression="none", data_page_version="2.0"),
    ],
    "a.arrow": [arrow()],
    "a.txt.gz": [gzip.compress(TEXT, mtime=0), gzip.compress(TEXT, 0, mtime=0) * 2],
    "a.jsonl.zst": [zstandard.compress(JSONL), zstandard.compress(JSONL) * 2],
    "a.txt.bz2": [bz2.compress(TEXT), bz2.compress(TEXT) * 2],
    "a.jsonl.xz": [lzma.compress(JSONL), lzma.compress(JSONL) + b"\0" * 4],
}


@st.composite
def mutated(draw, seeds):
    """One of `seeds` after a few flips, cuts, insertions and repetitions; or any bytes."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(data)))
        more = draw(st.integers(0, 40))
        kind = draw(st.sampled_from(["flip", "put", "cut", "drop", "repeat", "zero"]))
        if kind == "flip" and place < len(data):
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "put":
            data[place:place] = draw(st.binary(max_size=8))
        elif kind == "cut":
            del data[place:]
        elif kind == "drop":
            del data[place : place + more]
        elif kind == "repeat":
            data[place:place] = data[place : place + more]
        else:
            data[place : place + more] = bytes(len(data[place : place + more]))
    return bytes(data)


def plain(name, data):
    """What `data` is when it is expanded, by the standard library; None if that fails."""
    kind = name.rpartition(".")[2]
    try:
        if kind == "gz":
            return gzip.decompress(data)
        if kind == "bz2":
            return bz2.decompress(data)
        if kind == "xz":
            return lzma.decompress(data)
        if kind == "zst":
            reader = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True)
            return reader.read()
    except (OSError, EOFError, lzma.LZMAError, zstandard.ZstdError, ValueError):
        return None
    return data


options = st.fixed_dictionaries(
    {},
    optional={
        "documents": st.sampled_from(["paragraphs", "file", "<|endoftext|>", "\n\n"]),
        "errors": st.just("replace"),
        "field": st.just("a.b"),
    },
)


@pytest.mark.parametrize("name", SEEDS)
@pytest.mark.parametrize(
    "cases", [40, pytest.param(10_000, marks=[pytest.mark.torture, pytest.mark.timeout(3_600)])]
)
def test_any_bytes_give_documents_and_rejects_or_an_error_of_ours(name, cases, read, scratch):
    path = scratch / name

    @settings(max_examples=cases, suppress_health_check=list(HealthCheck), database=None)
    @given(
        data=mutated(SEEDS[name]) | st.binary(max_size=200),
        chosen=options,
        block=st.sampled_from([1, 7, 64, 4 << 20]),
        slice_bytes=st.sampled_from([50, 1_000, 64_000_000]),
    )
    def law(data, chosen, block, slice_bytes):
        path.write_bytes(data)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.sources.read.BLOCK_BYTES", block)
            try:
                found = read(path, slice_bytes=slice_bytes, **chosen)
            except PenstockError:
                return
        if not name.endswith(("parquet", "arrow")):
            expected = plain(name, data)
            assert expected is None or found.tally.total_bytes == len(expected)
        assert found.tally.documents == len(found.texts)
        assert found.tally.rejected == len(found.rejects)
        assert found.tally.rejected_bytes == sum(each.num_bytes for each in found.rejects)
        for text in found.texts:
            text.decode()

    law()
