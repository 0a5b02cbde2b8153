"""`overwrite` replaces a store and nothing else, and the old one stays until the end."""

import os

import pytest

import penstock
from penstock.errors import StoreError
from penstock.sources.settings import Texts
from penstock.store import overwrite as module

OLD, NEW = Texts(["old"] * 300), Texts(["new"] * 500)


def build(inputs, store, **options):
    return penstock.build(inputs, store, tokenizer="bytes", **options)


def hidden(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("before", [{}, {"split": "hash:0.5"}])
@pytest.mark.parametrize("after", [{}, {"split": "hash:0.5"}])
def test_overwrite_replaces_the_store(before, after, tmp_path, sums):
    texts = [Texts([f"{side} {number}" for number in range(99)]) for side in ("old", "new")]
    build(texts[0], tmp_path / "store", **before)
    with pytest.raises(StoreError, match="`penstock build --overwrite`"):
        build(texts[1], tmp_path / "store", **after)
    opened = build(texts[1], tmp_path / "store", overwrite=True, **after)
    build(texts[1], tmp_path / "clean", **after)

    assert opened.decode(0).startswith("new")
    assert sums(tmp_path / "store") == sums(tmp_path / "clean")
    assert not (tmp_path / ".store.new").exists()
    assert not (tmp_path / ".store.old").exists()


def test_overwrite_needs_no_store(tmp_path):
    assert len(build(NEW, tmp_path / "store", overwrite=True)) == 500
    (tmp_path / "empty").mkdir()
    assert len(build(NEW, tmp_path / "empty", overwrite=True)) == 500


def test_overwrite_builds_a_damaged_store_again(tmp_path):
    store = build(NEW, tmp_path / "store")
    (store.path / "part-00000.tokens.npy").write_bytes(b"damaged")

    build(NEW, tmp_path / "store", overwrite=True)
    assert len(penstock.verify(tmp_path / "store")) == 500


def test_the_old_store_stays_until_the_new_one_is_complete(tmp_path):
    build(OLD, tmp_path / "store")

    def stop(progress):
        assert len(penstock.verify(tmp_path / "store")) == 300
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(NEW, tmp_path / "store", overwrite=True, progress=stop)
    assert len(penstock.verify(tmp_path / "store")) == 300
    # The same call finishes it.
    assert len(build(NEW, tmp_path / "store", overwrite=True)) == 500
    # And so does a call with other settings, after another kill.
    with pytest.raises(KeyboardInterrupt):
        build(OLD, tmp_path / "store", overwrite=True, progress=_stop)
    assert len(build(Texts(["x"]), tmp_path / "store", overwrite=True)) == 1


def _stop(progress):
    raise KeyboardInterrupt


@pytest.mark.parametrize("others", [False, True])
def test_a_kill_between_the_two_renames_is_repaired_by_the_same_call(others, tmp_path, monkeypatch):
    build(OLD, tmp_path / "store")
    real = module.rename

    def rename(source, target):
        if source.name == ".store.new":
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(module, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        build(NEW, tmp_path / "store", overwrite=True)
    monkeypatch.undo()
    texts = Texts(["another"]) if others else NEW

    assert len(build(texts, tmp_path / "store", overwrite=True)) == len(texts)
    assert len(penstock.verify(tmp_path / "store")) == len(texts)
    assert not [name for name in hidden(tmp_path) if "old" in name or "new" in name]


def test_an_unfinished_build_is_replaced_and_the_same_one_resumed(tmp_path):
    for settings in ({}, {"eos": False}):
        with pytest.raises(KeyboardInterrupt):
            build(OLD, tmp_path / "store", progress=_stop, **settings, overwrite=True)
        assert (tmp_path / "store" / ".building.json").exists()
    assert len(build(OLD, tmp_path / "store", eos=False, overwrite=True)) == 300
    assert not [name for name in hidden(tmp_path) if "new" in name]


@pytest.mark.parametrize("where", ["", "train", ".store.new"])
def test_overwrite_never_deletes_a_directory_that_is_not_a_store(where, tmp_path):
    store = tmp_path / "store"
    build(OLD, store)
    folder = tmp_path / where if where == ".store.new" else store / where
    folder.mkdir(exist_ok=True)
    (folder / "thesis.tex").write_text("all of it")

    with pytest.raises(StoreError, match=r"holds thesis\.tex\. overwrite=True .* Move these"):
        build(NEW, store, overwrite=True)
    assert (folder / "thesis.tex").read_text() == "all of it"
    assert len(penstock.verify(store)) == 300


def test_overwrite_refuses_parts_without_a_manifest(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "part-00000.tokens.npy").write_bytes(b"whose?")

    with pytest.raises(StoreError, match=r"holds part-00000\.tokens\.npy"):
        build(NEW, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "part-00000.tokens.npy").exists()
    for number in range(1, 7):
        (tmp_path / "mine" / f"part-0000{number}.tokens.npy").touch()
    with pytest.raises(StoreError, match=r"00003\.tokens\.npy, part-00004\.tokens\.npy\. over"):
        build(NEW, tmp_path / "mine", overwrite=True)


def test_a_directory_that_cannot_be_renamed_is_emptied_first(tmp_path, monkeypatch):
    build(Texts([f"old {n}" for n in range(99)]), tmp_path / "store", split="hash:0.5")
    monkeypatch.setattr(os.path, "ismount", lambda path: True)

    assert len(build(NEW, tmp_path / "store", overwrite=True)) == 500
    assert not (tmp_path / "store" / "train").exists()


def test_a_link_to_a_store_stays_a_link(tmp_path):
    build(OLD, tmp_path / "big" / "store")
    (tmp_path / "link").symlink_to(tmp_path / "big" / "store")

    assert len(build(NEW, tmp_path / "link", overwrite=True)) == 500
    assert (tmp_path / "link").is_symlink()
    assert len(penstock.verify(tmp_path / "big" / "store")) == 500


def test_append_and_overwrite_contradict_each_other(tmp_path):
    with pytest.raises(StoreError, match="leave one of them out"):
        build(NEW, tmp_path / "store", append=True, overwrite=True)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("kind", ["old", "new"])
def test_a_kill_while_a_store_is_deleted_does_not_stop_the_next_overwrite(kind, tmp_path):
    build(OLD, tmp_path / "store")
    left = tmp_path / f".store.{kind}"
    left.mkdir()
    (left / "part-00001.tokens.npy").write_bytes(b"the manifest is deleted already")
    build(NEW, tmp_path / "store", overwrite=True)

    assert len(penstock.verify(tmp_path / "store")) == 500
    assert not left.exists()


def test_a_directory_of_other_files_is_not_taken_for_a_store_in_deletion(tmp_path):
    build(OLD, tmp_path / "store")
    (tmp_path / ".store.old").mkdir()
    (tmp_path / ".store.old" / "thesis.txt").write_text("mine")

    with pytest.raises(StoreError, match=r"it holds thesis\.txt"):
        build(NEW, tmp_path / "store", overwrite=True)
