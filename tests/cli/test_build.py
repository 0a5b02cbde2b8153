"""`penstock build`, as people and programs see it."""

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import penstock as ps


@pytest.fixture
def build(invoke, corpus):
    def build(*arguments, **options):
        return invoke(
            "build",
            corpus,
            "--documents",
            "lines",
            "-o",
            "store",
            "--tokenizer",
            "bytes",
            *arguments,
            **options,
        )

    return build


def test_it_builds_what_the_library_builds(invoke, corpus, sums, tmp_path):
    invoke("build", corpus, "--documents", "lines", "-o", "store")
    ps.build(str(corpus), tmp_path / "expected", documents="lines")

    assert sums("store") == sums("expected")


def test_it_ends_with_a_short_summary_and_the_next_command(build):
    lines = build().stdout.splitlines()

    assert lines[0] == "tokenizer bytes, engine bytes"
    assert re.fullmatch(r"store built in [\d.]+ m?s", lines[1])
    assert [line.split() for line in lines[2:8]] == [
        ["documents", "4"],
        ["document", "is", "a", "line"],
        ["tokens", "75"],
        ["bytes/token", "0.95"],
        ["skipped", "1", "blank", "record"],
        ["rejected", "none"],
    ]
    assert lines[8:] == ["next: penstock info store"]


def test_a_finished_build_says_so(build, run_json, corpus):
    build()

    assert "\nstore is already finished (" in build().stdout
    again = run_json("build", corpus, "--documents", "lines", "-o", "store", "--tokenizer", "bytes")
    assert again["finished_before"]
    assert again["read_bytes"] == 0


def test_json_has_all_numbers(run_json, corpus):
    answer = run_json(
        "build", corpus, "--documents", "lines", "-o", "store", "--tokenizer", "bytes"
    )
    store = ps.TokenStore("store")

    assert answer.pop("seconds") > 0
    assert answer == {
        "stores": [
            {
                "path": "store",
                "side": None,
                "num_documents": 4,
                "num_tokens": 75,
                "digest": store.digest,
            }
        ],
        "num_documents": 4,
        "num_pieces": 4,
        "documents": "a line",
        "num_tokens": 75,
        "vocab_size": 257,
        "padded_vocab_size": 320,
        "bytes_per_token": 71 / 75,
        "rejects": {},
        "num_skipped": 1,
        "skipped_files": {},
        "num_replaced": 0,
        "read_bytes": corpus.stat().st_size,
        "finished_before": False,
        "resumed": False,
        "engine": "bytes",
    }


def test_quiet_is_silent(build):
    result = build("--quiet")

    assert (result.stdout, result.stderr) == ("", "")


def test_rejects_are_shown_by_reason_with_their_log(invoke, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": 7}\nnot json\n{"text": "fine"}\n')

    shown = invoke(
        "build", "a.jsonl", "-o", "store", "--tokenizer", "bytes", "--max-bad", "2"
    ).stdout

    assert "2: bad_json 1, not_a_string 1" in shown
    assert "store/rejects.jsonl" in shown


def test_too_many_rejects_are_an_error(invoke, tmp_path):
    (tmp_path / "a.jsonl").write_text("not json\n" * 30)

    result = invoke("build", "a.jsonl", "-o", "store", "--tokenizer", "bytes", code=1)

    assert result.stderr.startswith("SourceError: 30 of 30 records were rejected")


def test_a_split_shows_both_sides(build, run_json):
    shown = build("--split", "tail:0.4").stdout

    assert re.search(r"train +3 documents, 63 tokens", shown)
    assert re.search(r"val +1 document, 12 tokens", shown)
    assert list(run_json("info", "store")) == ["train", "val"]


def test_append_adds(build, invoke, tmp_path):
    build()
    (tmp_path / "more.txt").write_text("one more\n")

    shown = invoke(
        "build",
        "more.txt",
        "--documents",
        "lines",
        "-o",
        "store",
        "--tokenizer",
        "bytes",
        "--append",
    ).stdout

    assert re.search(r"documents +5", shown)


def test_an_append_names_its_own_log_of_rejected_records(build, invoke, tmp_path):
    build()
    (tmp_path / "more.txt").write_bytes(b"one more\n\xff\n")

    arguments = [
        "--documents",
        "lines",
        "-o",
        "store",
        "--tokenizer",
        "bytes",
        "--append",
        "--max-bad",
        "1",
    ]
    shown = invoke("build", "more.txt", *arguments).stdout

    (named,) = re.findall(r"\S+\.jsonl", shown)
    assert "invalid_utf8" in (tmp_path / named).read_text()


@pytest.mark.parametrize(
    ("options", "edges"),
    [
        ([], (True, False)),
        (["--no-eos"], (False, False)),
        (["--bos"], (True, True)),
        (["--eos-token", "!", "--bos-token", "?"], ("!", "?")),
    ],
)
def test_edges_are_those_of_the_library(invoke, corpus, options, edges):
    invoke("build", corpus, "--documents", "lines", "-o", "store", *options)
    expected = ps.build(str(corpus), "expected", eos=edges[0], bos=edges[1], documents="lines")

    assert ps.TokenStore("store").digest == expected.digest


def test_no_end_and_an_end_token_exclude_each_other(build):
    assert "--no-eos and --eos-token" in build("--no-eos", "--eos-token", "!", code=2).stderr


def test_without_a_terminal_there_is_the_summary_and_nothing_else(penstock, corpus):
    done = penstock("build", corpus, "--documents", "lines", "-o", "store")

    assert done.stderr == b""
    assert b"\x1b" not in done.stdout
    assert done.stdout.decode().startswith("tokenizer gpt2, engine gigatoken\nstore built in ")


@pytest.mark.parametrize(("option", "shown"), [("--workers=1", True), ("--quiet", False)])
def test_a_tokenizer_that_only_the_slow_engine_supports_is_reported(
    penstock, corpus, option, shown
):
    words = Tokenizer(WordLevel({"a": 0, "?": 1}, "?"))
    words.pre_tokenizer = Whitespace()
    words.save(str(corpus.parent / "words.json"))
    done = penstock(
        "build",
        corpus,
        "--documents",
        "lines",
        "-o",
        "store",
        "--no-eos",
        "--tokenizer",
        "words.json",
        option,
    )

    warning = done.stderr.decode()
    assert warning.startswith("gigatoken is not used for words.json: ") is shown
    assert ("takes about 100 times as long" in warning) is shown
    assert warning.count("\n") == shown
    assert (b"engine tokenizers\n" in done.stdout) is shown


def test_json_on_stdout_is_one_object(penstock, corpus):
    done = penstock("build", corpus, "--documents", "lines", "-o", "store", "--json")

    assert json.loads(done.stdout)["num_documents"] == 4
    assert done.stderr == b""


def test_progress_goes_to_the_terminal_of_stderr_and_not_to_a_redirected_stdout(
    corpus, read_terminal
):
    command = ["-m", "penstock", "build", str(corpus), "--documents", "lines"]
    shown, out = read_terminal([*command, "-o", "store"])

    assert "━" in shown
    assert "100%" in shown
    assert b"\x1b" not in out
    assert "━" not in out.decode()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc here")
def test_a_store_where_no_directory_can_be_made_is_refused_in_words(invoke, corpus):
    done = invoke("build", corpus, "-o", "/proc/penstock/store", code=1)

    assert done.stderr.startswith("StoreError: /proc/penstock/store cannot be made")
    assert "elsewhere" in done.stderr
