"""Loops over a run whose store is still being written when the first of them begins."""

import json

import pytest

from penstock import Loader, Packs, Windows


def loops(loader, number):
    return [list(loader) for _ in range(number)]


@pytest.mark.parametrize("rows", [Windows, Packs])
@pytest.mark.parametrize("drop_last", [True, False])
def test_loops_over_a_stream_are_those_over_the_finished_store(
    stream, finished, same, rows, drop_last
):
    settings = {"epochs": 1, "seed": 4, "drop_last": drop_last}
    loader = Loader(rows(stream(), 32), 8, **settings)
    alone = Loader(rows(finished, 32), 8, shuffle="part", **settings)
    found, expected = loops(loader, 3), loops(alone, 3)

    assert all(same(one, two) for one, two in zip(found, expected, strict=True))
    assert found[0][0]["inputs"].tolist() != found[1][0]["inputs"].tolist()
    assert loader.position == alone.position == 3 * len(alone.plan)
    assert len(loader) == len(alone)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("after_the_end", [True, False])
def test_a_state_at_the_end_of_the_first_loop_resumes_with_the_second(
    stream, finished, same, drop_last, after_the_end
):
    """Also in a stream that does not know yet that the state is at the end of its rows."""
    settings = {"epochs": 1, "seed": 4, "drop_last": drop_last}
    alone = Loader(Windows(finished, 32), 8, shuffle="part", **settings)
    first = iter(alone)
    for _ in range(len(alone)):
        next(first)
    if after_the_end:
        assert next(first, None) is None
    state = json.loads(json.dumps(alone.state_dict()))
    first.close()
    streamed = Loader(Windows(stream(), 32), 8, **settings)
    streamed.load_state_dict(state)

    assert same(list(streamed), list(alone))
    assert streamed.position == 2 * len(alone.plan)


@pytest.mark.parametrize("into", [0, 3, 100])
@pytest.mark.parametrize("loops_before", [1, 2])
def test_a_state_or_a_position_of_a_later_loop_resumes_there(
    stream, finished, same, loops_before, into
):
    """Also by seek, while it is not known yet that the rows before it are whole epochs."""
    settings = {"epochs": 1, "seed": 4}
    alone = Loader(Windows(finished, 32), 8, shuffle="part", **settings)
    alone.seek(loops_before * len(alone.plan) + 8 * into)
    state = json.loads(json.dumps(alone.state_dict()))
    expected = list(alone)
    streamed = Loader(Windows(stream(), 32), 8, **settings)
    streamed.seek(state["position"])
    assert same(list(streamed), expected)
    streamed.load_state_dict(state)
    assert same(list(streamed), expected)
    fresh = Loader(Windows(stream(), 32), 8, **settings)
    fresh.load_state_dict(state)
    assert same(list(fresh), expected)


def test_a_dataloader_over_a_stream_has_loops_too(stream, finished, same):
    settings = {"epochs": 1, "seed": 4, "drop_last": False}
    found = loops(Loader(Windows(stream(), 32), 8, **settings).as_dataloader(), 2)
    expected = loops(Loader(Windows(finished, 32), 8, shuffle="part", **settings), 2)

    assert all(same(one, two) for one, two in zip(found, expected, strict=True))
