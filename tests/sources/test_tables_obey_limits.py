"""A table of a few bytes that stands for gigabytes is refused before they are allocated."""

import contextlib
import resource
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import SourceError

# Text of 20 GB or more, so it cannot be expanded in the 2 GB that the process may allocate.
MEMORY = 2 << 30
BUILD = """
import resource, sys
import penstock, penstock.store.build, penstock.sources.tables, penstock.tokenize.tokenizer
import pyarrow.parquet, pyarrow.compute
from penstock.errors import SourceError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in sys.argv[2:]:
    try:
        penstock.build(name, sys.argv[1], tokenizer="bytes", threads=1)
    except SourceError as error:
        print(error)
    print(name, "took", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


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


@pytest.fixture(scope="module")
def bombs(tmp_path_factory):
    """Small files that stand for at least 20 GB of text; one buffer or page of 300 MB."""
    folder = tmp_path_factory.mktemp("bombs")
    write_parquet(folder / "runs.parquet", repeated(10_000, 2_000_000), compression="NONE")
    write_parquet(folder / "zstd.parquet", repeated(900_000, 30_000), compression="zstd")
    write_parquet(folder / "brotli.parquet", repeated(900_000, 30_000), compression="brotli")
    long = pa.table({"text": ["x" * 300_000_000]})
    write_parquet(folder / "page.parquet", long, compression="zstd", use_dictionary=False)
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
        # The limit of such a small file is 16 MiB; the rest is Arrow's and Python's.
        assert int(memory.split()[-1]) < 200, memory  # MB


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
