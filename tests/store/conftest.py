"""Inputs and stores that are built in milliseconds."""

import json

import pytest

import penstock
from penstock.tokenize.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def bytewise():
    """The tokenizer that needs no vocabulary."""
    return load_tokenizer("bytes")


@pytest.fixture
def inputs(tmp_path):
    """A folder of text and JSON Lines, 26 kB, with three records that are refused."""
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [f"line {number} of some text, naïve café {number * 7919}\n" for number in range(300)]
    (folder / "a.txt").write_bytes("".join(lines).encode() + b"bad \xff byte\n")
    rows = [json.dumps({"text": f"row {number} 你好"}) for number in range(200)]
    (folder / "b.jsonl").write_text("\n".join([*rows, "not json", '{"no": "text"}']))
    return folder


@pytest.fixture
def built(inputs, tmp_path, bytewise, small_slices):
    """A store of several parts."""
    store = penstock.build(
        inputs, tmp_path / "store", tokenizer=bytewise, documents="lines", max_bad=10
    )
    assert len(store.manifest.parts) > 4
    return store
