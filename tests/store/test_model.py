"""A model of what the directory of a store may hold, compared with penstock in random order.

Builds, appends, overwrites, kills at random calls, copies, deletions, flipped bits, repairs, and
readers beside a writer that was stopped in the middle. After each step, every open gives a whole
store of some commit, or an error that says what to do.
"""

import os
import re
import shutil
import signal
import tempfile
import threading
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import penstock
from penstock.errors import StoreBusyError, StoreError
from penstock.sources.slices import cut

pytestmark = [pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]

# What a message says to do begins with one of these words.
ADVICE = re.compile(
    r"\b(Run|Repeat|Copy|Build|Rebuild|Choose|Delete|Replace|Wait|Give|Check|Name|Use|Make|Open|Restore|Move)\b"
    r"|`penstock build|leave out append|replace this one with|is not a store"
    r"|does not exist, so there is no store"
)
# Rules that hold once these modules exist.
HAS_CHECKSUMS = find_spec("penstock.store.blocks") is not None
CALLS = ("fsync", "replace", "unlink", "rmdir", "mkdir")
FILES = ("a.txt", "b.txt", "c.txt")


def refused(work, *arguments, **options):
    """Call `work`; returns the message of its StoreError, which must say what to do, or None."""
    try:
        work(*arguments, **options)
    except StoreBusyError:
        raise
    except StoreError as error:
        message = str(error)
    else:
        return None
    assert ADVICE.search(message), message
    return message


class Commit(NamedTuple):
    """A finished store: its split, and the inputs of each of its builds."""

    split: str | None
    groups: tuple[tuple[str, ...], ...]


class Action(NamedTuple):
    """A call of `build`."""

    kind: str
    group: tuple[str, ...]
    split: str | None

    def after(self, before):
        """The commit that follows `before` if the call succeeds."""
        if self.kind == "append" and before is not None:
            twice = any(name in group for group in before.groups for name in self.group)
            is_refused = twice or before.split != self.split
            return before if is_refused else Commit(self.split, (*before.groups, self.group))
        if self.kind == "build" and before is not None and before.split == self.split:
            return before  # finished already
        return Commit(self.split, (self.group,))


actions = st.builds(
    Action,
    st.sampled_from(("build", "build", "append", "overwrite")),
    st.lists(st.sampled_from(FILES), min_size=1, max_size=2, unique=True).map(sorted).map(tuple),
    st.sampled_from((None, None, "hash:0.5")),
)
places = st.sampled_from(("one", "two"))


def run_in_child(work, point, sent):
    """Fork a child that sends itself a signal before its call number `point` that writes."""
    child = os.fork()
    if child:
        return child
    calls, lock = count(1), threading.Lock()

    def stopping(call):
        def instead(*arguments, **options):
            with lock:
                if next(calls) == point:
                    os.kill(os.getpid(), sent)
            return call(*arguments, **options)

        return instead

    for name in CALLS:
        setattr(os, name, stopping(getattr(os, name)))
    code = 1
    try:
        work()
        code = 0
    except StoreError:
        code = 2
    finally:
        os._exit(code)


class Stores(RuleBasedStateMachine):
    """Two directories, and what each of them may hold."""

    @initialize()
    def prepare(self):
        memory = Path("/dev/shm")  # a kill needs no real disk, and syncs take a while
        self.folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None)).resolve()
        (self.folder / "in").mkdir()
        for name in FILES:
            lines = (f"{name} holds line {number} of text\n" for number in range(90))
            (self.folder / "in" / name).write_text("".join(lines))
        self.allowed = {"one": {None}, "two": {None}}
        self.damage: dict[str, dict[str, bytes]] = {"one": {}, "two": {}}
        self.readers: list[tuple[str, penstock.TokenStore, list[list[int]]]] = []
        self.clean: dict[Commit, Path] = {}

    def teardown(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    # What penstock is asked to do.

    def call(self, place, action):
        """Call `build` as the action says."""
        with small_slices():
            penstock.build(
                [self.folder / "in" / name for name in action.group],
                self.folder / place,
                tokenizer="bytes",
                documents="lines",
                split=action.split,
                workers=1,
                append=action.kind == "append",
                overwrite=action.kind == "overwrite",
            )

    def now(self, place):
        """The commit that the place holds; the training side is committed last."""
        for split, side in ((None, ""), ("hash:0.5", "train")):
            found = self.digest(self.folder / place / side)
            for each in self.allowed[place]:
                if each and each.split == split and self.clean_digest(each, side) == found:
                    return each
        return None

    def digest(self, path):
        """The digest of the store at `path` by its manifest; None where there is none."""
        return None if refused(penstock.TokenStore, path) else penstock.TokenStore(path).digest

    def clean_digest(self, commit, side):
        """The digest of a store that was built without any trouble."""
        if commit not in self.clean:
            self.clean[commit] = Path(f"clean-{len(self.clean)}")
            for number, group in enumerate(commit.groups):
                kind = "append" if number else "build"
                self.call(self.clean[commit], Action(kind, group, commit.split))
        return penstock.TokenStore(self.folder / self.clean[commit] / side).digest

    @rule(place=places, action=actions)
    def build(self, place, action):
        before = self.now(place)
        if message := refused(self.call, place, action):
            # Whatever a directory holds, there is a way to a whole store.
            assert action.kind != "overwrite", message
            return
        assert not (action.kind == "append" and before is None)
        self.allowed[place] = {action.after(before)}
        if action.kind == "overwrite":
            self.damage[place] = {}

    @rule(place=places, action=actions, point=st.integers(1, 60))
    def kill(self, place, action, point):
        before = self.now(place)
        child = run_in_child(lambda: self.call(place, action), point, signal.SIGKILL)
        self.ended(child, place, action, before)

    def ended(self, child, place, action, before):
        """Wait for a child, and note what it may have left."""
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            self.allowed[place] = {action.after(before)}
            self.damage[place] = {} if action.kind == "overwrite" else self.damage[place]
        elif os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
            if before is not None or action.kind != "append":
                self.allowed[place] = self.allowed[place] | {action.after(before)}
            if action.kind == "overwrite":
                # Between two renames there is no store at all, and overwriting again makes one.
                self.allowed[place] = self.allowed[place] | {None}
                self.damage[place] = dict.fromkeys(self.damage[place], b"")
        else:
            assert os.waitstatus_to_exitcode(status) == 2

    @rule(place=places, action=actions, point=st.integers(1, 60))
    def read_beside_a_writer(self, place, action, point):
        """Stop a writer in the middle; others read, and do not write."""
        before = self.now(place)
        child = run_in_child(lambda: self.call(place, action), point, signal.SIGSTOP)
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            code = os.waitstatus_to_exitcode(status)
            assert code in (0, 2)
            if code == 0:
                self.allowed[place] = {action.after(before)}
                self.damage[place] = {} if action.kind == "overwrite" else self.damage[place]
            return
        try:
            if not self.is_busy(place, action):
                # The writer was stopped while it made the directory, before it took the lock.
                assert point <= 2
                before = self.now(place)
            kept = self.allowed[place], self.damage[place]
            self.allowed[place] = kept[0] | {action.after(before), None}
            if action.kind == "overwrite":
                self.damage[place] = dict.fromkeys(kept[1], b"")
            self.every_open_gives_a_whole_store_or_says_what_to_do()
            self.allowed[place], self.damage[place] = kept
        finally:
            os.kill(child, signal.SIGCONT)
        self.ended(child, place, action, before)

    def is_busy(self, place, action):
        """Whether a second writer is refused; if not, it has done what the action says."""
        try:
            self.build(place, action)
        except StoreBusyError:
            return True
        return False

    # What users do.

    @rule(place=places)
    def copy(self, place):
        other = "two" if place == "one" else "one"
        if (self.folder / place).exists():
            self.delete(other)
            shutil.copytree(self.folder / place, self.folder / other)
            self.allowed[other] = set(self.allowed[place])
            self.damage[other] = dict(self.damage[place])

    @rule(place=places)
    def delete(self, place):
        shutil.rmtree(self.folder / place, ignore_errors=True)
        self.allowed[place], self.damage[place] = {None}, {}

    def files(self, place):
        """The files of finished stores, by their names below the place."""
        commit = self.now(place)
        sides = () if commit is None else ("train", "val") if commit.split else ("",)
        found = [path for side in sides for path in (self.folder / place / side).glob("[!.]*")]
        return sorted(path for path in found if path.is_file() and path.stat().st_size)

    @rule(place=places, where=st.integers(0, 1 << 30))
    def flip_a_bit(self, place, where):
        if self.damage[place] or not (found := self.files(place)):
            return
        path = found[where % len(found)]
        data = path.read_bytes()
        at = (where // 7) % len(data)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << where % 8]) + data[at + 1 :])
        self.damage[place][str(path.relative_to(self.folder / place))] = data

    @precondition(lambda self: any(self.damage.values()))
    @rule(place=places)
    def repair(self, place):
        """By copying the file from a good store."""
        for name, data in self.damage[place].items():
            path = self.folder / place / name
            if data and path.exists():
                path.write_bytes(data)
            else:
                return
        self.damage[place] = {}

    @precondition(lambda self: HAS_CHECKSUMS)
    @rule(place=places)
    def open_a_reader(self, place):
        commit = self.now(place)
        if commit is not None and not self.damage[place]:
            side = "train" if commit.split else ""
            whole = penstock.TokenStore(self.folder / self.clean[commit] / side)
            tokens = [document.tolist() for document in whole]
            self.readers.append((place, penstock.TokenStore(self.folder / place / side), tokens))

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 100))
    def read_from_an_open_reader(self, number):
        """A store that was opened stays the same, or reading it is an error."""
        _, store, expected = self.readers.pop(number % len(self.readers))
        found: list[list[int]] = []
        if not refused(lambda: found.extend(document.tolist() for document in store)):
            assert found == expected

    # What always holds.

    @invariant()
    def every_open_gives_a_whole_store_or_says_what_to_do(self):
        for place, allowed in getattr(self, "allowed", {}).items():
            opened = False
            for split, side in ((None, ""), ("hash:0.5", "train"), ("hash:0.5", "val")):
                path = self.folder / place / side
                damaged = any(
                    (self.folder / place / each).parent == path for each in self.damage[place]
                )
                # `verify` of the directory of a split checks both sides, which are opened below.
                if refused(penstock.TokenStore, path) or refused(penstock.verify, path):
                    opened = opened or damaged
                    continue
                found = penstock.TokenStore(path).digest
                digests = [
                    self.clean_digest(each, side)
                    for each in allowed
                    if each and each.split == split
                ]
                assert found in digests, f"{path} holds a store that nobody has built"
                assert not damaged or b"" in self.damage[place].values()
                opened = True
            assert opened or None in allowed, f"{place} holds no store; it held one of {allowed}"


@contextmanager
def small_slices():
    """Slices of about a kilobyte, so that each file makes several parts."""
    before = cut.__kwdefaults__["slice_bytes"]
    cut.__kwdefaults__["slice_bytes"] = 1_200
    try:
        yield
    finally:
        cut.__kwdefaults__["slice_bytes"] = before


@pytest.mark.parametrize(
    ("examples", "steps"),
    [(10, 15), pytest.param(300, 40, marks=[pytest.mark.torture, pytest.mark.timeout(7_200)])],
)
def test_every_open_gives_a_whole_store_or_says_what_to_do(examples, steps, figure):
    run_state_machine_as_test(
        Stores, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    )
    figure(f"random histories of two stores: {examples} of up to {steps} steps")
