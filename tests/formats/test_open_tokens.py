"""Token files of other tools are opened with equal tokens and documents, alone and in sets."""

import pickle
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock import Documents, Packs, Plan, Windows
from penstock.errors import MissingTokenizerError, StoreError
from penstock.formats import verify_tokens
from penstock.formats.mapped import MappedBytes, ScatteredArray
from penstock.testing import assert_resumable

TEXTS = [f"document {number} " * (number % 5 + 1) for number in range(40)]
LAYOUTS = ["llmc", "nanogpt", "olmo", "npy", "megatron", "old-megatron", "datatrove"]
LAYOUTS += ["mds", "mds-zstd", "litdata", "litdata-zstd", "arrow", "parquet"]
DOCUMENTS = [[5, 6, 7], [], [8] * 40, list(range(90)), [1]]
FILLED = [[5, 6, 7], [1], [8] * 300, list(range(90)), [2, 3]]
GROUPS = [[[number] * (number + 1), [], [number, 7]] for number in range(12)]
SET = [each for group in GROUPS for each in group]
SET_IDS = [token for each in SET for token in each]
SMALL = [[1, 2, 3], [4, 5]]
IDS = np.random.default_rng(17).integers(0, 50_000, 3_000)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_corpora_are_read_with_equal_tokens_and_documents(layouts, layout, tmp_path):
    for seed in range(50):
        generator = np.random.default_rng(seed)
        directory = tmp_path / str(seed)
        directory.mkdir()
        documents = layouts.random_corpus(generator, shortest=layout in layouts.NOT_EMPTY)
        dtypes = layouts.LAYOUTS[layout][1]
        dtype = dtypes[seed % len(dtypes)]
        path, named = layouts.write(layout, directory, documents, dtype)

        opened = ps.open_tokens(path, vocab_size=100, **named)
        ids = [token for each in documents for token in each]
        assert opened.dtype == np.dtype(dtype)
        assert layouts.all_ids(opened).tolist() == ids
        assert opened.num_tokens == verify_tokens(opened) == len(ids)
        assert opened.has_documents == (layout in layouts.WITH_DOCUMENTS)
        if opened.has_documents:
            assert [each.tolist() for each in opened] == documents
        if len(ids) > 8:
            read = Windows(opened, 8, tail="pad").read(np.array([0]))
            assert read["tokens"][0].tolist() == ids[:9]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pickled_set_is_opened_again_unless_its_tokens_changed(layouts, layout, tmp_path):
    documents = [each for each in DOCUMENTS if each or layout not in layouts.NOT_EMPTY]
    path, named = layouts.write(layout, tmp_path, documents)
    opened = ps.open_tokens(path, vocab_size=100, **named)
    pickled = pickle.dumps(opened)

    assert pickle.loads(pickled).digest == opened.digest
    assert len(pickled) < 2000
    layouts.write(layout, tmp_path, [*documents, [2]])
    with pytest.raises(StoreError, match="was changed after it was pickled"):
        pickle.loads(pickled)


def test_a_megatron_set_is_opened_by_its_prefix_and_by_either_file(layouts, tmp_path):
    layouts.write_megatron(tmp_path / "web.en", DOCUMENTS, split=3, modes=True)
    names = ("web.en", "web.en.bin", "web.en.idx")
    opened = [ps.open_tokens(tmp_path / name) for name in names]

    assert len({each.digest for each in opened}) == 1
    assert [each.tolist() for each in opened[0]] == DOCUMENTS
    assert opened[0].format == "megatron"


def test_a_megatron_index_without_documents_has_its_sequences_as_documents(layouts, tmp_path):
    layouts.write_megatron(tmp_path / "x", DOCUMENTS)
    index = tmp_path / "x.idx"
    data = bytearray(index.read_bytes())
    data[26:34] = (1).to_bytes(8, "little")
    index.write_bytes(data[: -8 * len(DOCUMENTS)])

    assert [each.tolist() for each in ps.open_tokens(tmp_path / "x")] == DOCUMENTS


def test_arrays_in_memory_are_read_without_a_copy():
    torch = pytest.importorskip("torch")
    ids = np.arange(50, dtype=np.int64)
    opened = ps.open_tokens(ids, vocab_size=50)

    assert np.shares_memory(opened.part_ids(0), ids)
    assert not opened.part_ids(0).flags.writeable
    assert pickle.loads(pickle.dumps(opened)).digest == opened.digest
    assert ps.open_tokens(torch.arange(50)).digest == opened.digest
    with pytest.raises(StoreError, match="holds float64 values; token ids are integers"):
        ps.open_tokens(np.ones(3))
    with pytest.raises(StoreError, match=r"shape \(2, 2\)"):
        ps.open_tokens(np.ones((2, 2), int))


def test_a_list_of_a_store_and_a_foreign_set_is_one_stream(layouts, tmp_path):
    native = ps.build(ps.Texts(TEXTS), tmp_path / "store", tokenizer="bytes")
    layouts.write_megatron(tmp_path / "x", list(native), "int32")
    rows = Packs([native, ps.open_tokens(tmp_path / "x")], 32)

    assert rows.stream.num_tokens == 2 * native.num_tokens
    assert len(rows) == 2 * len(Packs(native, 32))


def test_a_set_with_a_tokenizer_is_decoded_and_not_mixed_with_another_one(layouts, tmp_path):
    layouts.write_megatron(tmp_path / "x", [list(b"one"), list(b"two")])
    opened = ps.open_tokens(tmp_path / "x", tokenizer="bytes")
    assert opened.decode(1) == "two"
    with pytest.raises(MissingTokenizerError, match="does not record its tokenizer"):
        ps.open_tokens(tmp_path / "x").decode(0)
    other = ps.build(ps.Texts(["a b c"]), tmp_path / "store", tokenizer="bytes")
    assert Windows([other, opened], 4).stream.num_tokens == other.num_tokens + 6


def test_ids_in_runs_are_read_as_one_array(tmp_path):
    generator = np.random.default_rng(0)
    for seed in range(30):
        lengths = generator.integers(0, 20, 12)
        gaps = generator.integers(0, 9, 12)
        ids = generator.integers(0, 1000, lengths.sum()).astype("<i4")
        ends = np.cumsum(lengths)
        pieces = np.split(ids, ends[:-1])
        pairs = zip(gaps, pieces, strict=True)
        (tmp_path / str(seed)).write_bytes(
            b"".join(b"x" * gap + ids.tobytes() for gap, ids in pairs)
        )
        starts = np.cumsum(gaps) + 4 * (ends - lengths)
        found = ScatteredArray(MappedBytes(tmp_path / str(seed)), ids.dtype, starts, ends)

        assert np.array_equal(found[:], ids)
        assert np.array_equal(found[3:-2:3], ids[3:-2:3])
        width = int(generator.integers(1, 25))
        begins = generator.integers(0, len(ids) - width, 40)
        expected = np.stack([ids[each : each + width] for each in begins])
        assert np.array_equal(found.rows(begins, width), expected)


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("encoding", ["ndarray", "ndarray:uint16", "bytes"])
def test_every_encoding_of_mds_is_read_in_place(layouts, encoding, more, tmp_path):
    layouts.write_mds(tmp_path / "x", FILLED, "uint16", encoding=encoding, more=more)
    named = {"dtype": "uint16"} if encoding == "bytes" else {}
    opened = ps.open_tokens(tmp_path / "x", vocab_size=400, **named)

    assert [each.tolist() for each in opened] == FILLED
    assert opened.dtype == np.uint16
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("layout", ["megatron", "mds", "arrow"])
def test_rows_of_token_files_are_those_of_a_native_store(layouts, tmp_path, layout):
    native = ps.build(ps.Texts(TEXTS), tmp_path / "store", tokenizer="bytes")
    documents, path = [each.tolist() for each in native], tmp_path / "x"
    # Packs are made of the documents of one part, and the store has one.
    options = {} if layout == "megatron" else {"shards": 1}
    getattr(layouts, f"write_{layout}")(path, documents, "int32", **options)

    kinds = (Windows, Packs, partial(Documents, pad_id=0), partial(Windows, borders=True))
    for make in kinds:
        one, two = make(native, 16), make(ps.open_tokens(path), 16)
        rows = np.arange(len(one))
        for field, values in one.read(rows).items():
            assert np.array_equal(values, two.read(rows)[field]), field


@pytest.mark.parametrize("layout", ["mds", "litdata"])
def test_a_compressed_set_is_decompressed_once(layouts, layout, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    getattr(layouts, f"write_{layout}")(tmp_path / "x", FILLED, "int32", zstd=True)
    for _ in range(2):
        assert [each.tolist() for each in ps.open_tokens(tmp_path / "x")] == FILLED
        files = {each.name: each.stat().st_ino for each in (tmp_path / "cache/tokens").iterdir()}
        assert len([each for each in files if each.endswith(".raw")]) == 2
    assert files == {
        each.name: each.stat().st_ino for each in (tmp_path / "cache/tokens").iterdir()
    }
    getattr(layouts, f"write_{layout}")(tmp_path / "x", FILLED[::-1], "int32", zstd=True)
    assert [each.tolist() for each in ps.open_tokens(tmp_path / "x")] == FILLED[::-1]


@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
def test_arrow_files_are_mapped_unless_their_buffers_are_compressed(
    layouts, codec, tmp_path, monkeypatch
):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    layouts.write_arrow(tmp_path / "x", FILLED, "int32", codec=codec)
    opened = ps.open_tokens(tmp_path / "x", vocab_size=400)

    assert [each.tolist() for each in opened] == FILLED
    assert (tmp_path / "cache").exists() == (codec is not None)
    one = ps.open_tokens(tmp_path / "x" / "data-00000-of-00002.arrow")
    assert [each.tolist() for each in one] == FILLED[:3]


@pytest.mark.parametrize("layout", ["arrow", "parquet"])
def test_masks_that_exclude_nothing_leave_all_tokens_trained(layouts, layout, tmp_path):
    ones = [[1] * len(each) for each in FILLED]
    masks = {"attention_mask": ones, "labels": FILLED, "loss_mask": ones}
    getattr(layouts, f"write_{layout}")(tmp_path / "x", FILLED, **masks)
    for _ in range(2):
        opened = ps.open_tokens(tmp_path / "x")
        assert [each.tolist() for each in opened] == FILLED
        assert not opened.has_loss


@pytest.mark.parametrize("layout", ["arrow", "parquet"])
def test_padding_is_removed_and_labels_of_minus_100_are_not_trained_on(layouts, layout, tmp_path):
    ids = [[0, 5, 6, 7, 0], [0, 0], [8, 9], []]
    masks = {"attention_mask": [[0, 1, 1, 1, 0], [0, 0], [1, 1], []]}
    masks["labels"] = [[-100, -100, 6, 7, -100], [-100, 4], [8, -100], []]
    masks["loss_mask"] = [[0, 1, 1, 0, 0], [0, 0], [1, 1], []]
    getattr(layouts, f"write_{layout}")(tmp_path / "x", ids, **masks)
    opened = ps.open_tokens(tmp_path / "x")

    assert [each.tolist() for each in opened] == [[5, 6, 7], [], [8, 9], []]
    parts = range(len(opened.part_tokens))
    masks = [opened.part_loss(each) for each in parts if opened.part_loss(each) is not None]
    assert np.concatenate(masks).tolist() == [0, 1, 0, 1, 0]
    read = Windows(opened, 4).read(np.array([0]))
    assert read["target_mask"][0].tolist() == [True, False, True, False]
    assert verify_tokens(opened) == 5


def test_rows_of_one_length_are_read_from_lists_of_a_fixed_size(tmp_path):
    rows = np.arange(40).reshape(10, 4).tolist()
    table = pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32(), 4))})
    pq.write_table(table, tmp_path / "x.parquet")
    with pa.ipc.new_stream(tmp_path / "x.arrow", table.schema) as writer:
        writer.write_table(table.slice(3), max_chunksize=2)

    assert [each.tolist() for each in ps.open_tokens(tmp_path / "x.parquet")] == rows
    assert [each.tolist() for each in ps.open_tokens(tmp_path / "x.arrow")] == rows[3:]


def write_parts(write, directory, name, **options):
    """Write twelve files, of which 10 and 11 are before 2 by their bytes."""
    directory.mkdir()
    for number, group in enumerate(GROUPS):
        write(directory / name.format(number), group, **options)


@pytest.mark.parametrize(
    ("layout", "name", "named"),
    [
        ("llmc", "fineweb_train_{}.bin", {}),
        ("datatrove", "{}_tokens.ds", {}),
        ("olmo", "part-0-{}.npy", {"format": "olmo"}),
        ("npy", "ids{}.npy", {}),
        ("megatron", "web_{}_document", {}),
        ("raw", "train{}.bin", {"format": "nanogpt"}),
        ("parquet", "train-{}-of-12.parquet", {}),
    ],
)
def test_a_directory_of_files_is_one_set_in_natural_order(layouts, layout, name, named, tmp_path):
    write_parts(getattr(layouts, f"write_{layout}"), tmp_path / "set", name)
    opened = ps.open_tokens(tmp_path / "set", vocab_size=100, **named)

    assert layouts.all_ids(opened).tolist() == SET_IDS
    assert verify_tokens(opened) == len(SET_IDS)
    if opened.has_documents:
        assert [each.tolist() for each in opened] == SET
        assert opened.document(-1).tolist() == SET[-1]
    ending = "bin" if layout == "megatron" else name.rpartition(".")[2]
    pattern = ps.open_tokens(tmp_path / "set" / f"*.{ending}", vocab_size=100, **named)
    assert pattern.digest == opened.digest
    assert Windows(opened, 16).read(np.array([1]))["tokens"][0].tolist() == SET_IDS[16:33]


def test_windows_and_lists_take_patterns_and_directories(layouts, tmp_path):
    write_parts(layouts.write_megatron, tmp_path / "set", "web_{}")
    by_path, by_pattern = Windows(str(tmp_path / "set"), 8), Windows(f"{tmp_path}/set/*.bin", 8)

    assert by_path.digest == by_pattern.digest
    assert Packs([tmp_path / "set", tmp_path / "set"], 16).stream.num_tokens == 2 * len(SET_IDS)


def test_more_files_than_the_process_may_open_are_read(layouts, python, tmp_path):
    directory = tmp_path / "set"
    directory.mkdir()
    for number in range(200):
        layouts.write_llmc(directory / f"x{number}.bin", [[number] * 9])
    code = f"""
import resource
import numpy as np
import penstock as ps
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
opened = ps.open_tokens({str(directory)!r}, vocab_size=200)
rows = ps.Windows(opened, 8, tail="pad")
for start in (0, 0):
    read = rows.read(np.arange(len(rows)))["tokens"]
print(len(opened.part_tokens), opened.num_tokens, int(read.max()))
"""
    assert python(code).stdout == "200 1800 199\n"


def test_a_plan_of_a_store_a_megatron_set_and_an_mds_set_resumes_at_every_step(layouts, tmp_path):
    documents = [list(range(each, each + 50)) for each in range(8)]
    texts = [f"document {number} " * (number % 5 + 1) for number in range(40)]
    native = ps.build(ps.Texts(texts), tmp_path / "store", tokenizer="bytes")
    (tmp_path / "meg").mkdir()
    for number in range(2):
        layouts.write_megatron(tmp_path / "meg" / f"x{number}", documents[number::2], "int32")
    layouts.write_mds(tmp_path / "mds", documents, "uint16", shards=3)
    sources = {
        "native": Windows(native, 12),
        "megatron": Windows(ps.open_tokens(tmp_path / "meg"), 12),
        "mds": Packs(str(tmp_path / "mds"), 12),
    }
    plan = Plan(sources, weights={"native": 2, "megatron": 1, "mds": 1}, shuffle="full", seed=7)

    def make_loader(rank, world_size, prefetch):
        return ps.Loader(
            plan, global_batch_size=24, rank=rank, world_size=world_size, prefetch=prefetch
        )

    assert_resumable(make_loader, world_sizes=(1, 2, 3, 8), prefetch=(0, 2), steps=6)


@pytest.mark.parametrize("dtypes", [("<u2", "<u2"), ("<u2", "<u4"), (">u2", "<u2"), (">u2", ">u2")])
def test_rows_of_files_with_different_dtypes_have_the_ids_of_the_files(tmp_path, dtypes):
    halves = np.split(IDS, 2)
    for number, (ids, dtype) in enumerate(zip(halves, dtypes, strict=True)):
        np.save(tmp_path / f"{number}.npy", ids.astype(dtype))
    opened = ps.open_tokens(tmp_path / "*.npy", vocab_size=50_000)
    rows = ps.Windows(opened, 100)

    found = rows.read(np.arange(len(rows))[::-1])["tokens"]

    expected = [IDS[100 * row : 100 * row + 101] for row in range(len(rows))][::-1]
    assert found.tolist() == np.stack(expected).tolist()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.mark.parametrize("suffix", [".ids", ".bounds", ".loss", ".json"])
@pytest.mark.parametrize("damage", ["delete", "empty", "truncate"])
def test_a_decoded_copy_without_one_of_its_files_is_decoded_again(
    layouts, cache, tmp_path, suffix, damage
):
    layouts.write_parquet(tmp_path / "x", SMALL, loss_mask=[[1, 0, 1], [1, 1]])
    digest = ps.open_tokens(tmp_path / "x").digest
    (file,) = cache.glob(f"*{suffix}")
    if damage == "delete":
        file.unlink()
    else:
        file.write_bytes(b"" if damage == "empty" else file.read_bytes()[:-1])

    again = ps.open_tokens(tmp_path / "x")
    assert again.digest == digest
    assert again.part_loss(0).tolist() == [1, 0, 1, 1, 1]


@pytest.mark.parametrize("layout", ["mds-zstd", "litdata-zstd"])
@pytest.mark.parametrize("suffix", [".raw", ".json"])
@pytest.mark.parametrize("damage", ["delete", "empty", "truncate"])
def test_a_decompressed_copy_that_is_not_whole_is_decompressed_again(
    layouts, cache, tmp_path, layout, suffix, damage
):
    path, _ = layouts.write(layout, tmp_path, [*SMALL, [6], [7, 8]])
    digest = ps.open_tokens(path).digest
    for file in cache.glob(f"*{suffix}"):
        if damage == "delete":
            file.unlink()
        else:
            file.write_bytes(b"" if damage == "empty" else file.read_bytes()[:-1])

    assert ps.open_tokens(path).digest == digest
    assert len([*cache.glob("*.raw")]) == len([*cache.glob("*.json")]) == 2


def test_masks_of_booleans_are_read(cache, tmp_path):
    masks = [[True, False, True], [True, True]]
    pq.write_table(pa.table({"input_ids": SMALL, "loss_mask": masks}), tmp_path / "x.parquet")

    assert ps.open_tokens(tmp_path / "x.parquet").part_loss(0).tolist() == [1, 0, 1, 1, 1]


def test_a_path_may_begin_with_the_home_directory(layouts, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    layouts.write_llmc(tmp_path / "x_1.bin", [[1] * 50])

    assert ps.Windows("~/x_1.bin", 4).stream.num_tokens == 50
    assert ps.Windows("~/x_*.bin", 4).stream.num_tokens == 50


def test_brackets_in_names_of_existing_files_are_no_pattern(layouts, tmp_path):
    (tmp_path / "run[1]").mkdir()
    for prefix in ("run[1]/web", "web[v2]"):
        layouts.write_megatron(tmp_path / prefix, [[1, 2], [3]])
        assert ps.open_tokens(tmp_path / prefix).num_tokens == 3
    assert ps.Windows(tmp_path / "run[1]/w*.bin", 1).stream.num_tokens == 3


def test_an_index_of_datatrove_decides_the_dtype(layouts, tmp_path):
    documents = [[number, 1] for number in range(100, 300)]
    layouts.write_datatrove(tmp_path / "p.ds", documents)

    assert [each.tolist() for each in ps.open_tokens(tmp_path / "p.ds")] == documents


def test_a_pattern_that_also_matches_indices_and_masks_is_opened_alike(layouts, tmp_path):
    for number in range(5):
        layouts.write_datatrove(tmp_path / f"p{number}.ds", [[1, 2], [3, 4, 5]], loss=[1] * 5)

    for pattern in ("*", "p*"):
        assert ps.open_tokens(tmp_path / pattern).num_tokens == 25
        assert ps.Windows(tmp_path / pattern, 4).stream.num_tokens == 25
        ps.verify(tmp_path / pattern)


def test_any_path_is_opened_where_a_store_is(layouts, tmp_path):
    layouts.write_megatron(tmp_path / "w", [[1, 2], [3]])
    seen = []

    assert ps.verify(tmp_path / "w", lambda *each: seen.append(each)).num_tokens == 3
    assert seen == [(1, 1)]
    assert Windows(tmp_path / "w", 1).stream.num_tokens == 3


def test_a_column_is_found_by_its_name_and_kind(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"tokens": [["a", "b"]], "input_ids": [[1, 2]]}), path)
    assert ps.open_tokens(path).part_ids(0).tolist() == [1, 2]
    pq.write_table(pa.table({"tokens": [[1, 2]], "labels": [[1, 2]]}), path)
    assert ps.open_tokens(path, column="labels").part_ids(0).tolist() == [1, 2]
    words = pa.array([[1, 2]], pa.large_list(pa.uint16()))
    pq.write_table(pa.table({"words": words}), path)
    assert ps.open_tokens(path, column="words").document(0).tolist() == [1, 2]
