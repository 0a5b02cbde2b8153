"""Pack documents into rows: padding, lost tokens, time and memory, compared with other packers.

    python benchmarks/packing.py [--documents 10000000] [--peer-documents 100000]
                                 [--repetitions 5] [--seconds 1] [--json FILE]

Document lengths are `default_rng(0).lognormal(6.2, 1.1, N)` (mean about 900); rows have 2,048
tokens. Each figure is measured in a new process, without imports.

    penstock, one part        assign the pieces of all documents to rows in one call
    penstock, 20,000 a part   the same, one part after the other, as in a store
    penstock, rows read       the same from a store in the page cache: write its index, then read
                              every row with its masks, which the time of TRL includes too
    first-fit                 put each piece into the first row that has room, in their order
    TRL bfd, bfd_split        `trl.pack_dataset` with its defaults: batches of 1,000 documents
    a loader                  the speed of reading later: int64 tensors on the CPU, one thread

TRL copies tokens while it packs and keeps them in memory, and the time of first-fit grows with the
square of the number of documents. So both get fewer documents; penstock is measured with both
numbers. *lost* tokens are in no row. *targets lost* are tokens that follow another token of their
document but are not a target in any row: lost tokens, and the first of a piece without overlap.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import xxhash
from corpus import DATA
from measure import AnonymousMemory, forked, machine, spread
from stores import write_store

from penstock.disk import header
from penstock.loader.loader import Loader
from penstock.rows.documents import Documents
from penstock.rows.packing import pack
from penstock.rows.packs import Packs
from penstock.rows.windows import Windows
from penstock.store.manifest import PartRecord, PartTable, part_file, read_manifest, write_manifest

LENGTH = 2048
_PART_DOCUMENTS = 20_000


def drawn(number):
    """Random lengths of documents, each at least one token."""
    return np.maximum(1, np.random.default_rng(0).lognormal(6.2, 1.1, number)).astype(np.int64)


def write_documents(folder, lengths):
    """Write a store of documents with these lengths, 20,000 per part."""
    parts = np.split(lengths, range(_PART_DOCUMENTS, len(lengths), _PART_DOCUMENTS))
    write_store(folder, [np.zeros(int(each.sum()), np.uint16) for each in parts])
    manifest = read_manifest(folder)
    records = []
    for record, sizes in zip(manifest.parts, parts, strict=True):
        files = dict(record.files)
        for kind, array in (
            ("bounds", np.cumsum(sizes).astype("<u8")),
            ("origin", np.zeros((len(sizes), 2), "<u8")),
        ):
            data = header(array.dtype, array.shape) + array.tobytes()
            (folder / part_file(record.number, kind)).write_bytes(data)
            files[kind] = (len(data), xxhash.xxh3_128(data).hexdigest())
        records.append(PartRecord(record.number, len(sizes), record.num_tokens, files))
    told = {name: value for name, value in manifest.contents.items() if name != "digest"}
    told["counts"] = {"documents": len(lengths), "tokens": int(lengths.sum())}
    write_manifest(folder, told, PartTable.of(records, 2))


def summary(lengths, seconds, memory, num_rows, num_pieces, filled):
    """The figures of one packing."""
    return {
        "documents": len(lengths),
        "rows": num_rows,
        "padding": 1 - filled / (num_rows * LENGTH),
        "seconds": seconds,
        "bytes": memory.growth,
        "targets": filled - num_pieces,
        "all_targets": int((lengths - 1).sum()),
    }


def penstock(number, part_documents):
    """Assign the pieces of documents to rows, with penstock."""
    lengths = drawn(number)
    parts = [
        np.cumsum(lengths[first : first + part_documents])
        for first in range(0, number, part_documents)
    ]
    num_rows = num_pieces = filled = 0
    with AnonymousMemory() as memory:
        begun = time.perf_counter()
        for bounds in parts:
            index = pack(bounds, LENGTH)
            num_rows += index.num_rows
            num_pieces += index.num_pieces
            filled += index.num_tokens
        seconds = time.perf_counter() - begun
    return {**summary(lengths, seconds, memory, num_rows, num_pieces, filled), "lost": 0}


def penstock_rows(number, folder):
    """Index a store on disk and read all its rows in order, with penstock."""
    lengths = drawn(number)
    shutil.rmtree(folder / ".rows", ignore_errors=True)
    with AnonymousMemory() as memory:
        begun = time.perf_counter()
        packs = Packs(folder, LENGTH)
        filled = targets = 0
        for first in range(0, len(packs), 256):
            fields = packs.read(np.arange(first, min(first + 256, len(packs))))
            filled += int((fields["num_targets"] + 1).sum())
            targets += int(fields["same_document"].sum())
        seconds = time.perf_counter() - begun
    result = summary(lengths, seconds, memory, len(packs), filled - targets, filled)
    return {**result, "lost": 0}


def first_fit(number):
    """Put each piece into the first row that has room."""
    lengths = drawn(number)
    with AnonymousMemory() as memory:
        begun = time.perf_counter()
        full = (lengths - 1) // (LENGTH - 1)
        rest = lengths - full * (LENGTH - 1)
        pieces = rest[(rest > 1) | (full == 0)]
        rooms = np.zeros(len(pieces), np.int32)
        num_rows = 0
        for size in pieces.tolist():
            found = int((rooms[:num_rows] >= size).argmax()) if num_rows else 0
            if num_rows == 0 or rooms[found] < size:
                found, num_rows = num_rows, num_rows + 1
                rooms[found] = LENGTH
            rooms[found] -= size
        seconds = time.perf_counter() - begun
    filled = int(pieces.sum() + full.sum() * LENGTH)
    num_pieces = len(pieces) + int(full.sum())
    result = summary(lengths, seconds, memory, num_rows + int(full.sum()), num_pieces, filled)
    return {**result, "lost": 0}


def trl(number, strategy):
    """Pack a dataset in memory with TRL; ids have two bytes."""
    import datasets
    import pyarrow as pa
    from trl import pack_dataset

    datasets.disable_progress_bars()
    lengths = drawn(number)
    edges = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    ids = pa.array(np.zeros(int(edges[-1]), np.uint16))
    column = pa.LargeListArray.from_arrays(pa.array(edges), ids)
    table = datasets.Dataset(pa.table({"input_ids": column}))
    with AnonymousMemory() as memory:
        begun = time.perf_counter()
        packed = pack_dataset(table, LENGTH, strategy=strategy)
        seconds = time.perf_counter() - begun
    pieces = np.concatenate([np.array(each) for each in packed["seq_lengths"]])
    result = summary(lengths, seconds, memory, len(packed), len(pieces), int(pieces.sum()))
    return {**result, "lost": int(lengths.sum() - pieces.sum())}


def loading(rows, seconds):
    """Million tokens per second of a loader, in batches of 32 rows."""
    batches = iter(Loader(rows, 32, seed=17))
    for _ in range(20):
        next(batches)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        count += next(batches)["inputs"].numel()
    speed = count / (time.perf_counter() - begun) / 1e6
    batches.close()
    return speed


def readers(folder):
    """The kinds of rows over the store, by name."""
    return {
        "windows": Windows(folder, LENGTH),
        "windows with borders": Windows(folder, LENGTH, borders=True),
        "packs": Packs(folder, LENGTH),
        "packs without borders": Packs(folder, LENGTH, borders=False),
        "documents": Documents(folder, LENGTH),
    }


def cases(options, folder):
    """The cases by name, and the reasons why others cannot run."""
    many, few = options.documents, options.peer_documents
    found = {
        "penstock, one part": lambda: penstock(many, many),
        "penstock, 20,000 a part": lambda: penstock(many, _PART_DOCUMENTS),
        "penstock, one part ": lambda: penstock(few, few),
        "penstock, rows read": lambda: penstock_rows(few, folder),
        "first-fit": lambda: first_fit(few),
        "first-fit ": lambda: first_fit(few // 4),
    }
    if not find_spec("trl"):
        return found, {"TRL bfd": "trl is not installed"}
    return found | {f"TRL {each}": lambda s=each: trl(few, s) for each in ("bfd", "bfd_split")}, {}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--documents", type=int, default=10**7)
    parser.add_argument("--peer-documents", type=int, default=10**5)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1, help="seconds per loader")
    parser.add_argument("--folder", type=Path, default=DATA)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="packing-", dir=options.folder))
    print(machine(), flush=True)
    try:
        write_documents(folder, drawn(options.peer_documents))
        measured, missing = cases(options, folder)
        figures = {name: [] for name in measured}
        speeds = {name: [] for name in readers(folder)}
        for _ in range(options.repetitions):
            for name, case in measured.items():
                figures[name].append(forked(case))
            for name in speeds:
                rows = readers(folder)[name]
                speeds[name].append(forked(lambda: loading(rows, options.seconds)))  # noqa: B023
    finally:
        shutil.rmtree(folder)
    show(figures)
    print("a loader, batches of 32 rows, int64, million tokens per second:")
    for name, values in speeds.items():
        print(f"  {name:<24}{spread(values)}")
    for name, reason in missing.items():
        print(f"not measured: {name}: {reason}")
    if options.json:
        result = {"machine": machine(), "length": LENGTH, "cases": figures}
        result |= {"loaders": speeds, "missing": missing}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def show(figures):
    """Print the table: medians, with the spread of the time."""
    print(
        f"{'':<24}{'documents':>12}{'padding':>10}{'lost':>9}{'targets lost':>14}"
        f"{'seconds':>9} {'(lowest to highest)':<20}{'µs/document':>14}{'MB':>8}"
    )
    for name, runs in figures.items():
        result = runs[0]
        seconds = [run["seconds"] for run in runs]
        middle = statistics.median(seconds)
        tokens = result["all_targets"] + result["documents"]
        lost_targets = 1 - result["targets"] / result["all_targets"]
        span = f"({min(seconds):.2f} to {max(seconds):.2f})"
        print(
            f"{name:<24}{result['documents']:>12,}{result['padding']:>10.3%}"
            f"{result['lost'] / tokens:>9.2%}{lost_targets:>14.3%}{middle:>9.2f} {span:<20}"
            f"{1e6 * middle / result['documents']:>14.2f}"
            f"{max(run['bytes'] for run in runs) / 1e6:>8,.0f}"
        )


if __name__ == "__main__":
    main()
