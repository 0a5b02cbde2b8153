"""Time and memory of `penstock report` on a store of 10^9 tokens.

    python benchmarks/report.py --tokens 1000000000

The store takes two bytes per token, and is removed at the end. Its ids are distributed like words
(Zipf), its documents have 100 to 10,000 tokens, and some are copies. The command runs in a new
process. Memory is its peak: resident, and without mapped files.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from measure import anonymous_bytes, machine, spread
from stores import VOCAB_SIZE, write_documents

_PART_TOKENS = 1 << 25
_MEAN = 700


def parts(num_tokens):
    """Yield the tokens and the ends of documents of each part."""
    random = np.random.default_rng(17)
    weights = 1 / np.arange(1, VOCAB_SIZE + 1)
    # A table of 2^22 draws is indexed at random, which is faster than to draw each id.
    table = random.choice(VOCAB_SIZE, 1 << 22, p=weights / weights.sum()).astype("<u2")
    left = num_tokens
    while left:
        size = min(left, _PART_TOKENS)
        left -= size
        lengths = np.exp(random.normal(np.log(_MEAN), 0.8, size // _MEAN * 2)).astype(np.int64)
        ends = np.cumsum(np.clip(lengths, 100, 10_000))
        ends = np.append(ends[ends < size], size)
        at = random.integers(0, len(table), -(-size // 1024))
        tokens = table[(at[:, None] + np.arange(1024)) % len(table)].reshape(-1)[:size]
        _copy_some(random, tokens, ends)
        yield tokens, ends


def _copy_some(random, tokens, ends):
    """Make some documents copies of another one of the same length."""
    starts = np.concatenate([[0], ends[:-1]])
    known = {}
    for number in random.permutation(len(ends))[: len(ends) // 20].tolist():
        start, stop = int(starts[number]), int(ends[number])
        other = known.setdefault(stop - start, start)
        tokens[start:stop] = tokens[other : other + stop - start]


def measure(store, page):
    """Run the command; returns seconds, peak resident bytes and peak anonymous bytes."""
    command = [sys.executable, "-m", "penstock", "report", str(store), "-o", str(page)]
    started = time.perf_counter()
    running = subprocess.Popen(command)
    anonymous = 0
    while True:
        try:
            anonymous = max(anonymous, anonymous_bytes(running.pid))
        except (OSError, RuntimeError):  # it has ended
            break
        time.sleep(0.01)
    _, status, used = os.wait4(running.pid, 0)
    assert status == 0, status
    return time.perf_counter() - started, used.ru_maxrss * 1024, anonymous


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=10**9)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where the store is written")
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        store, page = Path(folder) / "store", Path(folder) / "report.html"
        write_documents(store, parts(options.tokens))
        found = [measure(store, page) for _ in range(options.repetitions)]
        text = page.read_text()
        size = page.stat().st_size
    seconds, resident, anonymous = zip(*found, strict=True)
    print(f"{options.tokens:,} tokens, a page of {size / 1e3:,.0f} kB")
    print(f"seconds                 {spread(seconds)}")
    print(f"peak resident, MB       {spread([each / 1e6 for each in resident])}")
    print(f"peak anonymous, MB      {spread([each / 1e6 for each in anonymous])}")
    for scope in re.findall(r'class="note">(Counted|Compared)([^<]*)', text):
        print("".join(scope))


if __name__ == "__main__":
    main()
