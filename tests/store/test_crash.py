"""A build killed at every step that touches the disk, and gone on with.

The child is a fork of this process that ends itself by SIGKILL before its k-th call that
makes, renames, removes or syncs something. tests/torture does the same from outside, with strace.
"""

import json
import re
import shutil
import tempfile
from itertools import count
from pathlib import Path

import pytest

import penstock
from penstock.errors import StoreError
from penstock.sources.slices import cut

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def digest_of(place):
    """The digest of a store that passes `verify`, or None where there is none yet."""
    try:
        return penstock.verify(place).digest
    except StoreError as error:
        if re.search("not finished|there is no store|not a store", str(error)):
            return None
        raise


@pytest.fixture
def tmp_path():
    """In memory where there is such a place: a kill needs no real disk, and syncs take a while."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def prepare(inputs, tmp_path, monkeypatch):
    """For each scenario: what stands before, and the build that is killed."""
    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", 6_000)
    more = tmp_path / "more.txt"
    more.write_text("".join(f"appended line {number}\n" for number in range(400)))
    one = tmp_path / "one.txt"
    one.write_text("".join(f"line {number} of one document\n" for number in range(700)))

    def build(place, documents="lines", **options):
        source = more if options.get("append") else inputs if documents == "lines" else one
        options = {"tokenizer": "bytes", "workers": 2, "max_bad": 10, **options}
        penstock.build(source, place, documents=documents, **options)

    def prepare(scenario, place):
        if "one document" in scenario:
            return lambda: build(place, documents="auto", split="tail:0.3")
        split = {"split": "hash:0.3"} if "split" in scenario else {}
        if "append" not in scenario:
            return lambda: build(place, **split)
        build(place, **split)
        return lambda: build(place, append=True, **split)

    return prepare


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.torture)])
@pytest.mark.parametrize(
    "scenario", ["build", "split build", "append", "split append", "split one document"]
)
def test_a_build_killed_at_any_call_goes_on_to_the_same_bytes(
    killed, scenario, every, prepare, tmp_path, sums, figure
):
    """`make test` kills at every twentieth call, `make torture` at every call."""
    clean, place, kept = tmp_path / "clean", tmp_path / "store", tmp_path / "kept"
    prepare(scenario, clean)()
    build = prepare(scenario, place)
    if place.exists():
        shutil.copytree(place, kept)
    sides = ("train", "val") if "split" in scenario else ("",)
    allowed = {side: {digest_of(kept / side), digest_of(clean / side)} for side in sides}

    for point in count(1, every):
        shutil.rmtree(place, ignore_errors=True)
        if kept.exists():
            shutil.copytree(kept, place)
        if not killed(build, point):
            break
        for side in sides:
            assert digest_of(place / side) in allowed[side]
        build()
        assert sums(place) == sums(clean), f"killed before call {point}"

    figure(f"{scenario} killed before every {every}. of its {point - 1} calls that touch the disk")
    assert point > 20


def test_a_build_killed_again_and_again_gets_there(killed, prepare, tmp_path, sums):
    prepare("build", tmp_path / "clean")()
    build = prepare("build", tmp_path / "store")
    for point in (3, 9, 2, 14, 5, 7, 11, 30):
        killed(build, point)
    build()

    assert sums(tmp_path / "store") == sums(tmp_path / "clean")


def test_what_was_sealed_before_a_kill_is_not_done_again(killed, prepare, tmp_path):
    build = prepare("build", tmp_path / "store")
    assert killed(build, 45)
    sealed = [path.name[-7:-5] for path in (tmp_path / "store").glob(".slice-*")]
    parts = [p for number in sealed for p in (tmp_path / "store").glob(f"part-000{number}.*")]
    before = [path.stat().st_mtime_ns for path in parts]
    build()

    assert len(parts) >= 8
    assert [path.stat().st_mtime_ns for path in parts] == before


def test_after_a_kill_the_store_says_that_it_is_unfinished(killed, prepare, tmp_path):
    killed(prepare("build", tmp_path / "store"), 30)

    with pytest.raises(StoreError, match=r"not finished. Run the same `penstock build`"):
        penstock.TokenStore(tmp_path / "store")
    killed(prepare("split build", tmp_path / "split"), 30)
    with pytest.raises(StoreError, match=r"split/train holds a build that was not finished"):
        penstock.TokenStore(tmp_path / "split" / "train")


def test_a_killed_build_does_not_go_on_with_changed_inputs(killed, prepare, inputs, tmp_path):
    # At call 45 two slices are sealed. At call 30, two busy threads may not have sealed any.
    assert killed(prepare("build", tmp_path / "store"), 45)
    path = inputs / "a.txt"
    # Every slice of it: one that no sealed slice has read could still be read as it is now.
    path.write_bytes(path.read_bytes().replace(b"line ", b"LINE "))

    with pytest.raises(StoreError, match=r"unfinished build with other settings: stamps: "):
        penstock.build(inputs, tmp_path / "store", tokenizer="bytes", documents="lines", max_bad=10)


def test_a_killed_build_does_not_go_on_with_other_settings(killed, prepare, inputs, tmp_path):
    killed(prepare("build", tmp_path / "store"), 30)

    with pytest.raises(StoreError, match=r"reading\.errors: 'strict' -> 'replace'.*--overwrite"):
        penstock.build(
            inputs,
            tmp_path / "store",
            tokenizer="bytes",
            errors="replace",
            documents="lines",
            max_bad=10,
        )


def test_a_killed_append_must_be_repeated_before_anything_else(killed, prepare, inputs, tmp_path):
    killed(prepare("append", tmp_path / "store"), 12)

    assert len(penstock.verify(tmp_path / "store")) == 500
    with pytest.raises(StoreError, match=r"append that was not finished\. Repeat that append"):
        penstock.build(inputs, tmp_path / "store", tokenizer="bytes", documents="lines", max_bad=10)


def test_a_sealed_part_that_was_cut_since_is_made_again(killed, prepare, tmp_path, sums):
    prepare("build", tmp_path / "clean")()
    build = prepare("build", tmp_path / "store")
    records = []
    for calls in range(30, 60, 3):  # with more threads, the first slice is sealed later
        assert killed(build, calls)
        if records := list((tmp_path / "store").glob(".slice-*.json")):
            break
    record = json.loads(records[0].read_text())
    number = record["record"]["parts"][""]["part"]
    part = tmp_path / "store" / f"part-{number:05d}.tokens.npy"
    part.write_bytes(part.read_bytes()[:-2])
    build()

    assert sums(tmp_path / "store") == sums(tmp_path / "clean")


def test_records_of_an_earlier_build_are_never_taken_for_this_one(killed, prepare, tmp_path, sums):
    """As a power cut may leave them: the directory lost some removals and kept others."""
    prepare("append", tmp_path / "clean")()
    build = prepare("append", tmp_path / "store")
    stale = (
        '{"number":0,"parts":{"":{"documents":9,"files":{},"part":0,"tokens":9}},'
        '"rejects":[],"tally":{}}'
    )
    (tmp_path / "store" / ".slice-000000.json").write_text(stale)
    killed(build, 12)
    build()

    assert sums(tmp_path / "store") == sums(tmp_path / "clean")
