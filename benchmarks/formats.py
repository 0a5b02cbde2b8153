"""Read rows in place from token files of other tools, compared with a native store and with the
loader of each format.

    python benchmarks/formats.py [--tokens 100000000] [--repetitions 7]

The same ids are in each file, and in the page cache. A figure of the first table is the time of
`Windows.read` for steps of 64 rows of 1,024 tokens, in random order, compared with the store. A
figure of the second table is the time of batches of 32 shuffled rows as int64 tensors, by
`penstock.Loader` and by the loader of the format, from the same files; packages that are not
installed are left out. Files of these packages have rows of 1,025 ids, as benchmarks/peers.py
writes them. Cases alternate, in the first table after each step, so that other work on the machine
affects all of them. Each is shown in millions of tokens a second: median (lowest to highest).
"""

import argparse
import itertools
import statistics
import struct
import tempfile
import time
from pathlib import Path

import numpy as np
from measure import alternate, machine, spread
from peers import BATCH, ROW, HubMap, LitData, Mosaic
from stores import VOCAB_SIZE, write_store

import penstock as ps

LENGTH, ROWS, STEPS = 1024, 64, 200
# Each peer, the arguments with which it is opened, and those of open_tokens for the same files.
PEERS = {
    "MosaicML Streaming": (Mosaic, {"num_workers": 0}, {"format": "mds", "dtype": "uint16"}),
    "LitData": (LitData, {"num_workers": 0}, {}),
    "datasets": (HubMap, {"format": "numpy", "num_workers": 0}, {"column": "tokens"}),
}


def opened(folder, ids):
    """Return the rows of each case."""
    write_store(folder / "store", [ids])
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    with (folder / "llmc.bin").open("wb") as stream:
        stream.write(header.tobytes())
        ids.tofile(stream)
    ids.tofile(folder / "nanogpt.bin")
    np.save(folder / "ids.npy", ids)
    # A pair of Megatron: 8 is the code of uint16, and all ids are one document.
    ids.tofile(folder / "megatron.bin")
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQiqqq", 1, 8, 1, 2, len(ids), 0, 0, 1)
    (folder / "megatron.idx").write_bytes(index)
    known = {"vocab_size": VOCAB_SIZE}
    found = {
        "native store": ps.TokenStore(folder / "store"),
        "llm.c": ps.open_tokens(folder / "llmc.bin", **known),
        "Megatron": ps.open_tokens(folder / "megatron", **known),
        "nanoGPT": ps.open_tokens(folder / "nanogpt.bin", format="nanogpt", **known),
        "npy": ps.open_tokens(folder / "ids.npy", **known),
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
        found[name] = peer, choice, ps.open_tokens(peer.folder, vocab_size=VOCAB_SIZE, **settings)
    return found


def read_batches(iterator, count):
    """Read batches; return the seconds that they took."""
    started = time.perf_counter()
    for inputs, _ in itertools.islice(iterator, count):
        inputs[0, 0].item()
    return time.perf_counter() - started


def compare_loaders(peers, repetitions, num_batches):
    """Print the speed of each peer, and of penstock from the same files."""
    for name, (peer, choice, opened) in peers.items():
        peer.open(**choice)
        rows = ps.Windows(opened, LENGTH, stride=ROW)
        loader = ps.Loader(rows, BATCH, seed=17, format="tuple")
        own, ours = iter(peer.batches()), iter(loader)
        num_batches = min(num_batches, len(rows) // BATCH // (repetitions + 1))
        cases = {
            "own": lambda own=own, count=num_batches: read_batches(own, count),
            "ours": lambda ours=ours, count=num_batches: read_batches(ours, count),
        }
        alternate(cases, 1)  # starts threads, and loads pages
        seconds = alternate(cases, repetitions)
        tokens = num_batches * BATCH * LENGTH / 1e6
        pairs = zip(seconds["own"], seconds["ours"], strict=True)
        ratio = statistics.median(theirs / mine for theirs, mine in pairs)
        print(f"{name:20} {spread([tokens / each for each in seconds['own']])} M tokens/s")
        print(f"  penstock, same files {spread([tokens / each for each in seconds['ours']])}")
        print(f"  penstock is {ratio:.1f} times as fast")
        # To the end, so that its threads do not read while the files are deleted.
        for _ in own:
            pass


def main():
    """Measure each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--batches", type=int, default=200, help="of each loader and repetition")
    given = parser.parse_args()
    generator = np.random.default_rng(0)
    ids = generator.integers(0, VOCAB_SIZE, given.tokens, dtype="<u2")
    with tempfile.TemporaryDirectory() as folder:
        cases = opened(Path(folder), ids)
        peers = peers_in(Path(folder), ids)
        cases |= {f"{name}'s": ps.Windows(each[2], LENGTH) for name, each in peers.items()}
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
            ratio = statistics.median(b / a for a, b in zip(values, native, strict=True))
            print(f"{name:20} {spread(speeds)} M tokens/s, {ratio:.2f} times the store")
        compare_loaders(peers, given.repetitions, given.batches)


if __name__ == "__main__":
    main()
