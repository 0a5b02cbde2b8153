"""Sets whose files have different dtypes or byte orders: the ids of all rows are right."""

import numpy as np
import pytest

import penstock as ps

IDS = np.random.default_rng(17).integers(0, 50_000, 3_000)


@pytest.mark.parametrize("dtypes", [("<u2", "<u2"), ("<u2", "<u4"), (">u2", "<u2"), (">u2", ">u2")])
def test_rows_of_files_with_different_dtypes_have_the_ids_of_the_files(tmp_path, dtypes):
    halves = np.split(IDS, 2)
    for number, (ids, dtype) in enumerate(zip(halves, dtypes, strict=True)):
        np.save(tmp_path / f"{number}.npy", ids.astype(dtype))
    opened = ps.open_tokens(tmp_path / "*.npy", vocab_size=50_000)
    rows = ps.Windows(opened, 100)

    found = rows.read(np.arange(len(rows))[::-1])["tokens"]

    expected = [IDS[100 * row : 100 * row + 101] for row in range(len(rows))][::-1]
    assert found.tolist() == np.stack(expected).tolist()
