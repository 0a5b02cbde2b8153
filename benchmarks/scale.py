"""What large runs cost: 10^6 to 10^13 tokens, up to 10^6 parts, 1,000 sources and 16,384 ranks.

    make bench            or        python benchmarks/scale.py [--tokens N] [--repetitions 5]

It prints the tables of docs/scale.md. The stores are sparse: their files have the right lengths but
take no space on disk, and the parts of one store are links to a few files. Everything except the
disk is realistic. Figures are measured in new processes, without imports. Every rank reads 32 rows
of 1,024 tokens a step, int64. Times are processor times, because files that are not on a disk have
no waiting times, and other programs do not change them much.

    open        time and anonymous memory from paths to the first batch
    resume      time from a state to its next batch, in an open store, at random positions
    order       processor time to find the samples of a step
    first       processor time of a step that reads parts which were not read before
    step        processor time of the same step when it is read again
    gather      processor time of one NumPy call for the rows of that step, in files that are mapped
                already and are not checked, and of the conversion to int64
"""

import argparse
import datetime
import json
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
from corpus import DATA
from measure import AnonymousMemory, anonymous_bytes, forked, machine
from numpy.lib.stride_tricks import as_strided
from stores import write_sparse_store

import penstock.loader.loader
import penstock.order.plan
import penstock.rows.packing
import penstock.rows.windows
from penstock.order.shuffle import Block
from penstock.order.steps import Shard, Steps
from penstock.sources.batch import Tally
from penstock.store.journal import Journal, SealedSlice
from penstock.store.manifest import PartRecord, read_manifest, write_manifest
from penstock.store.reader import TokenStore

LENGTH = 1024
BATCH = 32
PART_TOKENS = 15_000_000
"""The tokens of a slice of 64 MB of English, in a vocabulary of 50,257."""
GPUS = 8
"""Ranks of one machine."""
_LATEST = 2**61


def opened(folders, shuffle="full", rank=0, world_size=1):
    """A loader over these stores, without a thread that reads ahead."""
    sources = {folder.name: penstock.rows.windows.Windows(folder, LENGTH) for folder in folders}
    plan = penstock.order.plan.Plan(sources, seed=17, shuffle=shuffle)
    options = {"format": "tuple", "prefetch": 0, "rank": rank, "world_size": world_size}
    return penstock.loader.loader.Loader(plan, BATCH, **options)


def touch(batch):
    return batch[0][0, 0].item()


def measure_open(folders):
    """Processor seconds and bytes of memory from paths to the first batch."""
    with AnonymousMemory() as memory:
        begun = time.process_time()
        touch(next(iter(opened(folders))))
        seconds = time.process_time() - begun
    return {"seconds": seconds, "bytes": memory.growth}


def measure_resume(folders, number):
    """Processor seconds from a state to its next batch, at positions in the first 100 epochs."""
    loader, other = opened(folders), opened(folders)
    last = min(100 * len(loader.plan), _LATEST)
    positions = np.random.default_rng(17).integers(0, last, number).tolist()
    seconds = []
    for position in positions:
        other.seek(position)
        state = json.loads(json.dumps(other.state_dict()))
        begun = time.process_time()
        loader.load_state_dict(state)
        touch(next(iter(loader)))
        seconds.append(time.process_time() - begun)
    return {"seconds": seconds, "state": len(json.dumps(loader.state_dict()))}


def measure_order(folders, shuffle, rank, world_size, steps):
    """Processor seconds to find the samples of a step, of 64 steps at a time."""
    loader = opened(folders, shuffle, rank, world_size)
    shard, locate = loader.run.shard, loader.plan.locate
    locate(shard.positions(0, 64))
    begun = time.process_time()
    for first in range(0, steps, 64):
        locate(shard.positions(first, first + 64))
    return (time.process_time() - begun) / (-(-steps // 64) * 64)


def measure_steps(folders, shuffle, rank, world_size, steps):
    """Processor seconds of a step, when it is first read and again; the growth of memory."""
    loader = opened(folders, shuffle, rank, world_size)
    touch(next(iter(loader)))
    before, figures = anonymous_bytes(), {}
    position = len(loader.plan) // 3 // (BATCH * world_size) * BATCH * world_size
    for name in ("first", "again"):
        loader.seek(position)
        begun = time.process_time()
        for batch in islice(loader, steps):
            touch(batch)
        figures[name] = (time.process_time() - begun) / steps
    figures["bytes"] = anonymous_bytes() - before
    return {**figures, "gather": measure_gather(loader, position, steps)}


def measure_gather(loader, position, steps):
    """Processor seconds of a bare gather of the rows of a step."""
    first = position // (BATCH * loader.world_size)
    samples = loader.plan.locate(loader.run.shard.positions(first, first + steps))[2]
    stream = loader.plan.sources[loader.plan.names[0]].stream
    # Rows that end in another part are moved to the left by a row, so that one call reads all.
    starts = samples * LENGTH
    numbers = np.searchsorted(stream.ends, starts, side="right")
    starts = np.where(starts + LENGTH < stream.ends[numbers], starts, starts - LENGTH)
    pieces, which = np.unique(numbers, return_inverse=True)
    arrays, addresses = stream.pieces(pieces)
    lowest = int(addresses.argmin())
    begins = (addresses - addresses[lowest])[which] // 2 + starts - stream.starts[numbers]
    shape = (int(begins.max()) + 1, LENGTH + 1)
    windows = as_strided(arrays[lowest], shape, (2, 2), writeable=False)
    for _ in range(2):  # the second time, all pages are mapped
        begun = time.process_time()
        for at in range(0, len(begins), BATCH):
            windows[begins[at : at + BATCH]].astype(np.int64)
        seconds = time.process_time() - begun
    return seconds / steps


def measure_loader(folders, options, shuffle, rank=0, world_size=1):
    """Figures of one rank: each a list, with one entry for each repetition."""
    arguments = (folders, shuffle, rank, world_size)
    repeated = [
        {
            "order": forked(lambda: measure_order(*arguments, 10 * options.steps)),
            **forked(lambda: measure_steps(*arguments, options.steps)),
        }
        for _ in range(options.repetitions)
    ]
    return {name: [each[name] for each in repeated] for name in repeated[0]}


def show(values, scale, digits=0):
    """`median (lowest to highest)`."""
    low, middle, high = (
        f"{scale * each:,.{digits}f}"
        for each in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def sizes_table(folder, options):
    """One line for each size of a store."""
    yield (
        "| tokens | parts | open and first batch, ms | MB | resume, ms | order, µs "
        "| step, block, µs | gather | step, full, µs | gather | grows by, MB |"
    )
    yield "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for power in (6, 8, 10, 12, 13):
        if 10**power > options.tokens:
            break
        parts = min(10_000, max(1, 10**power // 10**8))
        here = folder / f"size-{power}"
        write_sparse_store(here, 10**power // parts, parts)
        opens = [forked(lambda: measure_open([here])) for _ in range(options.repetitions)]  # noqa: B023
        resume = forked(lambda: measure_resume([here], options.resumes))  # noqa: B023
        block, full = (measure_loader([here], options, mode) for mode in ("block", "full"))
        shutil.rmtree(here)
        cells = [
            f"10^{power}",
            f"{parts:,}",
            show([each["seconds"] for each in opens], 1e3),
            f"{max(each['bytes'] for each in opens) / 1e6:,.0f}",
            show(resume["seconds"], 1e3, 1),
            show(full["order"], 1e6),
            show(block["again"], 1e6),
            show(block["gather"], 1e6),
            show(full["again"], 1e6),
            show(full["gather"], 1e6),
            f"{max(full['bytes']) / 1e6:,.0f}",
        ]
        yield f"| {' | '.join(cells)} |"


def ranks_table(store, options):
    """One line for each number of ranks over the largest store."""
    yield (
        "| ranks | order, µs | first, full, µs | step, full, µs | gather "
        "| step, block, µs | gather | grows by, MB |"
    )
    yield "|--:|--:|--:|--:|--:|--:|--:|--:|"
    for world_size in (1, 8, 64, 1024, 16_384):
        # The last rank: it would be the slowest one if a rank computed the shares of others.
        ranks = {"rank": world_size - 1, "world_size": world_size}
        block = measure_loader([store], options, "block", **ranks)
        full = measure_loader([store], options, "full", **ranks)
        cells = [f"{world_size:,}"]
        cells += [show(full[name], 1e6) for name in ("order", "first", "again", "gather")]
        cells += [show(block[name], 1e6) for name in ("again", "gather")]
        cells.append(f"{max(full['bytes']) / 1e6:,.0f}")
        yield f"| {' | '.join(cells)} |"


def manifest_lines(store, options):
    """The manifest of the largest store, and its table of parts."""
    manifest = read_manifest(store)
    num_parts = len(manifest.parts)
    table = sum(path.stat().st_size for path in store.glob("parts-*.npy"))
    size = (store / "penstock.json").stat().st_size
    opens = [forked(lambda: measure_manifest(store)) for _ in range(options.repetitions)]
    yield "tokens, parts", f"{manifest.num_tokens:,} in {num_parts:,}"
    yield (
        "manifest",
        f"{size:,} bytes, and a table of {table / 1e6:,.0f} MB",
    )
    yield "open the store", f"{show([each[0] for each in opens], 1e3)} ms"
    yield "memory of the open store", f"{max(each[1] for each in opens) / 1e6:,.0f} MB"
    first = [forked(lambda: measure_open([store])) for _ in range(options.repetitions)]
    yield "open and first batch", f"{show([each['seconds'] for each in first], 1e3)} ms"
    yield "memory up to the first batch", f"{max(each['bytes'] for each in first) / 1e6:,.0f} MB"
    resume = forked(lambda: measure_resume([store], options.resumes))
    yield "resume at a random position", f"{show(resume['seconds'], 1e3, 1)} ms"
    yield "state in a checkpoint", f"{resume['state']:,} bytes"
    append = forked(lambda: measure_append(store))
    yield "commit an append of one part", f"{append:,.1f} s"


def measure_manifest(store):
    with AnonymousMemory() as memory:
        begun = time.process_time()
        kept = TokenStore(store)
        seconds = time.process_time() - begun
        assert kept.num_tokens
    return seconds, memory.growth


def measure_append(store):
    """Seconds to write the manifest of one part more, in another directory on the same disk."""
    begun = time.process_time()
    manifest = read_manifest(store)
    last = manifest.parts[-1]
    new = PartRecord(last.number + 1, last.num_documents, last.num_tokens, last.files)
    parts = manifest.parts.followed_by([new])
    contents = {key: value for key, value in manifest.contents.items() if key != "digest"}
    with tempfile.TemporaryDirectory(dir=store.parent) as place:
        write_manifest(Path(place), contents, parts)
        return time.process_time() - begun


def mixture_lines(folder, options):
    """A mixture of many sources with weights; each has the same number of parts."""
    number = options.sources
    real = folder / "source"
    write_sparse_store(real, PART_TOKENS, max(1, options.parts // number))
    folders = []
    for source in range(number):
        folders.append(folder / f"source-{source:04d}")
        folders[-1].symlink_to(real)
    rows = len(penstock.rows.windows.Windows(real, LENGTH))
    figures = [forked(lambda: measure_mixture(number, rows)) for _ in range(options.repetitions)]
    yield f"set up weights of {number:,} sources", f"{show([each[0] for each in figures], 1e3)} ms"
    yield "order of a step in that mixture", f"{show([each[1] for each in figures], 1e6)} µs"
    first = [forked(lambda: measure_open(folders)) for _ in range(options.repetitions)]
    parts = len(read_manifest(real).parts)
    what = f"{number:,} stores of {parts:,} part{'s' * (parts > 1)}: open and first batch"
    yield what, f"{show([each['seconds'] for each in first], 1, 2)} s"
    yield "their memory", f"{max(each['bytes'] for each in first) / 1e6:,.0f} MB"


class Rows:
    """A number of rows, for the arithmetic alone."""

    def __init__(self, name, number):
        self.digest, self._number = name, number

    def __len__(self):
        return self._number

    def read(self, samples):
        return {"tokens": samples}


def measure_mixture(number, rows):
    sources = {f"source {n}": Rows(f"{n}", rows) for n in range(number)}
    weights = {name: 1 + n % 7 for n, name in enumerate(sources)}
    begun = time.process_time()
    plan = penstock.order.plan.Plan(sources, weights=weights, seed=17)
    seconds = time.process_time() - begun
    begun = time.process_time()
    shard = Shard(Steps(BATCH * 16_384), rank=7, world_size=16_384)
    for first in range(0, 640, 64):
        plan.locate(shard.positions(first, first + 64))
    return seconds, (time.process_time() - begun) / 640


def index_lines():
    """The index of rows that are not windows, computed for one part of English web text."""
    # The lengths of documents of openwebtext are about log-normal, with a median of 700 tokens.
    sizes = np.random.default_rng(17).lognormal(np.log(700), 0.9, PART_TOKENS // 1050)
    bounds = np.cumsum(np.maximum(1, sizes.astype(np.int64)))
    tokens = int(bounds[-1])
    for name, lay_out in (
        ("Packs(2048)", lambda: penstock.rows.packing.pack(bounds, 2048)),
        ("Documents(2048)", lambda: penstock.rows.packing.one_each(bounds, 2048, split=False)),
    ):
        begun = time.process_time()
        index = lay_out()
        seconds = time.process_time() - begun
        size = 8 * (len(index.pieces) + len(index.edges))
        total = size / tokens * 15e12 / 1e9
        yield (
            f"index of {name}",
            (
                f"{1e3 * size / tokens:,.1f} bytes per 1,000 tokens, {total:,.0f} GB in all; "
                f"{1e3 * seconds:,.0f} ms to compute for a part"
            ),
        )
    yield (
        "bitmap of checked blocks",
        f"{15e12 * 2 / 65536 / 8 / 1e6:,.0f} MB for 15 trillion tokens",
    )


def bandwidth_lines(store):
    """How many parts the ranks of one machine read in one step of 16,384 ranks."""
    world_size, rows_per_part = 16_384, PART_TOKENS // LENGTH
    windows = penstock.rows.windows.Windows(store, LENGTH)
    modes = {
        '"block"': "block",
        f"Block(rows={rows_per_part})": Block(rows=rows_per_part),
        '"full"': "full",
    }
    for name, shuffle in modes.items():
        plan = penstock.order.plan.Plan(windows, shuffle=shuffle)
        found = []
        for step in range(20):
            positions = step * BATCH * world_size + np.arange(BATCH * GPUS)
            parts = plan.locate(positions)[2] * LENGTH // PART_TOKENS
            found.append(len(np.unique(parts)))
        number = statistics.median(found)
        size = number * PART_TOKENS * 2 / 1e9
        yield (
            f"shuffle={name}: parts of the {BATCH * GPUS} rows of a machine in a step",
            f"{number:,.0f}, or {size:,.1f} GB if parts are fetched whole",
        )
    one, all_ranks = (number * BATCH * LENGTH * 2 for number in (GPUS, world_size))
    figure = f"{one / 1e6:,.1f} MB on a machine, {all_ranks / 1e9:,.2f} GB on all"
    yield f"bytes of the rows of a step of {world_size:,} ranks", figure


def journal_lines(folder, options):
    """What a resumed build reads and removes, for each slice."""
    place, number = folder / "journal", options.records
    place.mkdir()
    journal = Journal(place)
    journal.record({"inputs": []}, 0)
    for slice_number in range(number):
        digest = f"{slice_number:064x}"
        kinds = ("tokens", "bounds", "origin", "checks")
        part = PartRecord(
            slice_number, 15_000, PART_TOKENS, dict.fromkeys(kinds, (30000128, digest))
        )
        record = SealedSlice(slice_number, Tally(documents=15_000), {"": part})
        path = place / f".slice-{slice_number:06d}.json"
        path.write_bytes(journal._record_bytes(record))
    (read, size, removed), many = forked(lambda: measure_journal(place)), 10**6 / number
    yield (
        f"read the journal of {number:,} slices",
        f"{read:,.1f} s, {size / 1e6:,.0f} MB; {_million(read * many, size * many)}",
    )
    yield "remove that journal", f"{removed:,.1f} s; 10^6: {removed * many:,.0f} s"
    shutil.rmtree(place)


def _million(seconds, size):
    return f"10^6 slices: {seconds:,.0f} s, {size / 1e9:,.1f} GB"


def measure_journal(place):
    journal = Journal(place)
    before, begun = anonymous_bytes(), time.process_time()
    kept = journal.sealed()
    read, size = time.process_time() - begun, anonymous_bytes() - before
    assert kept
    begun = time.process_time()
    journal.end()
    return read, size, time.process_time() - begun


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--tokens", type=int, default=10**13, help="the largest store of 10,000 parts"
    )
    parser.add_argument("--parts", type=int, default=10**6, help="parts of the largest store")
    parser.add_argument("--sources", type=int, default=1000)
    parser.add_argument("--records", type=int, default=100_000, help="records of the journal")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--resumes", type=int, default=50, help="random positions to resume at")
    # The loader reads blocks of 1, 4, 16, 63 and 63 steps. With another number, part of the last
    # block would be read and not be counted.
    parser.add_argument("--steps", type=int, default=147, help="steps to read per repetition")
    parser.add_argument("--folder", type=Path, help="directory for the stores (default: data/)")
    options = parser.parse_args()
    if options.folder is None:
        DATA.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="scale-", dir=options.folder or DATA))
    command = " ".join(["python", "benchmarks/scale.py", *map(shlex.quote, sys.argv[1:])])
    today = datetime.datetime.now(datetime.UTC).date()
    print(f"{today}, `{command}`; {machine()}\n", flush=True)
    store = folder / "largest"
    try:
        for text in sizes_table(folder, options):
            print(text, flush=True)
        write_sparse_store(store, PART_TOKENS, options.parts)
        print()
        for text in ranks_table(store, options):
            print(text, flush=True)
        print("\n| what | figure |\n|---|---|")
        groups = (
            manifest_lines(store, options),
            mixture_lines(folder, options),
            index_lines(),
            bandwidth_lines(store),
            journal_lines(folder, options),
        )
        for group in groups:
            for what, figure in group:
                print(f"| {what} | {figure} |", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
