"""States of streams: exact, the same on every rank, and bound to what was read."""

import json
import shutil

import pytest

import penstock
from penstock.errors import ResumeError, StoreError
from penstock.loader.loader import Loader
from penstock.rows.packs import Packs
from penstock.rows.windows import Windows
from penstock.testing import assert_resumable


def test_a_stream_resumes_exactly_at_every_step_on_any_topology(stream):
    streamed = stream()

    def make(rank, world_size, prefetch):
        return Loader(
            Windows(streamed, 32),
            global_batch_size=96,
            rank=rank,
            world_size=world_size,
            prefetch=prefetch,
            epochs=2,
            seed=5,
        )

    assert_resumable(make, steps=40, stops=range(0, 30, 7), world_sizes=(1, 3))


@pytest.mark.parametrize("rows", [Windows, Packs])
def test_a_state_taken_while_growing_loads_on_the_finished_store_and_back(
    stream, held, tmp_path, conftest, same, rows
):
    path = tmp_path / "in.txt"
    path.write_text(conftest.lines(held_at=[600]))
    loader = Loader(rows(stream(path, tokenizer=held), 32), 8, seed=1, epochs=2)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    growing_state = json.loads(json.dumps(loader.state_dict()))
    held.let_on()
    rest = list(iterator)

    finished = Loader(rows(tmp_path / "s", 32), 8, seed=1, epochs=2, shuffle="part")
    finished.load_state_dict(growing_state)
    assert same(list(finished), rest)

    finished.seek(40)
    finished_state = finished.state_dict()
    assert finished_state["plan"]
    assert not growing_state["plan"]
    assert growing_state["prefix"] == finished_state["prefix"]
    again = Loader(rows(stream(path, tmp_path / "copy", tokenizer=held), 32), 8, seed=1, epochs=2)
    again.load_state_dict(finished_state)
    assert same(list(again), rest)


def test_a_state_of_a_later_epoch_waits_for_the_whole_store(stream, finished, same):
    alone = Loader(Windows(finished, 32), 8, seed=1, epochs=3, shuffle="part")
    alone.seek(2 * len(Windows(finished, 32)) + 16)
    state = alone.state_dict()
    loader = Loader(Windows(stream(), 32), 8, seed=1, epochs=3)

    loader.load_state_dict(state)

    assert same(list(loader), list(alone))


def test_states_are_equal_whoever_has_seen_the_end_of_the_build(stream, held, tmp_path, conftest):
    path = tmp_path / "in.txt"
    path.write_text(conftest.lines(held_at=[1_100]))
    loaders = []
    for _ in range(2):
        loaders.append(Loader(Windows(stream(path, tokenizer=held), 32), 8, prefetch=0))
        iterator = iter(loaders[-1])
        for _ in range(20):
            next(iterator)
    held.let_on()
    assert loaders[0][500]
    assert loaders[0].plan.complete
    assert not loaders[1].plan.complete

    assert loaders[0].state_dict() == loaders[1].state_dict()


def state_after(store, steps, rows=Windows, **options):
    loader = Loader(rows(store, 32), 8, **options)
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    iterator.close()
    return loader.state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eos": False}, r"eos_id: 256 -> None"),
        ({"documents": "paragraphs"}, r"reading.documents: 'lines' -> 'paragraphs'"),
        ({"tokenizer": "gpt2"}, r"tokenizer"),
    ],
)
def test_a_state_of_another_build_is_refused_with_what_differs(stream, tmp_path, change, message):
    state = state_after(stream(), 5)
    other = Loader(Windows(stream(store=tmp_path / "other", **change), 32), 8)

    with pytest.raises(ResumeError, match=message):
        other.load_state_dict(state)
    other.load_state_dict(state, on_change="restart")
    assert other.position == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("3 some", "3 same", 1), "contents of the first . parts"),
        (lambda text: text + "more\n", "inputs: '1 file of"),
    ],
)
def test_a_state_of_other_inputs_is_refused(stream, text, tmp_path, change, message):
    path = tmp_path / "in.txt"
    path.write_text(text.read_text())
    first = stream(path)
    state = state_after(first, 5)
    first.close()
    (tmp_path / "s").rename(tmp_path / "old")  # a worker may still write a last file
    path.write_text(change(text.read_text()))
    loader = Loader(Windows(stream(path), 32), 8)

    with pytest.raises(ResumeError, match=message):
        loader.load_state_dict(state)


def test_what_comes_after_the_position_has_no_part_in_a_state(stream, text, tmp_path, same):
    """A state binds to the parts that were read; the sizes of inputs are all it says of others."""
    path = tmp_path / "in.txt"
    path.write_text(text.read_text())
    first = stream(path)
    state = state_after(first, 5)
    first.close()
    shutil.rmtree(tmp_path / "s")
    path.write_text(text.read_text().replace("1000 some", "1000 same"))
    loader = Loader(Windows(stream(path), 32), 8)

    loader.load_state_dict(state)

    assert loader.position == 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 2}, "seed 1 -> 2"),
        ({"rows": Packs}, "kind 'windows' -> 'packs'"),
    ],
)
def test_a_state_of_another_order_is_refused(stream, options, message):
    streamed = stream()
    state = state_after(streamed, 5, seed=1)
    rows = options.pop("rows", Windows)
    loader = Loader(rows(streamed, 32), 8, **{"seed": 1, **options})

    with pytest.raises(ResumeError, match=message):
        loader.load_state_dict(state)


def test_a_state_of_a_stream_does_not_load_into_another_order_of_its_store(stream, finished):
    state = state_after(stream(), 5)

    with pytest.raises(ResumeError, match="shuffle 'part' -> 'full'"):
        Loader(Windows(finished, 32), 8).load_state_dict(state)
    with pytest.raises(ResumeError, match="shuffle 'full' -> 'part'"):
        Loader(Windows(stream(), 32), 8).load_state_dict(state_after(finished, 5))


def test_an_input_that_was_changed_since_the_store_was_begun_is_refused(
    stream, held, tmp_path, conftest
):
    path = tmp_path / "in.txt"
    path.write_text(conftest.lines(held_at=[600]))
    first = stream(path, tokenizer=held)
    state_after(first, 5)
    first.close()
    path.write_text(path.read_text().replace("some", "same"))

    with pytest.raises(StoreError, match="unfinished build with other settings: stamps"):
        list(Loader(Windows(stream(path, tokenizer=held), 32), 8, epochs=1))


def test_a_finished_store_whose_input_was_changed_is_refused_at_the_call(stream, tmp_path, text):
    path = tmp_path / "in.txt"
    path.write_text(text.read_text())
    penstock.build(path, tmp_path / "s", tokenizer="bytes", documents="lines")
    path.write_text(text.read_text().replace("some", "same"))

    with pytest.raises(StoreError, match="changed or replaced after it was built"):
        stream(path)


@pytest.mark.parametrize("damage", [{"prefix": None}, {"prefix": {"build": {}, "parts": -1}}])
def test_a_state_without_its_prefix_is_refused(stream, damage):
    from penstock.loader.state import write_state

    streamed = stream()
    state = state_after(streamed, 5) | damage
    forged = write_state(
        {key: state[key] for key in state if key not in ("check", "version", "position")}, 40
    )

    with pytest.raises(ResumeError, match="another order of the data"):
        Loader(Windows(streamed, 32), 8).load_state_dict(forged)
