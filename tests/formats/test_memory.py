"""Arrays in memory, and objects that are none: an error in words, and no value lost in silence."""

import io

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PlanError, StoreError


@pytest.mark.parametrize(
    "named",
    [
        {"requires_grad": True},
        {"dtype": "bfloat16"},
        {"dtype": "int64", "device": "meta"},
        {"dtype": "int64", "layout": "sparse_coo"},
    ],
)
def test_tensors_that_are_no_array_of_ids_are_refused_in_words(named):
    torch = pytest.importorskip("torch")
    is_type = ("dtype", "layout")
    made = torch.zeros(3, **{k: getattr(torch, v) if k in is_type else v for k, v in named.items()})

    with pytest.raises(StoreError, match=r"^Tensor cannot be read .*tensor on the CPU"):
        ps.open_tokens(made)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[1, 2], [3]], r"^list cannot be read .*numpy\.concatenate joins"),
        (["a.bin", "b.bin"], r"Windows\(\[open_tokens\(path\), …\], length\)"),
        ([], r"The array holds float64 values"),
        (np.ma.array([1, 2, 3], mask=[0, 1, 0]), r"masked.*compressed\(\)"),
        (io.StringIO("1 2"), r"StringIO is neither a path nor an array"),
        (None, r"NoneType is neither a path nor an array"),
    ],
)
def test_objects_that_are_no_array_of_ids_are_refused_in_words(given, message):
    with pytest.raises(StoreError, match=message):
        ps.open_tokens(given)


def test_a_masked_array_without_a_mask_is_read():
    assert ps.open_tokens(np.ma.array([1, 2, 3])).num_tokens == 3


def test_stores_and_files_that_are_open_already_are_refused_as_such(tmp_path):
    store = ps.build(ps.Texts(["To be,", "or not"]), tmp_path / "store", tokenizer="bytes")
    np.save(tmp_path / "x.npy", np.arange(9))

    for given in (store, ps.open_tokens(tmp_path / "x.npy"), ps.ArrayFile(tmp_path / "x.npy")):
        with pytest.raises(StoreError, match=r"is open already\. Pass it to Windows"):
            ps.open_tokens(given)


def test_a_dataset_in_memory_is_refused_with_the_way_to_its_files():
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]]})

    for given in (dataset, datasets.DatasetDict(train=dataset)):
        with pytest.raises(StoreError, match=r"save_to_disk"):
            ps.open_tokens(given)


@pytest.mark.parametrize("name", ["format", "column"])
def test_arguments_that_describe_files_are_refused_for_an_array(name):
    with pytest.raises(StoreError, match=rf"{name}='npy': an array in memory has none"):
        ps.open_tokens(np.arange(3), **{name: "npy"})


def test_rows_of_an_array_say_how_to_open_it():
    for given in (np.arange(99), list(range(99))):
        with pytest.raises(StoreError, match=r"open_tokens\(array\)"):
            ps.Windows(given, 4)


@pytest.mark.parametrize("name", ["b", "b.bin", "b.idx"])
def test_the_missing_ids_of_an_index_are_named_for_the_prefix_too(layouts, tmp_path, name):
    layouts.write_megatron(tmp_path / "b", [[1, 2], [3]])
    (tmp_path / "b.bin").unlink()

    with pytest.raises(StoreError, match=r"b\.bin does not exist; Megatron's files are a pair"):
        ps.open_tokens(tmp_path / name)


def test_files_without_documents_are_not_packed_and_are_named(layouts, tmp_path):
    layouts.write_llmc(tmp_path / "x.bin", [[1, 2], [3]])

    with pytest.raises(PlanError, match=r"x\.bin does not record where documents end"):
        ps.Packs(tmp_path / "x.bin", 4)
