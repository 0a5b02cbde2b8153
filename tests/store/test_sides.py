"""Train and validation commit together: whoever opens both gets both of one build."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import time

import pytest
import zygote

import penstock
from penstock.cli.options import open_at
from penstock.errors import MissingStoreError, StoreError
from penstock.integrations.stores import stores_together
from penstock.sources.settings import Texts
from penstock.store import open_sides, sides
from penstock.store.manifest import read_manifest

SPLIT = {"tokenizer": "bytes", "split": "hash:0.5"}


def texts(word, count=60):
    return Texts([f"{word} {number}" for number in range(count)])


@pytest.fixture
def impatient(monkeypatch):
    """Sides that do not belong together are an error at once."""
    monkeypatch.setattr(sides, "_WAIT_SECONDS", 0.05)


@pytest.fixture
def mixed(tmp_path):
    """The training side of one build, and the validation side of another."""
    for word in ("old", "new"):
        penstock.build(texts(word), tmp_path / word, **SPLIT)
    shutil.rmtree(tmp_path / "old" / "val")
    shutil.copytree(tmp_path / "new" / "val", tmp_path / "old" / "val")
    return tmp_path / "old"


def generations(store):
    return [read_manifest(store / side).contents["generation"] for side in ("train", "val")]


def test_both_manifests_carry_one_generation_that_changes_with_every_build(tmp_path):
    seen = []
    penstock.build(texts("first"), tmp_path / "store", **SPLIT)
    seen += [generations(tmp_path / "store")]
    # One more document, on one side only: the other side has a new generation too.
    penstock.build(Texts(["one more"]), tmp_path / "store", **SPLIT, append=True)
    seen += [generations(tmp_path / "store")]
    penstock.build(texts("second"), tmp_path / "store", **SPLIT, overwrite=True)
    seen += [generations(tmp_path / "store")]

    assert all(train == val for train, val in seen)
    assert len({train for train, _ in seen}) == 3
    train, val = open_sides(tmp_path / "store")
    assert len(train) + len(val) == 60
    assert (
        "generation"
        not in penstock.build(texts("x"), tmp_path / "one", tokenizer="bytes").manifest.contents
    )


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("opens", ["open_sides", "command", "lightning", "trainer", "val given"])
def test_sides_of_different_builds_are_an_error_wherever_both_are_opened(mixed, opens):
    def open_both():
        if opens == "open_sides":
            open_sides(mixed)
        elif opens == "command":
            open_at(mixed)
        elif opens == "lightning":
            stores_together({"train": mixed / "train", "val": str(mixed / "val")})
        else:
            from penstock.recipe import DataConfig
            from penstock.train.data import open_data

            given = {"train": str(mixed)}
            if opens == "val given":
                given = {"train": str(mixed / "train"), "val": str(mixed / "val")}
            config = DataConfig(**given, length=16, rows="windows")
            open_data(config, mixed.parent / "run", log=lambda line: None)

    with pytest.raises(StoreError, match=r"of different builds.* Repeat that build, or copy both"):
        open_both()
    # One side alone is a store.
    assert len(penstock.TokenStore(mixed / "train")) > 0
    assert len(penstock.verify(mixed / "val")) > 0


@pytest.mark.usefixtures("impatient")
def test_a_build_that_was_killed_between_the_sides_is_an_error_until_it_is_repeated(
    tmp_path, monkeypatch
):
    store = tmp_path / "store"
    penstock.build(texts("old"), store, **SPLIT)
    then = [read_manifest(store / side).digest for side in ("train", "val")]
    real = os.replace

    def dying(old, new):
        if str(new).endswith("penstock.json") and read_manifest(store / "val").digest != then[1]:
            raise KeyboardInterrupt  # the validation side is committed, and training is next
        real(old, new)

    monkeypatch.setattr(os, "replace", dying)
    with pytest.raises(KeyboardInterrupt):
        penstock.build(texts("more"), store, **SPLIT, append=True)
    monkeypatch.undo()
    monkeypatch.setattr(sides, "_WAIT_SECONDS", 0.05)

    assert read_manifest(store / "train").digest == then[0]
    with pytest.raises(StoreError, match="of different builds"):
        open_sides(store)
    penstock.build(texts("more"), store, **SPLIT, append=True)
    train, val = open_sides(store)
    assert len(train) + len(val) == 120
    penstock.verify(store / "train"), penstock.verify(store / "val")


def test_a_reader_waits_while_the_sides_are_being_replaced(mixed):
    good, bad = mixed.parent / "new" / "val", mixed / "train"
    # Another process repairs the pair while this one waits.
    code = f"import time, shutil; time.sleep(0.3); shutil.rmtree({str(bad)!r}); "
    code += f"shutil.copytree({str(good.with_name('train'))!r}, {str(bad)!r})"
    with zygote.Popen(["-c", code]):
        train, val = open_sides(mixed)
    assert train.decode(0).startswith("new")
    assert val.decode(0).startswith("new")


def test_a_store_that_does_not_exist_is_an_error_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sides, "_WAIT_SECONDS", 600.0)
    with pytest.raises(MissingStoreError, match="does not exist"):
        open_sides(tmp_path / "none")


WRITER = """
import shutil, sys, penstock
from penstock import Texts
store, number = sys.argv[1], 0
print("begin", flush=True)
while True:
    number += 1
    texts = Texts([f"build {number} document {n}" for n in range(40)])
    kind = "append" if number % 4 else "overwrite"
    penstock.build(texts, store, tokenizer="bytes", split="hash:0.5", **{kind: True})
"""


def read_pairs(store, until, counts):
    """Open both sides again and again; count pairs, errors, and pairs of different builds."""
    while time.monotonic() < until:
        try:
            train, val = open_sides(store)
        except StoreError:
            counts.put("error")
            continue
        same = [each["inputs"] for each in train.manifest.builds]
        counts.put("pair" if same == [each["inputs"] for each in val.manifest.builds] else "mixed")


@pytest.mark.skipif(os.name == "nt", reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("seconds", "least"),
    [(2.0, 50), pytest.param(120.0, 4_000, marks=[pytest.mark.torture, pytest.mark.timeout(600)])],
)
def test_no_reader_sees_sides_of_different_builds(tmp_path, seconds, least, figure):
    store = tmp_path / "store"
    penstock.build(texts("build"), store, **SPLIT)
    context = multiprocessing.get_context("fork")
    counts = context.Queue()
    command = ["-c", WRITER, str(store)]
    with zygote.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "begin\n"
        until = time.monotonic() + seconds
        readers = [context.Process(target=read_pairs, args=(store, until, counts)) for _ in "12"]
        for reader in readers:
            reader.start()
        found = {"pair": 0, "error": 0, "mixed": 0}
        while any(reader.is_alive() for reader in readers) or not counts.empty():
            if not counts.empty():
                found[counts.get()] += 1
        for reader in readers:
            reader.join()
        assert writer.poll() is None, "the writer ended"
        writer.send_signal(signal.SIGKILL)
    total = found["pair"] + found["mixed"]
    figure(f"{total:,} opens of both sides beside builds: {found['mixed']} of different builds")
    assert found["mixed"] == found["error"] == 0
    assert total >= least
