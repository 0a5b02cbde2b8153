"""`penstock.Loader` beside LitData, MosaicML Streaming, Grain, HF datasets, nanoGPT and torch.

    make bench            or        python benchmarks/loader.py [--tokens N] [--repetitions 5]

The same ids (uint16) for all, to int64 CPU tensors `(inputs, targets)` of 32 rows of 1,024,
shuffled, with the files in the page cache. Every case runs in a process of its own (`case.py`);
cases take turns, and every figure is the median of the repetitions. Each case runs with the
fastest of its settings in `peers.py`, found by a trial that is printed first. The consumer reads
one element of each batch. A peer that cannot be run is named with the reason.

    M tokens/s    by the clock; on a busy machine, trust the processor time beside it
    CPU           of all threads and workers of the case
    first batch   from opening to the first batch, imports done
    resume        the same to the middle of an epoch, from the case's own state, and whether the
                  batch is the one that would have come
    memory        how far anonymous memory grows while it opens and reads, workers included
    cold          from opening on, with the files dropped from the page cache
"""

import argparse
import importlib.util
import json
import math
import select
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
from corpus import DATA
from measure import machine, read_all, spread
from peers import BATCH, CASES, LENGTH
from stores import VOCAB_SIZE, write_array

_PATIENCE = 900  # seconds for the slowest order: writing 10^8 tokens, row by row
_BY_HAND = "HF datasets, Arrow by hand"
_PEERS = (
    *("LitData", "MosaicML Streaming", "Grain", "HF datasets", "HF datasets, iterable"),
    *(_BY_HAND, "nanoGPT get_batch"),
)


class CaseError(Exception):
    """A case that cannot be run, and why."""


class Process:
    """A case in a process of its own, which does what it is told."""

    def __init__(self, name, folder, log):
        command = [sys.executable, Path(__file__).with_name("case.py"), name, folder]
        self.name = name
        self.choice = {}
        self._process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            bufsize=1,
        )

    def started(self):
        """Wait until it has imported all it needs."""
        self.answer()
        return self

    def order(self, order, **details):
        """Do something in a fresh fork, and return what comes of it."""
        self.tell({"order": order, **details})
        return self.answer()["result"]

    def tell(self, order):
        """Send a line."""
        self._process.stdin.write(json.dumps(order) + "\n")

    def answer(self):
        """The next line."""
        ready, _, _ = select.select([self._process.stdout], [], [], _PATIENCE)
        line = self._process.stdout.readline() if ready else ""
        told = json.loads(line) if line else {"error": "no answer" if ready else "timed out"}
        if "error" in told:
            raise CaseError(told["error"])
        return told

    def serve(self, choice):
        """Open the case with these settings, to be measured by `speed`."""
        self.tell({"order": "serve", "choice": choice})
        self.answer()

    def speed(self, seconds):
        """Tokens and processor time of reading that long."""
        self.tell(seconds)
        return self.answer()

    def rest(self):
        """End what `serve` began."""
        self.tell(None)
        self.answer()

    def close(self):
        """End the process. Its forks have ended, and tidied up after themselves."""
        self._process.kill()
        self._process.wait()


def make_tokens(folder, num_tokens, store):
    """The ids, as a file in `folder`: of `store`, if there is one, or made up."""
    path = folder / "array" / "tokens.npy"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        if store is not None:
            from penstock.store.reader import TokenStore

            opened = TokenStore(store)
            tokens = opened.tokens(0, min(num_tokens, opened.num_tokens))
        else:
            generator = np.random.default_rng(17)
            tokens = generator.integers(0, VOCAB_SIZE, num_tokens, np.uint16)
        write_array(path, tokens)
        (path.parent / ".done").touch()
    return len(np.load(path, mmap_mode="r"))


def start(names, folder, log):
    """The processes of the cases that can run, and the reasons of those that cannot."""
    failed, started = {}, {}
    for name in names:
        package = CASES[name].package
        if package is not None and not importlib.util.find_spec(package):
            failed[name] = f"{package} is not installed"
        else:
            started[name] = Process(name, folder, log)
    running = {}
    for name, process in started.items():
        try:
            running[name] = process.started()
            process.order("prepare")
        except CaseError as error:
            failed[name] = str(error)
            running.pop(name, None)
            process.close()
    return running, failed


def choose(process, seconds):
    """Try the settings of a case, twice in turns; returns the speed of each, the fastest first."""
    choices = CASES[process.name].choices
    speeds = [0.0] * len(choices)
    for number in [*range(len(choices))] * (2 if len(choices) > 1 else 1):
        try:
            process.serve(choices[number])
            told = process.speed(seconds)
            process.rest()
        except CaseError as error:
            print(f"  {process.name} with {spelled(choices[number])} does not run: {error}")
            continue
        speeds[number] = max(speeds[number], told["tokens_per_second"])
    if not any(speeds):
        raise CaseError("none of its settings runs")
    ordered = sorted(zip(speeds, choices, strict=True), key=lambda each: -each[0])
    process.choice = ordered[0][1]
    return ordered


def spelled(choice):
    return ", ".join(f"{name}={value}" for name, value in choice.items()) or "nothing to choose"


def at_rest(process, options, num_batches):
    """All figures of one case that are not its speed; each in a fresh process, several times."""
    choice = process.choice
    case = CASES[process.name]
    figures = {
        "cold": process.order("cold", choice=choice, num_batches=num_batches),
        "first": [process.order("first", choice=choice) for _ in range(options.repetitions)],
        "memory": process.order("memory", choice=choice, seconds=options.seconds),
        "resume": None,
    }
    if hasattr(case, "state"):
        half = process.order("half", choice=choice, num_batches=num_batches)
        told = [
            process.order("resume", choice=choice, state=half["state"])
            for _ in range(options.repetitions)
        ]
        figures["resume"] = [each["seconds"] for each in told]
        figures["exact"] = all(each["digest"] == half["digest"] for each in told)
    return figures


def race(running, failed, options):
    """Speeds of all cases, measured in turns."""
    figures = {name: [] for name in running}
    for name, process in list(running.items()):
        try:
            process.serve(process.choice)
        except CaseError as error:
            failed[name] = str(error)
            del running[name], figures[name]
    for _ in range(options.repetitions):
        for name, process in list(running.items()):
            try:
                figures[name].append(process.speed(options.seconds))
            except CaseError as error:
                failed[name] = str(error)
                del running[name], figures[name]
    for process in running.values():
        process.rest()
        process.close()
    return figures


def report(figures):
    """The tables."""
    speeds = {name: statistics.median(told["speed"]) for name, told in figures.items()}
    costs = {name: statistics.median(told["processor"]) for name, told in figures.items()}
    ours, our_cost = speeds.get("penstock", math.nan), costs.get("penstock", math.nan)
    print(
        f"\n{'':27} {'M tokens/s: median (spread)':>32} {'penstock':>9} {'CPU':>9} {'÷':>9}\n"
        f"{'':27} {'':32} {'÷':>9} {'ns/token':>9} {'penstock':>9}"
    )
    for name, told in figures.items():
        shown = spread([each / 1e6 for each in told["speed"]])
        print(
            f"{name:27} {shown:>32} {ours / speeds[name]:9.1f} {costs[name]:9.2f} "
            f"{costs[name] / our_cost:9.1f}"
        )
    print(
        f"\n{'':27} {'first batch':>12} {'resume':>10} {'':15} {'memory':>10} {'cold':>15}\n"
        f"{'':27} {'ms':>12} {'ms':>10} {'':15} {'MB':>10} {'M tokens/s':>15} {'from disk':>9}"
    )
    for name, told in figures.items():
        resume, exact = "not", "supported"
        if told["resume"]:
            resume = f"{1000 * statistics.median(told['resume']):,.1f}"
            exact = "exact" if told["exact"] else "ANOTHER BATCH"
        print(
            f"{name:27} {1000 * statistics.median(told['first']):12,.1f} {resume:>10} {exact:15} "
            f"{told['memory'] / 1e6:10,.1f} {told['cold']['speed'] / 1e6:15,.1f} "
            f"{told['cold']['disk_bytes'] / 1e6:6,.0f} MB"
        )
    compare(speeds)


def compare(speeds):
    """The ratios that DESIGN.md promises."""
    print()
    lines = [
        ("penstock", "torch Dataset in RAM", "2"),
        ("penstock, narrow", "NumPy gather", "0.35"),
        ("penstock, 64 sources", "penstock, 64 parts", "0.87, which is 15 % slower"),
    ]
    peers = sorted((name for name in _PEERS if name in speeds), key=speeds.get)
    if peers:
        lines.insert(0, ("penstock", peers[-1], "8: the fastest peer"))
    if peers and peers[-1] == _BY_HAND and len(peers) > 1:
        lines.insert(1, ("penstock", peers[-2], "8: the fastest that gives tensors or arrays"))
    for over, under, target in lines:
        if over in speeds and under in speeds:
            print(f"{over} ÷ {under}: {speeds[over] / speeds[under]:.2f} (target {target})")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each repetition")
    parser.add_argument("--folder", type=Path, help="where the tokens are written, and kept")
    parser.add_argument("--store", type=Path, help="take the ids from this store")
    parser.add_argument("--no-peers", action="store_true", help="only what needs no other package")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="these cases")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    parser.add_argument("--log", type=Path, help="what the peers print; forgotten by default")
    options = parser.parse_args()
    default = DATA / "store"
    if options.store is None and (default / "penstock.json").exists():
        options.store = default
    if options.folder is None:
        options.folder = DATA / f"loader-{options.tokens}"
    return options


def main():
    options = parse()
    names = options.only or list(CASES)
    if options.no_peers:
        names = [name for name in names if CASES[name].package is None]
    num_tokens = make_tokens(options.folder, options.tokens, options.store)
    num_batches = max(1, num_tokens // (LENGTH + 1) // BATCH // 2)
    source = options.store or "made up"
    print(f"{num_tokens:,} tokens ({source}), T={LENGTH}, B={BATCH}; {machine()}", flush=True)
    log = options.log.open("w") if options.log else subprocess.DEVNULL
    running, failed = start(names, options.folder, log)
    figures, chosen = {}, {}
    for name, process in list(running.items()):
        try:
            read_all(process_folder(name, options.folder))
            chosen[name] = choose(process, min(1.0, options.seconds))
            shown = "; ".join(f"{spelled(c)}: {s / 1e6:,.1f}" for s, c in chosen[name])
            print(f"  {name}: {shown}", flush=True)
            figures[name] = at_rest(process, options, num_batches)
            read_all(process_folder(name, options.folder))
        except CaseError as error:
            failed[name] = str(error)
            running.pop(name).close()
    told = race(running, failed, options)
    figures = {name: figures[name] for name in told}
    for name, each in told.items():
        figures[name]["speed"] = [one["tokens_per_second"] for one in each]
        figures[name]["processor"] = [1e9 * one["processor_seconds"] for one in each]
        figures[name]["choice"] = chosen[name][0][1]
    report(figures)
    for name, reason in failed.items():
        print(f"not measured: {name}: {reason}")
    if options.json:
        versions = {"machine": machine(), "tokens": num_tokens, "failed": failed}
        options.json.write_text(json.dumps({**versions, "cases": figures}, indent=1) + "\n")


def process_folder(name, folder):
    """Where the files of a case lie."""
    return folder / CASES[name].data


if __name__ == "__main__":
    main()
