"""Stores that are built in object storage: the bytes of a local build, one writer, safe to kill."""

import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

import penstock
from penstock.errors import MissingStoreError, RemoteError, StoreError
from penstock.sources.settings import Texts

pytestmark = pytest.mark.usefixtures("small_slices")
SETTINGS = {"tokenizer": "bytes", "documents": "lines", "max_bad": 10}


def build(inputs, store, **settings):
    with suppress(MissingStoreError):
        return penstock.build(inputs, store, **{**SETTINGS, **settings})


@pytest.fixture
def inputs(tmp_path):
    """A file of a few slices, with a record that is refused."""
    lines = [f"line {number} of some text {number * 7919}\n" for number in range(400)]
    (tmp_path / "in.txt").write_bytes("".join(lines).encode() + b"bad \xff byte\n")
    return tmp_path / "in.txt"


@pytest.fixture
def more(tmp_path):
    """Another file."""
    (tmp_path / "more.txt").write_text("".join(f"more text, line {n}\n" for n in range(300)))
    return tmp_path / "more.txt"


def digests(objects):
    return {name: hashlib.sha256(data).hexdigest() for name, data in objects.items()}


def test_a_remote_store_has_the_bytes_of_a_local_one(bucket, inputs, tmp_path, sums):
    build(inputs, tmp_path / "local")

    build(inputs, f"{bucket.url}/some/store")

    assert digests(bucket.objects("some/store")) == sums(tmp_path / "local")


def test_an_append_gives_the_bytes_of_a_local_append(bucket, inputs, more, tmp_path, sums):
    url = f"{bucket.url}/store"
    for place in (tmp_path / "local", url):
        build(inputs, place)
        build(more, place, append=True)

    assert digests(bucket.objects("store")) == sums(tmp_path / "local")


def test_both_sides_of_a_split_are_written(bucket, inputs, more, tmp_path, sums):
    url = f"{bucket.url}/store"
    for place in (tmp_path / "local", url):
        build(inputs, place, split="hash:0.2")
        build(more, place, split="hash:0.2", append=True)

    assert digests(bucket.objects("store")) == sums(tmp_path / "local")
