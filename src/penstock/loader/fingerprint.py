"""Fingerprints: a number for the contents of a batch that does not depend on the world size.

Each row has a 64-bit value, and the fingerprint of a batch is their sum modulo 2^64. A sum does not
depend on the order, so the fingerprints of all ranks add up to the fingerprint of one process that
reads the same global batch. Two runs whose fingerprints agree at a step read the same rows.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.digest import derive_key, mix64
from penstock.loader.dataloader import LoaderBatches
from penstock.rows.protocol import Array, Integers

if TYPE_CHECKING:
    from penstock.loader.batch_format import Batch
    from penstock.loader.loader import Loader


def log_fingerprints(batches: "Loader | LoaderBatches", path: str | Path) -> "Iterator[Batch]":
    """Yield the batches of a loader or its DataLoader, and append their fingerprints to a file.

    Each line is JSON: the step, the position after it, and the fingerprint on this rank. It is in
    the file before the batch is yielded. Use one file per rank.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    loader = batches.loader if isinstance(batches, LoaderBatches) else batches
    for batch in batches:
        # The loader has advanced already, so this step is the one before its next step.
        step, position = loader.step - 1, loader.position
        line = {"step": step, "position": position, "fingerprint": f"{loader.fingerprint:016x}"}
        # Opened for each line, so that a crash loses no line that was written before.
        with path.open("a", encoding="ascii") as stream:
            stream.write(json.dumps(line) + "\n")
        yield batch


def read_log(path: str | Path) -> dict[int, str]:
    """Return the fingerprint of each step in a log, by the position after the step.

    The last one counts if a step was repeated. The key is the position and not the step, because
    steps are counted anew after a resume with another batch size.
    """
    lines = Path(path).read_text(encoding="ascii").splitlines()
    entries = [json.loads(line) for line in lines]
    return {entry["position"]: entry["fingerprint"] for entry in entries}


_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)


def source_keys(names: Sequence[str]) -> NDArray[np.uint64]:
    """Return a key for each source, which depends on its name and not on its number."""
    return np.array([derive_key("fingerprint", name) for name in names], np.uint64)


def of_samples(keys: NDArray[np.uint64], *located: Integers) -> NDArray[np.uint64]:
    """Return a value for each row, from the key of its source, its epoch, sample and position."""
    # Mixed one after the other, so that (epoch 1, sample 2) and (epoch 2, sample 1) differ.
    value = keys
    for numbers in located:
        value = _mixed(value ^ numbers.astype(np.uint64))
    return value


def of_tokens(
    tokens: Array, targets: NDArray[np.bool_] | None, positions: Integers
) -> NDArray[np.uint64]:
    """Return a value for each row, from its tokens, its ignored targets and its position.

    `targets` is None if all targets count. The value of a row does not depend on other rows.
    """
    columns = np.arange(1, tokens.shape[1] + 1, dtype=np.uint64)
    # Odd weights: a product with one is 0 modulo 2^64 only for 0, so no changed token is missed.
    weights = _mixed(columns * np.uint64(_MULTIPLIERS[3])) | np.uint64(1)
    with np.errstate(over="ignore"):
        value = ((tokens.astype(np.uint64) + np.uint64(1)) * weights).sum(axis=1, dtype=np.uint64)
        if targets is not None:
            value += (~targets * weights[1:] * np.uint64(_MULTIPLIERS[1])).sum(1, dtype=np.uint64)
    return _mixed(_mixed(value) ^ positions.astype(np.uint64))


def combine(values: NDArray[np.uint64], begins: Sequence[int]) -> list[int]:
    """Return the fingerprints of batches: sums of the values of their rows, modulo 2^64.

    Each batch begins at one of `begins` and has at least one row.

    >>> combine(np.array([2**64 - 1, 3, 7], np.uint64), [0, 2])
    [2, 7]
    """
    sums: list[int] = np.add.reduceat(values, begins).tolist()
    return sums


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a bijection on 64 bits in which every bit of the result depends on every bit."""
    return mix64(value + np.uint64(_MULTIPLIERS[0]))
