"""Writers of the layouts of other tools, from the description of each format, and stores."""

import gzip
import json
import struct
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import penstock as ps
from penstock.sources.slices import cut

MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def joined(documents, dtype):
    return np.concatenate([np.zeros(0, dtype), *(np.array(each, dtype) for each in documents)])


def ends(documents):
    return np.cumsum([len(each) for each in documents], dtype=np.int64)


def write_llmc(path, documents, dtype="uint16"):
    ids = joined(documents, dtype)
    magic, version = (20240520, 1) if dtype == "uint16" else (20240801, 7)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids)
    Path(path).write_bytes(
        header.tobytes() + ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    )


def write_raw(path, documents, dtype="uint16"):
    joined(documents, np.dtype(dtype).newbyteorder("<")).tofile(path)


def write_npy(path, documents, dtype="uint16"):
    with Path(path).open("wb") as stream:
        np.save(stream, joined(documents, dtype))


def write_olmo(path, documents, dtype="uint16"):
    write_raw(path, documents, dtype)
    stops = ends(documents).tolist()
    rows = zip([0, *stops[:-1]], stops, strict=True) if stops else ()
    lines = [f'{start},{stop},"id-{start}",s3://a/b.json.gz,{stop}\n' for start, stop in rows]
    with gzip.open(Path(path).with_suffix(".csv.gz"), "wt") as stream:
        stream.writelines(lines)


def write_datatrove(path, documents, dtype="uint16", loss=None):
    write_raw(path, documents, dtype)
    Path(f"{path}.index").write_bytes(ends(documents).astype("<u8").tobytes())
    if loss is not None:
        Path(f"{path}.loss").write_bytes(np.asarray(loss, "?").tobytes())


def write_megatron(prefix, documents, dtype="uint16", *, split=1, modes=False):
    """Write the current index; each document is stored as at most `split` sequences."""
    write_raw(f"{prefix}.bin", documents, dtype)
    sequences = [part for each in documents for part in np.array_split(each, split)]
    lengths = np.array([len(each) for each in sequences], "<i4")
    item = np.dtype(dtype).itemsize
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * item
    firsts = np.arange(len(documents) + 1, dtype="<i8") * split
    head = b"MMIDIDX\x00\x00" + struct.pack(
        "<QBQQ", 1, MEGATRON_CODES[dtype], len(lengths), len(firsts)
    )
    body = [lengths.tobytes(), starts.astype("<i8").tobytes(), firsts.tobytes()]
    body += [np.zeros(len(lengths), "i1").tobytes()] * modes
    Path(f"{prefix}.idx").write_bytes(head + b"".join(body))


def write_old_megatron(prefix, documents, dtype="int32"):
    """Write the index of old versions."""
    write_raw(f"{prefix}.bin", documents, dtype)
    count, stops = len(documents), ends(documents)
    lengths = np.diff(stops, prepend=0)
    head = b"TNTIDX\x00\x00" + struct.pack(
        "<QQQ", 1, MEGATRON_CODES[dtype], np.dtype(dtype).itemsize
    )
    head += struct.pack("<QQQ", count, count, count + 1)
    arrays = [np.arange(count + 1), np.append(0, stops), lengths, np.arange(count + 1)]
    Path(f"{prefix}.idx").write_bytes(
        head + b"".join(each.astype("<i8").tobytes() for each in arrays)
    )


MDS_CODES = {"uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "uint32": 32, "int32": 33}
MDS_CODES |= {"uint64": 64, "int64": 65}


def mds_value(ids, encoding):
    """Return ids as a column of an encoding stores them."""
    if encoding == "bytes":
        return ids.tobytes()
    width = next(each for each in (1, 2, 4, 8) if len(ids) < 1 << 8 * each)
    code = bytes([MDS_CODES[ids.dtype.name]]) if encoding == "ndarray" else b""
    head = bytes([4 | (width.bit_length() - 1)]) + len(ids).to_bytes(width, "little")
    return code + head + ids.tobytes()


def write_mds(
    directory, documents, dtype="uint16", *, encoding=None, shards=2, zstd=False, more=False
):
    """Write MDS shards; with `more`, two other columns beside the ids."""
    directory = Path(directory)
    directory.mkdir(exist_ok=True)
    encoding = encoding or f"ndarray:{dtype}"
    columns = [("tokens", encoding, None)]
    if more:
        columns = [("id", "str", None), ("length", "int", 8), *columns]
    names, encodings, sizes = (list(each) for each in zip(*columns, strict=True))
    records = []
    for number, group in enumerate(np.array_split(np.arange(len(documents)), shards)):
        samples = []
        for index in group.tolist():
            value = mds_value(np.array(documents[index], np.dtype(dtype)), encoding)
            others = [f"document {index}".encode(), (7).to_bytes(8, "little")] if more else []
            heads = [len(others[0])] if more else []
            head = b"".join(size.to_bytes(4, "little") for size in [*heads, len(value)])
            samples.append(head + b"".join([*others, value]))
        config = b'{"format": "mds"}'
        offsets = np.cumsum([0, *map(len, samples)]) + 8 + 4 * len(samples) + len(config)
        words = np.array([len(samples), *offsets], "<u4").tobytes()
        data = words + config + b"".join(samples)
        raw = {"basename": f"shard.{number:05}.mds", "bytes": len(data), "hashes": {}}
        packed = None
        if zstd:
            packed = write_zstd(directory / f"{raw['basename']}.zstd", data)
        else:
            (directory / raw["basename"]).write_bytes(data)
        records.append(
            {
                "column_encodings": encodings,
                "column_names": names,
                "column_sizes": sizes,
                "compression": "zstd:7" if zstd else None,
                "format": "mds",
                "hashes": [],
                "raw_data": raw,
                "samples": len(samples),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": packed,
            }
        )
    (directory / "index.json").write_text(json.dumps({"shards": records, "version": 2}))


def write_zstd(path, data):
    import zstandard

    Path(path).write_bytes(zstandard.ZstdCompressor().compress(data))
    return {"basename": path.name, "bytes": path.stat().st_size, "hashes": {}}


LITDATA_CODES = {"int8": 0, "int16": 1, "int32": 2, "int64": 3, "uint8": 4, "uint16": 5}


def write_litdata(directory, documents, dtype="uint16", *, shards=2, zstd=False):
    directory = Path(directory)
    directory.mkdir(exist_ok=True)
    chunks = []
    for number, group in enumerate(np.array_split(np.arange(len(documents)), shards)):
        items = [np.array(documents[index], np.dtype(dtype)).tobytes() for index in group]
        offsets = np.cumsum([0, *map(len, items)]) + 8 + 4 * len(items)
        data = np.array([len(items), *offsets], "<u4").tobytes() + b"".join(items)
        name = f"chunk-0-{number}{'.zstd' * zstd}.bin"
        if zstd:
            write_zstd(directory / name, data)
        else:
            (directory / name).write_bytes(data)
        # As LitData writes it: None if the first document of a chunk is empty.
        count = sum(map(len, items)) // np.dtype(dtype).itemsize if items and items[0] else None
        record = {"chunk_bytes": len(data), "chunk_size": len(items), "dim": count}
        chunks.append({**record, "filename": name})
    config = {"compression": "zstd" if zstd else None, "encryption": None}
    config["item_loader"] = "TokensLoader"
    config["data_format"] = [f"no_header_numpy:{LITDATA_CODES[dtype]}"]
    (directory / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))


def table_of(documents, dtype="int32", **masks):
    import pyarrow as pa

    columns = {"input_ids": pa.array(documents, pa.list_(pa.from_numpy_dtype(np.dtype(dtype))))}
    for name, rows in masks.items():
        kind = pa.int64() if name == "labels" else pa.int8()
        columns[name] = pa.array(rows, pa.list_(kind))
    return pa.table(columns)


def write_arrow(directory, documents, dtype="int32", *, shards=2, rows=4, codec=None, **masks):
    """Write a dataset as `save_to_disk` does, with `rows` rows in a record batch."""
    import pyarrow as pa

    directory = Path(directory)
    directory.mkdir(exist_ok=True)
    table = table_of(documents, dtype, **masks)
    names = [f"data-{number:05}-of-{shards:05}.arrow" for number in range(shards)]
    for name, group in zip(names, np.array_split(np.arange(len(documents)), shards), strict=True):
        part = table.slice(int(group[0]) if len(group) else 0, len(group)).combine_chunks()
        options = pa.ipc.IpcWriteOptions(compression=codec)
        with pa.ipc.new_stream(directory / name, part.schema, options=options) as writer:
            writer.write_table(part, max_chunksize=rows)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text("{}")


def write_parquet(path, documents, dtype="int32", **masks):
    import pyarrow.parquet as pq

    pq.write_table(table_of(documents, dtype, **masks), path, row_group_size=4)


def write_mds_zstd(directory, documents, dtype="int32"):
    write_mds(directory, documents, dtype, encoding="ndarray", zstd=True, more=True)


def write_litdata_zstd(directory, documents, dtype="int64"):
    write_litdata(directory, documents, dtype, zstd=True)


LAYOUTS = {
    "llmc": (write_llmc, ("uint16", "uint32"), "x.bin"),
    "nanogpt": (write_raw, ("uint16",), "x.bin"),
    "olmo": (write_olmo, ("uint16",), "x.npy"),
    "npy": (write_npy, ("uint8", "uint16", "uint32", "int32", "int64"), "x.npy"),
    "megatron": (write_megatron, tuple(MEGATRON_CODES), "x"),
    "old-megatron": (write_old_megatron, tuple(MEGATRON_CODES), "x"),
    "datatrove": (write_datatrove, ("uint16", "uint32"), "x.ds"),
    "mds": (write_mds, ("uint16", "int32", "int64", "uint8"), "."),
    "mds-zstd": (write_mds_zstd, ("uint16", "int32", "int64", "int8"), "."),
    "litdata": (write_litdata, tuple(LITDATA_CODES), "."),
    "litdata-zstd": (write_litdata_zstd, ("uint16", "int32", "int64"), "."),
    "arrow": (write_arrow, ("int32", "int64", "uint16"), "."),
    "parquet": (write_parquet, ("int32", "int64", "uint16"), "x"),
}
"""A writer, its dtypes and the name that is opened, for each layout."""
WITH_DOCUMENTS = ("olmo", "megatron", "old-megatron", "datatrove")
WITH_DOCUMENTS += ("mds", "mds-zstd", "litdata", "litdata-zstd", "arrow", "parquet")
NOT_EMPTY = ("mds", "mds-zstd")
"""Layouts whose writers refuse documents without tokens."""
HEADERLESS = ("nanogpt", "olmo")


def write(layout, directory, documents, dtype=None):
    """Write a corpus; return the path to open and the arguments that it needs."""
    writer, dtypes, name = LAYOUTS[layout]
    target = Path(directory) / name
    writer(target, documents, dtype or dtypes[0])
    return target, {"format": layout} if layout in HEADERLESS else {}


def all_ids(opened):
    """Return the ids of all parts of token files."""
    parts = range(len(opened.part_tokens))
    return np.concatenate(
        [np.zeros(0, opened.dtype), *(opened.part_ids(each)[:] for each in parts)]
    )


def random_corpus(generator, vocab_size=None, shortest=0):
    """Return documents of random lengths, some of them empty."""
    vocab_size = vocab_size or int(generator.integers(2, 100))
    lengths = generator.integers(0, 60, generator.integers(1, 30)) * generator.integers(0, 2, 1)
    lengths = np.maximum(lengths + generator.integers(0, 9, len(lengths)), shortest)
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]


@pytest.fixture(scope="session")
def layouts():
    """The functions and tables of this module."""
    return SimpleNamespace(**globals())


@pytest.fixture
def tmp_path():
    """In memory where there is such a place: kills need no real disk, and syncs take a while."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def small_parts(monkeypatch):
    """Builds make parts of 2,000 bytes of text."""
    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", 2_000)


@pytest.fixture
def store(small_parts, tmp_path):
    """A store of several parts."""
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"line {number} {'x' * (number % 37)}\n" for number in range(400)))
    made = ps.build(path, tmp_path / "store", tokenizer="bytes", documents="lines")
    assert len(made.manifest.parts) > 3
    return made


@pytest.fixture
def one_document(small_parts, tmp_path):
    """A store of one document that is stored in pieces."""
    path = tmp_path / "one.txt"
    path.write_text("".join(f"line {number}\n" for number in range(900)))
    made = ps.build(path, tmp_path / "one", tokenizer="bytes")
    assert len(made) > 3
    assert made.manifest.num_documents == 1
    return made


@pytest.fixture
def chats(tmp_path):
    """A store with a loss mask."""
    turns = [
        {"role": "user", "content": "Name a color."},
        {"role": "assistant", "content": "Blue."},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(5)))
    return ps.build(path, tmp_path / "chats", chat=ps.Chat("chatml", "gpt2", add_tokens="auto"))


@pytest.fixture
def write_files(tmp_path):
    """Write token files of datatrove, and open them."""

    def write_files(documents, *, wide=False, loss=None, vocab_size=None):
        path = tmp_path / "x.ds"
        flat = np.concatenate([np.zeros(0, "<u4"), *(np.array(each, "<u4") for each in documents)])
        flat.astype("<u4" if wide else "<u2").tofile(path)
        np.cumsum([len(each) for each in documents]).astype("<u8").tofile(f"{path}.index")
        if loss is not None:
            np.array(loss, "u1").tofile(f"{path}.loss")
        return ps.open_tokens(path, format="datatrove", vocab_size=vocab_size)

    return write_files
