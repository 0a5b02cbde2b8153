"""The first rows of a streamed run, for ever.

Changing the literal here changes the order of every streamed run: it needs an entry under "Data
order" in CHANGELOG.md.
"""

import numpy as np
import pytest

import penstock
from penstock.loader import BatchFormat

FIRST_ROWS = {
    "windows": [472, 485, 197, 88, 74, 275, 334, 265, 321, 433, 467, 415, 185, 282, 105, 220],
    "packs": [9, 0, 12, 14, 13, 8, 1, 3, 5, 6, 2, 4, 7, 15, 16, 11],
}


@pytest.mark.usefixtures("small_slices")
def test_the_first_16_positions_of_a_streamed_run(tmp_path):
    texts = [f"{number} some text " + "and more " * (number % 7) for number in range(400)]
    with penstock.stream(penstock.Texts(texts), tmp_path / "store", tokenizer="bytes") as store:
        found = {}
        for name, rows in {
            "windows": penstock.Windows(store, length=8),
            "packs": penstock.Packs(store, length=256),
        }.items():
            loader = penstock.Loader(rows, batch_size=16, seed=17, format=BatchFormat(ids=True))
            found[name] = np.asarray(next(iter(loader))["sample"]).tolist()

    assert found == FIRST_ROWS
