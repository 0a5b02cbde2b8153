"""Inputs and stores that are built in milliseconds."""

import json
import os
import signal
import threading
from itertools import count

import pytest

import penstock
from penstock.tokenize.tokenizer import load_tokenizer

CALLS = ("fsync", "rename", "unlink", "mkdir")


def _killed(build, point):
    """Run `build` in a child that dies before its `point`-th call; False if it ended before."""
    child = os.fork()
    if child == 0:
        calls, lock = count(1), threading.Lock()

        def dying(call):
            def instead(*arguments, **options):
                if str(arguments[0]).endswith(".lock"):
                    return call(*arguments, **options)  # removed when the build is complete
                with lock:
                    if next(calls) == point:
                        os.kill(os.getpid(), signal.SIGKILL)
                        signal.pause()
                return call(*arguments, **options)

            return instead

        for name in CALLS:
            setattr(os, name, dying(getattr(os, name)))
        try:
            build()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.fixture(scope="session")
def killed():
    """A function that runs another one in a child, which is killed before its n-th call."""
    return _killed


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
