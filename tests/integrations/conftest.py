"""A cache of its own for every test, and a tokenizer as small as they come."""

import json

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The directory that tokenized files are kept in."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("PENSTOCK_CACHE", str(directory))
    return directory


class Letters:
    """A tokenizer of the user's own: a character an id. Counts how often it is called."""

    def __init__(self, returns=list):
        self.returns = returns
        self.calls = 0

    def encode(self, text):
        self.calls += 1
        return self.returns([ord(letter) for letter in text])


@pytest.fixture
def letters():
    return Letters()


@pytest.fixture
def write(tmp_path):
    """Write a file from bytes or text, or JSON lines from a list of texts."""

    def write(name, contents):
        path = tmp_path / name
        if isinstance(contents, list):
            contents = "".join(json.dumps({"text": text}) + "\n" for text in contents)
        path.write_bytes(contents.encode() if isinstance(contents, str) else contents)
        return path

    return write
