"""The cache of decoded files, and rows of tables that cannot be read as tokens."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import StoreError
from penstock.formats.open import open_tokens

IDS = [[1, 2, 3], [4, 5]]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.mark.parametrize("suffix", [".ids", ".bounds", ".loss", ".json"])
@pytest.mark.parametrize("damage", ["delete", "empty", "truncate"])
def test_a_decoded_copy_without_one_of_its_files_is_decoded_again(
    layouts, cache, tmp_path, suffix, damage
):
    layouts.write_parquet(tmp_path / "x", IDS, loss_mask=[[1, 0, 1], [1, 1]])
    digest = open_tokens(tmp_path / "x").digest
    (file,) = cache.glob(f"*{suffix}")
    if damage == "delete":
        file.unlink()
    else:
        file.write_bytes(b"" if damage == "empty" else file.read_bytes()[:-1])

    again = open_tokens(tmp_path / "x")
    assert again.digest == digest
    assert again.part_loss(0).tolist() == [1, 0, 1, 1, 1]


@pytest.mark.parametrize("layout", ["mds-zstd", "litdata-zstd"])
@pytest.mark.parametrize("suffix", [".raw", ".json"])
@pytest.mark.parametrize("damage", ["delete", "empty", "truncate"])
def test_a_decompressed_copy_that_is_not_whole_is_decompressed_again(
    layouts, cache, tmp_path, layout, suffix, damage
):
    path, _ = layouts.write(layout, tmp_path, [*IDS, [6], [7, 8]])
    digest = open_tokens(path).digest
    for file in cache.glob(f"*{suffix}"):
        if damage == "delete":
            file.unlink()
        else:
            file.write_bytes(b"" if damage == "empty" else file.read_bytes()[:-1])

    assert open_tokens(path).digest == digest
    assert len([*cache.glob("*.raw")]) == len([*cache.glob("*.json")]) == 2


def test_the_answer_about_masks_is_found_again_if_its_file_is_empty(layouts, cache, tmp_path):
    layouts.write_arrow(tmp_path / "x", IDS, loss_mask=[[1, 1, 1], [1, 1]])
    digest = open_tokens(tmp_path / "x").digest
    for file in cache.glob("*.masks"):
        file.write_bytes(b"")

    assert open_tokens(tmp_path / "x").digest == digest


def test_a_cache_on_a_file_system_without_files_is_an_error_in_words(
    layouts, tmp_path, monkeypatch
):
    monkeypatch.setenv("PENSTOCK_CACHE", "/proc/nope")
    layouts.write_parquet(tmp_path / "x", IDS)

    with pytest.raises(StoreError, match="Set PENSTOCK_CACHE to a directory that can be written"):
        open_tokens(tmp_path / "x")


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("labels", [["a", "b", "c"], ["d", "e"]], "string"),
        ("labels", [[[1], [2], [3]], [[4], [5]]], "list<"),
        ("loss_mask", [["1", "0", "1"], ["1", "1"]], "string"),
    ],
)
def test_masks_of_other_values_than_integers_are_refused(cache, tmp_path, name, values, kind):
    pq.write_table(pa.table({"input_ids": IDS, name: values}), tmp_path / "x.parquet")

    with pytest.raises(StoreError, match=rf"column '{name}' \(list<.*{kind}.*Remove or rename"):
        open_tokens(tmp_path / "x.parquet")


def test_masks_of_booleans_are_read(cache, tmp_path):
    masks = [[True, False, True], [True, True]]
    pq.write_table(pa.table({"input_ids": IDS, "loss_mask": masks}), tmp_path / "x.parquet")

    assert open_tokens(tmp_path / "x.parquet").part_loss(0).tolist() == [1, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("labels", [1, 3], r"row 5,000 has the id 2 and the label 3 at token 1"),
        ("attention_mask", [1, 0, 1], r"attention mask of row 5,000 is 0 between tokens"),
        ("loss_mask", [1, 2], r"row 5,000 has the value 2 in the column 'loss_mask'"),
        ("loss_mask", [1], r"row 5,000 has 2 ids, but 1 values in 'loss_mask'"),
    ],
)
def test_a_bad_row_is_named_by_its_number_in_the_file(cache, tmp_path, name, bad, message):
    ids = [[1]] * 5000 + [[1, 2, 1][: max(2, len(bad))]]
    table = pa.table({"input_ids": ids, name: [[1]] * 5000 + [bad]})
    pq.write_table(table, tmp_path / "x.parquet")

    with pytest.raises(StoreError, match=message):
        open_tokens(tmp_path / "x.parquet")


def test_columns_of_the_same_name_are_refused_without_an_advice_that_does_not_help(cache, tmp_path):
    table = pa.Table.from_arrays([pa.array(IDS), pa.array(IDS)], names=["input_ids", "input_ids"])
    pq.write_table(table, tmp_path / "x.parquet")

    for column in (None, "input_ids"):
        with pytest.raises(StoreError, match=r"has 2 columns named input_ids\. Rename all but one"):
            open_tokens(tmp_path / "x.parquet", format="parquet", column=column)


def test_files_of_int64_and_uint64_are_not_called_floats(cache, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(3, dtype="i8"))
    np.save(tmp_path / "b.npy", np.arange(3, dtype="u8"))

    with pytest.raises(StoreError, match=r"int64 and uint64 files, which have no common dtype"):
        ps.open_tokens(tmp_path / "*.npy")


def test_a_table_of_another_kind_than_format_says_is_named_as_what_it_is(layouts, cache, tmp_path):
    layouts.write_parquet(tmp_path / "x", IDS)

    with pytest.raises(StoreError, match=r"contents of the format 'parquet', and not of 'arrow'"):
        open_tokens(tmp_path / "x", format="arrow")
