"""`penstock bench`: the table, the object, and the arithmetic behind what GPUs need."""

import math
import re
import threading

import pytest

import penstock as ps
from penstock.cli import bench
from penstock.cli.bench import NEEDS, Need, bench_command, measure_speed

SMALL = ("--length", "16", "--batch-size", "4", "--seconds", "0.1")


@pytest.fixture
def store(invoke, tmp_path):
    (tmp_path / "long.txt").write_text("To be, or not to be: that is the question.\n" * 200)
    return ps.build("long.txt", "store", tokenizer="bytes", documents="lines")


def test_the_table_has_all_figures_and_fits_eighty_columns(invoke, store):
    shown = invoke("bench", "store", *SMALL).stdout

    for name in ("batches", "int64", "narrow", "first batch", "resume", "memory"):
        assert re.search(rf"^  {name}  +\S", shown, re.M), name
    assert re.search(r"^  int64 +[\d.]+[kMG]? tokens/s, [\d.]+ (µs|ms) per batch *$", shown, re.M)
    assert re.search(r"GPT-2, 124M +1 GPU +665k tokens/s +read [\d,.]+ times as fast", shown)
    assert "989 TFLOP/s (H100, bfloat16) · 50% ÷ (6 FLOP · parameters)" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_json_is_one_object_with_the_same_figures(run_json, store):
    found = run_json("bench", "store", *SMALL)

    assert found["store"] == "store"
    assert found["num_tokens"] == store.num_tokens
    assert found["num_rows"] == (store.num_tokens - 1) // 16
    assert found["tokens_per_second"].keys() == {"int64", "narrow"}
    assert min(found["tokens_per_second"].values()) > 0
    assert 0 < found["resume_seconds"]["median"] <= found["resume_seconds"]["worst"]
    assert found["first_batch_seconds"] > 0
    assert found["memory_bytes"] is None or found["memory_bytes"] >= 0
    first = found["needs"][0]
    assert first["headroom"] == pytest.approx(
        found["tokens_per_second"]["int64"] / first["tokens_per_second"], rel=0.01
    )


def test_needs_are_six_operations_a_parameter_and_token_at_half_of_an_h100():
    assert Need("any", 1e9, 8).tokens_per_second == 8 * 989e12 * 0.5 / (6 * 1e9)
    assert [round(need.tokens_per_second / 1e6, 2) for need in NEEDS] == [0.66, 5.32, 0.66, 0.08]


def test_the_training_side_of_a_split_is_read(run_json, invoke, store):
    ps.build("long.txt", "both", tokenizer="bytes", split="tail:0.1", documents="lines")

    assert run_json("bench", "both", *SMALL)["store"] == "both/train"


def test_a_store_that_is_too_small_says_how_short_rows_must_be(invoke, corpus):
    ps.build(str(corpus), "store", tokenizer="bytes", documents="lines")

    assert "75 tokens do not make one row of 1,024" in invoke("bench", "store", code=1).stderr


def test_what_is_no_store_is_an_error(invoke):
    assert "nowhere does not exist" in invoke("bench", "nowhere", code=1).stderr


@pytest.mark.parametrize("option", ["--length", "--batch-size", "--seconds"])
def test_numbers_below_the_least_are_refused(invoke, option):
    assert option in invoke("bench", "store", option, "0", code=2).stderr


def test_no_thread_is_left(store):
    measure_speed(store.path, length=16, batch_size=4, seconds=0.05)

    left = [each.name for each in threading.enumerate() if each.name.startswith("penstock")]
    # Threads that download files are kept for the next files: tests of remote stores leave some.
    assert not [name for name in left if not name.startswith("penstock-download")]


def test_progress_is_drawn_at_each_turn(store):
    drawn = []

    measure_speed(
        store.path, length=16, batch_size=4, seconds=0.05, draw=lambda *t: drawn.append(t)
    )

    assert [turn for turn, _, _ in drawn] == list(range(6))
    assert {total for _, total, _ in drawn} == {6}
    assert [words for _, _, words in drawn[:2]] == ["reading int64", "reading narrow"]


def test_a_system_that_does_not_report_memory_is_not_an_error(invoke, store, monkeypatch):
    monkeypatch.setattr(bench, "anonymous_bytes", lambda: None)

    assert "not reported by this system" in invoke("bench", "store", *SMALL).stdout


def test_help_fits_eighty_columns_and_the_command_is_documented(invoke):
    shown = invoke("bench", "--help").stdout

    assert bench_command.__doc__
    assert max(map(len, shown.splitlines())) <= 80


def test_more_rows_a_batch_than_the_store_has_still_work(run_json, store):
    found = run_json(
        "bench", "store", "--length", "1000", "--batch-size", "64", "--seconds", "0.05"
    )

    assert found["num_rows"] < 64
    assert math.isfinite(found["tokens_per_second"]["int64"])
