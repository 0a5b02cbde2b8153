"""A build whose directory or files are deleted while it runs ends with a sentence."""

import shutil

import pytest

import penstock
from penstock.errors import StoreError
from penstock.sources.settings import Texts

TEXTS = Texts([f"text {number}" for number in range(100)])


@pytest.mark.parametrize("mode", ["first", "append", "overwrite"])
@pytest.mark.parametrize("workers", ["threads:2", "processes:3"])
def test_a_build_whose_directory_is_deleted_says_so(mode, workers, tmp_path):
    store = tmp_path / "out" / "store"
    settings = {"tokenizer": "bytes", "split": "hash:0.5"}
    options = {}
    if mode != "first":
        penstock.build(Texts([f"old {number}" for number in range(20)]), store, **settings)
        options = {mode: True}

    def delete(progress):
        shutil.rmtree(store.parent, ignore_errors=True)

    with pytest.raises(StoreError, match=r"store\S* was deleted (while|or) .* Run this again"):
        penstock.build(TEXTS, store, workers=workers, progress=delete, **settings, **options)
    assert not store.exists()


def test_a_manifest_names_no_part_that_was_deleted_during_the_build(tmp_path):
    def delete(progress):
        for path in (tmp_path / "store").glob("part-*"):
            path.unlink()

    with pytest.raises(StoreError, match=r"part-00000\..*npy .* during the build.* Run this again"):
        penstock.build(TEXTS, tmp_path / "store", tokenizer="bytes", progress=delete)
    assert not (tmp_path / "store" / "penstock.json").exists()
    assert len(penstock.build(TEXTS, tmp_path / "store", tokenizer="bytes")) == 100
