"""How the size of a store affects speed: 10^6 to 10^12 tokens, 1 to 10,000 parts, 1 or 64 sources.

    make bench            or        python benchmarks/scale.py [--tokens N] [--repetitions 5]

The stores are sparse: their files have the right lengths but take no space on disk, so that a
terabyte fits on a laptop. Everything except the disk is realistic. Each figure is measured in a
new process, without imports. Every batch has 32 rows of 1,024 tokens, int64.

    open        time and anonymous memory from paths to the first batch
    resume      time from a state to its next batch, in an open store: at random positions of the
                first 100 epochs, and at extremes (0, 1, the ends of an epoch, about 2^61)
    batch       wall-clock and processor time of one batch
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
from corpus import DATA
from measure import AnonymousMemory, forked, machine
from stores import write_sparse_store

import penstock.loader.loader
import penstock.order.plan
import penstock.rows.windows

LENGTH = 1024
BATCH = 32
_PART_TOKENS = 10**8
_MOST_PARTS = 10_000
_NUM_SOURCES = 64
_LATEST = 2**61


def make(folder, num_tokens, num_parts, num_sources):
    """Write the stores of one size; returns their directories."""
    folders = [folder / f"{number:02d}" for number in range(num_sources)]
    for each in folders:
        write_sparse_store(each, num_tokens // num_sources, num_parts // num_sources)
    return folders


def opened(folders, shuffle="full"):
    """A loader over these stores."""
    sources = {folder.name: penstock.rows.windows.Windows(folder, LENGTH) for folder in folders}
    plan = penstock.order.plan.Plan(sources, seed=17, shuffle=shuffle)
    return penstock.loader.loader.Loader(plan, BATCH, format="tuple")


def touch(batch):
    return batch[0][0, 0].item()


def measure_open(folders):
    """Seconds and bytes of memory from paths to the first batch."""
    with AnonymousMemory() as memory:
        begun = time.perf_counter()
        batches = iter(opened(folders))
        touch(next(batches))
        seconds = time.perf_counter() - begun
    return {"seconds": seconds, "bytes": memory.growth}


def measure_resume(folders, num_random):
    """Seconds from a state to its next batch, by position."""
    loader, other = opened(folders), opened(folders)
    num_rows = len(loader.plan)
    generator = np.random.default_rng(17)
    anywhere = generator.integers(0, min(100 * num_rows, _LATEST), num_random).tolist()
    extremes = [0, 1, num_rows // 2, num_rows - 1, num_rows, 10**6 * num_rows + 1, _LATEST]
    seconds = {"random": [], "extreme": []}
    for kind, positions in (("random", anywhere), ("extreme", extremes)):
        for position in positions:
            other.seek(min(position, _LATEST))
            state = json.loads(json.dumps(other.state_dict()))
            begun = time.perf_counter()
            loader.load_state_dict(state)
            batches = iter(loader)
            touch(next(batches))
            seconds[kind].append(time.perf_counter() - begun)
            batches.close()
    return seconds


def measure_batches(folders, seconds, shuffle):
    """Seconds and processor seconds of a batch, and the growth of memory while reading."""
    with AnonymousMemory() as memory:
        batches = iter(opened(folders, shuffle))
        for batch in islice(batches, 100):
            touch(batch)
        begun, spent, count = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - begun < seconds:
            for batch in islice(batches, 10):
                touch(batch)
                count += 1
        took = time.perf_counter() - begun
        spent = time.process_time() - spent
    return {"seconds": took / count, "processor": spent / count, "bytes": memory.growth}


def measure(folders, options):
    """All figures of one size."""
    starts = [forked(lambda: measure_open(folders)) for _ in range(options.repetitions)]
    resumes = forked(lambda: measure_resume(folders, options.resumes))
    return {
        "open": [each["seconds"] for each in starts],
        "open_bytes": max(each["bytes"] for each in starts),
        "resume": resumes,
        "batch": {
            shuffle: [
                forked(lambda: measure_batches(folders, options.seconds, shuffle))  # noqa: B023
                for _ in range(options.repetitions)
            ]
            for shuffle in ("full", "block")
        },
    }


def line(name, data):
    """One line of the table."""
    resumes = data["resume"]["random"] + data["resume"]["extreme"]
    batch = {
        shuffle: {
            kind: 1e6 * statistics.median(each[kind] for each in repeated)
            for kind in ("seconds", "processor")
        }
        for shuffle, repeated in data["batch"].items()
    }
    growth = max(each["bytes"] for repeated in data["batch"].values() for each in repeated)
    return (
        f"{name:28} {1000 * statistics.median(data['open']):8.1f} {1000 * max(data['open']):8.1f} "
        f"{data['open_bytes'] / 1e6:7.1f} {1000 * statistics.median(resumes):8.1f} "
        f"{1000 * max(data['resume']['random']):8.1f} {1000 * max(data['resume']['extreme']):8.1f} "
        f"{batch['full']['seconds']:8.0f} {batch['full']['processor']:8.0f} "
        f"{batch['block']['seconds']:8.0f} {growth / 1e6:8.1f}"
    )


HEADINGS = (
    f"{'':28} {'open and first batch':>25} {'resume, ms':>26} {'batch, µs':>26} {'reading':>8}\n"
    f"{'':28} {'ms':>8} {'worst':>8} {'MB':>7} {'median':>8} {'random':>8} {'extreme':>8} "
    f"{'full':>8} {'cpu':>8} {'block':>8} {'MB':>8}"
)


def sizes(most):
    """Tokens, parts and sources of each line."""
    powers = [10**power for power in range(6, 13) if 10**power <= most]
    lines = [(each, min(_MOST_PARTS, max(1, each // _PART_TOKENS)), 1) for each in powers]
    if powers:
        last = powers[-1]
        parts = max(_NUM_SOURCES, min(_MOST_PARTS, last // _PART_TOKENS))
        lines += [(last, parts, 1)] if parts != lines[-1][1] else []
        lines += [(last, parts // _NUM_SOURCES * _NUM_SOURCES, _NUM_SOURCES)]
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=10**12, help="the largest store")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--resumes", type=int, default=50, help="random positions to resume at")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="seconds of reading per repetition"
    )
    parser.add_argument("--folder", type=Path, help="directory for the stores (default: data/)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    if options.folder is None:
        DATA.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="scale-", dir=options.folder or DATA))
    print(f"T={LENGTH}, B={BATCH}; {machine()}\n\n{HEADINGS}", flush=True)
    figures = {}
    try:
        for num_tokens, num_parts, num_sources in sizes(options.tokens):
            here = folder / "stores"
            folders = make(here, num_tokens, num_parts, num_sources)
            name = f"10^{len(str(num_tokens)) - 1}, {num_parts:,} part{'s' * (num_parts > 1)}"
            if num_sources > 1:
                name += f", {num_sources} sources"
            figures[name] = measure(folders, options)
            print(line(name, figures[name]), flush=True)
            shutil.rmtree(here)
    finally:
        shutil.rmtree(folder)
    print("\ntargets at 10^12 tokens in 10,000 parts: open < 1,000 ms, < 50 MB; resume < 50 ms")
    if options.json:
        result = {"machine": machine(), "sizes": figures}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
