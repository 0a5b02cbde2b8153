"""Rows with a transform, for a plan or a loader.

    Plan({"web": Windows(web, 1024), "code": Transformed(Windows(code, 1024), middle, seed=17)})

A changed row depends only on (seed, rows, epoch, sample). A plan's position determines epoch
and sample, so it determines the row. Each sample occurs once per epoch of its source, so no
row is changed the same way twice. The position itself is not the key: then a row would
change with the weights of the mixture. Here, two runs that differ only in weights read the
same rows in a different order.
"""

from functools import cached_property
from operator import index
from typing import Any, final

import numpy as np
import numpy.typing as npt

from penstock.digest import digest_json
from penstock.rows.protocol import RowsLike, WrappedRows
from penstock.transforms.draws import row_keys
from penstock.transforms.transform import Fields, Transform, gives_labels

TRANSFORM_FORMAT = 2
"""Part of every digest. Increased when the same arguments produce different rows."""


@final
class Transformed(WrappedRows):
    """Rows changed by a transform. They work like all other rows, and have a separate digest.

    Everything else (`num_tokens`, `part_rows`, `read_ahead`) is that of the rows.
    Immutable, and safe to read from several threads if the rows are.

    Args:
        rows: The rows to change, such as `Windows`, or rows that are already transformed.
        transform: The transform; use `Chain` for several.
        seed: Any integer. Another seed gives other random choices.
    """

    def __init__(self, rows: RowsLike, transform: Transform, *, seed: int = 0) -> None:
        super().__init__(rows)
        self.transform = transform
        self.seed = index(seed)
        self.gives_labels = self.gives_labels or gives_labels(transform)

    def __repr__(self) -> str:
        return f"Transformed({self.rows!r}, {self.transform!r}, seed={self.seed})"

    @cached_property
    def digest(self) -> str:
        """A digest of rows, transform and seed; the plan's digest is computed from it."""
        return digest_json(
            ["transformed", TRANSFORM_FORMAT, self.rows.digest, self.seed, self._described]
        )

    def describe(self) -> dict[str, Any]:
        """Return the description of the rows, with a short one of the transform added."""
        described = self.rows.describe()
        # Eight digits of the settings' digest: a state names the transform in under 100 bytes.
        short = f"{self._described['kind']} {digest_json(self._described)[:8]}"
        before = f"{described['transform']}, " if "transform" in described else ""
        return {**described, "transform": f"{before}{short} seed {self.seed}"}

    def read(self, samples: npt.ArrayLike) -> Fields:
        """Return the rows `samples` as they are in epoch 0."""
        samples = np.asarray(samples, np.int64)
        return self.read_epochs(samples, np.zeros(len(samples), np.int64))

    def read_epochs(self, samples: npt.ArrayLike, epochs: npt.ArrayLike) -> Fields:
        """Return the rows `samples`, each as it is in its epoch; the loader calls this."""
        samples, epochs = np.asarray(samples, np.int64), np.asarray(epochs, np.int64)
        # Inner rows that are transformed too must be read in the same epoch.
        fields = self.rows.read_epochs(samples, epochs)
        # The digest of the rows is part of the key, so two sources make independent choices.
        keys = row_keys(self.seed, self.rows.digest, epochs, samples)
        return self.transform.apply(fields, keys, self.length)

    @cached_property
    def _described(self) -> dict[str, Any]:
        return self.transform.describe()
