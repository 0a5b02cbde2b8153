"""Every place that takes a store takes token files, and refuses the same ones for one reason."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import MissingStoreError, StoreError
from penstock.train.command import choose_recipe, run_recipe

SMALL = {"training.steps": 1, "training.global_batch_size": 4, "training.batch_size": 4}
SMALL |= {"model.layers": 1, "model.heads": 1, "model.width": 8, "data.length": 16}


def train(path, output, **settings):
    recipe = choose_recipe(
        str(path), {**SMALL, "output": str(output), **settings}, "cpu", lambda _: None
    )
    return run_recipe(recipe, device="cpu", log=lambda _: None)


@pytest.mark.parametrize(("layout", "name"), [("litdata", "chunk-0-0.bin"), ("mds", "*.mds")])
def test_one_file_of_a_set_with_an_index_is_never_read_as_ids(layouts, tmp_path, layout, name):
    directory = tmp_path / "set"
    write, *_ = layouts.LAYOUTS[layout]
    write(directory, [[*range(50, 90)]] * 20, "uint16")
    file = next(directory.glob(name))

    with pytest.raises(StoreError, match=rf"one file of a set of the format '{layout}'"):
        ps.ArrayFile(file, "uint16")
    if layout == "litdata":
        with pytest.raises(StoreError, match=r"Pass its directory, .*set"):
            train(file, tmp_path / "run")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1, 2, -5, 3, 4]), "has the token id -5, and no id is negative"),
        (np.array([1, 2**31], "u4"), "has the token id 2,147,483,648"),
        (np.zeros((2, 2), int), "one-dimensional"),
    ],
)
def test_an_npy_file_is_refused_alike_by_windows_and_open_tokens(tmp_path, array, message):
    np.save(tmp_path / "x.npy", array)

    for opens in (ps.open_tokens, lambda path: ps.Windows(path, 1)):
        with pytest.raises(StoreError, match=message):
            opens(tmp_path / "x.npy")


def test_bytes_after_an_array_are_refused_and_ids_of_int16_are_read(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(50, dtype="i2"))
    assert ps.Windows(tmp_path / "x.npy", 4).read(np.array([1]))["tokens"].tolist() == [
        [4, 5, 6, 7, 8]
    ]
    with (tmp_path / "x.npy").open("ab") as stream:
        stream.write(b"\0" * 8)
    with pytest.raises(StoreError, match="has 54 ids, but its header says 50"):
        ps.Windows(tmp_path / "x.npy", 4)


def test_a_path_may_begin_with_the_home_directory(layouts, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    layouts.write_llmc(tmp_path / "x_1.bin", [[1] * 50])

    assert ps.Windows("~/x_1.bin", 4).stream.num_tokens == 50
    assert ps.Windows("~/x_*.bin", 4).stream.num_tokens == 50


def test_brackets_in_names_of_existing_files_are_no_pattern(layouts, tmp_path):
    (tmp_path / "run[1]").mkdir()
    for prefix in ("run[1]/web", "web[v2]"):
        layouts.write_megatron(tmp_path / prefix, [[1, 2], [3]])
        assert ps.open_tokens(tmp_path / prefix).num_tokens == 3
    assert ps.Windows(tmp_path / "run[1]/w*.bin", 1).stream.num_tokens == 3


def test_windows_of_a_directory_is_refused_as_by_open_tokens(layouts, tmp_path):
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "README.md").write_text("x")
    layouts.write_llmc(tmp_path / "mixed" / "a_train_1.bin", [[1] * 9])
    (tmp_path / "raw").mkdir()
    layouts.write_raw(tmp_path / "raw" / "train.bin", [[1000] * 9])

    for name, message in {"mixed": r"README\.md", "raw": "need format="}.items():
        for opens in (ps.open_tokens, ps.verify, lambda path: ps.Windows(path, 1)):
            with pytest.raises(StoreError, match=message):
                opens(tmp_path / name)


def test_a_table_without_ids_is_refused_with_its_columns(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"words": [[1, 2], [3]]}), tmp_path / "x.parquet")

    with pytest.raises(StoreError, match='column="words"'):
        ps.Windows(tmp_path / "x.parquet", 1)


def test_verify_takes_token_files(layouts, tmp_path):
    layouts.write_megatron(tmp_path / "w", [[1, 2], [3]])
    seen = []

    assert ps.verify(tmp_path / "w", lambda *each: seen.append(each)).num_tokens == 3
    assert seen == [(1, 1)]
    with (tmp_path / "big.npy").open("wb") as stream:
        ids = np.ones(1_000_000, "i4")
        ids[40_000] = -7
        np.save(stream, ids)
    for given in (tmp_path / "big.npy", ps.open_tokens(tmp_path / "big.npy")):
        with pytest.raises(StoreError, match="token id -7"):
            ps.verify(given)


def test_a_link_without_its_file_is_never_left_out(layouts, tmp_path):
    (tmp_path / "data").mkdir()
    for number in (0, 2):
        layouts.write_llmc(tmp_path / "data" / f"train_{number}.bin", [[number] * 20])
    layouts.write_datatrove(tmp_path / "x.ds", [[1, 2], [3]])
    layouts.write_raw(tmp_path / "p.npy", [[1, 2, 3]])
    layouts.write_raw(tmp_path / "m.bin", [[1, 2, 3]])
    for name in ("data/train_1.bin", "x.ds.loss", "p.csv.gz", "m.idx"):
        (tmp_path / name).symlink_to("/not/mounted")

    for name, options in {
        "data": {},
        "x.ds": {},
        "p.npy": {"format": "olmo", "vocab_size": 9},
        "m.bin": {"format": "nanogpt", "vocab_size": 9},
    }.items():
        with pytest.raises(MissingStoreError, match="a link to /not/mounted, which does not exist"):
            ps.open_tokens(tmp_path / name, **options)
    for first in ("data", "data/*.bin"):
        (tmp_path / "data" / "train_0.bin").unlink(missing_ok=True)
        with pytest.raises(MissingStoreError, match="a link to /not/mounted"):
            ps.Windows(tmp_path / first, 4)


def test_one_missing_table_of_documents_does_not_lose_all_documents(layouts, tmp_path):
    for number in range(2):
        layouts.write_olmo(tmp_path / f"part-{number}.npy", [[1, 2], [3]])
    known = {"format": "olmo", "vocab_size": 9}
    assert len(ps.open_tokens(tmp_path, **known)) == 4
    (tmp_path / "part-1.csv.gz").unlink()

    with pytest.raises(
        MissingStoreError, match=r"part-1\.csv\.gz does not exist, but 1 of 2 files"
    ):
        ps.open_tokens(tmp_path, **known)
    assert Path(ps.open_tokens(tmp_path / "part-1.npy", **known).path).name == "part-1.npy"


def test_alternating_small_ids_are_read_with_the_dtype_that_the_message_names(tmp_path):
    pairs = np.stack([np.arange(100, 2100), np.ones(2000, int)], 1)
    pairs.astype("<u2").tofile(tmp_path / "p.bin")
    known = {"format": "nanogpt", "vocab_size": 50_257}
    with pytest.raises(StoreError, match='pass dtype="uint16"'):
        ps.open_tokens(tmp_path / "p.bin", **known)
    with pytest.raises(StoreError, match='pass dtype="uint16"'):
        ps.open_tokens(tmp_path / "p.bin", **known, dtype="uint32")

    # An ArrayFile has no vocabulary, so it cannot decide.
    with pytest.raises(StoreError, match=r'open_tokens\(path, format="nanogpt", dtype="uint16"'):
        ps.ArrayFile(tmp_path / "p.bin", "uint16")
    opened = ps.open_tokens(tmp_path / "p.bin", **known, dtype="uint16")
    assert opened.part_ids(0)[:4].tolist() == [100, 1, 101, 1]


def test_alternating_small_ids_of_a_column_of_bytes_are_read(layouts, tmp_path):
    documents = [[number, 1] * 20 for number in range(100, 120)]
    layouts.write_mds(tmp_path, documents, "uint16", encoding="bytes")

    opened = ps.open_tokens(tmp_path, dtype="uint16", vocab_size=300)
    assert [each.tolist() for each in opened] == documents


def test_an_index_of_datatrove_decides_the_dtype(layouts, tmp_path):
    documents = [[number, 1] for number in range(100, 300)]
    layouts.write_datatrove(tmp_path / "p.ds", documents)

    assert [each.tolist() for each in ps.open_tokens(tmp_path / "p.ds")] == documents


def test_a_pattern_that_also_matches_indices_and_masks_is_opened_alike(layouts, tmp_path):
    for number in range(5):
        layouts.write_datatrove(tmp_path / f"p{number}.ds", [[1, 2], [3, 4, 5]], loss=[1] * 5)

    for pattern in ("*", "p*"):
        assert ps.open_tokens(tmp_path / pattern).num_tokens == 25
        assert ps.Windows(tmp_path / pattern, 4).stream.num_tokens == 25
        ps.verify(tmp_path / pattern)


def test_a_pattern_without_matches_is_refused_alike(tmp_path):
    for opens in (ps.open_tokens, ps.verify, lambda path: ps.Windows(path, 4)):
        with pytest.raises(MissingStoreError, match=r"x\*\.ds matches no file"):
            opens(tmp_path / "x*.ds")


def test_a_file_that_is_no_table_is_named_beside_parquet_files_of_ids(tmp_path):
    pq.write_table(pa.table({"input_ids": [[1, 2], [3]]}), tmp_path / "part-0.parquet")
    (tmp_path / "README.md").write_text("About these files.")

    for opens in (ps.open_tokens, lambda path: ps.Windows(path, 1)):
        with pytest.raises(StoreError, match=r"1 of 2 files .* README\.md"):
            opens(tmp_path)


@pytest.mark.parametrize("name", ["chunk-0-0.bin", "größe-0.bin"])
def test_one_file_of_a_set_is_refused_through_a_link_and_by_any_name(layouts, tmp_path, name):
    directory = tmp_path / "set"
    layouts.write_litdata(directory, [[*range(50, 90)]] * 20, "uint16")
    index = (directory / "index.json").read_text("utf-8")
    (directory / "index.json").write_text(index.replace("chunk-0-0.bin", name), "utf-8")
    (directory / "chunk-0-0.bin").rename(directory / name)
    (tmp_path / "x.bin").symlink_to(directory / name)

    for path in (directory / name, tmp_path / "x.bin"):
        with pytest.raises(StoreError, match="one file of a set"):
            ps.ArrayFile(path, "uint16")
        with pytest.raises(StoreError, match="one file of a set"):
            ps.open_tokens(path, format="nanogpt", vocab_size=50_257)


@pytest.mark.parametrize("layout", ["datatrove", "parquet", "arrow"])
def test_a_set_of_which_some_files_have_no_mask_is_refused(layouts, tmp_path, layout):
    for number, has_mask in enumerate([True, False, True]):
        path = tmp_path / f"p{number}"
        if layout == "datatrove":
            layouts.write_datatrove(f"{path}.ds", [[1, 2, 3]], loss=[0, 1, 1] if has_mask else None)
            continue
        table = pa.table({"input_ids": [[1, 2, 3]], "loss_mask": [[0, 1, 1]]})
        table = table if has_mask else table.select(["input_ids"])
        if layout == "parquet":
            pq.write_table(table, f"{path}.parquet")
        else:
            with pa.ipc.new_stream(f"{path}.arrow", table.schema) as stream:
                stream.write(table)

    with pytest.raises(StoreError, match=r"p1\.\w+ has no loss.*, but 2 of 3 files have"):
        ps.open_tokens(tmp_path)
