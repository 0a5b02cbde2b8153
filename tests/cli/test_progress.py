"""The text beside the bar of a build."""

import sys

import pytest

from penstock.cli.progress import Meter, bar
from penstock.store.job import BuildProgress


def progress(text_bytes, *, done=None, total=1_000_000_000, tokens=0, rejects=0):
    return BuildProgress(
        done_bytes=text_bytes if done is None else done,
        total_bytes=total,
        text_bytes=text_bytes,
        num_documents=0,
        num_tokens=tokens,
        num_rejects=rejects,
    )


@pytest.fixture
def clock():
    times = [100.0]

    def clock():
        return times[0]

    clock.times = times
    return clock


def test_the_first_call_shows_no_speed(clock):
    assert Meter(clock).line(progress(0)) == ""


def test_speed_and_remaining_time_follow_from_two_calls(clock):
    meter = Meter(clock)
    meter.line(progress(0))
    clock.times[0] += 2

    line = meter.line(progress(500_000_000, tokens=100_000_000, rejects=3))

    assert line == "250 MB/s  50M tokens/s  0:02 left  3 rejected"


def test_parts_of_an_earlier_run_do_not_count_as_speed(clock):
    meter = Meter(clock)
    meter.line(progress(900_000_000, tokens=10))
    clock.times[0] += 1

    assert meter.line(progress(910_000_000, tokens=20)).startswith(
        "10.0 MB/s  10 tokens/s  0:09 left"
    )


def test_nothing_is_drawn_without_a_terminal(capsys):
    with bar() as draw:
        draw(1, 2, "words")

    assert not sys.stderr.isatty()
    assert capsys.readouterr() == ("", "")
