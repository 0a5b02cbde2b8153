"""What users of a shell do from habit works, or is refused in words."""

import pytest

import penstock
from penstock.errors import TokenizerError
from penstock.tokenize.train import train_tokenizer


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
