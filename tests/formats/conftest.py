"""Writers of the layouts of other tools, from the description of each format."""

import gzip
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

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


LAYOUTS = {
    "llmc": (write_llmc, ("uint16", "uint32"), "x.bin"),
    "nanogpt": (write_raw, ("uint16",), "x.bin"),
    "olmo": (write_olmo, ("uint16",), "x.npy"),
    "npy": (write_npy, ("uint8", "uint16", "uint32", "int32", "int64"), "x.npy"),
    "megatron": (write_megatron, tuple(MEGATRON_CODES), "x"),
    "old-megatron": (write_old_megatron, tuple(MEGATRON_CODES), "x"),
    "datatrove": (write_datatrove, ("uint16", "uint32"), "x.ds"),
}
"""A writer, its dtypes and the name that is opened, for each layout."""
WITH_DOCUMENTS = ("olmo", "megatron", "old-megatron", "datatrove")
HEADERLESS = ("nanogpt", "olmo")


def write(layout, directory, documents, dtype=None):
    """Write a corpus; return the path to open and the arguments that it needs."""
    writer, dtypes, name = LAYOUTS[layout]
    target = Path(directory) / name
    writer(target, documents, dtype or dtypes[0])
    return target, {"format": layout} if layout in HEADERLESS else {}


def random_corpus(generator, vocab_size=None):
    """Return documents of random lengths, some of them empty."""
    vocab_size = vocab_size or int(generator.integers(2, 100))
    lengths = generator.integers(0, 60, generator.integers(1, 30)) * generator.integers(0, 2, 1)
    lengths = lengths + generator.integers(0, 9, len(lengths))
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]


@pytest.fixture(scope="session")
def layouts():
    """The functions and tables of this module."""
    return SimpleNamespace(**globals())
