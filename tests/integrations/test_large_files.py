"""Files that are larger than memory: they are read in blocks, and digested once."""

import io
import json
import os
import tracemalloc
from functools import partial
from pathlib import Path

import pytest

from penstock.errors import SourceError
from penstock.integrations import stores as stores_module
from penstock.integrations.pytorch import TextDataset, TransformerDataset, samples
from penstock.integrations.pytorch import datasets as datasets_module
from penstock.store import job
from penstock.store.memory import keep_freed_memory
from penstock.tokenize import tokenizer as tokenizer_module

MEGABYTE = 1 << 20
LINE = "The quick brown fox jumps over the lazy dog, and the dog does not mind.\n"


def text_of(layout, num_bytes):
    line = json.dumps({"text": LINE * 10}) + "\n" if layout == "jsonl" else LINE * 10 + "\n"
    return line * (num_bytes // len(line))


def dataset_of(path, layout, **options):
    if layout == "file":
        return TextDataset(path, 64, "bytes", **options)
    return TransformerDataset(path, "bytes", 64, layout == "jsonl", **options)


@pytest.fixture
def reads(monkeypatch):
    """The sizes of all reads from files that are opened as text."""
    sizes = []

    class Counting(io.FileIO):
        def readinto(self, buffer):
            sizes.append(len(buffer))
            return super().readinto(buffer)

    def opened(path, mode="r", buffering=-1, encoding=None, **options):
        if mode != "r" or path.name != "large":
            return original(path, mode, buffering, encoding, **options)
        return io.TextIOWrapper(io.BufferedReader(Counting(path), buffering), encoding)

    original = Path.open
    monkeypatch.setattr(Path, "open", opened)
    return sizes


@pytest.mark.parametrize("layout", ["jsonl", "paragraphs", "file"])
def test_a_file_is_tokenized_in_a_fraction_of_its_size(layout, tmp_path, reads, monkeypatch):
    # A build holds the tokens of one slice per thread. Slices have 64 MB, which is more than a
    # test should need, and a machine may have many cores.
    monkeypatch.setattr(job.Job, "num_threads", 2)
    monkeypatch.setattr(job, "cut", partial(job.cut, slice_bytes=MEGABYTE // 4))
    monkeypatch.setattr(samples, "_PIECE_BYTES", MEGABYTE // 2)
    path = tmp_path / "large"
    # One document takes 9 MB at its peak, of which the text of a piece is little.
    path.write_text(text_of(layout, 24 * MEGABYTE))
    size = path.stat().st_size
    keep_freed_memory()  # 32 MB once per process, which are never touched
    tracemalloc.start()
    try:
        dataset = dataset_of(path, layout)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < size / 2
    assert max(reads) <= MEGABYTE
    assert sum(reads) >= size
    assert len(dataset) > size / 2


def test_a_file_that_is_known_is_not_read_into_memory(tmp_path):
    path = tmp_path / "large.txt"
    path.write_text(text_of("file", 8 * MEGABYTE))
    dataset_of(path, "file")
    tracemalloc.start()
    try:
        dataset_of(path, "file")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 4 * MEGABYTE  # 2 MiB at a time are copied to be checked


@pytest.mark.parametrize("tokenizer", ["gpt2", "bytes"])
def test_a_text_in_pieces_has_the_ids_of_the_whole(tokenizer, tmp_path, monkeypatch, gpt2):
    monkeypatch.setattr(samples, "_PIECE_BYTES", 10_000)
    path = tmp_path / "text.txt"
    text = "".join(f"{number} naïve 日本\r\n\r\n{'word ' * (number % 90)}" for number in range(900))
    path.write_text(text, newline="")
    dataset = TextDataset(path, 8, tokenizer)
    plain = text.replace("\r\n", "\n")

    assert len(dataset._store) > 5
    expected = gpt2.encode(plain).tolist() if tokenizer == "gpt2" else list(plain.encode())
    assert dataset.tokens.tolist() == expected
    assert dataset.samples == [plain]


def test_a_text_with_an_end_token_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "_PIECE_BYTES", 1_000)
    path = tmp_path / "text.txt"
    path.write_text(LINE * 100)

    assert TextDataset(path, 8, "bytes", eos=True).tokens.tolist() == [*(LINE * 100).encode(), 256]


def test_a_file_that_changes_while_it_is_read_gives_no_store(tmp_path, monkeypatch, cache):
    path = tmp_path / "text.txt"
    path.write_text("one two")
    digest = datasets_module.digest_contents

    def written_after(*arguments):
        found = digest(*arguments)
        path.write_text("three")
        return found

    monkeypatch.setattr(datasets_module, "digest_contents", written_after)
    with pytest.raises(SourceError, match="Make the dataset again when nothing writes"):
        TextDataset(path, 1)
    monkeypatch.undo()
    assert TextDataset(path, 1, cache_dir=cache).tokens.tolist() == [15542]


def test_the_position_of_a_bad_byte_counts_from_the_start_of_the_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"a line\n" * 500_000 + b"\xff")

    with pytest.raises(SourceError, match=r"not UTF-8 at byte 3,500,000 \(invalid start byte\)"):
        TextDataset(path, 1)


def test_the_second_start_loads_no_engine(tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text("one two")
    first = TextDataset(path, 1).tokens.tolist()
    monkeypatch.setattr(tokenizer_module, "choose_engine", None)

    assert TextDataset(path, 1).tokens.tolist() == first


class Digests:
    """Counts how often files were digested in full."""

    def __init__(self):
        self.paths = []

    def __call__(self, path):
        self.paths.append(path)
        return digest_file(path)


digest_file = stores_module.digest_file


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A file that counts as large, and was written long ago."""
    monkeypatch.setattr(stores_module, "_WHOLE_BYTES", 10)
    monkeypatch.setattr(stores_module, "_SETTLED_NANOSECONDS", -1)
    path = tmp_path / "large.txt"
    path.write_text(LINE * 100)
    return path


@pytest.fixture
def digests(monkeypatch):
    counting = Digests()
    monkeypatch.setattr(stores_module, "digest_file", counting)
    return counting.paths


def test_a_large_file_is_digested_once(large, digests, tmp_path):
    first = [stores_module.digest_contents(large, tmp_path / "stores") for _ in range(3)]

    assert len(digests) == 1
    assert first == [digest_file(large)] * 3


def change_the_middle(path):
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(before.st_size // 2)
        stream.write(b"#")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_the_file(path):
    other = path.with_suffix(".new")
    other.write_text(LINE.upper() * 100)
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize("change", [change_the_middle, replace_the_file])
def test_a_large_file_that_changed_is_digested_again(change, large, digests, tmp_path):
    """The size and the time of the last write stay the same."""
    before = stores_module.digest_contents(large, tmp_path / "stores")
    change(large)

    assert stores_module.digest_contents(large, tmp_path / "stores") == digest_file(large) != before
    assert len(digests) == 2


def test_a_file_that_has_just_been_written_is_digested_again(large, digests, tmp_path, monkeypatch):
    monkeypatch.setattr(stores_module, "_SETTLED_NANOSECONDS", 3_600 * 10**9)
    for _ in range(2):
        stores_module.digest_contents(large, tmp_path / "stores")

    assert len(digests) == 2


def test_a_damaged_record_of_a_digest_is_ignored(large, digests, tmp_path):
    stores_module.digest_contents(large, tmp_path / "stores")
    (record,) = (tmp_path / "stores" / "digests").iterdir()
    record.write_text("half of a dig")

    assert stores_module.digest_contents(large, tmp_path / "stores") == digest_file(large)
