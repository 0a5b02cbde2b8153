"""`keep=False`: the disk holds what is being read and a little more."""

import importlib.util
import json
import os
import time
from pathlib import Path

import pytest

from penstock.errors import StoreError
from penstock.loader.loader import Loader
from penstock.rows.packs import Packs
from penstock.rows.windows import Windows
from penstock.streaming import marks
from penstock.streaming.marks import Mark, Wishes, wanted_slices

DEADLINE = 20


def parts(folder):
    """The numbers of the parts that lie there."""
    return sorted(int(path.name[5:10]) for path in folder.glob("part-*.tokens.npy"))


def settled_parts(folder):
    """The same, once nothing changes any more."""
    before, deadline = None, time.monotonic() + DEADLINE
    while (now := parts(folder)) != before and time.monotonic() < deadline:
        before = now
        time.sleep(0.4)
    return now


def test_the_builder_stays_a_few_parts_ahead_and_drops_those_behind(stream, finished, tmp_path):
    loader = Loader(Windows(stream(keep=False, ahead=2), 32), 1, prefetch=0, ids=True)
    iterator, folder = iter(loader), tmp_path / "s"
    ends = Windows(finished, 32).part_rows.cumsum()

    next(iterator)
    assert settled_parts(folder) == [0, 1, 2]
    while loader.position < ends[4] + 1:
        next(iterator)
    assert settled_parts(folder) == [5, 6, 7]


def test_records_of_dropped_parts_are_kept_and_the_digest_is_that_of_the_store(
    stream, finished, tmp_path
):
    growing = stream(keep=False)
    assert sum(1 for _ in Loader(Windows(growing, 32), 8, epochs=1)) > 100

    assert growing.digest == finished.digest
    assert len(list((tmp_path / "s").glob(".slice-*.json"))) == len(finished.manifest.parts)
    assert len(parts(tmp_path / "s")) < len(finished.manifest.parts)


@pytest.mark.parametrize("rows", [Windows, Packs])
def test_a_resumed_run_makes_only_the_parts_from_its_position_on(
    stream, finished, tmp_path, same, rows
):
    first = stream(keep=False, ahead=1)
    loader = Loader(rows(first, 32), 8, seed=4, epochs=1)
    iterator = iter(loader)
    for _ in range(100):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = list(iterator)
    first.close()
    for path in (tmp_path / "s").glob("part-*"):
        path.unlink()

    again = stream(keep=False, ahead=1)
    time.sleep(0.5)
    assert parts(tmp_path / "s") == []  # nobody has said yet what is wanted
    resumed = Loader(rows(again, 32), 8, seed=4, epochs=1, prefetch=0)
    resumed.load_state_dict(state)
    iterator = iter(resumed)
    batches = [next(iterator)]
    at = loader.plan.parts_before(800) - 1
    made = settled_parts(tmp_path / "s")
    assert made
    assert set(made) <= set(range(at - 1, at + 3))
    assert same(batches + list(iterator), rest)


@pytest.mark.parametrize("late", [{"keep": False, "ahead": 1}, {"keep": True}])
def test_a_reader_that_comes_late_gets_the_parts_that_were_dropped(stream, finished, same, late):
    early = Loader(Windows(stream(keep=False, ahead=1), 32), 8, seed=4, epochs=1)
    iterator = iter(early)
    found = [next(iterator) for _ in range(60)]
    late = list(Loader(Windows(stream(**late), 32), 8, seed=4, epochs=1))

    alone = list(Loader(Windows(finished, 32), 8, seed=4, epochs=1, shuffle="part"))
    assert same(late, alone)
    assert same(found + list(iterator), alone)


def test_a_reader_that_keeps_does_not_wait_for_one_that_has_not_begun(stream, finished, same):
    first = stream(keep=False, ahead=1)
    early = iter(Loader(Windows(first, 32), 8, seed=4, epochs=1))
    for _ in range(60):
        next(early)
    del early
    first.close()
    idle = stream(keep=False, ahead=1)
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline and not idle._builder.building:
        time.sleep(0.02)
    late = list(Loader(Windows(stream(), 32), 8, seed=4, epochs=1))

    assert same(late, list(Loader(Windows(finished, 32), 8, seed=4, epochs=1, shuffle="part")))


def test_what_was_closed_leaves_no_mark_when_it_is_read(stream, tmp_path):
    dropping = stream(keep=False, ahead=1)
    early = iter(Loader(Windows(dropping, 32), 8, epochs=1))
    for _ in range(60):
        next(early)
    kept = stream()
    before = set((tmp_path / "s" / ".readers").iterdir())
    kept.close()
    with pytest.raises(StoreError, match="the stream was closed"):
        kept.part_array(0, "tokens")

    assert set((tmp_path / "s" / ".readers").iterdir()) == before


def test_a_reader_that_keeps_goes_on_alone_when_the_one_that_drops_has_left(
    stream, finished, tmp_path, same
):
    dropping = stream(keep=False, ahead=1)
    early = iter(Loader(Windows(dropping, 32), 8, seed=4, epochs=1))
    for _ in range(60):
        next(early)
    late = iter(Loader(Windows(stream(keep=True), 32), 8, seed=4, epochs=1))
    found = [next(late) for _ in range(50)]
    del early
    dropping.close()

    found += list(late)
    assert same(found, list(Loader(Windows(finished, 32), 8, seed=4, epochs=1, shuffle="part")))
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (tmp_path / "s" / "penstock.json").exists():
        time.sleep(0.05)
    assert len(parts(tmp_path / "s")) == len(finished.manifest.parts)


def test_a_store_that_was_dropped_can_be_kept_after_all(stream, finished, tmp_path, same):
    dropped = stream(keep=False)
    assert list(Loader(Windows(dropped, 32), 8, epochs=1))
    dropped.close()

    kept = list(Loader(Windows(stream(), 32), 8, epochs=1))

    assert same(kept, list(Loader(Windows(finished, 32), 8, epochs=1, shuffle="part")))
    assert len(parts(tmp_path / "s")) == len(finished.manifest.parts)


def test_any_step_can_be_asked_for_also_of_parts_that_are_gone(stream, finished, same):
    loader = Loader(Windows(stream(keep=False, ahead=1), 32), 8, epochs=1)
    alone = Loader(Windows(finished, 32), 8, epochs=1, shuffle="part")
    steps = [150, 3, 170, 80]

    assert same([loader[step] for step in steps], [alone[step] for step in steps])


def test_marks_of_readers_that_are_gone_count_for_nothing(tmp_path):
    one, other = Mark(tmp_path), Mark(tmp_path)
    one.want([3, 4])
    other.want([7, 3, 8])
    assert wanted_slices(tmp_path) == [3, 7, 4, 8]

    other.close()
    assert wanted_slices(tmp_path) == [3, 4]
    (tmp_path / ".readers" / "999-0.json").write_text("[1]")  # of a process that was killed
    assert wanted_slices(tmp_path) == [3, 4]
    one.close()
    assert not (tmp_path / ".readers").exists()


def test_wishes_go_on_at_the_first_slice_after_the_last(tmp_path):
    wishes, reader = Wishes(tmp_path, ahead=2), Windows
    assert wishes.place(reader, 8, None) == {8, 9, 10}
    assert wishes.place(reader, 8, 10) == {8, 9, 0}
    wishes.add(5, 10)
    assert wanted_slices(tmp_path) == [5, 8, 9, 0]
    wishes.close()


def test_what_is_read_after_the_stream_was_closed_touches_no_other_file(stream, tmp_path):
    """The mark's file number is free then, and the next file that is opened gets it."""
    growing = stream(keep=False, ahead=1)
    iterator = iter(Loader(Windows(growing, 32), 1, prefetch=0))
    next(iterator)
    growing.close()
    others = [(tmp_path / f"{number}.txt").open("w+") for number in range(9)]

    with pytest.raises(StoreError, match="the stream was closed"):
        list(iterator)
    for other in others:
        assert other.read() == ""
        other.close()


def test_a_part_that_is_dropped_the_moment_before_it_is_opened_is_waited_for(
    stream, finished, tmp_path, same, monkeypatch
):
    """As another reader's next step may do to one that asks for steps anywhere."""
    loader = Loader(Windows(stream(keep=False, ahead=1), 32), 8, prefetch=0)
    alone = Loader(Windows(finished, 32), 8, epochs=1, shuffle="part")
    gone, open_file = [], Path.open

    def open_later(path, *arguments, **options):
        if path.parent == tmp_path / "s" and path.name.endswith(".tokens.npy") and not gone:
            gone.append(path)
            path.unlink()
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_later)

    assert same([loader[90]], [alone[90]])
    assert gone


def test_a_part_that_another_thread_maps_meanwhile_is_left_alone(stream, monkeypatch):
    growing = stream(keep=False, ahead=2)
    assert growing.await_parts(1)
    known = len(growing.manifest.parts)
    place = growing._wishes.place

    def place_while_another_reads(*words):
        wanted = place(*words)
        assert growing.await_parts(known + 1)
        growing.part_array(known, "tokens")
        return wanted

    monkeypatch.setattr(growing._wishes, "place", place_while_another_reads)
    growing.reading(place_while_another_reads, 0)  # any reader will do

    assert (known, "tokens") in growing._mapped


def as_elsewhere(module):
    """A module as another machine has it, which knows nothing of ours."""
    spec = importlib.util.spec_from_file_location("elsewhere", module.__file__)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_marks_of_machines_where_processes_have_the_same_number_are_two(tmp_path):
    one, other = (as_elsewhere(marks).Mark(tmp_path) for _ in range(2))
    one.want([3])
    other.want([7])

    assert sorted(wanted_slices(tmp_path)) == [3, 7]
    one.close()
    assert wanted_slices(tmp_path) == [7]
    other.close()


def test_marks_are_read_and_made_while_others_write_and_leave(tmp_path):
    """A mark that is read half before and half after a change, and a folder that goes."""
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                until = time.monotonic() + 1.5
                while time.monotonic() < until:
                    mark = Mark(tmp_path)
                    for number in range(20):
                        mark.want(range(100) if number % 2 else [123_456, 7])
                    mark.close()
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    while children:
        assert set(wanted_slices(tmp_path)) <= {*range(100), 123_456}
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            assert status == 0
            children.remove(child)
