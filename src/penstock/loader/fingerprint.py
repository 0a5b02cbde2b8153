"""A number for what a batch holds, the same however it was shared out.

Each row has a 64-bit value; a batch's fingerprint is their sum modulo 2^64. Sums do not
depend on order, so the fingerprints of all ranks add up to that of one process reading
the same global batch. Two runs whose fingerprints agree at a step saw the same rows.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.digest import derive_key, mix64

__all__ = ["FingerprintLog", "combine", "of_samples", "of_tokens", "read_log", "source_keys"]


class FingerprintLog:
    """A file with a line for each step: step, position after it, fingerprint."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, step: int, position: int, fingerprint: int) -> None:
        """Add one line; it is in the file when this returns."""
        line = json.dumps(
            {"step": step, "position": position, "fingerprint": f"{fingerprint:016x}"}
        )
        with self._path.open("a", encoding="ascii") as stream:
            stream.write(line + "\n")


def read_log(path: str | Path) -> dict[int, str]:
    """The fingerprint of each step in a log, by the position after the step.

    The last one counts where a step was repeated. By position, because steps are counted
    anew after a resume with another batch size.
    """
    lines = Path(path).read_text(encoding="ascii").splitlines()
    entries = [json.loads(line) for line in lines]
    return {entry["position"]: entry["fingerprint"] for entry in entries}


_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)


def source_keys(names: Sequence[str]) -> NDArray[np.uint64]:
    """A key for each source, from its name: not from its place in the plan."""
    return np.array([derive_key("fingerprint", name) for name in names], np.uint64)


def of_samples(
    keys: NDArray[np.uint64],
    epochs: NDArray[np.int64],
    samples: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> NDArray[np.uint64]:
    """A value for each row, of its source, epoch, sample and position."""
    value = keys
    for numbers in (epochs, samples, positions):
        value = _mixed(value ^ numbers.astype(np.uint64))
    return value


def of_tokens(
    tokens: NDArray[Any], targets: NDArray[np.bool_] | None, positions: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """A value for each row, of its tokens, of which are no targets, and of its position.

    `targets` may be left out where all are: a row's value depends on no other row.
    """
    places = np.arange(1, tokens.shape[1] + 1, dtype=np.uint64)
    # Odd, so that no change of one token can vanish modulo 2^64.
    weights = _mixed(places * np.uint64(_MULTIPLIERS[3])) | np.uint64(1)
    with np.errstate(over="ignore"):
        value = ((tokens.astype(np.uint64) + np.uint64(1)) * weights).sum(axis=1, dtype=np.uint64)
        if targets is not None:
            value += (~targets * weights[1:] * np.uint64(_MULTIPLIERS[1])).sum(1, dtype=np.uint64)
    return _mixed(_mixed(value) ^ positions.astype(np.uint64))


def combine(values: NDArray[np.uint64], begins: Sequence[int]) -> list[int]:
    """The fingerprints of batches: sums of their rows' values, modulo 2^64.

    Each batch begins at one of `begins` and has at least one row.

    >>> combine(np.array([2**64 - 1, 3, 7], np.uint64), [0, 2])
    [2, 7]
    """
    return [int(each) for each in np.add.reduceat(values, begins)]


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection on 64 bits in which every bit of the result depends on every bit."""
    return mix64(value + np.uint64(_MULTIPLIERS[0]))
