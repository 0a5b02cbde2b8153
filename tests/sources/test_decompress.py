"""Compressed inputs: every member is read, every cut is noticed, bombs are stopped as they grow."""

import bz2
import contextlib
import gzip
import lzma
import os
import random

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import SourceError
from penstock.options import ReadSettings
from penstock.sources.files import Expanded
from penstock.sources.listing import list_files

PACK = {
    "gz": lambda data: gzip.compress(data, 1, mtime=0),
    "zst": zstandard.ZstdCompressor(level=1, write_checksum=True).compress,
    "bz2": lambda data: bz2.compress(data, 1),
    "xz": lambda data: lzma.compress(data, preset=0),
}
KINDS = list(PACK)


def expanded(path, file=None):
    file = file or list_files(path, ReadSettings(format="text"))[0]
    stream = Expanded(file)
    try:
        # In pieces: where it fails, pyarrow leaks the buffer that it was about to fill.
        return b"".join(iter(lambda: stream.read(1 << 16), b""))
    finally:
        stream.close()


@pytest.mark.parametrize("kind", KINDS)
@given(pieces=st.lists(st.binary(max_size=50), min_size=1, max_size=5))
def test_all_members_are_read_one_after_another(kind, pieces, scratch):
    path = scratch / f"members.txt.{kind}"
    path.write_bytes(b"".join(PACK[kind](piece) for piece in pieces))

    assert expanded(path) == b"".join(pieces)


def test_bytes_that_were_peeked_are_read_again(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abcdefgh")

    with contextlib.closing(Expanded(list_files(tmp_path, ReadSettings())[0])) as stream:
        assert [stream.peek(5), stream.peek(2), stream.read(1)] == [b"abcde", b"ab", b"a"]
        assert [stream.peek(6), stream.read(9), stream.peek(1)] == [b"bcdefg", b"bcdefgh", b""]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_may_span_members_and_slices(kind, read, tmp_path):
    lines = [b"line %d %s" % (number, b"x" * (number % 300)) for number in range(500)]
    data = b"\n".join(lines)
    members = [data[place : place + 1_000] for place in range(0, len(data), 1_000)]
    (tmp_path / f"a.txt.{kind}").write_bytes(b"".join(map(PACK[kind], members)))
    found = read(tmp_path, slice_bytes=5_000)

    assert found.texts == lines
    assert 10 < found.num_slices < 20
    assert all(
        data[place:].startswith(t) for t, (_, place) in zip(found.texts, found.places, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_anywhere_is_refused(kind, tmp_path):
    whole = PACK[kind](b"some text that repeats, some text that repeats\n" * 3)
    path = tmp_path / f"a.txt.{kind}"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(SourceError, match=r"cut off"):
            expanded(path)


@pytest.mark.parametrize("every", [9_973, pytest.param(61, marks=pytest.mark.torture)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_file_of_several_members_cut_anywhere_is_refused(kind, every, tmp_path):
    """Several reads of the disk and several members; the border of a member is no exception."""
    chance = random.Random(3)
    members = [PACK[kind](chance.randbytes(60_000).hex().encode()) for _ in range(3)]
    whole = b"".join(members)
    path = tmp_path / f"a.txt.{kind}"
    path.write_bytes(whole)
    (file,) = list_files(path, ReadSettings(format="text"))
    borders = {len(members[0]), len(members[0] + members[1]), 1 << 16, 1 << 17, len(whole) - 1}
    for length in sorted({*range(1, len(whole), every), *borders}):
        os.truncate(path, length)
        with pytest.raises(SourceError, match="cut off"):
            expanded(path, file=file)
        path.write_bytes(whole)


@pytest.mark.parametrize("kind", KINDS)
@given(garbage=st.binary(min_size=1, max_size=40).filter(lambda data: data.strip(b"\0")))
@example(garbage=b"\n")
@example(garbage=b"plain text after the end")
def test_garbage_after_the_end_is_refused(kind, garbage, scratch):
    path = scratch / f"garbage.txt.{kind}"
    path.write_bytes(PACK[kind](b"text\n") + garbage)

    with pytest.raises(SourceError, match="something follows"):
        expanded(path)


@pytest.mark.parametrize("kind", KINDS)
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_gives_an_error_or_the_same_bytes(kind, place, bit, scratch):
    """The same bytes: gzip's header holds a time and a system, which nothing depends on."""
    data = bytes(range(256)) * 4
    damaged = bytearray(PACK[kind](data))
    damaged[place % len(damaged)] ^= 1 << bit
    path = scratch / f"flipped.txt.{kind}"
    path.write_bytes(damaged)

    with contextlib.suppress(SourceError):
        assert expanded(path) == data


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_compressed_file_was_cut_off(kind, read, tmp_path):
    (tmp_path / f"a.txt.{kind}").write_bytes(b"")

    with pytest.raises(SourceError, match=r"is empty, and a .* file never is: it was cut off"):
        read(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_can_be_compressed(kind, read, tmp_path):
    (tmp_path / f"a.txt.{kind}").write_bytes(PACK[kind](b""))

    assert read(tmp_path).texts == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_not_compressed_at_all_is_refused(kind, read, tmp_path):
    (tmp_path / f"a.txt.{kind}").write_bytes(b"plain text\n")

    with pytest.raises(
        SourceError, match=r"is not a \w+ file, though its name says so: it begins with b'plain"
    ):
        read(tmp_path)


MADE = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("suffix", MADE)
def test_a_compressed_file_without_its_suffix_is_named(suffix, read, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(MADE[suffix](b'{"text": "a"}\n'))

    with pytest.raises(SourceError, match=r"a\.jsonl begins like a \w+ file and not like text"):
        read(tmp_path / "a.jsonl")
