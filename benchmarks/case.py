"""One case of `loader.py`, in a separate process that reads commands from stdin.

    python benchmarks/case.py NAME FOLDER

It imports the packages of the case, reports that it is ready, and then forks a new process for
each command: `prepare`, `first`, `memory`, `half`, `resume`, `cold` or `serve`. `serve` keeps
running and measures the speed on request. Commands and answers are lines of JSON. The output of a
peer goes to stderr.
"""

import gc
import hashlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np
from measure import AnonymousMemory, disk_bytes, drop_page_cache, forked, processor_seconds
from peers import BATCH, CASES, LENGTH

_WARM_BATCHES = 8
_WARM_SECONDS = 0.25


def prepare(case):
    """Write the tokens in the format of the case, unless they exist."""
    done = case.folder / ".done"
    if not done.exists():
        case.prepare(np.load(case.array, mmap_mode="r"))
        done.touch()
    return True


def first(case, choice):
    """Seconds from opening to the first batch."""
    begun = time.perf_counter()
    case.open(**choice)
    case.touch(next(iter(case.batches())))
    return time.perf_counter() - begun


def memory(case, choice, seconds):
    """The growth of anonymous memory while opening and reading, workers included."""
    gc.collect()
    with AnonymousMemory(workers=True) as watched:
        case.open(**choice)
        Reader(case).run(seconds)
    return watched.growth


def half(case, choice, num_batches):
    """The state after `num_batches` batches, and a digest of the next batch."""
    case.open(**choice)
    batches = iter(case.batches())
    for _ in range(num_batches):
        next(batches)
    state = json.loads(json.dumps(case.state()))
    return {"state": state, "digest": _digest(next(batches))}


def resume(case, choice, state):
    """Seconds from opening to the first batch after `state`, and a digest of that batch."""
    begun = time.perf_counter()
    case.open(**choice)
    case.restore(state)
    batch = next(iter(case.batches()))
    case.touch(batch)
    return {"seconds": time.perf_counter() - begun, "digest": _digest(batch)}


def cold(case, choice, num_batches):
    """Tokens per second, opening included, from files that are not in the page cache."""
    drop_page_cache(case.folder)
    before, begun = disk_bytes(), time.perf_counter()
    case.open(**choice)
    count = 0
    while count < num_batches:
        for batch in case.batches():
            case.touch(batch)
            count += 1
            if count == num_batches:
                break
    seconds = time.perf_counter() - begun
    return {"speed": count * BATCH * LENGTH / seconds, "disk_bytes": disk_bytes() - before}


def _digest(batch):
    tensors = batch.values() if isinstance(batch, dict) else batch
    joined = b"".join(np.ascontiguousarray(each.numpy()).tobytes() for each in tensors)
    return hashlib.sha256(joined).hexdigest()[:16]


class Reader:
    """Reads the batches of an open case, epoch after epoch."""

    def __init__(self, case):
        self._case = case
        self._batches = iter(case.batches())
        case.check(next(self._batches))

    def run(self, seconds):
        """Tokens per second and processor seconds per token, measured for `seconds`.

        Batches that were prepared while other cases were measured are read first and not
        counted. The time in which a peer starts another epoch is not counted either.
        """
        self._warm(_WARM_BATCHES, min(_WARM_SECONDS, seconds))
        count, skipped, took = 0, 0, 0.0
        spent = processor_seconds()
        while took < seconds:
            begun = time.perf_counter()
            number, ended = self._read(begun + seconds - took)
            took += time.perf_counter() - begun
            count += number
            if ended:
                skipped += self._warm(_WARM_BATCHES, 0.0)
        spent = (processor_seconds() - spent) / (count + skipped)
        return {
            "tokens_per_second": count * BATCH * LENGTH / took,
            "processor_seconds": spent
            / (BATCH * LENGTH),  # per token; includes the start of other epochs
        }

    def _read(self, deadline):
        touch, clock, count = self._case.touch, time.perf_counter, 0
        for batch in self._batches:
            touch(batch)
            count += 1
            if clock() >= deadline:
                return count, False
        self._batches = iter(self._case.batches())
        return count, True

    def _warm(self, num_batches, seconds):
        begun, count = time.perf_counter(), 0
        while count < num_batches or time.perf_counter() - begun < seconds:
            try:
                self._case.touch(next(self._batches))
            except StopIteration:
                self._batches = iter(self._case.batches())
            count += 1
        return count


def serve(case, choice, answer):
    """Measure the speed for the number of seconds on each line, until a line is null."""
    case.open(**choice)
    reader = Reader(case)
    answer({"ready": True})
    while seconds := json.loads(_line()):
        answer(reader.run(seconds))
    return True


ORDERS = {
    "prepare": prepare,
    "first": first,
    "memory": memory,
    "half": half,
    "resume": resume,
    "cold": cold,
    "serve": serve,
}


def _line():
    """One line of stdin, read byte by byte: the next line may be for another process."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(0)
        line += byte
    return line


def main():
    name, folder = sys.argv[1], Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(value):
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    def attempt(work):
        """The result of `work()`, or its error."""
        try:
            return {"result": work()}
        except Exception as error:  # noqa: BLE001  (the failure of a peer is reported)
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}

    made = attempt(lambda: CASES[name](folder))
    answer({"error": made["error"]} if "error" in made else {"ready": True})
    while "result" in made:
        order = json.loads(_line())
        work = ORDERS[order.pop("order")]
        if work is serve:
            order["answer"] = answer
        answer(forked(lambda: attempt(lambda: work(made["result"], **order))))  # noqa: B023


if __name__ == "__main__":
    main()
