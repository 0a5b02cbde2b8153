"""Exports hold the tokens, documents and loss masks of their source, as each format describes."""

import json
import resource
import shutil
from itertools import count

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock.cli.app import app
from penstock.disk import locked
from penstock.errors import StoreBusyError, StoreError
from penstock.formats.export import TokenSource, write_llmc, write_parquet

FORMATS = ("megatron", "nanogpt", "llmc", "parquet")


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """A corpus of a few kilobytes has several shards."""
    monkeypatch.setattr(write_llmc, "__defaults__", (1_000,))
    monkeypatch.setattr(write_parquet, "__defaults__", (3_000,))


def read_back(folder, to, vocab_size):
    """Return the documents of an export; a format without documents has one."""
    if to == "parquet":
        return pq.read_table(folder / "train.parquet")["input_ids"].to_pylist()
    if to in ("nanogpt", "llmc"):
        named = {"format": "nanogpt"} if to == "nanogpt" else {}
        opened = [
            ps.open_tokens(each, vocab_size=vocab_size, **named)
            for each in sorted(folder.glob("*.bin"))
        ]
        return [[id for each in opened for id in each.part_ids(0).tolist()]]
    return [each.tolist() for each in ps.open_tokens(folder / "train", vocab_size=vocab_size)]


def whole_documents(store):
    """Return the documents of a store; one that is stored in pieces is one."""
    found, begun = [], []
    for number in range(len(store)):
        begun += store.document(number).tolist()
        if store.edges(number)[1]:
            found.append(begun)
            begun = []
    return found


def check_export(source, folder, to, documents):
    files = ps.export_tokens(source, folder, to=to)

    if to in ("nanogpt", "llmc"):
        documents = [[id for each in documents for id in each]]
    assert read_back(folder, to, source.vocab_size) == documents
    assert all(path.is_file() for path in files)
    return files


@pytest.mark.parametrize("to", FORMATS)
def test_an_export_of_a_store_of_several_parts_has_its_tokens_and_documents(to, store, tmp_path):
    files = check_export(store, tmp_path / "out", to, whole_documents(store))

    assert len(files) > 2 or to != "llmc"


@pytest.mark.parametrize("to", FORMATS)
def test_a_document_in_pieces_is_exported_as_one(to, one_document, tmp_path):
    check_export(one_document, tmp_path / "out", to, whole_documents(one_document))


@pytest.mark.parametrize("to", FORMATS)
def test_empty_documents_of_token_files_are_kept_where_the_format_has_them(
    to, write_files, tmp_path
):
    documents = [[], [1, 2, 3], [], [], list(range(300)), [7], []]

    check_export(write_files(documents, vocab_size=300), tmp_path / "out", to, documents)


@pytest.mark.parametrize("to", [to for to in FORMATS if to != "nanogpt"])
def test_ids_beyond_uint16_are_exported(to, write_files, tmp_path):
    documents = [[70_000, 1], [65_536] * 70_000]

    check_export(
        write_files(documents, wide=True, vocab_size=70_001), tmp_path / "out", to, documents
    )


@pytest.mark.parametrize("to", FORMATS)
def test_both_sides_of_a_split_are_exported(to, tmp_path):
    texts = ps.Texts([f"text {number}" for number in range(60)])
    ps.build(texts, tmp_path / "store", tokenizer="bytes", split="hash:0.3")
    files = ps.export_tokens(tmp_path / "store", tmp_path / "out", to=to)

    names = {str(path.relative_to(tmp_path / "out")) for path in files}
    assert any("train" in name for name in names)
    assert any("val" in name for name in names)


def test_groups_of_documents_fit_and_cover_all(write_files):
    """Compared with a loop over the documents."""
    generator = np.random.default_rng(0)
    for _ in range(30):
        lengths = generator.integers(0, 50, generator.integers(1, 40)).tolist()
        source = TokenSource(write_files([[1] * length for length in lengths]))
        room = int(generator.integers(10, 200))
        expected, used, end = [[]], 0, 0
        for length in lengths:
            cost = 2 * length + 3
            if expected[-1] and used + cost > room:
                expected.append([])
                used = 0
            used, end = used + cost, end + length
            expected[-1].append(end)

        assert [ends.tolist() for ends in source.groups(room, 2, 3)] == expected


def test_a_full_disk_leaves_nothing_behind(store, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, limits[1]))
    try:
        with pytest.raises(OSError, match="No room to write"):
            ps.export_tokens(store, tmp_path / "out", to="megatron")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert not [*tmp_path.glob("*out*")]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.torture)])
@pytest.mark.parametrize("to", ["llmc", "megatron"])
def test_a_killed_export_leaves_all_files_or_none(to, every, store, tmp_path, killed, sums):
    """And the same call then writes all of them."""
    clean, out = tmp_path / "clean", tmp_path / "out"
    ps.export_tokens(store, clean, to="nanogpt")
    old = sums(clean)
    ps.export_tokens(store, clean, to=to, overwrite=True)
    for point in count(1, every):
        shutil.rmtree(out, ignore_errors=True)
        ps.export_tokens(store, out, to="nanogpt")
        if not killed(lambda: ps.export_tokens(store, out, to=to, overwrite=True), point):
            break
        found = sums(out) if out.exists() else {}
        # Only while its files are deleted, the old export is incomplete; then the new one is
        # complete beside it.
        beside = tmp_path / ".out.export"
        is_deleting = found.items() < old.items() and sums(beside) == sums(clean)
        assert found in (old, sums(clean)) or is_deleting, point
        ps.export_tokens(store, out, to=to, overwrite=True)
        assert sums(out) == sums(clean)
        assert not [*tmp_path.glob(".out.*")]
    assert point > 8


def test_progress_counts_tokens(store, tmp_path):
    seen = []
    ps.export_tokens(store, tmp_path / "out", to="llmc", progress=lambda *now: seen.append(now))

    assert seen == sorted(seen)
    assert seen[-1] == (store.num_tokens, store.num_tokens)


def test_the_command_exports_stores_and_token_files(store, tmp_path):
    def run(*words):
        return CliRunner().invoke(app, ["export", *map(str, words)])

    done = run(store.path, "--to", "nanogpt", "-o", tmp_path / "a")
    assert f"{tmp_path / 'a'} holds 1 file of the format nanogpt" in done.stdout
    words = (tmp_path / "a" / "train.bin", "--to", "llmc", "-o", tmp_path / "b", "--json")
    done = run(*words, "--format", "nanogpt", "--vocab-size", 257)
    files = json.loads(done.stdout)["files"]
    opened = [ps.open_tokens(each, vocab_size=257) for each in files]

    assert sum(each.num_tokens for each in opened) == store.num_tokens
    assert run(*words).exit_code == 1  # not without its format
    assert run(store.path, "--to", "nanogpt", "-o", tmp_path / "a").exit_code == 1


@pytest.mark.parametrize("name", ["store", "one_document"])
def test_exports_are_opened_and_imported_again(name, tmp_path, request):
    source, folder = request.getfixturevalue(name), tmp_path / "out"
    ps.export_tokens(source, folder, to="parquet")
    opened = ps.open_tokens(folder / "train.parquet", tokenizer="bytes")
    imported = ps.import_tokens(opened, tmp_path / "imported")

    assert [each.tolist() for each in opened] == whole_documents(source)
    assert whole_documents(ps.verify(imported.path)) == whole_documents(source)


def test_the_loss_mask_of_parquet_is_opened_and_imported_again(chats, tmp_path):
    ps.export_tokens(chats, tmp_path / "out", to="parquet")
    opened = ps.open_tokens(tmp_path / "out" / "train.parquet", vocab_size=chats.vocab_size)
    imported = ps.import_tokens(opened, tmp_path / "imported")

    mask = chats.part_array(0, "loss").tolist()
    assert opened.part_loss(0).tolist() == imported.part_array(0, "loss").tolist() == mask


REFUSALS = {
    "format": ([[1, 2]], 9, "zip", r"to='zip' \(--to\) is not one of megatron, nanogpt"),
    "nothing": ([[]], 9, "llmc", "holds no tokens, so there is nothing to export"),
    "wide": ([[70_000]], 70_001, "nanogpt", "vocabulary of 70,001 ids, and nanoGPT's"),
    "wide id": ([[70_000]], None, "nanogpt", "token id 70,000, which does not fit the uint16"),
    "int32": ([[2**31]], 1 << 32, "megatron", "does not fit the int32 ids"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_source_that_a_format_cannot_hold_is_refused(write_files, tmp_path, name):
    documents, vocab_size, to, message = REFUSALS[name]
    files = write_files(documents, wide=True, vocab_size=vocab_size)
    before = set(tmp_path.iterdir())

    with pytest.raises(StoreError, match=message):
        ps.export_tokens(files, tmp_path / "out", to=to)
    assert set(tmp_path.iterdir()) == before  # nothing is left behind
    with pytest.raises(StoreError, match="is a file, and a directory is needed"):
        ps.export_tokens(write_files([[1]], vocab_size=9), tmp_path / "x.ds", to="llmc")


def test_lengths_beyond_int32_are_refused_before_anything_is_written(tmp_path):
    path = tmp_path / "x.bin"
    with path.open("wb") as stream:
        stream.truncate(2 * 2**31)  # a sparse file
    files = ps.open_tokens(path, format="nanogpt", vocab_size=10)

    for to in ("megatron", "parquet"):
        with pytest.raises(StoreError, match="a document of 2,147,483,648 tokens, and "):
            ps.export_tokens(files, tmp_path / "out", to=to)


def test_a_loss_mask_is_kept_refused_or_dropped(chats, write_files, tmp_path):
    ps.export_tokens(chats, tmp_path / "parquet", to="parquet")
    mask = chats.part_array(0, "loss")
    rows = pq.read_table(tmp_path / "parquet" / "train.parquet")["loss_mask"].to_pylist()

    assert mask.tolist() == [bit for row in rows for bit in row]
    assert 0 < mask.sum() < len(mask)
    for to in ("megatron", "nanogpt", "llmc"):
        with pytest.raises(StoreError, match="has a loss mask, and files of the format"):
            ps.export_tokens(chats, tmp_path / to, to=to)
        assert ps.export_tokens(chats, tmp_path / to, to=to, drop_loss_mask=True)
    # A mask that excludes nothing is not lost.
    files = write_files([[0, 1], [2, 3, 4]], loss=[1] * 5, vocab_size=5)
    check_export(files, tmp_path / "out", "megatron", [[0, 1], [2, 3, 4]])


def test_an_export_is_replaced_only_if_asked_and_other_files_never(store, tmp_path, sums):
    out = tmp_path / "out"
    ps.export_tokens(store, out, to="llmc")
    with pytest.raises(StoreError, match="holds an export already"):
        ps.export_tokens(store, out, to="megatron")
    ps.export_tokens(store, out, to="megatron", overwrite=True)
    names = sorted(path.name for path in out.iterdir())
    assert names == [".penstock-export.json", "train.bin", "train.idx"]
    before = sums(out)
    ps.export_tokens(store, out, to="megatron", overwrite=True)
    assert sums(out) == before
    (out / "notes.txt").write_text("mine")

    with pytest.raises(StoreError, match=r"holds more than an export: notes\.txt"):
        ps.export_tokens(store, out, to="nanogpt", overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"


def test_a_running_export_is_not_disturbed(store, tmp_path):
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out"), pytest.raises(StoreBusyError):
        ps.export_tokens(store, tmp_path / "out", to="megatron")
    assert (tmp_path / "out").is_dir()
