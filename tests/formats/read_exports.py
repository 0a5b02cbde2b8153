"""Compare exports with what the packages of each format read from them.

    make .venv-bench/.done
    nice .venv-bench/bin/python tests/formats/read_exports.py --corpora 60

Each corpus is a store or a token file with random documents: of one part or of several, with
documents that are stored in pieces, with empty documents, with loss masks, with narrow and wide
vocabularies. Shards are made small, so that a corpus has several of them.
"""

import argparse
import shutil
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import numpy as np

import penstock as ps
from penstock.formats.export import write_llmc
from penstock.sources.slices import cut

FORMATS = ("megatron", "nanogpt", "llmc", "parquet")
PACKAGES = ("megatron-core", "datasets", "pyarrow")


def make_small():
    """Make parts, shards and chunks of a few kilobytes, in a new process."""
    warnings.simplefilter("ignore")
    cut.__kwdefaults__["slice_bytes"] = 1_500
    write_llmc.__defaults__ = (300,)


def random_source(folder, seed):
    """Return a store or token files, and the documents in them."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 90, generator.integers(1, 40)) * generator.integers(0, 2)
    lengths += generator.integers(0, 9, len(lengths))
    lengths[0] += 1  # at least one token
    kind = ("store", "one document", "narrow", "wide", "masked")[seed % 5]
    if kind in ("store", "one document"):
        texts = ["".join(map(chr, generator.integers(97, 122, length + 1))) for length in lengths]
        rule = "lines"
        if kind == "one document":  # which is stored in pieces
            texts, rule = ["".join(texts) * 30 + "."], "auto"
        path = folder / "text.txt"
        path.write_text("\n".join(texts))
        store = ps.build(path, folder / "store", tokenizer="bytes", documents=rule, workers=1)
        return store, [[*text.encode(), 256] for text in texts]
    most = 70_000 if kind == "wide" else 50_000
    documents = [generator.integers(0, most, length).tolist() for length in lengths]
    flat = np.concatenate([np.array(each, "<u4") for each in documents])
    flat.astype("<u4" if kind == "wide" else "<u2").tofile(folder / "x.ds")
    np.cumsum(lengths).astype("<u8").tofile(folder / "x.ds.index")
    if kind == "masked":
        generator.integers(0, 2, len(flat)).astype("u1").tofile(folder / "x.ds.loss")
    opened = ps.open_tokens(folder / "x.ds", format="datatrove", vocab_size=most)
    return opened, documents


def read_megatron(folder, source):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    found = IndexedDataset(str(folder / "train"))
    firsts = found.document_indices.tolist()
    assert firsts == list(range(len(found) + 1))
    return [found[number].tolist() for number in range(len(found))], True


def read_nanogpt(folder, source):
    return [np.memmap(folder / "train.bin", dtype=np.uint16, mode="r").tolist()], False


def read_llmc(folder, source):
    """Read as `_load_data_shard` of llm.c and modded-nanogpt does."""
    tokens = []
    for path in sorted(folder.glob("*_train_*.bin")):
        with path.open("rb") as stream:
            header = np.frombuffer(stream.read(256 * 4), dtype=np.int32)
            assert header[0] in (20240520, 20240801)
            assert header[1] in (1, 7)
            dtype = np.uint16 if header[0] == 20240520 else np.uint32
            found = np.frombuffer(stream.read(), dtype=dtype)
        assert len(found) == header[2]
        tokens += found.tolist()
    return [tokens], False


def read_parquet(folder, source):
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:
        found = load_dataset(
            "parquet", data_files=str(folder / "train.parquet"), split="train", cache_dir=cache
        )
        if source.has_loss:
            flat = [each for row in found["loss_mask"] for each in row]
            assert flat == source.part_loss(0).tolist()
        return [list(each) for each in found["input_ids"]], True


READERS = {name: globals()[f"read_{name}"] for name in FORMATS}


def compare(to, seed):
    """Export one corpus, and compare; returns the number of files, 0 if it does not fit."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, documents = random_source(folder, seed)
        target = folder / "out"
        try:
            files = ps.export_tokens(source, target, to=to, drop_loss_mask=True)
        except ps.errors.StoreError as error:
            if to != "nanogpt" or source.vocab_size <= 65_536:
                raise AssertionError(f"{to}, corpus {seed} was refused") from error
            return 0
        found, has_documents = READERS[to](target, source)
        expected = documents if has_documents else [list(chain.from_iterable(documents))]
        assert found == expected, (to, seed)
        # The same source gives the same bytes.
        ps.export_tokens(source, folder / "again", to=to, drop_loss_mask=True)
        for path in target.rglob("*"):
            if path.is_file():
                assert path.read_bytes() == (folder / "again" / path.name).read_bytes(), path
        shutil.rmtree(target)
        return len(files)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpora", type=int, default=60)
    parser.add_argument("--to", nargs="*", default=FORMATS)
    given = parser.parse_args()
    for to in given.to:
        files = []
        for start in range(0, given.corpora, 20):
            # A new process: a StreamingDataset keeps its files open as long as the process runs.
            with ProcessPoolExecutor(1, get_context("spawn"), make_small) as process:
                seeds = range(start, min(start + 20, given.corpora))
                files += process.map(partial(compare, to), seeds)
        held = sum(number > 0 for number in files)
        left = f"; {given.corpora - held} refused, beyond uint16" if held < given.corpora else ""
        line = f"{to}: {held} corpora of up to {max(files)} files read back with equal tokens{left}"
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except ModuleNotFoundError:
            continue
    sys.stdout.write(f"{found}\n")


if __name__ == "__main__":
    main()
