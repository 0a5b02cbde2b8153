"""`penstock tokenizer train`."""

import re

import penstock as ps


def test_it_trains_what_build_then_uses(invoke, data):
    text = data / "tinyshakespeare" / "input.txt"
    shown = invoke("tokenizer", "train", text, "-o", "own.json", "--vocab-size", 1000).stdout

    assert shown.startswith("own.json written\n")
    assert re.search(r"vocabulary +1,000 tokens", shown)
    invoke("build", text, "-o", "store", "--tokenizer", "own.json")
    store = ps.TokenStore("store")
    assert store.manifest.contents["tokenizer"]["vocab_size"] == 1000
    assert store.manifest.contents["eos_id"] == 0
    assert store.decode_bytes(0) == text.read_bytes()


def test_json_describes_the_training(run_json, corpus):
    answer = run_json("tokenizer", "train", corpus, "-o", "own.json", "--vocab-size", 260)

    assert answer == {
        "path": "own.json",
        "vocab_size": 260,
        "num_documents": 1,
        "num_bytes": 76,
        "num_rejects": 0,
    }


def test_special_tokens_replace_the_usual_one(invoke, corpus):
    options = ["--special-token", "<|a|>", "--special-token", "<|b|>"]
    invoke("tokenizer", "train", corpus, "-o", "own.json", "--vocab-size", 260, *options)

    tokenizer = ps.load_tokenizer("own.json")
    assert [tokenizer.token_id(token) for token in ("<|a|>", "<|b|>")] == [0, 1]
    assert tokenizer.eos_id is None


def test_fields_of_json_lines_can_be_named(invoke, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "hello hello hello"}\n' * 9)
    command = ["tokenizer", "train", "a.jsonl", "-o", "own.json", "--vocab-size", 262]

    assert 'no field "text"' in invoke(*command, code=1).stderr
    invoke(*command, "--field", "body")


def test_a_vocabulary_that_is_too_small_is_an_error(invoke, corpus):
    result = invoke("tokenizer", "train", corpus, "-o", "own.json", "--vocab-size", 100, code=1)

    assert result.stderr.startswith("TokenizerError: vocab_size=100 has no room for the 256 bytes")
