"""Stores written file by file, so that a test can say where every document and part ends."""

import hashlib
from pathlib import Path

import made_store
import numpy as np
import pytest
import xxhash

import penstock
from penstock.disk import header
from penstock.store.manifest import PartRecord, part_file


def write_store(place, parts, *, tokenizer="made", dtype="uint16"):
    """A store whose parts hold these documents, each a list of ids."""
    place = Path(place)
    place.mkdir(parents=True, exist_ok=True)
    records = []
    for number, documents in enumerate(parts):
        tokens = [token for document in documents for token in document]
        arrays = {
            "tokens": np.array(tokens, np.dtype(dtype).newbyteorder("<")),
            "bounds": np.cumsum([len(document) for document in documents]).astype("<u8"),
            "origin": np.zeros((len(documents), 2), "<u8"),
        }
        files = {}
        for kind, array in arrays.items():
            data = header(array.dtype, array.shape) + array.tobytes()
            (place / part_file(number, kind)).write_bytes(data)
            files[kind] = (len(data), xxhash.xxh3_128(data).hexdigest())
        records.append(PartRecord(number, len(documents), len(tokens), files))
    made_store.write(place, _contents(records, tokenizer, dtype), records)
    return penstock.TokenStore(place)


def _contents(records, tokenizer, dtype):
    name = hashlib.sha256(tokenizer.encode()).hexdigest()
    return {
        "format": "penstock-store",
        "dtype": dtype,
        "tokenizer": {
            "name": tokenizer,
            "digest": name,
            "canary": name,
            "vocab_size": 65_536,
            "eos_id": 0,
            "bos_id": None,
            "special_tokens": "text",
        },
        "eos_id": 0,
        "bos_id": None,
        "split": None,
        "side": None,
        "counts": {
            "documents": sum(record.num_documents for record in records),
            "tokens": sum(record.num_tokens for record in records),
        },
        "builds": [
            {
                "slices": len(records),
                "counts": {},
                "rejects": {"bytes": 0, "xxh3_128": xxhash.xxh3_128().hexdigest(), "reasons": {}},
                "reading": {},
                "inputs": [{"name": "a.txt", "bytes": 1, "format": "text", "compression": None}],
            }
        ],
    }


@pytest.fixture(scope="session", name="write_store")
def _write_store():
    return write_store


@pytest.fixture(scope="session")
def sparse_store(tmp_path_factory):
    """Three parts of 2^31 + 5 tokens, one document each, that take a few kilobytes of disk."""
    place, size = tmp_path_factory.mktemp("sparse"), 2**31 + 5
    records = []
    for number in range(3):
        arrays = {"bounds": np.array([size], "<u8"), "origin": np.zeros((1, 2), "<u8")}
        files = {"tokens": (128 + 2 * size, "1" * 32)}
        for kind, array in arrays.items():
            data = header(array.dtype, array.shape) + array.tobytes()
            (place / part_file(number, kind)).write_bytes(data)
            files[kind] = (len(data), "1" * 32)
        with (place / part_file(number, "tokens")).open("wb") as stream:
            stream.write(header(np.dtype("<u2"), (size,)) + np.array([7], "<u2").tobytes())
            stream.seek(128 + 2 * (size - 1))
            stream.write(np.array([11], "<u2").tobytes())
        records.append(PartRecord(number, 1, size, files))
    made_store.write(place, _contents(records, "made", "uint16"), records)
    return penstock.TokenStore(place), size


@pytest.fixture(scope="session")
def parted(tmp_path_factory):
    """A store of 100 ids from 1 on, in three parts with documents of 7, and the ids."""
    documents = [list(range(first, min(first + 7, 101))) for first in range(1, 101, 7)]
    parts = [documents[:4], documents[4:5], documents[5:]]
    return write_store(tmp_path_factory.mktemp("parted"), parts)
