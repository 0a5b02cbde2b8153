"""Read rows in place from token files of other tools, compared with a native store.

    python benchmarks/formats.py [--tokens 100000000] [--repetitions 7]

The same ids are in each file, and in the page cache. A figure is the time of `Windows.read` for
steps of 64 rows of 1,024 tokens, in random order. Cases alternate, so that other work on the
machine affects all of them. Each is shown in millions of tokens a second, and compared with the
store: median (lowest to highest).
"""

import argparse
import statistics
import struct
import tempfile
import time
from pathlib import Path

import numpy as np
from measure import machine, spread
from stores import VOCAB_SIZE, write_store

import penstock as ps

LENGTH, ROWS, STEPS = 1024, 64, 200


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


def main():
    """Measure each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--repetitions", type=int, default=7)
    given = parser.parse_args()
    generator = np.random.default_rng(0)
    ids = generator.integers(0, VOCAB_SIZE, given.tokens, dtype="<u2")
    with tempfile.TemporaryDirectory() as folder:
        cases = opened(Path(folder), ids)
        order = generator.permutation(len(cases["llm.c"]))
        steps = [np.resize(np.roll(order, -ROWS * step), ROWS) for step in range(STEPS)]
        times = {name: [] for name in cases}
        for repetition in range(given.repetitions + 1):
            for name, rows in cases.items():
                started = time.perf_counter()
                for step in steps:
                    rows.read(step)
                if repetition:  # the first one loads pages and checks the blocks of the store
                    times[name].append(time.perf_counter() - started)
    print(machine())
    native = times["native store"]
    for name, values in times.items():
        speeds = [STEPS * ROWS * LENGTH / value / 1e6 for value in values]
        ratio = statistics.median(b / a for a, b in zip(values, native, strict=True))
        print(f"{name:14} {spread(speeds)} M tokens/s, {ratio:.2f} times the store")


if __name__ == "__main__":
    main()
