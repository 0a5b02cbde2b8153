"""Time of `inspect` and `when --document` at random steps of a store of 10^12 tokens.

    python benchmarks/inspect_runs.py --tokens 1000000000000

The token files are sparse, so the store takes little space. Each part has 100 documents with
separate records. For the functions, the clock starts before the recipe is opened. The commands run
in new processes, with the start of Python and all imports: elapsed and processor time. Modules are
compiled once before, as pip does when it installs a package.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from corpus import DATA
from measure import machine
from stores import write_sparse_documents

import penstock.inspect

_PART_TOKENS = 10**8
_DOCUMENTS = 100
RECIPE = """
output = "{folder}/run"
[data]
length = 1024
train = "{store}"
[training]
steps = {steps}
global_batch_size = 512
"""


def timed(repetitions, call):
    """Seconds of each call; `call` gets the number of the repetition."""
    seconds = []
    for number in range(repetitions):
        begun = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - begun)
    return seconds


def measure(recipe, last_step, num_parts, repetitions):
    """Seconds of both commands, each with opening the recipe, at random steps and documents."""
    generator = np.random.default_rng(17)
    steps = generator.integers(1, last_step + 1, repetitions).tolist()
    documents = generator.integers(0, num_parts * _DOCUMENTS, repetitions).tolist()
    sightings = []

    def inspect(number):
        run = penstock.inspect.open_run(str(recipe))
        found = penstock.inspect.inspect_step(run.plan, run.steps, steps[number], most=4)
        assert len(found.rows) == 4

    def when(number):
        run = penstock.inspect.open_run(str(recipe))
        (found,) = penstock.inspect.find_documents(run.plan, "made", documents[number])
        sightings.append(len(penstock.inspect.when(run.plan, run.steps, found)))

    inspect(0)  # imports the rest of the package
    return {"inspect": timed(repetitions, inspect), "when": timed(repetitions, when)}, sightings


def commands(recipe, last_step, num_parts, repetitions):
    """Elapsed and processor seconds of both commands, each in a new process."""
    generator = np.random.default_rng(18)
    found = {}
    # Without this, a machine on which Python must not write compiled files would compile each time.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(recipe.parent / "compiled")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for number in range(repetitions + 1):
        step = str(generator.integers(1, last_step + 1))
        document = f"made:{generator.integers(0, num_parts * _DOCUMENTS)}"
        for name, option, value in (("inspect", "--step", step), ("when", "--document", document)):
            command = [sys.executable, "-m", "penstock", name, str(recipe), option, value]
            begun = time.perf_counter()
            running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            _, status, used = os.wait4(running.pid, 0)
            assert status == 0, command
            if number:  # the first process compiles the modules
                elapsed = found.setdefault(f"penstock {name}", [])
                elapsed.append(time.perf_counter() - begun)
                found.setdefault(f"penstock {name}, processor", []).append(
                    used.ru_utime + used.ru_stime
                )
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=10**12, help="tokens of the store")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="directory for the store (default: data/)")
    options = parser.parse_args()
    if options.folder is None:
        DATA.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="inspect-", dir=options.folder or DATA))
    try:
        num_parts = max(1, options.tokens // _PART_TOKENS)
        write_sparse_documents(folder / "store", options.tokens, num_parts, _DOCUMENTS)
        # Two epochs, so that every document is seen twice.
        last_step = max(1, 2 * (options.tokens // 1024) // 512)
        recipe = folder / "recipe.toml"
        recipe.write_text(RECIPE.format(folder=folder, store=folder / "store", steps=last_step))
        found, sightings = measure(recipe, last_step, num_parts, options.repetitions)
        found |= commands(recipe, last_step, num_parts, options.repetitions)
        print(f"{options.tokens:,} tokens in {num_parts:,} parts, {machine()}")
        for name, seconds in found.items():
            print(
                f"{name:28} median {statistics.median(seconds):6.3f} s, "
                f"from {min(seconds):.3f} to {max(seconds):.3f} s"
            )
        print(f"rows that hold a document: {min(sightings):,} to {max(sightings):,}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
