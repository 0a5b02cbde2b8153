"""The file that keeps how documents were packed: found, made again, never believed blindly."""

import hashlib
import multiprocessing
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.disk import HEADER_BYTES, cache_directory
from penstock.errors import PlanError
from penstock.rows.packs import Packs

DOCUMENTS = [list(range(1, 2 + number * 7 % 23)) for number in range(60)]


@pytest.fixture
def store(write_store, tmp_path):
    return write_store(tmp_path / "store", [DOCUMENTS[:20], DOCUMENTS[20:21], DOCUMENTS[21:]])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept(place):
    return sorted(path.name for path in place.rglob("*.npy") if "part-" not in path.name)


def everything(packs):
    return {name: values.tolist() for name, values in packs.read(np.arange(len(packs))).items()}


def test_it_is_in_the_users_cache_under_a_name_of_what_was_packed(store, cache):
    Packs(store, 16)
    Packs(store.path, 16, borders=False)
    Packs(store, 17)

    assert [name.split("-")[:2] for name in kept(cache)] == [["packs", "16"], ["packs", "17"]]
    assert not [name for name in kept(store.path) if name != store.manifest.table]


def test_one_that_is_there_is_used_and_not_written_again(store, cache):
    Packs(store, 16)
    (path,) = (cache / "rows").iterdir()
    before = path.stat()
    Packs(store, 16)

    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino


def test_any_reader_of_npy_files_can_read_it(store, cache):
    packs = Packs(store, 16)
    (path,) = (cache / "rows").iterdir()
    words = np.load(path, allow_pickle=False)

    assert words.dtype == np.uint64
    assert words[8:11].tolist() == [3, len(packs), (len(words) - 16 - 3 - 1 - len(packs))]
    assert words[16:19].tolist() == packs.part_rows.tolist()


def test_one_that_came_with_a_store_is_not_used(store, cache):
    """Whoever sends a store could choose every row, under the digest of the rows that are right."""
    right = everything(Packs(store, 16))
    (path,) = (cache / "rows").iterdir()

    def repeat(words):
        words[-len(words) // 4 :] = words[-1]  # the same piece again and again, within its part

    forged(path, repeat)
    (store.path / ".rows").mkdir()
    path.rename(store.path / ".rows" / path.name)

    assert everything(Packs(store, 16)) == right
    assert kept(cache) == [path.name]


def test_where_nothing_can_be_written_rows_are_the_same(store, cache):
    right = everything(Packs(store, 16))
    shutil.rmtree(cache)
    cache.write_text("in the way")

    assert everything(Packs(store, 16)) == right


@settings(max_examples=60)
@given(data=st.data())
def test_one_that_was_changed_anywhere_is_made_again(write_store, scratch, data):
    store = write_store(scratch / "mutated", [DOCUMENTS])
    right = everything(Packs(store, 16))
    (path,) = (cache_directory() / "rows").iterdir()
    good = path.read_bytes()
    place = data.draw(st.integers(0, len(good) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "longer", "empty", "zeros"]))
    bad = {
        "flip": good[:place] + bytes([good[place] ^ (1 << place % 8)]) + good[place + 1 :],
        "cut": good[:place],
        "longer": good + good[place : place + 8] + b"\0" * 8,
        "empty": b"",
        "zeros": bytes(len(good)),
    }[how]
    path.write_bytes(bad)

    assert everything(Packs(store, 16)) == right
    assert path.read_bytes() == good


def test_one_of_another_store_or_length_is_not_used_under_its_name(
    write_store, tmp_path, store, cache
):
    other = write_store(tmp_path / "other", [DOCUMENTS[::-1]])
    right = [everything(Packs(each, length)) for each, length in ((store, 16), (store, 9))]
    names = sorted((cache / "rows").iterdir())
    Packs(other, 16)
    (foreign,) = set((cache / "rows").iterdir()) - set(names)
    swapped = [path.read_bytes() for path in names][::-1]
    for path, contents in zip(names, swapped, strict=True):
        path.write_bytes(contents)

    assert [everything(Packs(store, length)) for length in (16, 9)] == right
    for path in names:
        path.write_bytes(foreign.read_bytes())
    assert [everything(Packs(store, length)) for length in (16, 9)] == right


def forged(path, change):
    """The file with other words, and a digest that matches them."""
    data = path.read_bytes()
    words = np.frombuffer(data[HEADER_BYTES:], "<u8").copy()
    change(words)
    digest = hashlib.sha256(words[8:].tobytes()).digest()
    words[4:8] = np.frombuffer(digest, "<u8")
    path.write_bytes(data[:HEADER_BYTES] + words.tobytes())


@pytest.mark.parametrize("word", [8, 9, 10, 16, 17, 18, 19, 20, -1, -2, -20])
@pytest.mark.parametrize("value", [0, 1 << 24, (1 << 64) - 1])
def test_one_that_was_forged_reads_no_token_outside_its_part(store, word, value, cache):
    """Its digest fits, and yet a piece may not lie outside, nor a row be too long."""
    right = everything(Packs(store, 16))
    (path,) = (cache / "rows").iterdir()
    forged(path, lambda words: words.__setitem__(word, value))

    assert everything(Packs(store, 16)) == right


def test_pickles_in_its_place_are_not_opened(store, tmp_path, cache):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    right = everything(Packs(store, 16))
    (path,) = (cache / "rows").iterdir()
    np.save(path, np.array([Bomb()], dtype=object), allow_pickle=True)

    assert everything(Packs(store, 16)) == right
    assert not (tmp_path / "exploded").exists()


def _packed(path, barrier):
    barrier.wait(timeout=60)
    packs = Packs(path, 16)
    raise SystemExit(0 if len(packs) and not packs.num_empty else 1)


def test_several_processes_may_make_it_at_once(store, cache):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    processes = [context.Process(target=_packed, args=(store.path, barrier)) for _ in range(4)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(timeout=60)

    assert [each.exitcode for each in processes] == [0] * 4
    assert len(list((cache / "rows").iterdir())) == 1


def test_rows_of_the_parts_that_were_there_stay_when_parts_are_added(write_store, tmp_path):
    parts = [DOCUMENTS[:20], DOCUMENTS[20:35], DOCUMENTS[35:]]
    before = Packs(write_store(tmp_path / "before", parts[:2]), 16)
    after = Packs(write_store(tmp_path / "after", parts), 16)
    samples = np.arange(len(before))

    assert after.part_rows[:2].tolist() == before.part_rows.tolist()
    for name, values in before.read(samples).items():
        assert values.tolist() == after.read(samples)[name].tolist()


def test_a_store_without_documents_has_no_rows(write_store, tmp_path):
    for number, parts in enumerate(([], [[]], [[[]], [[], []]])):
        with pytest.raises(PlanError, match="holds no documents with tokens, so it has no rows"):
            Packs(write_store(tmp_path / str(number), parts), 8)
