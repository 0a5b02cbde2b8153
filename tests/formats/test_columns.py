"""Ids in columns: MDS shards, LitData chunks, Arrow and Parquet tables, and their masks."""

import json
import pickle
import shutil

import numpy as np
import pytest

import penstock as ps
from penstock import Documents, Packs, Windows
from penstock.errors import MissingStoreError, StoreError
from penstock.formats import verify_tokens
from penstock.formats.mapped import MappedBytes
from penstock.formats.scattered import ScatteredArray

DOCUMENTS = [[5, 6, 7], [1], [8] * 300, list(range(90)), [2, 3]]
IDS = [token for each in DOCUMENTS for token in each]


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
        assert np.array_equal(np.asarray(found), ids)
        assert np.array_equal(found[3:-2:3], ids[3:-2:3])
        width = int(generator.integers(1, 25))
        begins = generator.integers(0, len(ids) - width, 40)
        expected = np.stack([ids[each : each + width] for each in begins])
        assert np.array_equal(found.rows(begins, width), expected)


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("encoding", ["ndarray", "ndarray:uint16", "bytes"])
def test_every_encoding_of_mds_is_read_in_place(layouts, encoding, more, tmp_path):
    layouts.write_mds(tmp_path / "x", DOCUMENTS, "uint16", encoding=encoding, more=more)
    named = {"dtype": "uint16"} if encoding == "bytes" else {}
    opened = ps.open_tokens(tmp_path / "x", vocab_size=400, **named)

    assert [each.tolist() for each in opened] == DOCUMENTS
    assert opened.dtype == np.uint16
    assert not (tmp_path / "cache").exists()


def test_rows_of_mds_and_arrow_are_those_of_a_native_store(layouts, tmp_path):
    texts = [f"document {number} " * (number % 5 + 1) for number in range(40)]
    native = ps.build(ps.Texts(texts), tmp_path / "store", tokenizer="bytes")
    documents = [each.tolist() for each in native]
    layouts.write_mds(tmp_path / "mds", documents, native.dtype.name, shards=1)
    layouts.write_arrow(tmp_path / "arrow", documents, "int64", shards=1)

    for name in ("mds", "arrow"):
        for make in (Windows, Packs, lambda *each: Documents(*each, pad_id=0)):
            one, two = make(native, 16), make(str(tmp_path / name), 16)
            rows = np.arange(len(one))
            for field, values in one.read(rows).items():
                assert np.array_equal(values, two.read(rows)[field]), field


def test_bytes_of_mds_need_a_dtype_and_a_vocabulary(layouts, tmp_path):
    ids = np.random.default_rng(0).integers(0, 50000, 500).tolist()
    layouts.write_mds(tmp_path, [ids, ids], "int32", encoding="bytes")
    with pytest.raises(StoreError, match=r"holds bytes, whose dtype is not recorded. Pass dtype="):
        ps.open_tokens(tmp_path)
    with pytest.raises(StoreError, match=r"in every second place.*Pass dtype=\"uint32\""):
        ps.open_tokens(tmp_path, dtype="uint16", vocab_size=50000)
    with pytest.raises(StoreError, match="the vocabulary has 50,000 ids"):
        ps.open_tokens(tmp_path, dtype="int64", vocab_size=50000)
    opened = ps.open_tokens(tmp_path, dtype="int32", vocab_size=50000)
    assert opened.document(1).tolist() == ids
    assert pickle.loads(pickle.dumps(opened)).digest == opened.digest


@pytest.mark.parametrize("encoding", ["pkl", "json", "str", "int32", "ndarray:float32", "jpeg"])
def test_other_encodings_of_mds_are_refused_and_nothing_is_decoded(layouts, encoding, tmp_path):
    layouts.write_mds(tmp_path, DOCUMENTS)
    text = (tmp_path / "index.json").read_text().replace("ndarray:uint16", encoding)
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(StoreError, match=r"is pickled|Nothing was decoded"):
        ps.open_tokens(tmp_path)


def test_a_pickled_column_beside_the_ids_is_refused(layouts, tmp_path):
    layouts.write_mds(tmp_path, DOCUMENTS, more=True)
    index = (tmp_path / "index.json").read_text().replace('"str"', '"pkl"')
    (tmp_path / "index.json").write_text(index)
    with pytest.raises(
        StoreError, match=r"the column 'id' is pickled\. Unpickling can run any code"
    ):
        ps.open_tokens(tmp_path)


def test_a_file_outside_of_its_directory_is_not_opened(layouts, tmp_path):
    layouts.write_mds(tmp_path / "x", DOCUMENTS, shards=1)
    text = (tmp_path / "x" / "index.json").read_text()
    (tmp_path / "secret.mds").write_bytes((tmp_path / "x" / "shard.00000.mds").read_bytes())
    for name in ("../secret.mds", str(tmp_path / "secret.mds"), "..\\\\secret.mds", "a/../../s"):
        changed = text.replace("shard.00000.mds", name)
        (tmp_path / "x" / "index.json").write_text(changed)
        with pytest.raises(StoreError, match="which is not in its directory"):
            ps.open_tokens(tmp_path / "x")


def test_two_columns_that_could_hold_the_ids_are_refused_with_the_argument(layouts, tmp_path):
    layouts.write_mds(tmp_path, DOCUMENTS, more=True)
    path = tmp_path / "index.json"
    before = path.read_text()
    path.write_text(before.replace('"tokens"', '"words"'))
    assert ps.open_tokens(tmp_path).num_tokens == len(IDS)  # the only array
    path.write_text(before.replace('"id"', '"input_ids"'))
    with pytest.raises(
        StoreError, match=r"input_ids, length, tokens, and it is not clear.*column="
    ):
        ps.open_tokens(tmp_path)
    assert [each.tolist() for each in ps.open_tokens(tmp_path, column="tokens")] == DOCUMENTS
    path.write_text(before.replace('"id"', '"labels"'))
    with pytest.raises(StoreError, match="column 'labels', which penstock does not read from MDS"):
        ps.open_tokens(tmp_path)


def test_a_table_of_ids_in_another_document_is_found_when_opened_or_by_verify(layouts, tmp_path):
    documents = [[each % 90] * 9 for each in range(5000)]
    layouts.write_mds(tmp_path, documents, "uint16", shards=1)
    assert verify_tokens(ps.open_tokens(tmp_path)) == 45_000
    data = bytearray((tmp_path / "shard.00000.mds").read_bytes())
    offset = int.from_bytes(data[4 + 4 * 2 : 8 + 4 * 2], "little")  # of document 2
    assert data[offset + 4 : offset + 6] == bytes([4, 9])  # one dimension of 9
    data[offset + 4] = 8  # two dimensions
    (tmp_path / "shard.00000.mds").write_bytes(data)
    with pytest.raises(StoreError, match="the header of document 2 does not describe one row"):
        verify_tokens(ps.open_tokens(tmp_path))
    layouts.write_mds(tmp_path, documents[:100], "uint16", shards=1)
    (tmp_path / "shard.00000.mds").write_bytes(
        (tmp_path / "shard.00000.mds").read_bytes().replace(bytes([4, 9, 3]), bytes([8, 9, 3]))
    )
    with pytest.raises(StoreError, match="the header of document 3 does not describe one row"):
        ps.open_tokens(tmp_path)


def test_documents_of_several_dtypes_are_not_one_shard(layouts, tmp_path):
    layouts.write_mds(tmp_path, [[1, 2, 3, 4], [5, 6]], "int32", encoding="ndarray", shards=1)
    data = (tmp_path / "shard.00000.mds").read_bytes()
    short = np.array([5, 6], "<i4").tobytes()
    changed = data.replace(bytes([33, 4, 2]) + short, bytes([17, 4, 4]) + short)
    (tmp_path / "shard.00000.mds").write_bytes(changed)
    with pytest.raises(StoreError, match="document 1 does not describe one row of int32 ids"):
        ps.open_tokens(tmp_path)


@pytest.mark.parametrize("layout", ["mds", "litdata"])
def test_a_compressed_set_is_decompressed_once(layouts, layout, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    getattr(layouts, f"write_{layout}")(tmp_path / "x", DOCUMENTS, "int32", zstd=True)
    for _ in range(2):
        assert [each.tolist() for each in ps.open_tokens(tmp_path / "x")] == DOCUMENTS
        files = {each.name: each.stat().st_ino for each in (tmp_path / "cache/tokens").iterdir()}
        assert len([each for each in files if each.endswith(".raw")]) == 2
    assert files == {
        each.name: each.stat().st_ino for each in (tmp_path / "cache/tokens").iterdir()
    }
    getattr(layouts, f"write_{layout}")(tmp_path / "x", DOCUMENTS[::-1], "int32", zstd=True)
    assert [each.tolist() for each in ps.open_tokens(tmp_path / "x")] == DOCUMENTS[::-1]


@pytest.mark.parametrize("layout", ["mds", "litdata"])
def test_a_zstd_bomb_is_refused_before_it_fills_the_disk(layouts, layout, tmp_path, monkeypatch):
    zstandard = pytest.importorskip("zstandard")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    getattr(layouts, f"write_{layout}")(tmp_path / "x", DOCUMENTS, "int32", zstd=True, shards=1)
    packed = next(each for each in (tmp_path / "x").iterdir() if each.suffix != ".json")
    compressor = zstandard.ZstdCompressor().compressobj()
    blocks = [compressor.compress(bytes(1 << 24)) for _ in range(6)]  # 96 MiB
    packed.write_bytes(b"".join([*blocks, compressor.flush()]))
    assert packed.stat().st_size < 100_000
    with pytest.raises(StoreError, match=r"expands to more than .* a decompression bomb"):
        ps.open_tokens(tmp_path / "x")
    assert sum(each.stat().st_size for each in (tmp_path / "cache/tokens").iterdir()) == 0


def test_other_compression_of_mds_is_refused_with_the_way_out(layouts, tmp_path):
    layouts.write_mds(tmp_path, DOCUMENTS, zstd=True)
    index = (tmp_path / "index.json").read_text().replace("zstd:7", "br:11")
    (tmp_path / "index.json").write_text(index)
    with pytest.raises(
        StoreError, match=r"compressed with 'br:11'; zstd can be read\. Decompress it"
    ):
        ps.open_tokens(tmp_path)


def test_a_shard_that_is_missing_is_named(layouts, tmp_path):
    layouts.write_mds(tmp_path, DOCUMENTS)
    (tmp_path / "shard.00001.mds").unlink()
    with pytest.raises(MissingStoreError, match=r"shard\.00001\.mds does not exist"):
        ps.open_tokens(tmp_path)


@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
def test_arrow_files_are_mapped_unless_their_buffers_are_compressed(
    layouts, codec, tmp_path, monkeypatch
):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    layouts.write_arrow(tmp_path / "x", DOCUMENTS, "int32", codec=codec)
    opened = ps.open_tokens(tmp_path / "x", vocab_size=400)

    assert [each.tolist() for each in opened] == DOCUMENTS
    assert (tmp_path / "cache").exists() == (codec is not None)
    one = ps.open_tokens(tmp_path / "x" / "data-00000-of-00002.arrow")
    assert [each.tolist() for each in one] == DOCUMENTS[:3]


@pytest.mark.parametrize("layout", ["arrow", "parquet"])
def test_masks_that_exclude_nothing_leave_all_tokens_trained(layouts, layout, tmp_path):
    ones = [[1] * len(each) for each in DOCUMENTS]
    masks = {"attention_mask": ones, "labels": DOCUMENTS, "loss_mask": ones}
    getattr(layouts, f"write_{layout}")(tmp_path / "x", DOCUMENTS, **masks)
    for _ in range(2):
        opened = ps.open_tokens(tmp_path / "x")
        assert [each.tolist() for each in opened] == DOCUMENTS
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


@pytest.mark.parametrize("layout", ["arrow", "parquet"])
@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (
            {"labels": [[6, 7, 1], [1]]},
            "row 0 has the id 5 and the label 6 at token 0. A model is trained on the next",
        ),
        ({"attention_mask": [[1, 0, 1], [1]]}, "of row 0 is 0 between tokens"),
        ({"attention_mask": [[1, 2, 1], [1]]}, "neither 0 nor 1"),
        ({"loss_mask": [[1, 1], [1]]}, "has 3 ids, but 2 values in 'loss_mask'"),
        ({"completion_mask": [[1, 1, 1], [None]]}, "the column 'completion_mask' has a null"),
        ({"labels": [[5, 6, 7], None]}, "the column 'labels' has a null"),
    ],
)
def test_masks_that_do_not_describe_the_ids_are_refused(layouts, layout, masks, message, tmp_path):
    getattr(layouts, f"write_{layout}")(tmp_path / "x", [[5, 6, 7], [1]], **masks)
    with pytest.raises(StoreError, match=message):
        ps.open_tokens(tmp_path / "x")


def test_tables_without_ids_are_refused_with_their_columns(layouts, tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": ["one"], "n": [1]}), tmp_path / "x.parquet")
    with pytest.raises(StoreError, match=r"no column input_ids .*text \(string\), n \(int64\)"):
        ps.open_tokens(tmp_path / "x.parquet")
    table = pa.table({"words": pa.array([[1, 2]], pa.large_list(pa.uint16()))})
    parquet.write_table(table, tmp_path / "y.parquet")
    opened = ps.open_tokens(tmp_path / "y.parquet", column="words")
    assert opened.document(0).tolist() == [1, 2]
    both = pa.table({"input_ids": [[1, 2]], "tokens": [[3]]})
    parquet.write_table(both, tmp_path / "both.parquet")
    with pytest.raises(StoreError, match=r"or several that could be.*Name the column: open_tokens"):
        Windows(str(tmp_path / "both.parquet"), 8)
    assert ps.open_tokens(tmp_path / "both.parquet", column="tokens").num_tokens == 1
    layouts.write_llmc(tmp_path / "z.bin", DOCUMENTS)
    with pytest.raises(StoreError, match=r"column='words': .* \(llmc\) has no columns"):
        ps.open_tokens(tmp_path / "z.bin", column="words")


def test_rows_of_one_length_are_read_from_lists_of_a_fixed_size(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = np.arange(40).reshape(10, 4).tolist()
    table = pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32(), 4))})
    parquet.write_table(table, tmp_path / "x.parquet")
    with pa.ipc.new_stream(tmp_path / "x.arrow", table.schema) as writer:
        writer.write_table(table.slice(3), max_chunksize=2)

    assert [each.tolist() for each in ps.open_tokens(tmp_path / "x.parquet")] == rows
    assert [each.tolist() for each in ps.open_tokens(tmp_path / "x.arrow")] == rows[3:]


def test_an_arrow_file_that_was_truncated_between_batches_is_refused(layouts, tmp_path):
    pa = pytest.importorskip("pyarrow")
    layouts.write_arrow(tmp_path, DOCUMENTS, shards=1, rows=2)
    path = tmp_path / "data-00000-of-00001.arrow"
    data = path.read_bytes()
    path.write_bytes(data[:-8])
    assert pa.ipc.open_stream(path.read_bytes()).read_all().num_rows == len(DOCUMENTS)
    with pytest.raises(StoreError, match=r"has no mark at its end.*truncated"):
        ps.open_tokens(tmp_path)


def test_an_index_of_rows_in_a_separate_file_is_refused(layouts, tmp_path):
    layouts.write_arrow(tmp_path, DOCUMENTS)
    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps({**state, "_indices_data_files": ["x"]}))
    with pytest.raises(StoreError, match="stores the order of rows in a separate file"):
        ps.open_tokens(tmp_path)


def test_a_cache_that_cannot_be_written_is_an_error_in_words(layouts, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file, and not a directory")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    layouts.write_parquet(tmp_path / "x", DOCUMENTS)
    with pytest.raises(StoreError, match="Set PENSTOCK_CACHE to a directory"):
        ps.open_tokens(tmp_path / "x")


def test_a_decoded_file_that_was_deleted_is_decoded_again(layouts, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    layouts.write_parquet(tmp_path / "x", DOCUMENTS)
    digest = ps.open_tokens(tmp_path / "x").digest
    shutil.rmtree(tmp_path / "cache")
    assert ps.open_tokens(tmp_path / "x").digest == digest


def test_ids_of_litdata_are_integers_of_one_dimension(layouts, tmp_path):
    layouts.write_litdata(tmp_path, DOCUMENTS, "int32")
    text = (tmp_path / "index.json").read_text()
    for kind in ("no_header_numpy:9", "no_header_tensor:0", "pickle", "numpy"):
        (tmp_path / "index.json").write_text(text.replace("no_header_numpy:2", kind))
        with pytest.raises(
            StoreError, match=r"is not one of integers|describes items of the format"
        ):
            ps.open_tokens(tmp_path)
    (tmp_path / "index.json").write_text(
        text.replace('"encryption": null', '"encryption": {"a": 1}')
    )
    with pytest.raises(StoreError, match="encrypted or compressed by items"):
        ps.open_tokens(tmp_path)
