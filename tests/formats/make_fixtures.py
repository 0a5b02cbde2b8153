"""Write tests/formats/fixtures with the packages whose formats penstock reads.

    python -m venv /tmp/writers && /tmp/writers/bin/pip install numpy torch humanize loguru fsspec
    /tmp/writers/bin/pip install --no-deps megatron-core datatrove
    /tmp/writers/bin/python tests/formats/make_fixtures.py

With `--compare`, it writes 50 random corpora with each package to a temporary directory instead,
and compares what `penstock.open_tokens` reads; that needs penstock in the same environment.

The tests read the fixtures, and need none of these packages.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

FIXTURES = Path(__file__).parent / "fixtures"
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16")


def corpus(seed):
    """Return documents with ids below 100; some are empty."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 12, 15)
    return [generator.integers(0, 100, length).tolist() for length in lengths]


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


def write_all(directory, seed):
    """Write a corpus in each dtype of each package; return the documents by name."""
    expected = {}
    for number, dtype in enumerate(DTYPES):
        name = f"megatron-{dtype}"
        expected[name] = corpus(seed + number)
        write_megatron(directory / name, expected[name], dtype)
    for size in (2, 4):
        name = f"datatrove-{size}.ds"
        expected[name] = corpus(seed + size)
        write_datatrove(directory / name, expected[name], size)
    return expected


def compare(num_corpora):
    """Compare what penstock reads from `num_corpora` corpora of each package and dtype."""
    import penstock as ps

    for seed in range(num_corpora):
        with TemporaryDirectory() as directory:
            for name, documents in write_all(Path(directory), 100 * seed).items():
                opened = ps.open_tokens(Path(directory) / name, vocab_size=100)
                assert [each.tolist() for each in opened] == documents, (seed, name)
    sys.stdout.write(f"{num_corpora} corpora of each package and dtype have equal documents\n")


if __name__ == "__main__":
    if "--compare" in sys.argv:
        compare(50)
    else:
        FIXTURES.mkdir(exist_ok=True)
        documents = write_all(FIXTURES, 0)
        packages = {name: version(name) for name in ("megatron-core", "datatrove", "numpy")}
        contents = {"packages": packages, "documents": documents}
        (FIXTURES / "expected.json").write_text(json.dumps(contents) + "\n")
