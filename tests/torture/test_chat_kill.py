"""Builds of chat stores killed at every file they name, and at random times."""

import json
import random
import signal
import subprocess
import sys

import pytest

import penstock
from penstock.sources.slices import cut

SLICE_BYTES = 4_000
# Builds argv[1] into argv[2], and dies before it gives a file its argv[3]-th name.
CHILD = f"""
import os, signal, sys
import penstock
from penstock.sources.slices import cut
cut.__kwdefaults__["slice_bytes"] = {SLICE_BYTES}
replace, left = os.replace, int(sys.argv[3])
def dying(old, new):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(old, new)
os.replace = dying
settings = dict(chat=penstock.Chat("chatml", "bytes", add_tokens="auto"), max_bad=1)
penstock.build(sys.argv[1], sys.argv[2], workers=2, **settings)
"""


@pytest.fixture
def inputs(tmp_path):
    def line(number):
        said = [("user", f"What is {number}?"), ("assistant", f"It is {number}. 你好")]
        return json.dumps({"messages": [{"role": role, "content": text} for role, text in said]})

    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join([*(line(number) for number in range(150)), "{}"]))
    return path


@pytest.mark.parametrize(
    "num_kills", [2, pytest.param(30, marks=[pytest.mark.torture, pytest.mark.timeout(3_600)])]
)
def test_chat_builds_killed_anywhere_go_on_to_the_same_bytes(
    inputs, tmp_path, sums, num_kills, monkeypatch, figure
):
    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", SLICE_BYTES)
    clean = tmp_path / "clean"
    parts = penstock.build(
        inputs, clean, chat=penstock.Chat("chatml", "bytes", add_tokens="auto"), max_bad=1
    ).manifest.parts
    names = 5 * len(parts) + 4  # four arrays and a record for each part, and the rest
    chance, hits = random.Random(num_kills), 0
    for number in range(num_kills):
        place = tmp_path / f"store-{number}"
        at = number + 1 if num_kills > names else chance.randint(1, names)
        done = subprocess.run([sys.executable, "-c", CHILD, inputs, place, str(at)], timeout=120)
        hits += done.returncode == -signal.SIGKILL
        settings = {"chat": penstock.Chat("chatml", "bytes", add_tokens="auto"), "max_bad": 1}
        penstock.build(inputs, place, **settings)
        assert sums(place) == sums(clean), f"killed before file {at}"

    figure(f"chat builds killed before a file: {hits} of {num_kills}, {len(parts)} parts")
    assert hits
