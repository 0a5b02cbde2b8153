"""An import makes a store of token files: the same tokens, and the same bytes after any kill."""

import json
import os
import shutil
from itertools import count

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock.check.directory import directory_problem
from penstock.cli.app import app
from penstock.errors import MissingTokenizerError, StoreError
from penstock.formats.export import TokenSource
from penstock.formats.imports import import_slices
from penstock.options import ReadSettings
from penstock.sources.listing import list_files

DOCUMENTS = [[1, 2, 3], [], [4] * 700, [5, 6], [], list(range(250)), [9] * 90, []]


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """Token files of a few hundred ids become several parts."""
    monkeypatch.setattr(import_slices, "__defaults__", (200,))


def whole_documents(store):
    found, begun = [], []
    for number in range(len(store)):
        begun += store.document(number).tolist()
        if store.edges(number)[1]:
            found.append(begun)
            begun = []
    return found


def test_a_store_has_the_documents_of_the_token_files(write_files, tmp_path):
    store = ps.import_tokens(write_files(DOCUMENTS, vocab_size=300), tmp_path / "store")

    assert ps.verify(store.path).vocab_size == 300
    assert whole_documents(store) == [each for each in DOCUMENTS if each]
    assert len(store.manifest.parts) > 4
    counts = store.manifest.builds[0]["counts"]
    assert (counts["documents"], counts["skipped"]) == (5, 3)
    assert [store.origin(number).offset for number in (0, len(store) - 1)] == [0, 6]


def test_an_imported_document_is_named_by_its_number(tmp_path):
    path = tmp_path / "1.parquet"
    pq.write_table(pa.table({"input_ids": [[1, 1], [2], [3, 4]]}), path)
    store = ps.import_tokens(path, tmp_path / "store", tokenizer="bytes")

    assert str(ps.Packs(store, 2).origins(2)[-1]).endswith("(1.parquet, document 2)")
    shown = CliRunner().invoke(app, ["decode", str(store.path), "-d", "1"])
    assert "from 1.parquet, document 1" in shown.output


def test_a_set_without_documents_becomes_one_document_for_each_file(tmp_path):
    for number in range(3):
        np.full(10, number, "<u2").tofile(tmp_path / f"f_{number}.bin")
    named = {"format": "nanogpt", "vocab_size": 1000}
    store = ps.import_tokens(tmp_path / "f_*.bin", tmp_path / "store", **named)

    assert whole_documents(store) == [[number] * 10 for number in range(3)]


def test_a_loss_mask_is_imported(write_files, tmp_path):
    size = sum(map(len, DOCUMENTS))
    mask = np.random.default_rng(0).integers(0, 2, size)
    store = ps.import_tokens(write_files(DOCUMENTS, loss=mask, vocab_size=300), tmp_path / "store")

    ps.verify(store.path)
    parts = range(len(store.manifest.parts))
    assert np.array_equal(np.concatenate([store.part_array(each, "loss") for each in parts]), mask)


def test_a_store_that_is_exported_and_imported_has_its_tokens(store, tmp_path):
    ps.export_tokens(store, tmp_path / "out", to="megatron")
    again = ps.import_tokens(tmp_path / "out" / "train", tmp_path / "again", tokenizer="bytes")

    assert whole_documents(again) == whole_documents(store)
    assert again.tokenizer_record == store.tokenizer_record
    assert again.manifest.contents["eos_id"] == 256
    assert again.decode(7) == store.decode(7)
    assert len(ps.Windows([store, again], length=8)) > 100


def test_a_store_without_a_tokenizer_can_be_read_and_mixed(write_files, store, tmp_path):
    made = ps.import_tokens(write_files([[104, 105], [33]], vocab_size=257), tmp_path / "made")

    with pytest.raises(
        MissingTokenizerError, match=r"imported without a tokenizer.*each time with tokenizer= \("
    ):
        made.decode(0)
    assert made.decode(0, tokenizer="bytes") == "hi"
    assert len(ps.Windows([store, made], length=8))


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path):
    ids = np.zeros(1_000_000, np.uint16)
    ids[100_000] = 60_000  # between two of the blocks that are checked when it is opened
    files = ps.open_tokens(ids, vocab_size=50_257)

    with pytest.raises(StoreError, match="the token id 60,000, but the vocabulary has 50,257"):
        ps.import_tokens(files, tmp_path / "store")
    assert not (tmp_path / "store" / "penstock.json").exists()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({}, r"does not record its vocabulary.*tokenizer= \(--tokenizer\), or vocab_size="),
        ({"vocab_size": 9, "tokenizer": "bytes"}, "is not that of bytes, which has 257 ids"),
        ({"vocab_size": 2**33}, "does not fit the uint32 ids of a store"),
    ],
)
def test_the_vocabulary_must_be_known_and_fit(write_files, tmp_path, named, message):
    files = write_files([[1, 2]])

    with pytest.raises(StoreError, match=message):
        ps.import_tokens(files.path, tmp_path / "store", **named)


def test_a_directory_that_holds_something_else_is_refused(write_files, store, tmp_path):
    files = write_files(DOCUMENTS, vocab_size=300)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")

    with pytest.raises(StoreError, match=r"is not empty and not a store; it holds notes\.txt"):
        ps.import_tokens(files, tmp_path / "mine")
    with pytest.raises(StoreError, match="holds another store, or an unfinished one: "):
        ps.import_tokens(files, store.path)
    ps.import_tokens(files, tmp_path / "made")
    with pytest.raises(StoreError, match="tokenizer: unknown  -> bytes"):
        ps.import_tokens(files.path, tmp_path / "made", tokenizer="bytes")


def test_a_finished_import_is_not_repeated(write_files, tmp_path, sums):
    files = write_files(DOCUMENTS, vocab_size=300)
    ps.import_tokens(files, tmp_path / "store")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir()}
    ps.import_tokens(files, tmp_path / "store")

    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir()} == before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.torture)])
def test_an_import_killed_at_any_call_resumes_to_the_same_bytes(
    every, write_files, tmp_path, killed, sums, figure
):
    """`make test` kills at every ninth call, `make torture` at every call."""
    size = sum(map(len, DOCUMENTS))
    files = write_files(DOCUMENTS, loss=np.arange(size) % 2, vocab_size=300)
    clean, place = tmp_path / "clean", tmp_path / "store"
    digest = ps.import_tokens(files, clean).digest
    for point in count(1, every):
        shutil.rmtree(place, ignore_errors=True)
        if not killed(lambda: ps.import_tokens(files, place), point):
            break
        if (place / "penstock.json").exists():
            assert ps.verify(place).digest == digest
        ps.import_tokens(files, place)
        assert sums(place) == sums(clean), f"killed before call {point}"
    figure(f"import killed before every {every}. of its {point - 1} calls that touch the disk")
    assert point > 30


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_parts_that_were_sealed_before_a_kill_are_not_made_again(write_files, tmp_path, killed):
    files, place = write_files(DOCUMENTS, vocab_size=300), tmp_path / "store"
    assert killed(lambda: ps.import_tokens(files, place), 40)
    sealed = [path.name[-7:-5] for path in place.glob(".slice-*")]
    parts = [path for number in sealed for path in place.glob(f"part-000{number}.*")]
    before = [path.stat().st_mtime_ns for path in parts]
    ps.import_tokens(files, place)

    assert len(parts) >= 8
    assert [path.stat().st_mtime_ns for path in parts] == before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_source_that_changed_after_a_kill_gives_the_store_of_its_new_ids(tmp_path, killed):
    """Also where the digest of the source does not see the change: between the sampled blocks."""
    ids = np.zeros(1_000_000, "<u2")
    ids.tofile(tmp_path / "x.bin")
    named = {"format": "nanogpt", "vocab_size": 300}
    import_slices.__defaults__ = (150_000,)
    place = tmp_path / "store"
    assert killed(lambda: ps.import_tokens(tmp_path / "x.bin", place, **named), 40)
    assert len([*place.glob(".slice-*")]) > 1
    ids[100_000] = 7
    ids.tofile(tmp_path / "x.bin")
    store = ps.import_tokens(tmp_path / "x.bin", place, **named)

    assert np.array_equal(ps.verify(place).tokens(0, store.num_tokens), ids)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_unfinished_import_is_continued_only_by_itself(write_files, tmp_path, killed):
    files, place = write_files(DOCUMENTS, vocab_size=300), tmp_path / "store"
    assert killed(lambda: ps.import_tokens(files, place), 40)

    with pytest.raises(StoreError, match="holds another store, or an unfinished one: "):
        ps.import_tokens(write_files([[1, 2]], vocab_size=300), place)


def test_a_part_that_differs_from_its_source_is_an_error(tmp_path, monkeypatch):
    """The source changes while a part is written."""
    ids, sync = np.ones(500, np.uint16), os.fsync

    def changing(file):
        ids[-1] += len([*(tmp_path / "store").glob(".slice-000001.json")])  # the last part
        sync(file)

    monkeypatch.setattr(os, "fsync", changing)
    with pytest.raises(StoreError, match="is not equal to its source"):
        ps.import_tokens(ps.open_tokens(ids, vocab_size=100), tmp_path / "store")


def test_slices_cover_the_source_and_divide_only_long_documents(write_files):
    source = TokenSource(write_files(DOCUMENTS))
    slices = [*import_slices(source)]

    assert [piece.start for piece in slices[1:]] == [int(piece.ends[-1]) for piece in slices[:-1]]
    assert int(slices[-1].ends[-1]) == source.num_tokens
    assert all(int(piece.ends[-1]) - piece.start <= 200 for piece in slices)
    assert sum(len(piece.ends) for piece in slices if not piece.continues) == len(DOCUMENTS)


def test_progress_counts_tokens(write_files, tmp_path):
    seen = []
    files = write_files(DOCUMENTS, vocab_size=300)
    store = ps.import_tokens(files, tmp_path / "store", progress=lambda *now: seen.append(now))

    assert seen == sorted(seen)
    assert seen[-1] == (store.num_tokens, store.num_tokens)
    assert len(seen) > 4


def test_the_command_imports_token_files(write_files, tmp_path):
    def run(*words):
        return CliRunner().invoke(app, [str(word) for word in words])

    path = write_files([[104, 105, 256], [33, 256]]).path
    done = run("import", path, "-o", tmp_path / "store", "--tokenizer", "bytes")
    assert "imported, and compared with its source: 1 part, 2 documents, 5 tokens" in done.stdout
    again = run("import", path, "-o", tmp_path / "store", "--tokenizer", "bytes", "--json")
    assert json.loads(again.stdout)["num_tokens"] == 5
    assert "hi" in run("decode", tmp_path / "store", "-d", 0).stdout
    assert "imported" not in run("import", path, "-o", tmp_path / "b").stdout


def test_a_build_in_the_directory_of_an_import_is_refused(write_files, tmp_path):
    store = ps.import_tokens(write_files(DOCUMENTS, vocab_size=300), tmp_path / "store")
    path = tmp_path / "text.txt"
    path.write_text("a text\n" * 50)

    with pytest.raises(StoreError, match="is a finished store that was built differently"):
        ps.build(path, store.path, tokenizer="bytes")
    reading = ReadSettings()
    with pytest.raises(StoreError, match="is a finished store that was built differently"):
        directory_problem(
            store.path, list_files([path], reading), ps.load_tokenizer("bytes"), reading
        )
