"""How inputs are cut: tiles without gaps, by a rule that looks at the inputs alone."""

import gzip
import io
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from penstock.options import ReadSettings
from penstock.sources.listing import list_files
from penstock.sources.settings import Texts
from penstock.sources.slices import cut

names = st.sampled_from(["a.txt", "b.jsonl", "c.txt.gz", "d.txt", "e.jsonl.gz", "f.txt"])
contents = st.lists(st.sampled_from([b"line", b"\n", b"\n\n", b"x" * 50]), max_size=40).map(
    b"".join
)


def slices(folder, slice_bytes, **options):
    reading = ReadSettings(**{"documents": "lines", **options})
    files = list_files(folder, reading)
    return files, list(cut(files, reading, slice_bytes=slice_bytes))


@given(
    parts=st.dictionaries(names, contents, min_size=1),
    slice_bytes=st.integers(1, 300),
    documents=st.sampled_from(["lines", "paragraphs", "file", "\n\n", "sep:xline"]),
)
def test_slices_tile_every_file(parts, slice_bytes, documents, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiles")
    for name, data in parts.items():
        (folder / name).write_bytes(gzip.compress(data, 1) if name.endswith("gz") else data)
    _, pieces = slices(folder, slice_bytes, documents=documents)
    spans = [span for piece in pieces for span in piece.spans]

    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    assert [span.file for span in spans] == sorted(span.file for span in spans)
    for number, (_, data) in enumerate(sorted(parts.items())):
        edges = [(span.start, span.stop) for span in spans if span.file == number]
        if data:
            assert (edges[0][0], edges[-1][1]) == (0, len(data))
        assert all(one[1] == two[0] for one, two in pairwise(edges))
        for span in spans:
            if span.file == number and span.data is not None:
                assert span.data == data[span.start : span.stop]


def test_a_thousand_small_files_are_not_a_thousand_slices(read, tmp_path):
    for number in range(1_800):
        (tmp_path / f"{number:04d}.txt").write_bytes(b"%04d %s\n" % (number, b"x" * 60))
    _, pieces = slices(tmp_path, 10_000)
    found = read(tmp_path, slice_bytes=10_000)

    assert 12 <= len(pieces) <= 14
    assert [text[:4] for text in found.texts] == [b"%04d" % number for number in range(1_800)]
    assert [file for file, _ in found.places] == list(range(1_800))


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
def test_a_big_file_makes_slices_of_about_the_wanted_size(tmp_path, suffix):
    data = b"".join(b"%06d some line of text\n" % number for number in range(20_000))
    (tmp_path / f"a.{suffix}").write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    _, pieces = slices(tmp_path, 50_000)
    sizes = [sum(span.stop - span.start for span in piece.spans) for piece in pieces]

    assert sum(sizes) == len(data)
    assert all(0.7 * 50_000 < size < 1.3 * 50_000 for size in sizes[:-1])


def test_a_file_of_one_document_is_never_cut(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"line\n" * 10_000)
    _, pieces = slices(tmp_path, 1_000, documents="file")

    assert len(pieces) == 1


def test_one_record_longer_than_many_slices_makes_one_slice(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"short\n" + b"x" * 50_000 + b"\nshort\n")
    _, pieces = slices(tmp_path, 1_000)

    assert [(piece.spans[0].start, piece.spans[0].stop) for piece in pieces] == [
        (0, 50_007),
        (50_007, 50_013),
    ]


@pytest.mark.parametrize("end", [b"", b"<|endoftext|>"])
def test_a_long_record_is_looked_through_once(tmp_path, end):
    """A separator that does not occur must not make every slice look to the end of the file."""
    read = []

    class Counted(io.FileIO):
        def read(self, size=-1):
            data = super().read(size)
            read.append(len(data))
            return data

    (tmp_path / "a.txt").write_bytes(b"some words and no separator " * 100_000 + end)
    reading = ReadSettings(documents="<|endoftext|>")
    files = list_files(tmp_path / "a.txt", reading)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.sources.slices.open_file", lambda file: Counted(file.path))
        pieces = list(cut(files, reading, slice_bytes=50_000))

    assert len(pieces) == 1
    assert sum(read) < 2 * files[0].size


MB = 1_000_000


def sizes_of(inputs, **options):
    """The MB of text, or of a table, in each slice of a build."""
    reading = ReadSettings(**{"documents": "lines", **options})
    files = list_files(inputs, reading)
    for piece in cut(files, reading, is_cut_safe=lambda left, right: True):
        if files[0].format in ("text", "jsonl"):
            yield sum(span.stop - span.start for span in piece.spans) / MB
        else:
            yield piece.disk_bytes / MB


def write_sparse(path, num_bytes):
    """Lines of 1 MB, which take no room on the disk."""
    with path.open("wb") as stream:
        for end in range(MB, num_bytes + 1, MB):
            stream.seek(end - 1)
            stream.write(b"\n")
        stream.truncate(num_bytes)


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_the_slices_of_a_build_begin_small(suffix, tmp_path):
    write_sparse(tmp_path / f"a.{suffix}", 300 * MB)

    assert list(sizes_of(tmp_path / f"a.{suffix}")) == [4, 16, 70, 70, 70, 70]


@pytest.mark.parametrize(
    ("documents", "expected"),
    [("lines", [4, 16, 64, 64, 64, 88]), ("auto", [5, 17, 65, 65, 65, 83])],
)
def test_the_slices_of_a_compressed_file_begin_small(documents, expected, tmp_path):
    line = b"some words in a line" * 50_000
    with (tmp_path / "a.txt.zst").open("wb") as raw, zstandard.open(raw, "wb") as stream:
        for _ in range(300):
            stream.write(line[:-1] + b"\n")

    assert list(sizes_of(tmp_path, documents=documents)) == expected


@pytest.mark.parametrize(
    ("megabytes", "expected"),
    [
        (3, [3]),
        (6, [6]),
        (7, [4, 3]),
        (21, [4, 17]),
        (29, [4, 16, 9]),
        (85, [4, 16, 65]),
        (90, [4, 16, 70]),
    ],
)
@pytest.mark.parametrize("documents", ["lines", "auto"])
def test_no_slice_at_the_end_is_tiny(megabytes, expected, documents, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"some words in a line\n" * (megabytes * MB // 21))

    sizes = list(sizes_of(tmp_path / "a.txt", documents=documents))
    assert sizes == pytest.approx(expected, abs=0.01)


def test_small_files_fill_slices_that_begin_small(tmp_path):
    for number in range(100):
        write_sparse(tmp_path / f"{number:03d}.txt", MB)

    assert list(sizes_of(tmp_path)) == [4, 16, 64, 16]


def test_the_next_file_continues_the_ramp_and_only_the_inputs_decide(tmp_path):
    for name, size in (("a.txt", 2), ("b.txt", 60), ("c.txt", 100)):
        write_sparse(tmp_path / name, size * MB)

    sizes = list(sizes_of(tmp_path))
    assert sizes == [2, 16, 44, 50, 50]
    assert list(sizes_of(tmp_path)) == sizes


def test_tables_and_texts_fill_the_ramp_as_far_as_they_allow(tmp_path):
    table = pa.table({"text": ["x" * 100_000] * 1_000})
    options = {"row_group_size": 10, "use_dictionary": False, "compression": "NONE"}
    pq.write_table(table, tmp_path / "a.parquet", **options)

    assert list(sizes_of(tmp_path / "a.parquet")) == pytest.approx([4, 19, 77], abs=1)
    assert list(sizes_of(Texts(["x" * MB] * 100))) == [4, 16, 80]
