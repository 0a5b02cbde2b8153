"""A million batches: memory, open files and threads stay as they were.

pytest -m torture tests/torture/test_loader_soak.py
"""

import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock
from penstock.loader.loader import Loader
from penstock.order.plan import Plan
from penstock.rows.windows import Windows
from penstock.sources.slices import cut

pytestmark = pytest.mark.torture
torch.set_num_threads(1)

BATCHES = 1_000_000
WARM_UP = 50_000
MEBIBYTE = 1 << 20


def anonymous_bytes():
    """Memory that is not a mapped file."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024


def resources():
    return (
        anonymous_bytes(),
        len(list(Path("/proc/self/fd").iterdir())),
        threading.active_count(),
        len(os.listdir("/dev/shm")),  # noqa: PTH208
    )


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Two stores of two hundred parts, more than are kept open."""
    folder = tmp_path_factory.mktemp("soak")
    texts = [f"text {number} " * (number % 30 + 1) for number in range(3_000)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cut.__kwdefaults__, "slice_bytes", 2_500)
        for name in ("a", "b"):
            store = penstock.build(penstock.Texts(texts), folder / name, tokenizer="bytes")
            assert len(store.manifest.parts) > 150
    rows = {name: Windows(folder / name, 32, borders=name == "c") for name in ("a", "b")}
    return Plan(rows, weights={"a": 2, "b": 1}, seed=1)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_million_batches_leave_no_trace(plan, figure, prefetch):
    loader = Loader(plan, 2, prefetch=prefetch)
    begin = time.monotonic()
    total = 0
    for step, batch in enumerate(loader, 1):
        total += int(batch["inputs"][0, 0])
        if step == WARM_UP:
            before = resources()
        if step % 1_000 == 0:
            loader.state_dict()
        if step == BATCHES:
            after = resources()
            break
    growth = after[0] - before[0]
    figure(
        f"soak, prefetch={prefetch}: {BATCHES:,} batches in {time.monotonic() - begin:.0f} s, "
        f"anonymous memory {growth / MEBIBYTE:+.2f} MiB, files {after[1] - before[1]:+d}, threads "
        f"{after[2] - before[2]:+d}"
    )

    assert total > 0
    assert growth <= 16 * MEBIBYTE
    assert after[1:] == before[1:]


def test_a_thousand_loaders_leave_no_trace(plan, figure):
    def use():
        for number in range(100):
            loader = Loader(plan, 4, prefetch=number % 4)
            for step, _ in enumerate(loader):
                if step == number:
                    break

    use()
    for rows in plan.sources.values():
        rows.read(np.arange(len(rows)))  # as many parts are open now as ever will be
    before = resources()
    for _ in range(10):
        use()
    after = resources()
    growth = after[0] - before[0]
    figure(f"1,000 loaders opened and left: anonymous memory {growth / MEBIBYTE:+.2f} MiB")

    assert growth <= 16 * MEBIBYTE
    assert after[1:] == before[1:]
