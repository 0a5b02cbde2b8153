"""Compare the loader and the build of this revision with those of another one, in the same run.

    git worktree add ../old REVISION
    python benchmarks/revisions.py ../old [--turns 40] [--text FILE ...]

Short turns alternate between the two revisions, each in processes of its own. What is compared is
processor time, which other processes on the machine change little, and by which both revisions are
changed alike; of builds, the elapsed time too. Printed is the median of the ratios of neighbouring
turns, with its quartiles. The blocks of a store are verified in a first epoch that is not counted.
`--text` adds builds of files, with the tokenizer gpt2.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from peers import BATCH, LENGTH

from loader import Process, make_tokens

HERE = Path(__file__).parent
CASES = ("penstock", "penstock, narrow", "penstock, 64 parts", "penstock, 64 sources")
CHOICES = {"penstock, narrow": {"format": "narrow"}}
BUILD = """
import os, sys, penstock
text, out, documents = sys.argv[1:]
penstock.load_tokenizer("gpt2").encode("loaded")
before = os.times()
penstock.build(text, out, tokenizer="gpt2", **({"documents": documents} if documents else {}))
after = os.times()
print(after.user + after.system - before.user - before.system, after.elapsed - before.elapsed)
"""


def ratios(turns, old, new):
    """`new() / old()` of each turn; the one that is first changes from turn to turn."""
    found = []
    for turn in range(turns):
        both = {}
        for work in (old, new) if turn % 2 else (new, old):
            both[work] = np.array(work())
        found.append(both[new] / both[old])
    return np.array(found)


def report(name, found, what="processor time"):
    low, middle, high = statistics.quantiles(found, n=4)
    sys.stdout.write(f"{name:24} {middle:6.3f} of the old {what} ({low:.3f} to {high:.3f})\n")
    sys.stdout.flush()


def compare_loaders(name, arguments, folder):
    with (folder / "log").open("a") as log:
        both = []
        for root in (arguments.old, HERE.parent):
            place = folder / root.resolve().name
            place.mkdir(exist_ok=True)
            num_tokens = make_tokens(place, arguments.tokens, None)
            both.append(Process(name, place, log, root).started())
            both[-1].order("prepare")
            both[-1].serve({**CHOICES.get(name, {}), "prefetch": 0})
        epoch = num_tokens / (BATCH * LENGTH)
        for each in both:
            read = 0.0
            while read < epoch:
                read += each.speed(1.0)["tokens_per_second"] / (BATCH * LENGTH)
        old, new = (
            lambda each=each: each.speed(arguments.seconds)["processor_seconds"] for each in both
        )
        report(name, ratios(arguments.turns, old, new))
        for each in both:
            each.rest()
            each.close()


def compare_builds(text, arguments, folder):
    documents = "sep:<|endoftext|>" if text.suffix == ".txt" else ""

    def build(root):
        out = folder / "built"
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, "-c", BUILD, str(text), str(out), documents]
        environment = os.environ | {"PYTHONPATH": path_of(root)}
        done = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, cwd=folder
        )
        return [float(word) for word in done.stdout.split()[-2:]]

    old, new = (lambda root=root: build(root) for root in (arguments.old, HERE.parent))
    found = ratios(max(2, arguments.turns // 4), old, new)
    report(f"build {text.name}", found[:, 0])
    report(f"build {text.name}", found[:, 1], "elapsed time")


def path_of(root):
    """PYTHONPATH for a revision: its source, and what was set already."""
    found = [str((root / "src").resolve()), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, found))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path, help="a worktree of the other revision")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each turn of a loader")
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--only", nargs="*", default=CASES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            compare_loaders(name, arguments, Path(folder))
        for text in arguments.text:
            compare_builds(text.resolve(), arguments, Path(folder))


if __name__ == "__main__":
    main()
