"""Progress of builds: the text beside the bar, and lines where there is no terminal."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import zygote

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


def test_work_of_less_than_ten_seconds_writes_no_line(capsys):
    with bar() as draw:
        draw(1, 2, "words")

    assert not sys.stderr.isatty()
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_a_line_comes_every_ten_seconds(capsys, monkeypatch, clock):
    monkeypatch.setattr("penstock.cli.progress.time", SimpleNamespace(monotonic=clock))
    with bar() as draw:
        for second in range(35):
            clock.times[0] += 1
            draw(second + 1, 50, f"{second + 1} s \x1b[31m\r")

    assert capsys.readouterr().err.splitlines() == [
        r"20%  10 s \x1b[31m\r",
        r"40%  20 s \x1b[31m\r",
        r"60%  30 s \x1b[31m\r",
    ]


# Ten seconds are too long for a test, so each report is a line here.
AT_ONCE = "import penstock.cli.progress as p; p._LINE_SECONDS = 0; "
COMMAND = AT_ONCE + "from penstock.cli import main; main()"
BUILD = "import penstock; penstock.build('a.txt', 'store', tokenizer='bytes', progress=True)"
LIBRARY = AT_ONCE + BUILD


def build(directory, code, *options, **streams):
    (directory / "a.txt").write_text("some words\n" * 1_000)
    words = ["build", "a.txt", "-o", "store", "--tokenizer", "bytes", *options]
    return zygote.run(["-c", code, *words], cwd=directory, timeout=240, check=False, **streams)


@pytest.mark.parametrize("code", [COMMAND, LIBRARY], ids=["penstock build", "progress=True"])
def test_a_build_into_a_log_file_writes_plain_lines(tmp_path, code):
    done = build(tmp_path, code, capture_output=True)

    assert done.returncode == 0
    lines = done.stderr.decode().split("\n")
    assert re.fullmatch(r"100%(  .*tokens/s.*)?", lines[-2])
    assert lines[-1] == ""
    assert b"\r" not in done.stderr
    assert b"\x1b" not in done.stderr


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_quiet_and_json_write_no_lines(tmp_path, option):
    assert build(tmp_path, COMMAND, option, capture_output=True).stderr == b""


@pytest.mark.skipif(os.name == "nt", reason="Windows has other pipes")
def test_a_log_that_nobody_reads_does_not_end_a_build(tmp_path):
    ours, theirs = os.pipe()
    os.close(ours)
    done = build(tmp_path, COMMAND, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)

    assert done.returncode == 0
    assert (tmp_path / "store" / "penstock.json").exists()


def test_progress_true_shows_the_bar_of_the_command_in_a_terminal(tmp_path, read_terminal):
    (tmp_path / "a.txt").write_text("some words\n" * 1_000)
    shown, out = read_terminal(["-c", BUILD])

    assert "━" in shown
    assert "100%" in shown
    assert out == b""


@pytest.mark.parametrize("off", [False, None])
def test_progress_false_shows_nothing(tmp_path, off):
    code = LIBRARY.replace("True", str(off))

    assert build(tmp_path, code, capture_output=True).stderr == b""
