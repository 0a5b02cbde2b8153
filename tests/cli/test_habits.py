"""What users of a shell do from habit works, or is refused in words."""

import os
import re
import subprocess
import sys

import pytest

import penstock
from penstock.errors import StoreError, TokenizerError
from penstock.tokenize.train import train_tokenizer
from penstock.train.command import choose_recipe


def test_training_a_tokenizer_replaces_no_file_with_other_contents(tmp_path, invoke):
    path = tmp_path / "own.txt"
    path.write_text("the cat sat on the mat. " * 99)
    before = path.read_bytes()

    with pytest.raises(TokenizerError, match="exists already and has other contents"):
        train_tokenizer(str(path), path, vocab_size=264)
    assert path.read_bytes() == before
    train_tokenizer(str(path), tmp_path / "t.json", vocab_size=264)
    train_tokenizer(str(path), tmp_path / "t.json", vocab_size=264)  # the same again
    with pytest.raises(TokenizerError, match="--overwrite"):
        train_tokenizer(str(path), tmp_path / "t.json", vocab_size=262)
    invoke("tokenizer", "train", path, "-o", tmp_path / "t.json", "--vocab-size=262", "--overwrite")


def test_the_current_directory_can_be_the_store(tmp_path, monkeypatch, invoke):
    (tmp_path / "input.txt").write_text("one")
    (tmp_path / "store").mkdir()
    monkeypatch.chdir(tmp_path / "store")

    invoke("build", "../input.txt", "-o", ".")
    assert penstock.TokenStore(".").decode(0) == "one"


def test_a_build_says_what_it_skipped_and_repaired(tmp_path, invoke):
    (tmp_path / "a.txt").write_bytes(b"one\n\n\ntw\xff\n")
    shown = invoke(
        "build", tmp_path / "a.txt", "-o", tmp_path / "s", "--documents=lines", "--errors=replace"
    ).stdout

    assert "2 blank records" in shown
    assert "1 document with U+FFFD in place of invalid bytes" in shown


def test_info_of_a_file_and_of_a_failed_build_say_what_to_do(tmp_path, invoke):
    (tmp_path / "a.jsonl").write_text("{}\n")
    invoke("build", tmp_path / "a.jsonl", "-o", tmp_path / "s", code=1)

    assert "holds a build that failed" in (shown := invoke("info", tmp_path / "s").stdout)
    assert "change what its message says" in shown
    assert "is not a store" in invoke("info", tmp_path / "a.jsonl", code=1).stderr


def test_a_tilde_after_an_equals_sign_is_the_home_directory(tmp_path, monkeypatch, invoke):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "a.txt").write_text("one")

    invoke("build", tmp_path / "a.txt", "--output=~/store", "--tokenizer=bytes")
    invoke("info", "~/store")
    assert penstock.TokenStore(tmp_path / "home" / "store").decode(0) == "one"
    assert not (tmp_path / "~").exists()


def test_the_lengths_of_long_documents_fit_into_80_columns(tmp_path, invoke):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "{"x" * 12_000_000}"}}\n{{"text": "y"}}\n')
    invoke("build", tmp_path / "a.jsonl", "-o", "s", "--tokenizer=bytes")

    shown = invoke("info", "s").stdout.splitlines()
    assert [line.split()[-1] for line in shown if "median" in line or "mean" in line] == [
        "median",
        "max",
    ]


def test_info_names_a_replacement_that_is_not_finished(tmp_path, invoke):
    penstock.build(penstock.Texts(["a"]), tmp_path / "s", tokenizer="bytes")
    (tmp_path / ".s.new").mkdir()

    assert "an unfinished replacement of this store" in invoke("info", "s").stdout


def test_check_takes_directories_and_globs(tmp_path, invoke):
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.txt").write_text(f"the text of file {number} " * 400)

    for given in ("in", "in/*.txt"):
        assert "6 of 6 passed" in invoke("check", given, "--length", 16, "--batch-size", 2).stdout


def test_options_are_not_called_settings_of_the_text(tmp_path, invoke):
    (tmp_path / "input.txt").write_text("some text " * 99)

    shown = invoke("train", "input.txt", "--set", "training.foo=3", code=1).output
    assert "the command line sets training.foo" in shown


def test_the_guessed_warm_up_is_at_most_a_tenth_of_the_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input.txt").write_text("some text " * 99)
    logged = []
    recipe = choose_recipe("input.txt", {"training.steps": 30}, "cpu", logged.append)

    assert recipe.optimization.warmup_steps == 3
    assert "guessed optimization.warmup_steps = 3" in logged


@pytest.mark.skipif(os.name == "nt", reason="the shell of Windows is another")
@pytest.mark.parametrize(("file", "expected"), [("a.txt", 0), ("missing.txt", 1)])
def test_check_into_a_closed_pipe_exits_with_its_result(tmp_path, file, expected):
    (tmp_path / "a.txt").write_text("some words\n" * 9_000)
    # Unbuffered, so that each line meets the closed pipe.
    check = f"{sys.executable} -u -m penstock check {file}"
    code = f"{check} | true; exit ${{PIPESTATUS[0]}}"

    done = subprocess.run(
        ["bash", "-c", code], cwd=tmp_path, capture_output=True, timeout=240, check=False
    )

    assert (done.returncode, done.stderr) == (expected, b"")


def test_info_of_one_document_does_not_repeat_its_number_of_tokens(tmp_path, invoke):
    (tmp_path / "a.txt").write_text("one two three four")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n' * 2)
    invoke("build", tmp_path / "a.txt", "-o", tmp_path / "a", "--tokenizer=bytes")
    invoke("build", tmp_path / "b.jsonl", "-o", tmp_path / "b", "--tokenizer=bytes")

    shown = invoke("info", tmp_path / "a").stdout
    assert len(re.findall(r"\b19\b", shown)) == 1
    assert "median" in invoke("info", tmp_path / "b").stdout


def test_numbers_of_both_sides_of_a_split_say_so(tmp_path, invoke):
    (tmp_path / "a.txt").write_text("one\n\n" + "two\n" * 9)
    build = ("build", tmp_path / "a.txt", "-o", tmp_path / "s", "--documents=lines")
    invoke(*build, "--split=tail:0.3")
    shown = invoke("info", tmp_path / "s" / "val").stdout

    found = {line.split()[0] for line in shown.splitlines() if "train and val together" in line}
    assert found == {"bytes/token", "skipped"}


def test_the_advice_for_a_stream_into_a_split_store_can_be_followed(tmp_path):
    texts = penstock.Texts(["one", "two"] * 9)
    penstock.build(texts, tmp_path / "s", split="tail:0.3")

    with pytest.raises(StoreError, match=r"or call penstock.build with split='tail:0.3'\."):
        penstock.stream(texts, tmp_path / "s")
    penstock.build(texts, tmp_path / "s", split="tail:0.3")
