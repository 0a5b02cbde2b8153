"""Write tests/formats/fixtures with the packages whose formats penstock reads.

    make .venv-bench/.done
    .venv-bench/bin/python tests/formats/make_fixtures.py [megatron datatrove mds litdata datasets]

The environment of `make bench` has the packages. With `--compare`, the script writes 50 random
corpora with each package to a temporary directory instead, and compares what `penstock.open_tokens`
reads.

The tests read the fixtures, and need none of these packages.
"""

import importlib.machinery
import json
import os
import sys
import types
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

FIXTURES = Path(__file__).parent / "fixtures"
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16")


def corpus(seed, *, shortest=0):
    """Return documents with ids below 100; some are empty, unless `shortest` is 1."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(shortest, 12, 15)
    return [generator.integers(0, 100, length).tolist() for length in lengths]


def set_of(directory, seed):
    """Make a directory; return the documents of three files of it, by their numbers."""
    directory.mkdir(exist_ok=True)
    return {number: corpus(1000 * number + seed) for number in (1, 2, 10)}


def write_megatron(prefix, documents, dtype):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
    for each in documents:
        builder.add_item(torch.tensor(each, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def write_datatrove(path, documents, token_size):
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    file = TokenizedFile(
        str(path.parent), path.name, save_loss_metadata=True, token_size=token_size
    )
    for each in documents:
        file.write(each, np.array([token % 2 == 0 for token in each], bool))
    file.close()


def mds_writer():
    """Return the writer of MosaicML Streaming."""
    # `import streaming` imports torchvision, which `streaming.base` does not need. And
    # benchmarks/ has a file of the same name.
    if "streaming" not in sys.modules:
        spec = importlib.machinery.PathFinder.find_spec("streaming")
        package = types.ModuleType("streaming")
        package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
        sys.modules["streaming"] = package
    from streaming.base import MDSWriter

    return MDSWriter


def write_mds(path, documents, encoding, dtype, compression=None, more=False):
    columns = {"tokens": encoding, **({"id": "str", "length": "int"} if more else {})}
    options = {"compression": compression, "size_limit": 400, "hashes": ["sha1"]}
    with mds_writer()(out=str(path), columns=columns, **options) as writer:
        for number, each in enumerate(documents):
            tokens = np.array(each, dtype)
            others = {"id": f"document {number}", "length": len(each)} if more else {}
            value = tokens.tobytes() if encoding == "bytes" else tokens
            writer.write({"tokens": value, **others})


def write_litdata(path, documents, dtype, as_tensor, compression=None):
    import torch
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    # `litdata.optimize` starts processes that use this writer.
    options = {"compression": compression, "compression_level": "chunk" if compression else None}
    path.mkdir()
    writer = BinaryWriter(str(path), chunk_size=40, item_loader=TokensLoader(), **options)
    for number, each in enumerate(documents):
        tokens = np.array(each, dtype)
        writer[number] = torch.from_numpy(tokens) if as_tensor else tokens
    writer.done()
    writer.merge()


def masked(documents):
    """Return the columns of documents with padding, labels of -100, and another loss mask."""
    rows = {"input_ids": [], "attention_mask": [], "labels": [], "loss_mask": []}
    for number, each in enumerate(documents):
        left, right = number % 3, number % 2
        rows["input_ids"].append([0] * left + each + [0] * right)
        rows["attention_mask"].append([0] * left + [1] * len(each) + [0] * right)
        labels = [token if token % 3 else -100 for token in each]
        rows["labels"].append([-100] * left + labels + [-100] * right)
        rows["loss_mask"].append([0] * left + [int(token % 5 > 0) for token in each] + [1] * right)
    return rows


def dataset_of(columns, dtype):
    import datasets

    kinds = {name: "int8" for name in columns if name.endswith("_mask")}
    features = {name: datasets.Sequence(datasets.Value(kinds.get(name, dtype))) for name in columns}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def write_dataset(path, columns, dtype, num_shards=2):
    dataset_of(columns, dtype).save_to_disk(str(path), num_shards=num_shards)


def write_parquet(path, columns, dtype):
    dataset_of(columns, dtype).to_parquet(str(path), batch_size=4)


def megatron_cases(directory, seed):
    for number, dtype in enumerate(DTYPES):
        documents = corpus(seed + number)
        write_megatron(directory / f"megatron-{dtype}", documents, dtype)
        yield f"megatron-{dtype}", documents, {}
    groups = set_of(directory / "megatron-set", seed + len(DTYPES))
    for number, group in groups.items():
        write_megatron(directory / "megatron-set" / f"web_{number}_document", group, "int32")
    yield "megatron-set", [*chain.from_iterable(groups.values())], {}


def datatrove_cases(directory, seed):
    for size in (2, 4):
        documents = corpus(seed + size)
        write_datatrove(directory / f"datatrove-{size}.ds", documents, size)
        yield f"datatrove-{size}.ds", documents, {}
    groups = set_of(directory / "datatrove-set", seed + 5)
    for number, group in groups.items():
        write_datatrove(directory / "datatrove-set" / f"{number}_tokens.ds", group, 2)
    yield "datatrove-set", [*chain.from_iterable(groups.values())], {}


MDS_CASES = {
    "mds-int32": ("ndarray:int32", "int32", None, False),
    "mds-uint16-zstd": ("ndarray:uint16", "uint16", "zstd:7", False),
    "mds-any-columns": ("ndarray", "int64", None, True),
    "mds-any-zstd": ("ndarray", "int32", "zstd", True),
    "mds-bytes": ("bytes", "int64", None, False),
    "mds-bytes-columns-zstd": ("bytes", "uint16", "zstd", True),
    "mds-shape": ("ndarray:int32:7", "int32", None, False),
}


def mds_cases(directory, seed):
    for number, (name, case) in enumerate(MDS_CASES.items()):
        # The writer refuses arrays without items.
        documents = corpus(seed + number, shortest=0 if case[0] == "bytes" else 1)
        if case[0].endswith(":7"):
            documents = [(each * 7)[:7] for each in documents]
        encoding, dtype, compression, more = case
        write_mds(directory / name, documents, encoding, dtype, compression, more)
        yield name, documents, {"dtype": dtype} if encoding == "bytes" else {}


def litdata_cases(directory, seed):
    for number, (dtype, as_tensor, compression) in enumerate(
        [
            ("int32", True, None),
            ("int64", True, "zstd"),
            ("uint16", False, None),
            ("int32", False, "zstd"),
        ]
    ):
        name = f"litdata-{dtype}{'-tensor' * as_tensor}{'-zstd' * bool(compression)}"
        documents = corpus(seed + number)
        write_litdata(directory / name, documents, dtype, as_tensor, compression)
        yield name, documents, {}


def datasets_cases(directory, seed):
    for number, dtype in enumerate(("int32", "int64", "uint16")):
        documents = corpus(seed + number)
        write_dataset(directory / f"arrow-{dtype}", {"input_ids": documents}, dtype, number + 1)
        yield f"arrow-{dtype}", documents, {}
        write_parquet(directory / f"parquet-{dtype}", {"input_ids": documents}, dtype)
        yield f"parquet-{dtype}", documents, {}
    documents = corpus(seed)
    plain = {"input_ids": documents, "labels": documents}
    plain["attention_mask"] = [[1] * len(each) for each in documents]
    write_dataset(directory / "arrow-plain", plain, "int32")
    yield "arrow-plain", documents, {}
    write_dataset(directory / "arrow-masked", masked(documents), "int32")
    yield "arrow-masked", documents, {}
    write_parquet(directory / "parquet-masked", masked(documents), "int64")
    yield "parquet-masked", documents, {}


WRITERS = {
    "megatron": (megatron_cases, ("megatron-core",)),
    "datatrove": (datatrove_cases, ("datatrove",)),
    "mds": (mds_cases, ("mosaicml-streaming",)),
    "litdata": (litdata_cases, ("litdata",)),
    "datasets": (datasets_cases, ("datasets", "pyarrow")),
}


def compare(names, num_corpora):
    """Compare what penstock reads from `num_corpora` corpora of each package and dtype."""
    import penstock as ps
    from penstock.formats import verify_tokens

    for seed in range(num_corpora):
        with TemporaryDirectory() as directory:
            os.environ["PENSTOCK_CACHE"] = f"{directory}/cache"
            cases = [
                each for name in names for each in WRITERS[name][0](Path(directory), 100 * seed)
            ]
            for name, documents, options in cases:
                opened = ps.open_tokens(Path(directory) / name, vocab_size=100, **options)
                assert [each.tolist() for each in opened] == documents, (seed, name)
                assert verify_tokens(opened) == sum(map(len, documents)), (seed, name)
                if name.endswith("-masked"):
                    loss = np.concatenate(
                        [opened.part_loss(part) for part in range(len(opened.part_tokens))]
                    )
                    ids = [token for each in documents for token in each]
                    assert loss.tolist() == [int(t % 3 > 0 and t % 5 > 0) for t in ids], (
                        seed,
                        name,
                    )
    sys.stdout.write(f"{num_corpora} corpora of {len(cases)} cases have equal documents\n")


def main(words):
    """Write the fixtures of the packages that are named, or compare."""
    names = [each for each in words if each in WRITERS] or list(WRITERS)
    if "--compare" in words:
        compare(names, 50)
        return
    FIXTURES.mkdir(exist_ok=True)
    expected = FIXTURES / "expected.json"
    contents = json.loads(expected.read_text()) if expected.exists() else {}
    for name in names:
        cases, packages = WRITERS[name]
        for each, documents, options in cases(FIXTURES, 0):
            contents.setdefault("documents", {})[each] = documents
            if options:
                contents.setdefault("options", {})[each] = options
        for each in (*packages, "numpy"):
            contents.setdefault("packages", {})[each] = version(each)
    expected.write_text(json.dumps(contents) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
