"""The file fingerprints.jsonl: which rows and tokens each step of a run has read.

    {"step": 12, "position": 96, "rows": "4f0c…", "tokens": "91ab…"}

`step` is the number of the step as its trainer counts, and `position` the position after it. `rows`
is computed from the source, epoch, sample and position of each row, `tokens` from the tokens of
each row and from which of them are targets. Both are sums over all rows of a step on all ranks, so
the file does not depend on the number of ranks, and the sum over several steps is the fingerprint
of a larger step. Two runs that differ only in the text of their stores have equal `rows` and other
`tokens`.

One process writes the file. The trainer of penstock sums the fingerprints of all ranks together
with other numbers of a step. The callbacks of other trainers do not communicate: the process that
writes computes the fingerprints of all ranks from the plan and the stores. Either way, the rows are
read a second time, in 15 to 26 ns per token (one thread of a busy machine).
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.disk import read_file, sync_file, write_file
from penstock.loader.read import Assembler
from penstock.loader.run import AnyPlan, Run
from penstock.loader.state import of_samples, of_tokens, source_keys
from penstock.rows.protocol import Array, Integers

FILE_NAME = "fingerprints.jsonl"
_MODULUS = 2**64
_READ_ROWS = 256  # rows at a time, so that a step of any size needs little memory


class LoggedStep(NamedTuple):
    """A line of the file."""

    step: int
    position: int
    """The position after the step."""
    rows: int
    tokens: int | None
    """None in a log of `log_fingerprints`, which has one fingerprint of the kind of its loader."""


class RowReader:
    """Reads the rows at any positions of a plan, as a loader would, with their fingerprints.

    Args:
        plan: The order of the rows.
        check: Called with the tokens of rows that were read, and may raise.
    """

    def __init__(self, plan: AnyPlan, check: Callable[[Array], None] | None = None) -> None:
        self.plan = plan
        self._check = check
        run = Run(plan, {0: 1}, 0, 1, epochs=None, num_steps=None, drop_last=True)
        self.assembler = Assembler(run)
        self._keys = source_keys(plan.names)

    def locate(self, positions: Integers) -> Integers:
        """Return source, epoch, sample and position of each row, (4, rows)."""
        return np.stack([*self.plan.locate(positions), positions])

    def values(self, positions: Integers) -> tuple[Integers, Integers]:
        """Return what each row adds to the two fingerprints of a step: `rows` and `tokens`."""
        found = np.zeros((2, len(positions)), np.int64)
        for first in range(0, len(positions), _READ_ROWS):
            some = slice(first, first + _READ_ROWS)
            located = self.locate(positions[some])
            tokens, targets, _ = self.assembler.read(located)
            if self._check is not None:
                self._check(tokens)
            found[0, some] = of_samples(self._keys[located[0]], *located[1:]).view(np.int64)
            found[1, some] = of_tokens(tokens, targets, positions[some]).view(np.int64)
        return found[0], found[1]

    def fingerprints(self, start: int, stop: int) -> tuple[int, int]:
        """Return the fingerprints `rows` and `tokens` of the positions from `start` to `stop`."""
        return self.sums(np.arange(start, stop, dtype=np.int64))

    def sums(self, positions: Integers) -> tuple[int, int]:
        """Return the fingerprints `rows` and `tokens` of the rows at some positions."""
        # Sums of int64 wrap around to the same bits as sums of uint64.
        rows, tokens = (int(each.sum()) for each in self.values(positions))
        return rows % _MODULUS, tokens % _MODULUS


class FingerprintLog:
    """The log of a run, open for writing; one process writes it for all ranks.

    Args:
        directory: The directory of the run. Lines of steps after `position` are removed from the
            file: a run that resumes from a checkpoint takes these steps again.
        plan: The order of the rows.
        position: The position from which the run continues.
    """

    def __init__(self, directory: str | os.PathLike[str], plan: AnyPlan, position: int = 0) -> None:
        self._path = Path(directory) / FILE_NAME
        self._reader = RowReader(plan)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [each for each in read_fingerprints(self._path) if each.position <= position]
        # A temporary file that is renamed: a kill leaves the old lines or the new ones.
        write_file(self._path, [_line(each) for each in kept])

    def __repr__(self) -> str:
        return f"FingerprintLog({str(self._path)!r})"

    def add(self, step: int, *spans: tuple[int, int]) -> LoggedStep:
        """Write the line of a step that has read the positions of `spans`, in ascending order.

        The rows of all ranks are read again, to compute the fingerprints.
        """
        found = [self._reader.fingerprints(*span) for span in spans]
        rows, tokens = (sum(each) % _MODULUS for each in zip(*found, strict=True))
        return self.write(LoggedStep(step, spans[-1][1], rows, tokens))

    def write(self, logged: LoggedStep) -> LoggedStep:
        """Write the line of a step whose fingerprints are known; returns it."""
        # Opened for each line, so that a crash loses no line that was written before.
        with self._path.open("ab") as stream:
            stream.write(_line(logged))
        return logged

    def sync(self) -> None:
        """Force all lines to disk; called before a checkpoint is written."""
        sync_file(self._path, kept=True)


def _line(logged: LoggedStep) -> bytes:
    tokens = {} if logged.tokens is None else {"tokens": f"{logged.tokens:016x}"}
    named = {"step": logged.step, "position": logged.position, "rows": f"{logged.rows:016x}"}
    return json.dumps({**named, **tokens}).encode() + b"\n"


def read_fingerprints(path: Path) -> Iterator[LoggedStep]:
    """Yield the steps of a log, in the order of the file; none if there is no such file.

    A last line that a kill has cut short is skipped. A log of `log_fingerprints` can be read too.
    """
    if not path.exists():
        return
    for line in read_file(path).split(b"\n"):
        try:
            entry = json.loads(line)
            tokens = entry.get("tokens")
            yield LoggedStep(
                int(entry["step"]),
                int(entry["position"]),
                int(entry["rows" if "rows" in entry else "fingerprint"], 16),
                None if tokens is None else int(tokens, 16),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
