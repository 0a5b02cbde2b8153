"""`penstock verify`: a verdict and an exit code."""

import re
from pathlib import Path

import pytest

import penstock as ps


@pytest.fixture
def store(invoke, corpus):
    return ps.build(str(corpus), "store", tokenizer="bytes", documents="lines")


def flip(path, place):
    data = bytearray(Path(path).read_bytes())
    data[place] ^= 1
    Path(path).write_bytes(data)


def test_an_intact_store_is_one_line(invoke, store):
    shown = invoke("verify", "store").stdout

    assert re.fullmatch(r"store is intact: 1 part, 4 documents, 75 tokens \([\d.]+ m?s\)\n", shown)


def test_json_is_one_object(run_json, store):
    assert run_json("verify", "store") == {
        "store": "store",
        "whole": True,
        "num_parts": 1,
        "num_documents": 4,
        "num_pieces": 4,
        "num_tokens": 75,
        "digest": store.digest,
    }


@pytest.mark.parametrize(
    "name", ["part-00000.tokens.npy", "penstock.json", "part-00000.origin.npy"]
)
def test_damage_is_exit_code_one_and_names_the_file(invoke, run_json, store, name):
    flip(f"store/{name}", -3)

    assert name in invoke("verify", "store", code=1).stderr
    assert run_json("verify", "store", code=1)["error"]["type"] == "StoreError"


def test_both_sides_of_a_split_are_checked(invoke, run_json, corpus):
    ps.build(str(corpus), "both", tokenizer="bytes", split="tail:0.4", documents="lines")

    assert invoke("verify", "both").stdout.count("is intact") == 2
    assert list(run_json("verify", "both")) == ["train", "val"]
    flip("both/val/part-00000.tokens.npy", -1)
    assert "val/part-00000.tokens.npy" in invoke("verify", "both", code=1).stderr


def test_what_is_no_store_is_an_error(invoke, corpus):
    assert "has no penstock.json" in invoke("verify", ".", code=1).stderr
