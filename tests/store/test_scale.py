"""Large stores: ten thousand parts, and counts past 32 bits, in sparse and shared files."""

import os

import made_store
import numpy as np
import pytest
import xxhash

import penstock
from penstock.disk import header
from penstock.store.manifest import PartRecord, part_file

NUM_PARTS = 10_000


def contents(num_documents, num_tokens):
    """What stands in the manifest of a real store, with other counts."""
    return {
        "format": "penstock-store",
        "dtype": "uint16",
        "tokenizer": {
            "name": "bytes",
            "digest": "0" * 63 + "1",
            "canary": "0" * 63 + "1",
            "vocab_size": 257,
            "eos_id": 256,
            "bos_id": None,
            "special_tokens": "text",
        },
        "eos_id": 256,
        "bos_id": None,
        "split": None,
        "side": None,
        "counts": {"documents": num_documents, "tokens": num_tokens},
        "builds": [
            {
                "slices": NUM_PARTS,
                "counts": {},
                "rejects": {"bytes": 0, "xxh3_128": xxhash.xxh3_128().hexdigest(), "reasons": {}},
                "reading": {},
                "inputs": [{"name": "big.txt", "bytes": 7, "format": "text", "compression": None}],
            }
        ],
    }


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A store of 10,000 parts that share their files by hard links."""
    place = tmp_path_factory.mktemp("wide")
    arrays = {
        "tokens": np.array([7, 8, 256, 9, 256], "<u2"),
        "bounds": np.array([3, 5], "<u8"),
        "origin": np.array([[0, 0], [0, 2]], "<u8"),
    }
    files = {}
    for kind, array in arrays.items():
        data = header(array.dtype, array.shape) + array.tobytes()
        (place / kind).write_bytes(data)
        files[kind] = (len(data), xxhash.xxh3_128(data).hexdigest())
        for number in range(NUM_PARTS):
            os.link(place / kind, place / part_file(number, kind))
    parts = [PartRecord(number, 2, 5, files) for number in range(NUM_PARTS)]
    made_store.write(place, contents(2 * NUM_PARTS, 5 * NUM_PARTS), parts)
    return place


def test_opening_ten_thousand_parts_reads_the_manifest_alone(wide, python):
    """Counted in a separate process, because an audit hook cannot be removed."""
    code = """
import os, sys, penstock
from penstock import TokenStore
touched = []
def note(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(sys.argv[1]):
        touched.append(os.path.basename(str(arguments[0])))
sys.addaudithook(note)
TokenStore(sys.argv[1])
print(sorted(set(touched), reverse=True))
"""
    (table,) = wide.glob("parts-*.npy")
    assert python(code, wide).stdout == f"{['penstock.json', table.name]}\n"


def test_ten_thousand_parts_are_read_with_256_descriptors(wide, python):
    code = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import penstock
store = penstock.TokenStore(sys.argv[1])
assert sum(len(document) for document in store) == 50_000
assert store.tokens(0, 50_000).sum() == 10_000 * (7 + 8 + 9 + 512)
for number in [*range(500), *range(500, 20_000, 7)]:
    assert len(store.document(number)) == 3 - number % 2
    assert store.origin(number).offset == number % 2 * 2
print("read", len(store))
"""
    assert python(code, wide, timeout=120).stdout == "read 20000\n"


@pytest.mark.torture
def test_offsets_past_32_bits_are_right(tmp_path):
    """Three parts of 2**31 tokens in sparse files: the last tokens lie past 2**32."""
    num_tokens = 2**31
    parts = []
    for number in range(3):
        shapes = {
            "tokens": ("<u2", (num_tokens,)),
            "bounds": ("<u8", (1,)),
            "origin": ("<u8", (1, 2)),
        }
        files = {}
        for kind, (dtype, shape) in shapes.items():
            size = 128 + int(np.prod(shape)) * np.dtype(dtype).itemsize
            with (tmp_path / part_file(number, kind)).open("wb") as stream:
                stream.write(header(np.dtype(dtype), shape))
                stream.truncate(size)
                if kind == "tokens":
                    stream.seek(size - 2)
                    stream.write(bytes([number + 1, 0]))
                if kind == "bounds":
                    stream.seek(128)
                    stream.write(np.uint64(num_tokens).tobytes())
            files[kind] = (size, "1" * 32)
        parts.append(PartRecord(number, 1, num_tokens, files))
    made_store.write(tmp_path, contents(3, 3 * num_tokens), parts)
    store = penstock.TokenStore(tmp_path)

    assert store.num_tokens == 3 * 2**31
    for number in range(3):
        end = (number + 1) * num_tokens
        assert store.tokens(end - 1, end).tolist() == [number + 1]
        assert len(store.document(number)) == num_tokens
    assert store.tokens(2**32 - 1, 2**32 + 1).tolist() == [2, 0]
