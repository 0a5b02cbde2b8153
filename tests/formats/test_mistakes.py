"""Files that are opened as what they are not give an error, and never other tokens in silence."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

import penstock as ps
from penstock.errors import StoreError

IDS = np.random.default_rng(0).integers(0, 50_000, 1000)
KNOWN = {"format": "nanogpt", "vocab_size": 65536}


@pytest.mark.parametrize("count", [20, 1000])
@pytest.mark.parametrize(
    ("written", "read", "advice"),
    [
        ("<u4", "uint16", "uint32"),
        ("<i8", "uint16", "int64"),
        ("<i8", "uint32", "int64"),
        ("<u2", "uint8", "uint16"),
    ],
)
def test_a_dtype_that_is_too_narrow_is_named(tmp_path, count, written, read, advice):
    # Two bytes of a uint16 are both large, unless ids are small.
    ids = IDS[:count] % 200 if read == "uint8" else IDS[:count]
    ids.astype(written).tofile(tmp_path / "x.bin")
    size = 256 if read == "uint8" else 50_257

    with pytest.raises(StoreError, match=f'Pass dtype="{advice}"'):
        ps.open_tokens(tmp_path / "x.bin", format="nanogpt", dtype=read, vocab_size=size)
    with pytest.raises(StoreError, match=f'Pass dtype="{advice}"'):
        ps.ArrayFile(tmp_path / "x.bin", read)
    kept = ps.open_tokens(
        tmp_path / "x.bin", format="nanogpt", dtype=np.dtype(written).name, vocab_size=50_257
    )
    assert kept.part_ids(0).tolist() == ids.tolist()


RECORDED = ("npy", "megatron", "parquet", "arrow", "mds", "litdata")


@pytest.mark.parametrize("layout", RECORDED)
@pytest.mark.parametrize("vocab_size", [50_000, 128_256])
def test_no_dtype_is_advised_for_files_that_record_theirs(layouts, layout, vocab_size, tmp_path):
    # Its halves are 19,928 and 2: both are in each vocabulary.
    path, _ = layouts.write(layout, tmp_path, [[1, 151_000, 2]], "int32")

    with pytest.raises(StoreError, match=r"token id 151,000, but the .* or is damaged\.$"):
        ps.open_tokens(path, vocab_size=vocab_size)


def test_no_dtype_is_advised_for_an_array_in_memory():
    for dtype in (">i4", "<i4"):
        with pytest.raises(StoreError, match=r"token id 70,000, but the .* or is damaged\.$"):
            ps.open_tokens(np.array([1, 70_000], dtype), vocab_size=50_000)


def test_no_dtype_is_advised_that_does_not_hold_the_vocabulary(layouts, tmp_path):
    layouts.write_raw(tmp_path / "x.bin", [[1, 151_000, 2]], "uint32")
    known = {"format": "nanogpt", "dtype": "uint32"}

    with pytest.raises(StoreError, match=r"token id 151,000, but the .* or is damaged\.$"):
        ps.open_tokens(tmp_path / "x.bin", **known, vocab_size=128_256)
    with pytest.raises(StoreError, match=r'If they are uint16, pass dtype="uint16"\.$'):
        ps.open_tokens(tmp_path / "x.bin", **known, vocab_size=50_257)


def test_the_narrower_dtype_of_a_column_of_bytes_is_named(layouts, tmp_path):
    layouts.write_mds(tmp_path, [IDS.tolist()], "uint16", encoding="bytes")

    with pytest.raises(StoreError, match=r'pass dtype="uint16"\.$'):
        ps.open_tokens(tmp_path, dtype="uint32", vocab_size=50_257)


def test_a_file_of_zeros_with_few_ids_has_no_wrong_dtype(tmp_path):
    ids = np.zeros(1000, "<u2")
    ids[::100] = 300
    ids.tofile(tmp_path / "x.bin")

    assert ps.ArrayFile(tmp_path / "x.bin", "uint16").num_tokens == 1000


def test_an_array_file_refuses_headers(layouts, tmp_path):
    layouts.write_llmc(tmp_path / "x.bin", [IDS.tolist()])

    with pytest.raises(StoreError, match=r"format 'llmc', so its header would become tokens"):
        ps.ArrayFile(tmp_path / "x.bin", "uint16")
    layouts.write_megatron(tmp_path / "y", [IDS.tolist()])
    assert ps.ArrayFile(tmp_path / "y.bin", "uint16").num_tokens == 1000


def test_an_array_of_dolma_is_not_read_as_one_of_numpy(layouts, tmp_path):
    layouts.write_olmo(tmp_path / "x.npy", [IDS.tolist()])

    with pytest.raises(StoreError, match=r'open_tokens\(path, format="olmo", vocab_size=…\)'):
        ps.Windows(tmp_path / "x.npy", 8)


@pytest.mark.parametrize("text", ["To be, or not to be.\n" * 10, "天地玄黄宇宙洪荒。" * 9])
def test_text_is_not_read_as_ids(tmp_path, text):
    (tmp_path / "x.bin").write_bytes(text.encode()[: len(text.encode()) // 2 * 2])

    with pytest.raises(StoreError, match="is text, and not a file of ids"):
        ps.open_tokens(tmp_path / "x.bin", **KNOWN)
    # The ids of a tokenizer of bytes are text.
    assert ps.ArrayFile(tmp_path / "x.bin", "uint8").num_tokens > 0


def test_packed_files_are_not_read_as_ids(tmp_path):
    ids = IDS.astype("<u2")
    (tmp_path / "x.bin").write_bytes(gzip.compress(ids.tobytes()))
    np.savez(tmp_path / "x.npz", ids=ids)

    for name, kind in {"x.bin": "compressed with gzip", "x.npz": "a zip archive"}.items():
        path = tmp_path / name
        path.write_bytes(path.read_bytes() + b"\0" * (path.stat().st_size % 2))
        with pytest.raises(StoreError, match=kind):
            ps.open_tokens(path, **KNOWN)


def test_ids_of_billions_need_no_vocabulary_to_be_refused():
    with pytest.raises(StoreError, match=r"token id 3,276,800,000, and no vocabulary is so large"):
        ps.open_tokens(np.array([1, 3_276_800_000], "<u4"))


def test_urls_are_refused_without_their_password(tmp_path):
    with pytest.raises(StoreError, match=r"^https://host/x.bin is not on this machine"):
        ps.open_tokens("https://me:secret@host/x.bin?sig=1")
    with pytest.raises(StoreError, match="without file://"):
        ps.open_tokens(f"file://{tmp_path}/x.bin")


def test_empty_files_and_directories_of_several_formats_are_named(layouts, tmp_path):
    (tmp_path / "x.bin").touch()
    with pytest.raises(StoreError, match=r"x\.bin is empty\."):
        ps.open_tokens(tmp_path / "x.bin")
    (tmp_path / "mixed").mkdir()
    layouts.write_llmc(tmp_path / "mixed" / "a_1.bin", [[1, 2]])
    layouts.write_megatron(tmp_path / "mixed" / "a_2", [[1, 2]])
    with pytest.raises(StoreError, match=r"several formats: llmc, megatron. Pass a pattern"):
        ps.open_tokens(tmp_path / "mixed")


def test_a_big_endian_index_is_named(layouts, tmp_path):
    layouts.write_megatron(tmp_path / "x", [[1, 2, 3]])
    index = bytearray((tmp_path / "x.idx").read_bytes())
    index[9:17] = index[9:17][::-1]
    (tmp_path / "x.idx").write_bytes(index)

    with pytest.raises(StoreError, match="is big-endian"):
        ps.open_tokens(tmp_path / "x")


def test_litdata_chunks_of_other_items_are_refused(layouts, tmp_path):
    """Each item of `PyTreeLoader` begins with its size in bytes, which would become a token."""
    documents = [[1, 2, 3], [4, 5]]
    sized = [[4 * len(each), *each] for each in documents]
    layouts.write_litdata(tmp_path / "x", sized, "int32")
    index = json.loads((tmp_path / "x" / "index.json").read_text())
    for loader, counts in (("PyTreeLoader", True), ("PyTreeLoader", False), (None, False)):
        index["config"]["item_loader"] = loader
        for chunk in index["chunks"]:
            chunk["dim"] = chunk["dim"] if counts else None
        (tmp_path / "x" / "index.json").write_text(json.dumps(index))
        with pytest.raises(StoreError, match=r"litdata\.optimize and a TokensLoader"):
            ps.open_tokens(tmp_path / "x")


def test_labels_that_are_no_lists_are_refused(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"input_ids": [[1, 2]], "labels": [3]}), path)

    with pytest.raises(StoreError, match=r"'labels' \(int64\) is not a list for each row"):
        ps.open_tokens(path)


def test_the_column_of_integers_is_found_beside_one_of_words(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"tokens": [["a", "b"]], "input_ids": [[1, 2]]}), path)
    assert ps.open_tokens(path).part_ids(0).tolist() == [1, 2]

    pq.write_table(pa.table({"tokens": [[1]], "input_ids": [[1]]}), path)
    with pytest.raises(StoreError, match="--column tokens"):
        ps.open_tokens(path)
    pq.write_table(pa.table({"text": ["a"]}), path)
    with pytest.raises(StoreError, match="Text is tokenized with penstock build"):
        ps.open_tokens(path)
    pq.write_table(pa.table({"tokens": [[1, 2]], "labels": [[1, 2]]}), path)
    assert ps.open_tokens(path, column="labels").part_ids(0).tolist() == [1, 2]


@pytest.mark.parametrize("name", ["labels", "completion_mask"])
def test_masks_in_mds_shards_are_not_ignored(layouts, tmp_path, name):
    layouts.write_mds(tmp_path / "x", [[1, 2]], shards=1, more=True)
    index = json.loads((tmp_path / "x" / "index.json").read_text())
    for shard in index["shards"]:
        shard["column_names"][0] = name
    (tmp_path / "x" / "index.json").write_text(json.dumps(index))

    with pytest.raises(StoreError, match=f"{name}.*which penstock does not read from MDS"):
        ps.open_tokens(tmp_path / "x")


def test_one_file_of_a_set_and_a_feather_file_are_named(layouts, tmp_path):
    layouts.write_mds(tmp_path / "x", [[1, 2]], shards=1)
    for name in ("index.json", "shard.00000.mds"):
        with pytest.raises(StoreError, match=r"Pass its directory, .*x\.$"):
            ps.open_tokens(tmp_path / "x" / name)
    feather.write_feather(pa.table({"input_ids": [[1]]}), tmp_path / "x.arrow")
    with pytest.raises(StoreError, match="is a Feather file"):
        ps.open_tokens(tmp_path / "x.arrow")


@pytest.mark.parametrize("layout", ["mds", "litdata"])
def test_one_file_of_a_set_is_not_read_as_ids_without_a_header(layouts, layout, tmp_path):
    """The numbers at its beginning may all be below the vocabulary, and would become tokens."""
    layouts.write(layout, tmp_path, [[1, 2, 3], [4, 5, 6]], "uint16")
    (chunk, *_) = (each for each in tmp_path.iterdir() if each.suffix != ".json")
    if chunk.stat().st_size % 2:
        chunk.write_bytes(chunk.read_bytes() + b"\0")

    with pytest.raises(StoreError, match=f"is one file of a set of the format '{layout}'.*Pass"):
        ps.open_tokens(chunk, format="nanogpt", vocab_size=65_536)
    IDS.astype("<u2").tofile(tmp_path / "other.bin")  # which the index does not list
    assert ps.open_tokens(tmp_path / "other.bin", format="nanogpt", vocab_size=50_257).num_tokens


def test_a_directory_is_not_opened_as_one_array(layouts, tmp_path):
    layouts.write_mds(tmp_path / "x", [[1, 2]])

    with pytest.raises(StoreError, match="x is not a file"):
        ps.open_tokens(tmp_path / "x", format="npy")
