"""Read rows in place from token files of other tools, compared with a native store and with the
loader of each format.

    python benchmarks/formats.py [--tokens 100000000] [--repetitions 7]

The same ids are in each file, and in the page cache. A figure of the first table is the time of
`Windows.read` for steps of 64 rows of 1,024 tokens, in random order, compared with the store. The
store has the parts that `build` would write for so many tokens of GPT-2; a store of one part is
shown beside it. A figure of the second table is the speed of batches of 32 rows as int64 tensors,
in turns of a second, of `penstock.Loader` with its usual settings, and of the loader of the format
(own_loaders.py, peers.py) without worker processes, from the same files. penstock shuffles; it is
also measured in the order of the file where the other loader reads in that order, with its thread
and without it. Packages that are not installed are left out. Files of MosaicML Streaming, LitData
and datasets have rows of 1,025 ids, as peers.py writes them. Cases alternate, in the first table
after each step, so that other work on the machine affects all of them. Each is shown in millions of
tokens a second: median (lowest to highest).
"""

import argparse
import functools
import itertools
import statistics
import struct
import tempfile
import time
from pathlib import Path

import numpy as np
from measure import alternate, machine, spread
from own_loaders import OWN_LOADERS
from peers import BATCH, ROW, HubMap, LitData, Mosaic
from stores import VOCAB_SIZE, write_store

import penstock as ps

LENGTH, ROWS, STEPS = 1024, 64, 200
# `build` makes a part of each slice of 64 MB of text. A token of GPT-2 is about 4.4 bytes of it.
PART = 15_000_000
# Each peer, the arguments with which it is opened, and those of open_tokens for the same files.
PEERS = {
    "MosaicML Streaming": (Mosaic, {"num_workers": 0}, {"format": "mds", "dtype": "uint16"}),
    "LitData": (LitData, {"num_workers": 0}, {}),
    "datasets": (HubMap, {"format": "numpy", "num_workers": 0}, {"column": "tokens"}),
}


def opened(folder, ids):
    """Return the rows of each case."""
    write_store(folder / "store", [ids[at : at + PART] for at in range(0, len(ids), PART)])
    write_store(folder / "one", [ids])
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    with (folder / "llmc.bin").open("wb") as stream:
        stream.write(header.tobytes())
        ids.tofile(stream)
    ids.tofile(folder / "nanogpt.bin")
    ids.tofile(folder / "olmo.npy")  # a file of its own, so that no case reads cached lines
    np.save(folder / "ids.npy", ids)
    # As documents of 1 to 2,000 ids: of Megatron (8 is the code of uint16) and of datatrove.
    ends = np.cumsum(np.random.default_rng(1).integers(1, 2000, len(ids) // 500 + 1))
    ends = np.append(ends[ends < len(ids)], len(ids))
    starts = np.append(0, ends[:-1])
    ids.tofile(folder / "documents.bin")
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(ends), len(ends) + 1)
    tables = (np.diff(ends, prepend=0).astype("<i4"), 2 * starts, np.arange(len(ends) + 1))
    (folder / "documents.idx").write_bytes(index + b"".join(each.tobytes() for each in tables))
    (folder / "datatrove").mkdir()
    ids.tofile(folder / "datatrove" / "x.ds")
    ends.astype("<u8").tofile(folder / "datatrove" / "x.ds.index")
    known = {"vocab_size": VOCAB_SIZE}
    found = {
        "native store": ps.TokenStore(folder / "store"),
        "store of one part": ps.TokenStore(folder / "one"),
        "llm.c": ps.open_tokens(folder / "llmc.bin", **known),
        "Megatron": ps.open_tokens(folder / "documents", **known),
        "nanoGPT": ps.open_tokens(folder / "nanogpt.bin", format="nanogpt", **known),
        "npy": ps.open_tokens(folder / "ids.npy", **known),
        "datatrove": ps.open_tokens(folder / "datatrove" / "x.ds", **known),
        "OLMo": ps.open_tokens(folder / "olmo.npy", format="olmo", **known),
    }
    return {name: ps.Windows(each, LENGTH) for name, each in found.items()}


def peers_in(folder, ids):
    """Return the peers that are installed, after they wrote the ids, and the same files opened."""
    (folder / "array").mkdir()
    np.save(folder / "array" / "tokens.npy", ids)
    found = {}
    for name, (make, choice, settings) in PEERS.items():
        try:
            peer = make(folder)
        except ModuleNotFoundError:
            print(f"not measured: {name} is not installed")
            continue
        peer.prepare(ids)
        peer.open(**choice)
        opened = ps.open_tokens(peer.folder, vocab_size=VOCAB_SIZE, **settings)
        found[name] = peer, ps.Windows(opened, LENGTH, stride=ROW)
    return found


def own_loaders(folder, cases):
    """Return the other loaders that are installed, with the rows of the same files."""
    found = {}
    for name, (make, title) in OWN_LOADERS.items():
        try:
            found[title] = make(folder), cases[name.partition(",")[0]]
        except ModuleNotFoundError as error:
            print(f"not measured: {title}: {error}")
    return found


class Turns:
    """Reads batches of a loader for some seconds, again and again, epoch after epoch."""

    def __init__(self, batches):
        self._batches = batches
        self._iterator = iter(batches())

    def speed(self, seconds):
        """Return millions of tokens a second."""
        started, count = time.perf_counter(), 0
        while (took := time.perf_counter() - started) < seconds:
            found = next(self._iterator, None)
            if found is None:
                self._iterator = iter(self._batches())
                continue
            found[0][0, 0].item()
            count += 1
        return count * BATCH * LENGTH / took / 1e6

    def finish(self):
        """Read to the end, so that no thread reads while the files are deleted."""
        for _ in self._iterator:
            pass


def compare_loaders(loaders, repetitions, seconds):
    """Print the speed of each loader, and of penstock from the same files."""
    for name, (other, rows) in loaders.items():
        own = Turns(other.batches)
        shuffled = ps.Loader(rows, BATCH, seed=17, format="tuple")
        turns = {"own": own, "shuffled": Turns(shuffled.__iter__)}
        if name.endswith(", in order"):
            # These loops use no thread, so penstock is measured without its thread, too.
            for case, prefetch in (("in order", 2), ("in order, no thread", 0)):
                in_order = ps.Loader(rows, BATCH, shuffle="none", format="tuple", prefetch=prefetch)
                turns[case] = Turns(in_order.__iter__)
        cases = {each: functools.partial(turn.speed, seconds) for each, turn in turns.items()}
        alternate(cases, 1)  # starts threads, and loads pages
        speeds = alternate(cases, repetitions)
        print(f"{name:44} {spread(speeds['own'])} M tokens/s")
        for each in list(turns)[1:]:
            pairs = zip(speeds["own"], speeds[each], strict=True)
            ratios = [mine / theirs for theirs, mine in pairs if theirs]
            shown = f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
            print(f"  penstock, {each:20} {spread(speeds[each])}, {shown} times as fast")
        if name in PEERS:
            own.finish()


def main():
    """Measure each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1, help="of each loader and repetition")
    given = parser.parse_args()
    generator = np.random.default_rng(0)
    ids = generator.integers(0, VOCAB_SIZE, given.tokens, dtype="<u2")
    with tempfile.TemporaryDirectory() as folder:
        cases = opened(Path(folder), ids)
        peers = peers_in(Path(folder), ids)
        others = own_loaders(Path(folder), cases)
        cases |= {f"{name}'s": ps.Windows(rows.stream, LENGTH) for name, (_, rows) in peers.items()}
        # Rows of 1,025 ids are fewer: the last ids may not fill one.
        order = generator.permutation(min(map(len, cases.values())))
        steps = [np.resize(np.roll(order, -ROWS * step), ROWS) for step in range(STEPS)]
        times = {name: [] for name in cases}
        for repetition in range(given.repetitions + 1):
            steps_of = {name: [] for name in cases}
            for step, (name, rows) in itertools.product(steps, cases.items()):
                started = time.perf_counter()
                rows.read(step)
                steps_of[name].append(time.perf_counter() - started)
            if repetition:  # the first one loads pages and checks the blocks of the store
                for name, each in steps_of.items():
                    times[name].append(STEPS * statistics.median(each))
        print(machine())
        native = times["native store"]
        for name, values in times.items():
            speeds = [STEPS * ROWS * LENGTH / value / 1e6 for value in values]
            ratios = [theirs / mine for mine, theirs in zip(values, native, strict=True)]
            shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{name:20} {spread(speeds)} M tokens/s, {shown} times the store")
        compare_loaders(peers | others, given.repetitions, given.seconds)


if __name__ == "__main__":
    main()
