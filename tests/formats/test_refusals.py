"""Mistakes that people make with token files are errors in words, and never give other ids."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import MissingStoreError, PlanError, StoreError
from penstock.formats import verify_tokens

IDS = np.random.default_rng(0).integers(0, 50_000, 1000)
DOCUMENTS = [[5, 6, 7], [1], [8] * 300, list(range(90)), [2, 3]]
NANOGPT = {"format": "nanogpt", "vocab_size": 50_257}
OLMO = {"format": "olmo", "vocab_size": 100}


def edit_index(directory, old, new):
    text = (directory / "index.json").read_text()
    assert old in text
    (directory / "index.json").write_text(text.replace(old, new))


def with_index(layout, old, new, **options):
    """Write a set with an index, and change the index."""

    def write(layouts, path):
        getattr(layouts, f"write_{layout}")(path / "x", DOCUMENTS, **options)
        edit_index(path / "x", old, new)

    return write


def layout(name, file, documents=DOCUMENTS, **options):
    return lambda layouts, path: getattr(layouts, f"write_{name}")(
        path / file, documents, **options
    )


def raw(dtype):
    return lambda layouts, path: IDS.astype(dtype).tofile(path / "x")


def saved(array):
    def write(layouts, path):
        with (path / "x").open("wb") as stream:
            np.save(stream, array)

    return write


def table(**columns):
    return lambda layouts, path: pq.write_table(pa.table(columns), path / "x")


def contents(data):
    return lambda layouts, path: (path / "x").write_bytes(data)


def changed(write, change, file="x"):
    """Write a file and change its bytes."""

    def write_changed(layouts, path):
        write(layouts, path)
        (path / file).write_bytes(change((path / file).read_bytes()))

    return write_changed


def without(write, file):
    def write_without(layouts, path):
        write(layouts, path)
        (path / file).unlink()

    return write_without


def several(*writes):
    def write_all(layouts, path):
        (path / "x").mkdir()
        for write in writes:
            write(layouts, path / "x")

    return write_all


BIG_ENDIAN = (1).to_bytes(8, "big")
SHARDS = {"shards": 1}
MASK = {"input_ids": [[1, 2, 3]], "loss_mask": [[0, 1, 1]]}
REFUSALS = {
    # A wrong dtype, or a vocabulary that is missing or another one.
    "narrow": (raw("<u4"), NANOGPT, r'in every second place.*Pass dtype="uint32"'),
    "narrow int64": (raw("<i8"), NANOGPT, r'Pass dtype="int64"'),
    "narrow of int64": (raw("<i8"), {**NANOGPT, "dtype": "uint32"}, r'Pass dtype="int64"'),
    "wide": (raw("<u2"), {**NANOGPT, "dtype": "uint32"}, r'has 50,257 ids.*pass dtype="uint16"'),
    "vocabulary": (raw("<u2"), {**NANOGPT, "vocab_size": 128_256}, "128,256 ids does not fit"),
    "no vocabulary": (raw("<u2"), {"format": "nanogpt"}, r"Pass vocab_size= or tokenizer="),
    "unknown dtype": (raw("<u2"), {**NANOGPT, "dtype": "float"}, r"dtype='float' is not one of"),
    "other dtype": (layout("llmc", "x"), {"dtype": "int32"}, r"holds uint16 ids, not dtype="),
    "beyond": (layout("llmc", "x"), {"vocab_size": 300}, None),
    "below": (layout("llmc", "x"), {"vocab_size": 80}, r"token id 89, but the vocabulary has 80"),
    "negative": (saved(np.array([1, -5])), {}, r"token id -5, and no id is negative"),
    "billions": (saved(np.array([1, 2**31], "u4")), {}, "2,147,483,648, and no vocabulary is so"),
    # Files that do not hold ids, or of another format.
    "no format": (raw("<u2"), {}, r'open_tokens\(path, format="nanogpt", vocab_size='),
    "unknown format": (raw("<u2"), {"format": "tfrecord"}, r"format='tfrecord' is not one of"),
    "empty": (contents(b""), {}, r"x is empty\."),
    "text": (contents(b"To be, or not to be.\n" * 10), NANOGPT, "is text, and not a file of ids"),
    "gzip": (contents(gzip.compress(bytes(999)) + b"\0"), NANOGPT, "compressed with gzip"),
    "llmc as nanogpt": (
        layout("llmc", "x"),
        NANOGPT,
        r"of the format 'llmc', and not of 'nanogpt'",
    ),
    "parquet as arrow": (layout("parquet", "x"), {"format": "arrow"}, "not of 'arrow'"),
    "columns": (layout("llmc", "x"), {"column": "a"}, r"column='a': .* \(llmc\) has no columns"),
    "two formats": (
        several(layout("megatron", "y"), layout("llmc", "y.bin")),
        {},
        r"files of several formats|could be of several formats: llmc, megatron",
    ),
    "object": (saved(np.array([{}], object)), {}, "cannot be read as an array of NumPy"),
    "float": (saved(np.ones(4)), {}, "token ids are integers"),
    "two dimensions": (saved(np.ones((2, 2), int)), {}, r"holds an array of shape \(2, 2\)"),
    "dolma": (raw("<u2"), {"format": "npy"}, r'without one: open_tokens\(path, format="olmo"'),
    # Files that were cut off, or whose companion is missing or another one.
    "cut npy": (changed(saved(IDS), lambda data: data[:-2]), {}, "truncated or damaged"),
    "longer npy": (changed(saved(IDS), lambda data: data + bytes(8)), {}, "header says 1,000"),
    "cut llmc": (changed(layout("llmc", "x"), lambda data: data[:-2]), {}, "its header says 396"),
    "no pair": (without(layout("megatron", "x"), "x.bin"), {}, r"x\.bin does not exist; .* a pair"),
    "cut pair": (
        changed(layout("megatron", "x"), lambda data: data[:-2], "x.bin"),
        {},
        "truncated",
    ),
    "big-endian": (
        changed(layout("megatron", "x"), lambda data: data[:9] + BIG_ENDIAN + data[17:], "x.idx"),
        {},
        "only version 1 can be read",
    ),
    "cut table": (
        changed(layout("olmo", "x.npy"), lambda data: data[:-20], "x.csv.gz"),
        OLMO | {"file": "x.npy", "vocab_size": 400},
        "cannot be read as a table of documents",
    ),
    "other loss": (
        layout("datatrove", "x", loss=[1] * 9),
        {},
        r"x\.loss is for 9 tokens, but .* has 396",
    ),
    "no index": (
        without(layout("datatrove", "x.ds"), "x.ds.index"),
        {"file": "x.ds"},
        r"needs the index x\.ds\.index",
    ),
    "no mask": (
        several(
            layout("datatrove", "p0.ds", [[1, 2, 3]], loss=[0, 1, 1]),
            layout("datatrove", "p1.ds", [[1, 2, 3]]),
        ),
        {},
        r"p1.ds has no loss mask, but 1 of 2 files have it",
    ),
    "no table": (
        several(layout("olmo", "p0.npy"), without(layout("olmo", "p1.npy"), "p1.csv.gz")),
        OLMO | {"vocab_size": 400},
        r"p1\.npy has no table of documents, but 1 of 2",
    ),
    # Shards with an index.
    "one shard": (
        layout("mds", "x", **SHARDS),
        {"file": "x/shard.00000.mds"},
        r"one file of a set\. Pass its directory, .*x\.$",
    ),
    "one chunk": (
        layout("litdata", "x"),
        {"file": "x/chunk-0-0.bin", **NANOGPT},
        r"one file of a set of the format 'litdata'.* Pass its directory",
    ),
    "no shard": (
        without(layout("mds", "x", **SHARDS), "x/shard.00000.mds"),
        {},
        r"shard\.00000\.mds does not exist",
    ),
    "brotli": (
        with_index("mds", "zstd:7", "br:11", zstd=True),
        {},
        r"compressed with 'br:11'; zstd can be read\. Decompress it",
    ),
    "pickled": (with_index("mds", "ndarray:uint16", "pkl"), {}, "has the encoding 'pkl'"),
    "floats": (with_index("mds", "ndarray:uint16", "ndarray:float32"), {}, "has the encoding"),
    "bytes": (layout("mds", "x", encoding="bytes"), {}, r"does not record its dtype\. Pass dtype="),
    "unclear": (
        with_index("mds", '"id"', '"input_ids"', more=True),
        {},
        r"input_ids, length, tokens, and it is not clear.*column=",
    ),
    "masks": (
        with_index("mds", '"id"', '"labels"', more=True),
        {},
        "column 'labels', which penstock does not read from MDS",
    ),
    "elsewhere": (
        with_index("mds", "shard.00000.mds", "../shard.00000.mds"),
        {},
        "which is not in its directory",
    ),
    "other index": (with_index("mds", '"samples": 3', '"samples": 2'), {}, "is not what"),
    "other loader": (
        with_index("litdata", "TokensLoader", "PyTreeLoader"),
        {},
        r"litdata\.optimize and a TokensLoader",
    ),
    "float items": (
        with_index("litdata", "no_header_numpy:5", "no_header_numpy:9"),
        {},
        "items of the format 'no_header_numpy:9', and not rows of integers",
    ),
    "encrypted": (
        with_index("litdata", '"encryption": null', '"encryption": {"a": 1}'),
        {},
        "encrypted, compressed by items",
    ),
    # Tables.
    "no ids": (table(text=["a"], n=[1]), {}, r"no column input_ids .*text \(string\), n \(int64\)"),
    "text column": (table(text=["a"]), {}, "Text is tokenized with penstock build"),
    "other column": (table(words=[[1, 2]]), {}, 'column="words"'),
    "two columns": (table(input_ids=[[1]], tokens=[[1]]), {}, "--column input_ids"),
    "null": (table(input_ids=[[1], None]), {}, "the column 'input_ids' has a null"),
    "null mask": (table(input_ids=[[1]], labels=[[None]]), {}, "'labels'"),
    "no list": (table(input_ids=[[1]], labels=[3]), {}, r"\(int64\) is not a list for each row"),
    "shifted labels": (
        table(input_ids=[[1], [5, 6, 7]], labels=[[1], [6, 7, 1]]),
        {},
        r"row 1 has the value 6 in the column 'labels', at the id 5\. A model is trained on the",
    ),
    "gap": (
        table(input_ids=[[1], [5, 6, 7]], attention_mask=[[1], [1, 0, 1]]),
        {},
        "mask of row 1 is 0 between tokens",
    ),
    "2": (table(input_ids=[[1]], loss_mask=[[2]]), {}, "value 2 .* must be 0 or 1"),
    "short mask": (table(input_ids=[[1, 2]], loss_mask=[[1]]), {}, "has 2 ids, but 1 values in"),
    "no masks": (
        several(
            lambda layouts, path: pq.write_table(pa.table(MASK), path / "p0"),
            lambda layouts, path: pq.write_table(pa.table(MASK).select(["input_ids"]), path / "p1"),
        ),
        {},
        r"p1 has no loss_mask, but 1 of 2 files have it",
    ),
    "cut arrow": (
        changed(
            layout("arrow", "x", **SHARDS), lambda data: data[:-8], "x/data-00000-of-00001.arrow"
        ),
        {},
        r"has no mark at its end.*truncated",
    ),
    # Sets of files.
    "splits": (
        several(layout("llmc", "train_1.bin"), layout("llmc", "val_1.bin")),
        {},
        r"several names: train_\*\.bin, val_\*\.bin.*pattern",
    ),
    "other files": (
        several(layout("llmc", "y"), lambda layouts, path: (path / "README.md").write_text("a")),
        {},
        r"1 of 2 files without the contents.*README\.md",
    ),
    "directories": (
        several(layout("llmc", "y"), lambda layouts, path: (path / "more").mkdir()),
        {},
        "It has the directories more",
    ),
    "headerless": (several(layout("raw", "y.bin")), {}, "need format="),
    "formats": (several(layout("llmc", "y1"), layout("npy", "y2")), {}, "formats: llmc, npy"),
    "nothing": (several(), {}, "is a directory"),
    "no match": (several(), {"file": "x/*.ds"}, r"x/\*\.ds matches no file"),
    "a directory": (several(layout("mds", "y")), {"file": "x/y*"}, "matches the directory"),
    "missing": (several(), {"file": "none.bin"}, "none.bin does not exist"),
    "as a file": (several(layout("llmc", "y")), {"format": "npy", "file": "x/z"}, "not exist"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_mistake_is_refused_with_what_to_do(layouts, tmp_path, monkeypatch, name):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    write, named, message = REFUSALS[name]
    write(layouts, tmp_path)
    named = dict(named)
    path = tmp_path / named.pop("file", "x")

    if message is None:
        assert ps.open_tokens(path, **named).num_tokens
        return
    with pytest.raises(StoreError, match=message):
        ps.open_tokens(path, **named)


@pytest.mark.parametrize("name", ["other column", "no ids", "splits", "headerless", "no match"])
def test_every_place_refuses_the_same_files(layouts, tmp_path, name):
    write, named, message = REFUSALS[name]
    write(layouts, tmp_path)
    path = tmp_path / named.get("file", "x")

    for opens in (lambda path: ps.Windows(path, 4), ps.verify):
        with pytest.raises(StoreError, match=message):
            opens(path)


def test_urls_and_stores_are_not_token_files(tmp_path):
    for url in ("https://me:secret@host/x.bin?sig=1", f"file://{tmp_path}/x.bin", "s3://a/x.bin"):
        with pytest.raises(StoreError, match="is a URL") as caught:
            ps.open_tokens(url)
        assert "secret" not in str(caught.value)
    store = ps.build(ps.Texts(["one two three"] * 9), tmp_path / "store", tokenizer="bytes")
    with pytest.raises(StoreError, match=r"is a store of penstock\. Open it with TokenStore"):
        ps.open_tokens(store.path)
    (tmp_path / "store" / "penstock.json").unlink()
    with pytest.raises(StoreError, match="penstock build"):
        ps.Windows(str(store.path), 8)


def test_objects_that_are_no_array_of_ids_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    store = ps.build(ps.Texts(["To be,", "or not"]), tmp_path / "store", tokenizer="bytes")
    for given, message in [
        ([[1, 2], [3]], r"^list cannot be read .*numpy\.concatenate joins"),
        (torch.zeros(3, dtype=torch.bfloat16), r"^Tensor cannot be read .*tensor on the CPU"),
        (["a.bin", "b.bin"], r"Windows\(\[open_tokens\(path\), …\], length\)"),
        ([], "The array holds float64 values"),
        (np.ones((2, 2), int), r"shape \(2, 2\)"),
        (None, "NoneType is neither a path nor an array"),
        (store, r"is open already\. Pass it to Windows"),
        (ps.open_tokens(np.arange(9)), r"is open already\. Pass it to Windows"),
    ]:
        with pytest.raises(StoreError, match=message):
            ps.open_tokens(given)
    with pytest.raises(StoreError, match="are for files"):
        ps.open_tokens(np.arange(3), format="npy")
    with pytest.raises(StoreError, match=r"open_tokens\(array\)"):
        ps.Windows(np.arange(99), 4)


@pytest.mark.parametrize("kind", ["npy", "megatron", "parquet", "arrow", "mds", "litdata"])
def test_no_dtype_is_advised_for_files_that_record_theirs(layouts, kind, tmp_path):
    # Its halves are 19,928 and 2: both are in the vocabulary.
    path, _ = layouts.write(kind, tmp_path, [[1, 151_000, 2]], "int32")

    with pytest.raises(StoreError, match=r"token id 151,000, but the .* or is damaged\.$"):
        ps.open_tokens(path, vocab_size=50_000)


def test_a_vocabulary_decides_about_ids_that_alternate_with_small_ones(layouts, tmp_path):
    pairs = np.stack([np.arange(100, 2100), np.ones(2000, int)], 1)
    pairs.astype("<u2").tofile(tmp_path / "p.bin")
    for dtype in (None, "uint32"):
        with pytest.raises(StoreError, match='dtype="uint16"'):
            ps.open_tokens(tmp_path / "p.bin", **NANOGPT, dtype=dtype)
    with pytest.raises(StoreError, match=r'open_tokens\(path, format="nanogpt", dtype="uint16"'):
        ps.ArrayFile(tmp_path / "p.bin", "uint16")

    opened = ps.open_tokens(tmp_path / "p.bin", **NANOGPT, dtype="uint16")
    assert opened.part_ids(0)[:4].tolist() == [100, 1, 101, 1]
    documents = [[number, 1] * 20 for number in range(100, 120)]
    layouts.write_mds(tmp_path / "m", documents, "uint16", encoding="bytes")
    opened = ps.open_tokens(tmp_path / "m", dtype="uint16", vocab_size=300)
    assert [each.tolist() for each in opened] == documents
    with pytest.raises(StoreError, match=r'pass dtype="uint16"\.$'):
        ps.open_tokens(tmp_path / "m", dtype="uint32", vocab_size=300)


def test_the_dtype_of_a_file_of_zeros_with_few_ids_is_not_refused(tmp_path):
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
    layouts.write_litdata(tmp_path / "set", [[*range(50, 90)]] * 20)
    edit_index(tmp_path / "set", "chunk-0-0.bin", "größe.bin")
    (tmp_path / "set" / "chunk-0-0.bin").rename(tmp_path / "set" / "größe.bin")
    (tmp_path / "z.bin").symlink_to(tmp_path / "set" / "größe.bin")
    for path in (tmp_path / "z.bin", tmp_path / "set" / "größe.bin"):
        with pytest.raises(StoreError, match="one file of a set"):
            ps.ArrayFile(path, "uint16")
    IDS.astype("<u2").tofile(tmp_path / "set" / "other.bin")  # which the index does not list
    assert ps.ArrayFile(tmp_path / "set" / "other.bin", "uint16").num_tokens == 1000


def test_an_id_beyond_the_vocabulary_between_the_sampled_blocks_is_found_by_verify(
    layouts, tmp_path
):
    ids = np.zeros(3_000_000, "uint16")
    ids[100_000] = 60_000
    layouts.write_llmc(tmp_path / "x.bin", [ids])
    opened = ps.open_tokens(tmp_path / "x.bin", vocab_size=50257)

    for check in (verify_tokens, ps.verify):
        with pytest.raises(StoreError, match="token id 60,000, but the vocabulary has 50,257"):
            check(opened)


def test_the_file_with_an_id_beyond_the_vocabulary_is_numbered(layouts, tmp_path):
    for number in range(12):
        layouts.write_llmc(tmp_path / f"x{number}.bin", [[number]])

    with pytest.raises(StoreError, match=r"\(file 11 of 12\) has the token id 10, but the"):
        ps.open_tokens(tmp_path, vocab_size=10)


def test_headers_of_mds_are_compared_when_opened_or_by_verify(layouts, tmp_path):
    documents = [[each % 90] * 9 for each in range(5000)]
    layouts.write_mds(tmp_path, documents, "uint16", shards=1)
    file = tmp_path / "shard.00000.mds"
    assert verify_tokens(ps.open_tokens(tmp_path)) == 45_000
    data = bytearray(file.read_bytes())
    offset = int.from_bytes(data[4 + 4 * 2 : 8 + 4 * 2], "little")  # of document 2
    assert data[offset + 4 : offset + 6] == bytes([4, 9])  # one dimension of 9
    data[offset + 4] = 8  # two dimensions
    file.write_bytes(data)
    with pytest.raises(StoreError, match="does not describe one row"):
        verify_tokens(ps.open_tokens(tmp_path))
    # Each document records its dtype.
    layouts.write_mds(tmp_path, [[1, 2, 3, 4], [5, 6]], "int32", encoding="ndarray", shards=1)
    short = np.array([5, 6], "<i4").tobytes()
    changed = file.read_bytes().replace(bytes([33, 4, 2]) + short, bytes([17, 4, 4]) + short)
    file.write_bytes(changed)
    with pytest.raises(StoreError, match="does not describe one row of int32 ids"):
        ps.open_tokens(tmp_path)


def test_a_link_without_its_file_is_never_left_out(layouts, tmp_path):
    (tmp_path / "data").mkdir()
    for number in (0, 2):
        layouts.write_llmc(tmp_path / "data" / f"train_{number}.bin", [[number] * 20])
    layouts.write_datatrove(tmp_path / "x.ds", [[1, 2], [3]])
    layouts.write_raw(tmp_path / "p.npy", [[1, 2, 3]])
    layouts.write_raw(tmp_path / "m.bin", [[1, 2, 3]])
    for name in ("data/train_1.bin", "x.ds.loss", "p.csv.gz", "m.idx"):
        (tmp_path / name).symlink_to("/not/mounted")

    for name, options in {"data": {}, "x.ds": {}, "p.npy": OLMO, "m.bin": NANOGPT}.items():
        with pytest.raises(MissingStoreError, match="a link to /not/mounted, which does not exist"):
            ps.open_tokens(tmp_path / name, **options)
    (tmp_path / "data" / "train_0.bin").unlink()
    for first in ("data", "data/*.bin"):
        with pytest.raises(MissingStoreError, match="a link to /not/mounted"):
            ps.Windows(tmp_path / first, 4)


def test_a_dataset_dict_is_refused_with_its_splits(layouts, tmp_path):
    for name in ("train", "test"):
        layouts.write_arrow(tmp_path / name, DOCUMENTS)
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))

    with pytest.raises(
        StoreError, match=r"directories test, train\. Pass one directory.* one split"
    ):
        ps.Windows(tmp_path, 4)


def test_a_cache_that_cannot_be_written_is_an_error_in_words(layouts, tmp_path, monkeypatch):
    layouts.write_parquet(tmp_path / "x", DOCUMENTS)
    (tmp_path / "cache").write_text("a file, and not a directory")
    for cache in (str(tmp_path / "cache"), "/proc/nope"):
        monkeypatch.setenv("PENSTOCK_CACHE", cache)
        with pytest.raises(StoreError, match="Set PENSTOCK_CACHE to a directory"):
            ps.open_tokens(tmp_path / "x")


def test_files_without_documents_are_not_packed(layouts, tmp_path):
    layouts.write_llmc(tmp_path / "x.bin", DOCUMENTS)

    with pytest.raises(PlanError, match=r"x\.bin does not record where documents end"):
        ps.Packs(tmp_path / "x.bin", 4)


def test_a_file_that_was_overwritten_is_not_read(layouts, tmp_path):
    layouts.write_llmc(tmp_path / "x.bin", DOCUMENTS)
    rows = ps.Windows(ps.open_tokens(tmp_path / "x.bin"), 8)
    layouts.write_llmc(tmp_path / "x.bin", DOCUMENTS[:3])

    with pytest.raises(StoreError, match="overwritten in between"):
        rows.read(np.array([0]))
