"""State: small, JSON, the same everywhere, and refused where it does not belong."""

import copy
import json
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import ResumeError
from penstock.integrations.multiplex import create_multiplex_dataloader
from penstock.integrations.sft import sft_data_generator
from penstock.loader import BatchFormat
from penstock.loader.loader import Loader
from penstock.loader.state import explained
from penstock.order.plan import Plan
from penstock.rows.tokens import ArrayFile
from penstock.rows.windows import Windows


@pytest.fixture(scope="module")
def windows(store):
    return Windows(store, 16)


def weighted(windows, other_store, **settings):
    rows = {"web": windows, "code": Windows(other_store, 16)}
    return Plan(rows, **{"weights": {"web": 0.7, "code": 0.3}, "seed": 17, **settings})


def test_state_is_json_and_says_what_it_belongs_to(windows):
    loader = Loader(windows, 8, seed=17)
    loader.seek(4_096)
    state = loader.state_dict()

    assert json.loads(json.dumps(state)) == state
    assert state["position"] == 4_096
    assert state["version"] == 1
    assert len(json.dumps(state)) < 1_000


def test_state_is_the_same_on_every_rank_and_in_every_topology(windows):
    states = []
    for world_size, prefetch in ((1, 0), (2, 2), (4, 1)):
        for rank in range(world_size):
            loader = Loader(
                windows, global_batch_size=8, rank=rank, world_size=world_size, prefetch=prefetch
            )
            for _ in range(5):
                next(iter(loader))
            states.append(loader.state_dict())

    assert all(state == states[0] for state in states)


def test_a_state_that_was_taken_does_not_change_later(windows):
    loader = Loader(windows, 8)
    state = loader.state_dict()
    before = copy.deepcopy(state)
    next(iter(loader))
    loader.state_dict()["order"]["seed"] = 99

    assert state == before
    assert loader.state_dict()["order"]["seed"] == 0


@pytest.mark.parametrize("num_sources", [1, 64, 1_000])
def test_state_is_small_and_describes_many_sources_once(numbered, num_sources, monkeypatch):
    """4 KiB and 100 bytes a source. Describing the plan is the slow part, so it is kept."""
    described = []
    describe = Plan.describe
    monkeypatch.setattr(Plan, "describe", lambda plan: described.append(plan) or describe(plan))
    names = [f"source number {number:05d}, its full name" for number in range(num_sources)]
    rows = {name: numbered(10**12 + number) for number, name in enumerate(names)}
    weights = {name: 0.1 + number / 7 for number, name in enumerate(names)}
    loader = Loader(Plan(rows, weights=weights, seed=2**62, max_epochs=dict.fromkeys(names, 3)), 8)
    loader.seek(10**11)
    text = json.dumps(loader.state_dict())
    state = json.loads(text)
    assert len(text) <= 4_096 + 100 * num_sources
    first = len(described)  # once for the settings, and once for the digest
    for _ in range(3):
        assert loader.state_dict() == state
        loader.load_state_dict(state)
    assert len(described) == first <= 2
    assert loader.position == 10**11


def test_long_names_are_kept_short_and_apart(numbered):
    names = ["x" * 200 + "a", "x" * 200 + "b", "файл" * 50]
    text = json.dumps(Loader(Plan({name: numbered(9) for name in names}), 1).state_dict())
    state = json.loads(text)

    assert len(state["sources"]) == 3
    assert sorted(len(name.split("… ")[1]) for name in state["sources"]) == [8, 8, 8]
    assert all(len(json.dumps({name: source})) <= 102 for name, source in state["sources"].items())


def change(text, windows, other_store, tmp_path, gpt2):
    """Pairs of runs, and what the error must name."""
    many = weighted(windows, other_store)
    return {
        "seed": (Loader(windows, 8, seed=1), Loader(windows, 8, seed=2), "seed 1 -> 2"),
        "shuffle": (
            Loader(windows, 8),
            Loader(windows, 8, shuffle="none"),
            "shuffle 'full' -> 'none'",
        ),
        "store": (
            Loader(windows, 8),
            Loader(Windows(other_store, 16), 8),
            'the store of "data" (digest ',
        ),
        "length": (
            Loader(windows, 8),
            Loader(Windows(windows.stream.members[0], 8), 8),
            "length 16 -> 8, stride 16 -> 8. Restore",
        ),
        "stride": (
            Loader(windows, 8),
            Loader(Windows(windows.stream.members[0], 16, stride=4), 8),
            "stride 16 -> 4. Restore",
        ),
        "tail": (
            Loader(windows, 8),
            Loader(Windows(windows.stream.members[0], 16, tail="pad"), 8),
            "tail 'drop' -> 'pad'. Restore",
        ),
        "weights": (
            Loader(many, 8),
            Loader(weighted(windows, other_store, weights={"web": 0.6, "code": 0.4}), 8),
            'weight of "code" 0.3 -> 0.4, weight of "web" 0.7 -> 0.6. Restore',
        ),
        "max_epochs": (
            Loader(many, 8),
            Loader(weighted(windows, other_store, max_epochs=4), 8),
            "max_epochs none -> {'epochs': 4, 'then': 'error'}. Restore",
        ),
        "schedule": (
            Loader(many, 8),
            Loader(
                weighted(windows, other_store, schedule={1_000: {"web": 1, "code": 1}}),
                8,
            ),
            'weight of "web" from position 1,000 on none -> 1',
        ),
        "sources": (
            Loader(many, 8),
            Loader(Plan({"web": windows}, weights={"web": 1}, seed=17), 8),
            'source "code" is gone',
        ),
        "new source": (
            Loader(Plan({"web": windows}), 8),
            Loader(Plan({"web": windows, "code": Windows(other_store, 16)}), 8),
            'source "code" was not there',
        ),
        "order of sources": (
            Loader(
                Plan({"a": windows, "b": Windows(other_store, 16)}, weights={"a": 1, "b": 1}), 8
            ),
            Loader(
                Plan({"b": Windows(other_store, 16), "a": windows}, weights={"a": 1, "b": 1}), 8
            ),
            "the order of the sources",
        ),
        "tokenizer": (
            Loader(windows, 8),
            Loader(
                Windows(
                    penstock.build(
                        penstock.Texts(["some text " * 90]), tmp_path / "gpt2", tokenizer=gpt2
                    ),
                    16,
                ),
                8,
            ),
            "tokenizer '277089d9' -> '",
        ),
    }[text]


@pytest.mark.parametrize(
    "what",
    [
        "seed",
        "shuffle",
        "store",
        "length",
        "stride",
        "tail",
        "weights",
        "max_epochs",
        "schedule",
        "sources",
        "new source",
        "order of sources",
        "tokenizer",
    ],
)
def test_another_run_is_refused_by_name(what, windows, other_store, tmp_path, gpt2):
    before, after, named = change(what, windows, other_store, tmp_path, gpt2)
    before.seek(16)
    with pytest.raises(ResumeError) as caught:
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))

    assert str(caught.value).startswith(
        "This checkpoint belongs to another order of the data, so position 16 may hold "
        "another row. Changed after it was written: "
    )
    assert named in str(caught.value)
    assert "To begin the new order at 0, start without this state" in str(caught.value)
    assert after.position == 0
    after.load_state_dict(before.state_dict(), on_change="restart")
    assert after.position == 0


def test_every_other_seed_is_another_run(numbered):
    state = Loader(numbered(9), 2, seed=0).state_dict()
    for seed in range(1, 200):
        with pytest.raises(ResumeError, match=rf"seed 0 -> {seed}\. Restore"):
            Loader(numbered(9), 2, seed=seed).load_state_dict(state)


def test_rows_that_do_not_describe_themselves_are_told_apart(numbered):
    state = Loader(numbered(9), 2).state_dict()

    with pytest.raises(ResumeError, match=r'the rows of "data" \(digest .*, 9 rows -> 8\)\. Rest'):
        Loader(numbered(8), 2).load_state_dict(state)


def test_a_bare_file_of_other_ids_is_refused(tmp_path):
    np.arange(200, dtype="uint16").tofile(tmp_path / "a.bin")
    state = Loader(Windows(ArrayFile(tmp_path / "a.bin", "uint16"), 4), 2).state_dict()
    np.arange(1, 201, dtype="uint16").tofile(tmp_path / "a.bin")
    loader = Loader(Windows(ArrayFile(tmp_path / "a.bin", "uint16"), 4), 2)

    # The number of rows is the same, so it is not named.
    with pytest.raises(ResumeError, match=r'the store of "data" \(digest \w{8} -> \w{8}\)'):
        loader.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:format=.hf. leaves out")
def test_what_does_not_change_the_rows_may_change(windows, store):
    """Batch size, ranks, threads, format, borders and the end of the run are free."""
    loader = Loader(windows, 8, epochs=1)
    loader.seek(24)
    others = [
        Loader(windows, 6),
        Loader(windows, global_batch_size=6, rank=1, world_size=2),
        Loader(Windows(store, 16, borders=True), 8, epochs=3, format="hf", prefetch=0),
        Loader(windows, 8, steps=90, format=BatchFormat(fields="narrow", fingerprint="tokens")),
    ]
    for other in others:
        other.load_state_dict(loader.state_dict())
        assert other.position == 24


def test_a_state_past_the_end_is_refused(windows):
    loader = Loader(windows, 8, steps=60)
    loader.seek(437)

    with pytest.raises(ResumeError, match=r"This state is at position 437, past the end of this"):
        Loader(windows, 8, steps=54).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, r"\{\} is not the state of a loader\."),
        (5, r"5 is not the state of a loader\."),
        (None, "None is not the state of a loader"),
        ('{"version": 1}', "is not the state of a loader"),
        ([["version", 1]], "is not the state of a loader"),
        ({"version": 2}, r"This state is of version 2; this penstock reads version 1\."),
        ({"version": None}, "This state is of version None"),
        ({"version": 1}, "This state was changed after it was written: its check does not match"),
        ({"version": 1, "position": {1, 2}}, "This state was changed after it was written"),
        ({"version": 1, "position": float("nan")}, "This state was changed after it was written"),
    ],
)
@pytest.mark.parametrize("on_change", ["error", "restart"])
def test_what_is_no_state_is_refused(windows, state, message, on_change):
    with pytest.raises(ResumeError, match=message):
        Loader(windows, 8).load_state_dict(state, on_change=on_change)


def test_the_state_of_another_kind_of_loader_is_named(windows):
    examples = [{"n": number} for number in range(9)]
    others = {
        "a loader": Loader(windows, 8),
        "a multiplex DataLoader": create_multiplex_dataloader([("a", examples)], batch_size=3),
        "SFT batches": sft_data_generator(examples, 2, lambda _: ([1, 2], [0, 1]), pad_token_id=0),
    }
    for (kind, saved), (other, loader) in permutations(others.items(), 2):
        with pytest.raises(ResumeError, match=f"This is the state of {kind}, not of {other}"):
            loader.load_state_dict(saved.state_dict())


def test_on_change_is_one_of_two(windows):
    loader = Loader(windows, 8)

    with pytest.raises(ResumeError, match='on_change=\'ignore\' is not "error" or "restart"'):
        loader.load_state_dict(loader.state_dict(), on_change="ignore")


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)


def places(value, path=()):
    """Every place in a state, inner ones too."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inside:
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from places(each, (*path, key))


@settings(max_examples=150)
@given(data=st.data())
def test_a_state_that_was_changed_anywhere_never_loads(windows, other_store, data):
    loader = Loader(weighted(windows, other_store), 8)
    loader.seek(1_000)
    state = json.loads(json.dumps(loader.state_dict()))
    path = data.draw(st.sampled_from(list(places(state))))
    holder = state
    for key in path[:-1]:
        holder = holder[key]
    how = data.draw(st.sampled_from(["set", "remove", "add"]))
    before = holder[path[-1]]
    if how == "set":
        value = data.draw(VALUES)
        if value == before and type(value) is type(before):
            return
        holder[path[-1]] = value
    elif how == "remove":
        del holder[path[-1]]
    elif isinstance(holder, dict):
        holder[data.draw(st.text(max_size=5).filter(lambda key: key not in holder))] = 1
    else:
        holder.append(1)

    loader.seek(0)
    for on_change in ("error", "restart"):
        with pytest.raises(ResumeError):
            loader.load_state_dict(state, on_change=on_change)
    assert loader.position == 0


@settings(max_examples=100)
@given(data=st.data())
def test_a_state_text_with_one_other_byte_never_loads_as_another(windows, data):
    loader = Loader(windows, 8)
    loader.seek(1_000)
    whole = loader.state_dict()
    text = bytearray(json.dumps(whole).encode())
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] ^= data.draw(st.integers(1, 255))
    loader.seek(0)
    try:
        state = json.loads(text)
    except ValueError:
        return
    if state == whole:  # a blank became a tab, for example
        return
    with pytest.raises(ResumeError):
        loader.load_state_dict(state)


@pytest.mark.parametrize("field", ["order", "plan", "position", "rows", "sources"])
@pytest.mark.parametrize("value", [None, True, -1, 2.0, "x", [], {}, {"data": 5}])
def test_a_state_with_a_forged_check_is_refused_all_the_same(windows, field, value):
    """No digest keeps a determined hand out, but what comes of it is a typed error."""
    from penstock.digest import digest_json

    loader = Loader(windows, 8)
    state = {**loader.state_dict(), field: value}
    del state["check"]
    state["check"] = digest_json(state)[:16]
    if field in ("order", "rows", "sources") and isinstance(value, dict):
        loader.load_state_dict(state)  # words only: the digest of the plan is what decides
        state = {**state, "plan": "0" * 16}
        del state["check"]
        state["check"] = digest_json(state)[:16]
    with pytest.raises(ResumeError):
        loader.load_state_dict(state)


def test_a_message_names_five_differences_and_counts_the_others():
    def state(number, count):
        return {"rows": dict.fromkeys("abcdefg"[:count], number), "order": {}, "sources": {}}

    five = "a 1 -> 2, b 1 -> 2, c 1 -> 2, d 1 -> 2, e 1 -> 2"
    assert explained(state(1, 5), state(2, 5)) == five
    assert explained(state(1, 6), state(2, 6)) == f"{five} and 1 more"
    assert explained(state(1, 7), state(2, 7)) == f"{five} and 2 more"


def test_a_message_names_the_digests_and_rows_of_a_source_that_changed():
    def changed(old, new, rows=((), ())):
        then, now = (
            {"rows": dict(known), "order": {}, "sources": {"web": source}}
            for source, known in zip((old, new), rows, strict=True)
        )
        return explained(then, now)

    old = [9, "0123456789", "abcdefghijkl"]
    assert changed(old, [12, "9876543210", "zyxwvutsrqpo"]) == (
        'the store of "web" (digest abcdefgh -> zyxwvuts, 9 rows -> 12)'
    )
    assert changed(old, [7, "9876543210", old[2]]) == (
        'the rows of "web" (digest 01234567 -> 98765432, 9 rows -> 7)'
    )
    lists = ({"multiples": [4]}, {"multiples": [8]})
    assert changed(old, old, lists) == "multiples [4] -> [8]"
