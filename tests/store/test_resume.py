"""A killed build continues with what it wrote, and only with that: damage is noticed."""

import json
import logging
import random
import shutil
import tempfile
from pathlib import Path

import pytest

import penstock
from penstock.errors import PenstockError, StoreError
from penstock.store.journal import Journal

pytestmark = pytest.mark.usefixtures("small_slices")
SETTINGS = {"tokenizer": "bytes", "documents": "lines", "max_bad": 10, "workers": 1}


def build(inputs, store, **settings):
    return penstock.build(inputs, store, **{**SETTINGS, **settings})


def kill(inputs, store, at_least=3, **settings):
    """Build until some slices are sealed, and then stop."""

    def stop(progress):
        if len(list(store.glob(".slice-*.json"))) >= at_least:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(inputs, store, progress=stop, **settings)


@pytest.fixture
def tmp_path(tmp_path_factory):
    """In memory where there is such a place: hundreds of builds are made, and syncs are slow."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def killed(inputs, tmp_path):
    """An unfinished build with several sealed slices, and a copy of it."""
    kill(inputs, tmp_path / "store")
    shutil.copytree(tmp_path / "store", tmp_path / "kept")
    return tmp_path / "store"


@pytest.fixture
def clean(inputs, tmp_path, sums):
    build(inputs, tmp_path / "clean")
    return sums(tmp_path / "clean")


def flip(path, place, bit=0):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["tokens", "bounds", "origin"])
def test_a_byte_that_was_flipped_in_a_sealed_part_is_made_again(
    kind, inputs, killed, clean, sums, caplog
):
    damaged = sorted(killed.glob(f"part-*.{kind}.npy"))[1]
    flip(damaged, damaged.stat().st_size - 1)
    with caplog.at_level(logging.WARNING, "penstock"):
        build(inputs, killed)

    assert sums(killed) == clean
    assert f"{damaged} is damaged: its XXH3-128 is" in caplog.text
    assert "the journal says" in caplog.text
    assert "Its slice is made again." in caplog.text


def test_a_sealed_part_of_either_side_of_a_split_is_made_again(inputs, tmp_path, sums):
    build(inputs, tmp_path / "clean", split="hash:0.4")
    kill(inputs, tmp_path / "store", split="hash:0.4")
    for side in ("train", "val"):
        flip(next((tmp_path / "store" / side).glob("part-*.tokens.npy")), 140)
    build(inputs, tmp_path / "store", split="hash:0.4")

    assert sums(tmp_path / "store") == sums(tmp_path / "clean")


def test_an_intact_part_is_not_made_again(inputs, killed, clean, sums):
    names = [path.name[7:13] for path in killed.glob(".slice-*.json")]
    parts = [path for name in names for path in killed.glob(f"part-{name[1:]}.*")]
    before = [path.stat().st_mtime_ns for path in parts]
    build(inputs, killed)

    assert len(parts) >= 9
    assert [path.stat().st_mtime_ns for path in parts] == before
    assert sums(killed) == clean


def resumed(inputs, place, kept, clean, sums, damage):
    """What a build makes of a damaged journal: "the same store", or the message of an error."""
    shutil.rmtree(place)
    shutil.copytree(kept, place)
    damage(place)
    try:
        build(inputs, place)
    except PenstockError as error:
        return str(error)
    assert sums(place) == clean
    return "the same store"


def outcomes(inputs, killed, clean, sums, flips):
    """Flip one bit at a time; every outcome is the same store, or an error that can be followed."""
    kept, found = killed.with_name("kept"), {"the same store": 0, "error": 0}
    for name, place, bit in flips:
        outcome = resumed(
            inputs,
            killed,
            kept,
            clean,
            sums,
            lambda at, f=(name, place, bit): flip(at / f[0], *f[1:]),
        )
        if name.startswith(".slice"):
            assert outcome == "the same store"
        else:
            assert f"{name} is damaged, or was written by another version" in outcome
            assert "--overwrite" in outcome
        found["error" if name == ".building.json" else outcome] += 1
    return found


@pytest.fixture
def few(tmp_path):
    """An input of three slices, and an unfinished build of it with two sealed slices."""
    path = tmp_path / "few.txt"
    path.write_text("".join(f"line {number} of {'text ' * 40}\n" for number in range(50)))
    kill(path, tmp_path / "few", at_least=2)
    shutil.copytree(tmp_path / "few", tmp_path / "kept")
    return path, tmp_path / "few"


def journals(kept):
    return {path.name: path.stat().st_size for path in sorted(kept.glob(".*.json"))}


def test_a_flipped_bit_in_the_journal_never_gives_other_bytes(few, tmp_path, sums, figure):
    """250 bits of the journal, chosen by a seed; `make torture` flips one in every byte."""
    path, store = few
    build(path, tmp_path / "clean")
    every = [(name, place) for name, size in journals(store).items() for place in range(size)]
    chance = random.Random(15)
    flips = [(*each, chance.randrange(8)) for each in chance.sample(every, 250)]
    found = outcomes(path, store, sums(tmp_path / "clean"), sums, flips)

    figure(f"250 of {len(every):,} bytes of a journal flipped: {found}")
    assert found["the same store"] > 50
    assert found["error"] > 5


@pytest.mark.torture
def test_every_byte_of_the_journal_flipped_never_gives_other_bytes(few, tmp_path, sums, figure):
    path, store = few
    build(path, tmp_path / "clean")
    chance = random.Random(15)
    flips = [
        (name, place, chance.randrange(8))
        for name, size in journals(store).items()
        for place in range(size)
    ]
    found = outcomes(path, store, sums(tmp_path / "clean"), sums, flips)
    figure(f"{len(flips):,} bytes of a journal flipped, one at a time: {found}")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data + b"\n",
        lambda data: bytes(len(data)),
        lambda data: b"[]",
        lambda data: b"{}",
        lambda data: b"null",
        lambda data: b"[" * 100_000,
        lambda data: b'{"sha256": 1}',
        lambda data: data.replace(b'"documents":', b'"documents": '),
        lambda data: json.dumps({**json.loads(data), "more": 1}).encode(),
    ],
    ids=lambda damage: None,
)
@pytest.mark.parametrize("name", [".slice-000001.json", ".building.json"])
def test_a_journal_that_was_cut_or_replaced_is_noticed(
    name, damage, inputs, killed, clean, sums, caplog
):
    def replace(place):
        path = place / name
        before = path.read_bytes()
        path.write_bytes(damage(before))
        assert path.read_bytes() != before

    outcome = resumed(inputs, killed, killed.with_name("kept"), clean, sums, replace)
    if name == ".building.json":
        assert ".building.json is damaged, or was written by another version" in outcome
    else:
        assert outcome == "the same store"
        assert "Its slice is made again." in caplog.text


def test_who_only_looks_at_a_journal_removes_nothing(killed):
    """`penstock info` holds no lock, and the build may be running."""
    flip(killed / ".slice-000001.json", 100)
    before = sorted(killed.iterdir())
    found = Journal(killed).sealed()

    assert 1 not in [record.number for record in found]
    assert sorted(killed.iterdir()) == before


def test_a_record_of_another_slice_is_noticed(inputs, killed, clean, sums, caplog):
    shutil.copy(killed / ".slice-000000.json", killed / ".slice-000001.json")
    build(inputs, killed)

    assert sums(killed) == clean
    assert "it is the record of slice 0. Its slice is made again." in caplog.text


def test_a_record_and_the_parts_of_another_build_are_noticed(
    inputs, killed, clean, sums, tmp_path, caplog
):
    """The same inputs by name and size; only what they hold differs."""
    other = tmp_path / "other"
    shutil.copytree(inputs, other / "in")
    for path in (other / "in").iterdir():
        path.write_bytes(path.read_bytes().replace(b"1", b"7"))
    kill(other / "in", other / "store")
    for path in other.glob("store/*-00000*"):
        shutil.copy(path, killed)
    shutil.copy(other / "store" / ".slice-000001.json", killed)
    build(inputs, killed)

    assert sums(killed) == clean
    assert "it belongs to another build. Its slice is made again." in caplog.text


def test_the_advice_about_a_damaged_journal_can_be_followed(inputs, killed, clean, sums):
    flip(killed / ".building.json", 100)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"cannot be resumed\. Start again with .*--overwrite"):
            build(inputs, killed)
    build(inputs, killed, overwrite=True)

    assert sums(killed) == clean


def test_the_advice_about_a_damaged_journal_of_an_append_can_be_followed(inputs, tmp_path, sums):
    more = tmp_path / "more.txt"
    more.write_text("".join(f"appended line {number}\n" for number in range(900)))
    for name in ("clean", "store"):
        build(inputs, tmp_path / name)
    build(more, tmp_path / "clean", append=True)
    before = penstock.verify(tmp_path / "store").digest
    kill(more, tmp_path / "store", append=True)
    flip(tmp_path / "store" / ".building.json", 100)
    with pytest.raises(StoreError, match=r"Delete this file and build again: the finished store"):
        build(more, tmp_path / "store", append=True)
    assert penstock.verify(tmp_path / "store").digest == before
    (tmp_path / "store" / ".building.json").unlink()
    build(more, tmp_path / "store", append=True)

    assert sums(tmp_path / "store") == sums(tmp_path / "clean")


def test_damaged_times_of_inputs_are_ignored_and_the_contents_compared(inputs, tmp_path, sums):
    store = tmp_path / "store"
    build(inputs, store)
    before, stamps = sums(store), tmp_path / ".store.stamps.json"
    data = stamps.read_bytes()
    chance = random.Random(7)
    for _ in range(25):
        stamps.write_bytes(data)
        flip(stamps, chance.randrange(len(data)), chance.randrange(8))
        build(inputs, store)  # nothing to do
        assert stamps.read_bytes() == data  # written again
    for foreign in (b"", b"[]", b"null", b'{"store":1}', b"[" * 100_000):
        stamps.write_bytes(foreign)
        build(inputs, store)
    assert sums(store) == before

    # Other contents are noticed although the times say nothing.
    stamps.write_bytes(data[:-1])
    path = inputs / "a.txt"
    path.write_bytes(path.read_bytes().replace(b"line 1", b"LINE 1"))
    with pytest.raises(StoreError, match=r"a\.txt was changed or replaced"):
        build(inputs, store)


def test_rejects_are_counted_once_for_each_slice(inputs, tmp_path):
    """A build of 100,000 slices must not count the first ones 100,000 times."""
    from penstock.options import BuildOptions
    from penstock.sources.batch import Reject, Tally
    from penstock.store.job import Job
    from penstock.store.journal import SealedSlice
    from penstock.store.refusals import BadRecords

    class Counted(dict):
        num_read = 0

        def get(self, key):
            self.num_read += 1
            return super().get(key)

    bad = BadRecords(Job(BuildOptions(tokenizer="bytes", max_bad=20), tmp_path, [], None, {}))
    sealed = Counted()
    for number in range(1_000):
        reject = [Reject(0, 0, 1, "bad_utf8", "x")] * (number % 100 == 0)
        sealed[number] = SealedSlice(number, Tally(documents=9), rejects=reject)
        bad.refuse_bad(sealed)
    bad.refuse_bad(sealed, ended=True)

    assert sealed.num_read <= 2_001  # each slice, and the one after it


@pytest.mark.parametrize("name", [".building.json", ".slice-000001.json", "part-00000.tokens.npy"])
def test_a_temporary_file_of_a_killed_build_is_no_file_of_the_user(name, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    left = store / f".{name}.5847.029e62b4d165.tmp"
    left.write_bytes(b"half")
    penstock.build(penstock.Texts(["one"]), store, tokenizer="bytes")

    assert not left.exists()
