"""A copy of a store on this machine is whole, or it is not there; remote ones: tests/remote."""

import shutil
from itertools import count

import pytest

import penstock
from penstock.errors import MissingStoreError, StoreError

pytestmark = pytest.mark.usefixtures("small_slices")


@pytest.fixture
def store(built):
    return built.path


def test_a_copy_has_the_same_bytes(store, tmp_path, sums):
    reports = []

    copied = penstock.copy(store, tmp_path / "copy", progress=lambda *now: reports.append(now))

    assert sums(copied.path) == sums(store)
    assert penstock.verify(copied.path)
    total = sum(path.stat().st_size for path in store.iterdir() if path.name != "penstock.json")
    assert reports[-1] == (total, total)
    inodes = {path.stat().st_ino for path in store.iterdir()}
    assert not inodes & {path.stat().st_ino for path in copied.path.iterdir()}


def test_a_complete_copy_returns_at_once_and_anything_else_is_refused(store, tmp_path):
    penstock.copy(store, tmp_path / "copy")
    reports = []
    penstock.copy(store, tmp_path / "copy", progress=lambda *now: reports.append(now))
    assert not reports

    other = penstock.build(penstock.Texts(["other"]), tmp_path / "other", tokenizer="bytes")
    with pytest.raises(StoreError, match=r"copy is not empty, and not a copy of .*other; it holds"):
        penstock.copy(other.path, tmp_path / "copy")


def test_both_sides_of_a_split_are_copied(inputs, tmp_path, sums):
    settings = {"tokenizer": "bytes", "documents": "lines", "max_bad": 10, "split": "hash:0.2"}
    penstock.build(inputs, tmp_path / "split", **settings)

    copied = penstock.copy(tmp_path / "split", tmp_path / "copy")

    assert copied.path == tmp_path / "copy" / "train"
    assert sums(tmp_path / "copy") == sums(tmp_path / "split")
    assert penstock.copy(tmp_path / "split" / "val", tmp_path / "one").manifest.contents["side"]


def test_damage_is_named_and_nothing_is_copied(store, tmp_path):
    path = store / "part-00001.tokens.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"!")

    with pytest.raises(StoreError, match=r"part-00001\.tokens\.npy is damaged: its XXH3-128"):
        penstock.copy(store, tmp_path / "copy")
    path.unlink()
    with pytest.raises(MissingStoreError, match=r"part-00001\.tokens\.npy is missing"):
        penstock.copy(store, tmp_path / "copy")
    with pytest.raises(MissingStoreError, match="absent does not exist"):
        penstock.copy(tmp_path / "absent", tmp_path / "copy")
    assert not any((tmp_path / "copy").iterdir())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    "every", [pytest.param(1, marks=pytest.mark.torture), 37], ids=["every", "some"]
)
def test_a_copy_that_is_killed_is_resumed(every, killed, store, tmp_path, sums, figure):
    target, expected = tmp_path / "copy", sums(store)
    for point in count(1, every):
        shutil.rmtree(target, ignore_errors=True)
        if not killed(lambda: penstock.copy(store, target), point):
            break
        if not (target / "penstock.json").exists():
            with pytest.raises(MissingStoreError):
                penstock.TokenStore(target)
        assert sums(penstock.copy(store, target).path) == expected
    assert point > every
    figure(f"a copy killed before every {every}. of its {point - 1} calls that touch the disk")
