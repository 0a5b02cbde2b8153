"""The speed of `penstock build` with 1 to 16 workers, and of raw gigatoken, on the same text.

    python benchmarks/build.py --scale [--bytes N] [--workers 1 2 4 8 16] [--folder /dev/shm]

Raw gigatoken is a thread for each core, with a tokenizer each. A thread takes the next 16 MiB of
the text and encodes them; nothing is checked, written or kept. A build does everything. Its time
includes the start of its processes.

The text is made of the documents that corpus.py finds on this machine (source code and
documentation), each once. To make more text than there is, all documents are repeated in another
order: they are divided into eight groups, and each group is shuffled again. So at least
seven eighths of all documents come between two copies of a document. That must be more than a slice
(64 MB), and the benchmark stops if it is not. Documents with characters that gigatoken encodes
wrongly are left out: a build gives these to the slow reference, and raw gigatoken does not.

A case with n workers reads n equal files of the text, so all cases take about the same time, and
starting up weighs the same.
"""

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path

import corpus
import gigatoken
import numpy as np
from measure import Stopwatch, alternate, machine, show_ratios, spread

import penstock as ps
from penstock.sources.settings import SLICE_BYTES
from penstock.store import processes
from penstock.tokenize.supported import find

BUFFER = 16 << 20


def write_text(folder, num_files, num_bytes, roots):
    """Write `num_files` files of text; returns their paths and the size of one copy of all text."""
    documents, size = [], 0
    for text in corpus.documents(roots):
        if len(find(np.frombuffer(text.encode(), np.uint8), symbols=False)):
            continue
        documents.append(text.encode() + corpus.SEPARATOR.encode())
        size += len(documents[-1])
        if size >= num_bytes:
            break
    if size < num_bytes and size * (corpus.GROUPS - 1) // corpus.GROUPS < SLICE_BYTES:
        raise SystemExit(
            f"only {size:,} bytes of text were found, so documents would repeat within a slice: "
            "name more directories with --roots"
        )
    stream = corpus.in_other_orders(documents)
    paths = []
    for number in range(num_files):
        path, written = folder / f"text-{number:02d}.txt", 0
        with path.open("wb") as file:
            while written < num_bytes // num_files:
                document = next(stream)
                file.write(document)
                written += len(document)
        paths.append(path)
    return paths, size


def raw(paths, tokenizers):
    """Seconds in which a thread for each tokenizer encodes all files."""
    places = [(path, start) for path in paths for start in range(0, path.stat().st_size, BUFFER)]
    left, lock = iter(places), threading.Lock()

    def encode(tokenizer):
        while True:
            with lock:
                place = next(left, None)
            if place is None:
                return
            with place[0].open("rb", buffering=0) as stream:
                data = os.pread(stream.fileno(), BUFFER, place[1])
            tokenizer.encode_batch(gigatoken.BytesSource(data, corpus.SEPARATOR), parallel=False)

    threads = [threading.Thread(target=encode, args=(each,)) for each in tokenizers]
    watch = Stopwatch()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return watch.stop()


def build(paths, folder, threads, workers, threads_each):
    """Seconds of one build."""
    store = folder / "store"
    shutil.rmtree(store, ignore_errors=True)
    tokenizer = ps.load_tokenizer("gpt2")
    processes.THREADS_EACH = threads_each
    watch = Stopwatch()
    ps.build(paths, store, tokenizer=tokenizer, workers=f"{workers}:{threads}")
    took = watch.stop()
    shutil.rmtree(store)
    return took


def run(options, fresh):
    """Print the table; `fresh` loads a gigatoken tokenizer with an empty cache."""
    counts = sorted(options.workers)
    folder = Path(tempfile.mkdtemp(dir=options.folder or _memory(options.bytes)))
    try:
        # Not in the other benchmarks, whose corpus stays the same when packages are installed.
        roots = [*options.roots, sys.prefix, sysconfig.get_path("purelib")]
        paths, unique = write_text(folder, counts[-1], options.bytes, roots)
        sizes = [path.stat().st_size for path in paths]
        print(f"{sum(sizes):,} bytes in {len(paths)} files in {folder}; {machine()}")
        print(f"{unique:,} bytes of different documents; load average {os.getloadavg()[0]:.1f}")
        definition = ps.load_tokenizer("gpt2").definition
        cases, text = {}, {}
        for count in (counts[0], counts[-1]):
            name = f"raw gigatoken, {count} threads"
            text[name] = sum(sizes[:count])
            cases[name] = lambda count=count: raw(
                paths[:count], [fresh(definition) for _ in range(count)]
            )
        each = processes.THREADS_EACH
        kinds = [(count, "auto", each, f"build, {count} workers") for count in counts]
        kinds += [
            (counts[-1], "processes", number, f"build, {counts[-1]} in processes of {number}")
            for number in options.threads_each
        ]
        if options.threads_each:
            kinds.append((counts[-1], "threads", each, f"build, {counts[-1]} threads"))
        for count, workers, number, name in kinds:
            text[name] = sum(sizes[:count])
            cases[name] = lambda count=count, workers=workers, number=number: build(
                paths[:count], folder, count, workers, number
            )
        seconds = alternate(cases, options.repetitions)
        _show(seconds, text, f"raw gigatoken, {counts[-1]} threads", counts)
        gigabytes = {name: size / 1e9 for name, size in text.items()}
        show_ratios(seconds, f"raw gigatoken, {counts[-1]} threads", gigabytes)
        if options.memory:
            _show_memory(paths, folder, counts)
    finally:
        shutil.rmtree(folder)


def _show(seconds, text, reference, counts):
    speeds = {name: [text[name] / each / 1e6 for each in took] for name, took in seconds.items()}
    first = statistics.median(speeds[reference])
    print(f"{'':32} {'MB/s: median (spread)':>34} {'seconds':>8}   of {reference}")
    for name, values in speeds.items():
        took = statistics.median(seconds[name])
        print(
            f"{name:32} {spread(values):>34} {took:8.1f}   {statistics.median(values) / first:.3f}"
        )
    medians = [statistics.median(speeds[f"build, {count} workers"]) for count in counts]
    steps = [two / one for one, two in itertools.pairwise(medians)]
    print(f"more workers: {', '.join(f'{step:.2f} times' for step in steps)} the speed")


MEMORY = """
import json, sys
sys.path.insert(0, sys.argv[1])
from measure import AnonymousMemory
import penstock as ps
paths, store, threads, workers = json.loads(sys.argv[2])
tokenizer = ps.load_tokenizer("gpt2")
with AnonymousMemory(workers=True) as memory:
    ps.build(paths, store, tokenizer=tokenizer, workers=f"{workers}:{threads}")
print(memory.peak)
"""


def _show_memory(paths, folder, counts):
    """Print the peak memory of builds in new processes."""
    for count in counts:
        for workers in ("threads", "processes"):
            files = [str(path) for path in paths[:count]]
            task = json.dumps([files, str(folder / "store"), count, workers])
            command = [sys.executable, "-c", MEMORY, str(Path(__file__).parent), task]
            peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            shutil.rmtree(folder / "store")
            print(f"peak anonymous memory, {count} slices at once, {workers}: {peak / 1e6:,.0f} MB")


def _memory(num_bytes):
    """A directory in memory, if it has room for the text and a store."""
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free > 2 * num_bytes:
        return shared
    return None
