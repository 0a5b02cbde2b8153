"""Rows with a transform, for a plan or a loader.

    Plan({"web": Windows(web, 1024), "code": Transformed(Windows(code, 1024), middle, seed=17)})

What a row becomes depends on (seed, rows, epoch, sample) and on nothing else. A position of
a plan decides the epoch and the sample, so it decides the row; and as a source's samples
come once in each of its epochs, no row is ever changed in the same way twice. Keyed by
position itself, a row would also change with the weights of a mixture and the order of
the others; so two runs that differ in those alone differ in order alone.
"""

from functools import cached_property
from operator import index
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt

from penstock.digest import digest_json
from penstock.transform.chain import Fields, Transform
from penstock.transform.draw import Integers, row_keys

__all__ = ["TRANSFORM_FORMAT", "Transformed"]

TRANSFORM_FORMAT = 2
"""Bound into every digest. It grows when equal arguments come to mean other rows."""


class _Rows(Protocol):
    length: int

    def __len__(self) -> int: ...

    @property
    def digest(self) -> str: ...

    def read(self, samples: Integers) -> Fields: ...


@final
class Transformed:
    """Rows as a transform leaves them; also rows, of another digest.

    What else the rows have (`num_tokens`, `part_rows`, `read_ahead`) is theirs. Immutable, and
    safe to read from several threads where the rows are.

    Args:
        rows: What to change, such as `Windows`, or rows that are transformed already.
        transform: How; `Chain` for several.
        seed: Any integer. Another seed, other changes.
    """

    def __init__(self, rows: _Rows, transform: Transform, *, seed: int = 0) -> None:
        self.rows = rows
        self.transform = transform
        self.seed = index(seed)
        self.length = rows.length

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Transformed({self.rows!r}, {self.transform!r}, seed={self.seed})"

    def __getattr__(self, name: str) -> Any:
        if name == "rows" or name.startswith("_"):  # not there yet, while being unpickled
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.rows, name)

    @property
    def gives_labels(self) -> bool:
        """Whether places predict themselves instead of the next token."""
        return any(getattr(each, "gives_labels", False) for each in (self.transform, self.rows))

    @cached_property
    def digest(self) -> str:
        """A digest of the rows, the transform and the seed; a plan's is computed from it."""
        return digest_json(
            ["transformed", TRANSFORM_FORMAT, self.rows.digest, self.seed, self._described]
        )

    def describe(self) -> dict[str, Any]:
        """What the rows say of themselves, and the transform in short."""
        rows: Any = self.rows
        told = rows.describe() if hasattr(rows, "describe") else {}
        short = f"{self._described['kind']} {digest_json(self._described)[:8]}"
        before = f"{told['transform']}, " if "transform" in told else ""
        return {**told, "transform": f"{before}{short} seed {self.seed}"}

    def read(self, samples: npt.ArrayLike) -> Fields:
        """The rows `samples` as they are in epoch 0."""
        samples = np.asarray(samples, np.int64)
        return self.read_epochs(samples, np.zeros(len(samples), np.int64))

    def read_epochs(self, samples: npt.ArrayLike, epochs: npt.ArrayLike) -> Fields:
        """The rows `samples`, each as it is in its epoch; what a loader reads."""
        samples, epochs = np.asarray(samples, np.int64), np.asarray(epochs, np.int64)
        inner: Any = self.rows
        if hasattr(inner, "read_epochs"):
            fields = inner.read_epochs(samples, epochs)
        else:
            fields = inner.read(samples)
        keys = row_keys(self.seed, self.rows.digest, epochs, samples)
        changed: Fields = self.transform.apply(fields, keys, self.length)
        return changed

    @cached_property
    def _described(self) -> dict[str, Any]:
        return self.transform.describe()
