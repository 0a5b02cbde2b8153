"""One writer: a build whose directory or lock is taken away ends with an error and no damage.

The first build is stopped (SIGSTOP) while it writes. Its directory is deleted, moved or replaced,
and a second build makes another store there. Then the first build is continued.
"""

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import zygote

import penstock
from penstock.errors import StoreBusyError, StoreError
from penstock.sources.settings import Texts
from penstock.store.files import write_file
from penstock.store.lock import lock_path, locked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

CHILD = """
import sys, penstock
from penstock.sources.slices import cut
cut.__kwdefaults__["slice_bytes"] = 6_000
print("begin", flush=True)
penstock.build(
    sys.argv[1], sys.argv[2], tokenizer="bytes", documents="lines", workers=2,
    split=sys.argv[3] or None, append="append" in sys.argv, overwrite="overwrite" in sys.argv,
)
"""
# What happens to the store while its build is stopped.
ATTACKS = ("delete all", "delete store and lock", "move", "move, same text", "delete lock")


def _has_stopped(process):
    """Whether all threads of a process are stopped (T) or have ended."""
    states = set()
    with suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended
        for path in Path(f"/proc/{process}/task").glob("*/stat"):
            states.add(path.read_text().rpartition(")")[2].split()[0])
        return bool(states) and states <= {"T", "Z", "X"}
    return False


class Race:
    """Two builds of one directory."""

    def __init__(self, folder):
        self.folder, self.store = folder, folder / "out" / "store"
        self.texts = [folder / "one.txt", folder / "two.txt"]
        for number, path in enumerate(self.texts):
            path.write_text("".join(f"line {n} of text {number}\n" for n in range(9_000)))

    def begin(self, text, *options, split=""):
        """Start a build in another process."""
        command = ["-c", CHILD, str(text), str(self.store), split, *options]
        child = zygote.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "begin\n"
        return child

    def stopped(self, delay, *options, **settings):
        """Start a build, and stop it `delay` seconds after it has sealed its first slice."""
        child = self.begin(self.texts[0], *options, **settings)
        built = self.store.with_name(".store.new") if "overwrite" in options else self.store
        while child.poll() is None and not any(built.glob(".slice-*.json")):
            time.sleep(0.001)
        time.sleep(delay)
        child.send_signal(signal.SIGSTOP)
        # Until all of its threads have stopped, or it has ended. It is a child of another process,
        # so the system does not report that to `waitid`.
        while child.poll() is None and not _has_stopped(child.pid):
            time.sleep(0.001)
        return child

    def attack(self, attack):
        """Take the directory or the lock away."""
        if attack == "delete all":
            shutil.rmtree(self.store.parent)
        elif attack == "delete store and lock":
            shutil.rmtree(self.store)
            shutil.rmtree(self.store.with_name(".store.new"), ignore_errors=True)
            self.store.with_name(".store.lock").unlink(missing_ok=True)
        elif attack == "delete lock":
            self.store.with_name(".store.lock").unlink(missing_ok=True)
        else:
            self.store.parent.rename(self.folder / "moved")

    def run(self, attack, delay, *options, **settings):
        """One race; returns whether the first build was still running when it was attacked."""
        shutil.rmtree(self.store.parent, ignore_errors=True)
        shutil.rmtree(self.folder / "moved", ignore_errors=True)
        if options:
            self.begin(self.texts[1], **settings).communicate(timeout=60)
        first = self.stopped(delay, *options, **settings)
        self.attack(attack)
        is_same = attack in ("move, same text", "delete lock")
        later = [each for each in options if attack == "delete lock"]
        second = self.begin(self.texts[0 if is_same else 1], *later, **settings)
        _, second_error = second.communicate(timeout=60)
        sides = ("train", "val") if settings.get("split") else ("",)
        then = [penstock.verify(self.store / side).digest for side in sides]
        was_running = first.poll() is None
        first.send_signal(signal.SIGCONT)
        _, first_error = first.communicate(timeout=60)

        # An append that the first build has finished is not repeated.
        assert second.returncode == 0 or "already" in second_error, second_error
        # The store of the second build is not touched, and the first build is no silent success.
        assert [penstock.verify(self.store / side).digest for side in sides] == then
        if first.returncode:
            assert re.search(r"Store(Busy)?Error: ", first_error.splitlines()[-1]), first_error
            assert "while it was being written" in first_error
        hidden = {path.name for path in self.store.rglob(".*")}
        assert not hidden, "files of the first build are in the store of the second"
        return was_running and first.returncode != 0


@pytest.fixture
def race(tmp_path):
    return Race(tmp_path)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_build_whose_directory_or_lock_is_gone_refuses_to_write(race, attack):
    assert race.run(attack, 0.0)


@pytest.mark.parametrize("options", [("append",), ("overwrite",)])
def test_an_append_and_an_overwrite_refuse_too(race, options):
    assert race.run("delete all", 0.0, *options, split="hash:0.2")


def test_a_file_is_never_written_into_another_directory_of_the_same_name(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    with locked(store):
        write_file(store / "before", [b"1"])
        store.rename(tmp_path / "moved")
        store.mkdir()
        with pytest.raises(StoreError, match=r"was deleted, moved or replaced .* Run this again"):
            write_file(store / "after", [b"2"])
    assert not list(store.iterdir())
    assert [path.name for path in (tmp_path / "moved").iterdir()] == ["before"]


def test_a_directory_with_the_inode_number_of_the_deleted_one_is_another_directory(tmp_path):
    """File systems use the number of a deleted directory again, unless it is still open."""
    store = tmp_path / "store"
    store.mkdir()
    with locked(store):
        for _ in range(20):
            store.rmdir()
            store.mkdir()
            with pytest.raises(StoreError, match="deleted, moved or replaced"):
                write_file(store / "file", [b"1"])


def test_a_process_that_lost_its_lock_leaves_the_lock_of_the_next_one(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    with locked(store):
        lock_path(store).unlink()
        lock_path(store).write_text("another process\n")
        with pytest.raises(StoreBusyError, match=r"lock of .*store was deleted .* Run this again"):
            write_file(store / "file", [b"1"])
    assert lock_path(store).read_text() == "another process\n"


def test_a_manifest_names_no_part_that_was_deleted_during_the_build(tmp_path):
    def delete(progress):
        for path in (tmp_path / "store").glob("part-*"):
            path.unlink()

    texts = Texts([f"text {number}" for number in range(100)])
    with pytest.raises(StoreError, match=r"part-00000\..*npy .* during the build.* Run this again"):
        penstock.build(texts, tmp_path / "store", tokenizer="bytes", progress=delete)
    assert not (tmp_path / "store" / "penstock.json").exists()
    assert len(penstock.build(texts, tmp_path / "store", tokenizer="bytes")) == 100


@pytest.mark.torture
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("options", [(), ("append",), ("overwrite",)])
@pytest.mark.parametrize("split", ["", "hash:0.2"])
def test_two_builds_never_spoil_a_store(race, options, split, figure):
    chance = random.Random(len(options) + len(split))
    refused = 0
    for number in range(40):
        attack = ATTACKS[number % len(ATTACKS)]
        refused += race.run(attack, chance.uniform(0, 0.04), *options, split=split)

    figure(f"races {options} {split!r}: 40, first build refused {refused}, bad stores 0")
    assert refused >= 20
