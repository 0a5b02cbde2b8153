"""Compare `penstock.Loader` with LitData, MosaicML Streaming, Grain, HF datasets, nanoGPT, torch.

    make bench            or        python benchmarks/loader.py [--tokens N] [--repetitions 5]

All cases read the same ids (uint16) and return int64 CPU tensors `(inputs, targets)` of 32 rows of
1,024 tokens, shuffled, with the files in the page cache. Every case runs in a separate process
(`case.py`). The measurements alternate between the cases, and every figure is the median of the
repetitions. Each case runs with the fastest of its settings in `peers.py`; the trial that finds
it is printed first. The consumer reads one element of each batch. If a peer cannot run, the
reason is printed.

    M tokens/s    by wall-clock time; on a busy machine, the processor time is more reliable
    CPU           processor time of all threads and workers of the case
    first batch   time from opening to the first batch, without imports
    resume        time to the first batch after resuming in the middle of an epoch, and whether
                  it is the batch that would have been next
    memory        growth of anonymous memory while the case opens and reads, workers included
    cold          speed with files that are not in the page cache, opening included; the same
                  rows as the NumPy gather reads, half an epoch

`--cold` measures only the last figure, and prints each speed divided by that of the NumPy gather in
the same repetition.
"""

import argparse
import importlib.util
import json
import math
import os
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

_TIMEOUT = 900  # seconds; the slowest command is writing 10^8 tokens, row by row
_BY_HAND = "HF datasets, Arrow by hand"
_BARE = "NumPy gather"
_PEERS = (
    *("LitData", "MosaicML Streaming", "Grain", "HF datasets", "HF datasets, iterable"),
    *(_BY_HAND, "nanoGPT get_batch"),
)


class CaseError(Exception):
    """A case cannot run; the message is the reason."""


class Process:
    """A case in a separate process that executes commands."""

    def __init__(self, name, folder, log, root=None):
        root = root or Path(__file__).parent.parent
        command = [sys.executable, root / "benchmarks" / "case.py", name, folder]
        paths = [str((root / "src").resolve()), os.environ.get("PYTHONPATH", "")]
        self.name = name
        self.choice = {}
        self._process = subprocess.Popen(
            [str(word) for word in command],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            bufsize=1,
        )

    def started(self):
        """Wait until the process has imported its packages."""
        self.answer()
        return self

    def order(self, order, **details):
        """Execute a command in a new fork; returns its result."""
        self._send({"order": order, **details})
        return self.answer()["result"]

    def _send(self, order):
        """Write one line of JSON to the process."""
        self._process.stdin.write(json.dumps(order) + "\n")

    def answer(self):
        """The next line of JSON from the process."""
        ready, _, _ = select.select([self._process.stdout], [], [], _TIMEOUT)
        line = self._process.stdout.readline() if ready else ""
        result = json.loads(line) if line else {"error": "no answer" if ready else "timed out"}
        if "error" in result:
            raise CaseError(result["error"])
        return result

    def serve(self, choice):
        """Open the case with these settings, for `speed`."""
        self._send({"order": "serve", "choice": choice})
        self.answer()

    def speed(self, seconds):
        """Tokens per second and processor time, measured for `seconds`."""
        self._send(seconds)
        return self.answer()

    def rest(self):
        """Stop the fork that `serve` started."""
        self._send(None)
        self.answer()

    def close(self):
        """Stop the process. Its forks have stopped and cleaned up already."""
        self._process.kill()
        self._process.wait()


def make_tokens(folder, num_tokens, store):
    """Write the ids of `store`, or random ids, to a file in `folder`; returns their number."""
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
    """The processes of the cases that can run, and the reasons why others cannot."""
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
    """Measure each setting of a case twice; returns their speeds, the fastest first."""
    choices = CASES[process.name].choices
    speeds = [0.0] * len(choices)
    for number in [*range(len(choices))] * (2 if len(choices) > 1 else 1):
        try:
            process.serve(choices[number])
            result = process.speed(seconds)
            process.rest()
        except CaseError as error:
            print(f"  {process.name} with {as_text(choices[number])} cannot run: {error}")
            continue
        speeds[number] = max(speeds[number], result["tokens_per_second"])
    if not any(speeds):
        raise CaseError("it runs with none of its settings")
    ordered = sorted(zip(speeds, choices, strict=True), key=lambda each: -each[0])
    process.choice = ordered[0][1]
    return ordered


def as_text(choice):
    return ", ".join(f"{name}={value}" for name, value in choice.items()) or "no settings"


def other_figures(process, options, num_batches):
    """All figures of one case except its speed; each measured in a new process."""
    choice = process.choice
    case = CASES[process.name]
    figures = {
        "first": [process.order("first", choice=choice) for _ in range(options.repetitions)],
        "memory": process.order("memory", choice=choice, seconds=options.seconds),
        "resume": None,
    }
    if hasattr(case, "state"):
        half = process.order("half", choice=choice, num_batches=num_batches)
        result = [
            process.order("resume", choice=choice, state=half["state"])
            for _ in range(options.repetitions)
        ]
        figures["resume"] = [each["seconds"] for each in result]
        figures["exact"] = all(each["digest"] == half["digest"] for each in result)
    return figures


def race_cold(running, failed, options, num_batches):
    """The speeds of all cases with files that are not in the page cache, in alternation."""
    figures = {name: [] for name in running}
    for _ in range(options.repetitions):
        for name, process in list(running.items()):
            try:
                result = process.order("cold", choice=process.choice, num_batches=num_batches)
                figures[name].append(result)
            except CaseError as error:
                failed[name] = str(error)
                running.pop(name).close()
                del figures[name]
    return figures


def report_cold(figures):
    """Print the speeds without the page cache, also relative to the bare gather."""
    print(f"\n{'cold':27} {'M tokens/s: median (spread)':>32} {'÷ gather':>22} {'from disk':>10}")
    speeds = {name: [each["speed"] / 1e6 for each in result] for name, result in figures.items()}
    for name, result in figures.items():
        ratio = ""
        if _BARE in speeds:
            # Of one repetition, because other programs use the disk more at some times.
            ratios = [a / b for a, b in zip(speeds[name], speeds[_BARE], strict=True)]
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        disk = statistics.median(each["disk_bytes"] for each in result) / 1e6
        print(f"{name:27} {spread(speeds[name]):>32} {ratio:>22} {disk:7,.0f} MB")


def race(running, failed, options):
    """The speeds of all cases, in alternating measurements."""
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
    return figures


def report(figures):
    """Print the tables."""
    speeds = {name: statistics.median(result["speed"]) for name, result in figures.items()}
    costs = {name: statistics.median(result["processor"]) for name, result in figures.items()}
    ours, our_cost = speeds.get("penstock", math.nan), costs.get("penstock", math.nan)
    print(
        f"\n{'':27} {'M tokens/s: median (spread)':>32} {'penstock':>9} {'CPU':>9} {'÷':>9}\n"
        f"{'':27} {'':32} {'÷':>9} {'ns/token':>9} {'penstock':>9}"
    )
    for name, result in figures.items():
        shown = spread([each / 1e6 for each in result["speed"]])
        print(
            f"{name:27} {shown:>32} {ours / speeds[name]:9.1f} {costs[name]:9.2f} "
            f"{costs[name] / our_cost:9.1f}"
        )
    print(
        f"\n{'':27} {'first batch':>12} {'resume':>10} {'':15} {'memory':>10}\n"
        f"{'':27} {'ms':>12} {'ms':>10} {'':15} {'MB':>10}"
    )
    for name, result in figures.items():
        resume, exact = "not", "supported"
        if result["resume"]:
            resume = f"{1000 * statistics.median(result['resume']):,.1f}"
            exact = "exact" if result["exact"] else "WRONG BATCH"
        print(
            f"{name:27} {1000 * statistics.median(result['first']):12,.1f} {resume:>10} {exact:15} "
            f"{result['memory'] / 1e6:10,.1f}"
        )
    report_cold({name: result["cold"] for name, result in figures.items()})
    compare(speeds)


def compare(speeds):
    """Print the ratios for which there are targets."""
    print()
    lines = [
        ("penstock", "torch Dataset in RAM", "2"),
        ("penstock, narrow", _BARE, "0.35"),
        ("penstock, 64 sources", "penstock, 64 parts", "0.87, which is 15 % slower"),
    ]
    peers = sorted((name for name in _PEERS if name in speeds), key=speeds.get)
    if peers:
        lines.insert(0, ("penstock", peers[-1], "8: the fastest peer"))
    if peers and peers[-1] == _BY_HAND and len(peers) > 1:
        lines.insert(
            1, ("penstock", peers[-2], "8: the fastest peer that returns tensors or arrays")
        )
    for over, under, target in lines:
        if over in speeds and under in speeds:
            print(f"{over} ÷ {under}: {speeds[over] / speeds[under]:.2f} (target {target})")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per repetition")
    parser.add_argument("--folder", type=Path, help="directory in which the tokens are kept")
    parser.add_argument("--store", type=Path, help="use the ids of this store")
    parser.add_argument(
        "--no-peers", action="store_true", help="only cases that need no other package"
    )
    parser.add_argument("--cold", action="store_true", help="only files that are not in memory")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="only these cases")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument(
        "--log", type=Path, help="file for the output of the peers; discarded by default"
    )
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
    source = options.store or "random"
    print(f"{num_tokens:,} tokens ({source}), T={LENGTH}, B={BATCH}; {machine()}", flush=True)
    log = options.log.open("w") if options.log else subprocess.DEVNULL
    running, failed = start(names, options.folder, log)
    if options.cold:
        for name, process in running.items():
            process.choice = CASES[name].choices[0]
        report_cold(race_cold(running, failed, options, num_batches))
        end(running, failed)
        return
    figures, chosen = {}, {}
    for name, process in list(running.items()):
        try:
            read_all(process_folder(name, options.folder))
            chosen[name] = choose(process, min(1.0, options.seconds))
            shown = "; ".join(f"{as_text(c)}: {s / 1e6:,.1f}" for s, c in chosen[name])
            print(f"  {name}: {shown}", flush=True)
            figures[name] = other_figures(process, options, num_batches)
        except CaseError as error:
            failed[name] = str(error)
            running.pop(name).close()
    cold = race_cold(running, failed, options, num_batches)
    for name in running:
        read_all(process_folder(name, options.folder))
    result = race(running, failed, options)
    figures = {name: {**figures[name], "cold": cold[name]} for name in result}
    for name, each in result.items():
        figures[name]["speed"] = [one["tokens_per_second"] for one in each]
        figures[name]["processor"] = [1e9 * one["processor_seconds"] for one in each]
        figures[name]["choice"] = chosen[name][0][1]
    report(figures)
    end(running, failed)
    if options.json:
        versions = {"machine": machine(), "tokens": num_tokens, "failed": failed}
        options.json.write_text(json.dumps({**versions, "cases": figures}, indent=1) + "\n")


def end(running, failed):
    """Stop all processes, and print why some cases were not measured."""
    for process in running.values():
        process.close()
    for name, reason in failed.items():
        print(f"not measured: {name}: {reason}")


def process_folder(name, folder):
    """The directory with the files of a case."""
    return folder / CASES[name].data


if __name__ == "__main__":
    main()
