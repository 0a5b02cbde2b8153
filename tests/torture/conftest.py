"""A build that is run by another process, to be killed and starved."""

import re
import shutil
import subprocess
import sys

import pytest
import zygote

import penstock
from penstock.sources.slices import cut

SLICE_BYTES = 6_000
# Builds argv[1] into argv[2]; with argv[3], dies before it gives a file a name that begins so.
CHILD = f"""
import os, pathlib, signal, sys
import penstock
from penstock.sources.slices import cut
cut.__kwdefaults__["slice_bytes"] = {SLICE_BYTES}
if len(sys.argv) > 3:
    replace = os.replace
    def dying(old, new):
        if pathlib.Path(new).name.startswith(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        replace(old, new)
    os.replace = dying
print("begin", flush=True)
penstock.build(
    sys.argv[1], sys.argv[2], tokenizer="bytes", documents="lines", max_bad=2,
    workers=os.environ.get("WORKERS", 2),
)
print("end", flush=True)
"""


class Trial:
    """One input, its clean store, and a place where builds of it go wrong."""

    def __init__(self, folder, sums, num_lines):
        self.inputs = folder / "in.txt"
        lines = [f"line {number} of some text {number * 7919}\n" for number in range(num_lines)]
        self.inputs.write_text("".join(lines) + "bad \udcff\n" * 2, errors="surrogateescape")
        self.clean, self.place, self.folder = folder / "clean", folder / "store", folder
        self._sums = sums
        self.build(self.clean)
        self.expected = sums(self.clean)

    def build(self, place=None):
        """Build here, in this process."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(cut.__kwdefaults__, "slice_bytes", SLICE_BYTES)
            return penstock.build(
                self.inputs, place or self.place, tokenizer="bytes", documents="lines", max_bad=2
            )

    def command(self, *more):
        """The command that builds in another process."""
        return [sys.executable, *self.arguments(*more)]

    def arguments(self, *more):
        """The arguments of Python in that command."""
        return ["-c", CHILD, str(self.inputs), str(self.place), *more]

    def begin_at(self, state=None):
        """Start anew, or from a copy of the directory `state`."""
        shutil.rmtree(self.place, ignore_errors=True)
        if state is not None:
            shutil.copytree(state, self.place)

    def left_by(self, name, dies_before):
        """The state of a build that was killed before it named a file `dies_before`…"""
        self.begin_at()
        zygote.run(self.arguments(dies_before), stdout=subprocess.DEVNULL, timeout=60)
        shutil.move(self.place, self.folder / name)
        return self.folder / name

    def is_whole_or_unfinished(self):
        """Whether what lies there is a store that passes `verify`, or says that it is none."""
        try:
            penstock.verify(self.place)
        except penstock.errors.StoreError as error:
            return re.search("not finished|there is no store|not a store", str(error)) is not None
        return True

    def goes_on_to_the_same_bytes(self):
        """Whether building again gives the clean store, file by file."""
        self.build()
        return self._sums(self.place) == self.expected


@pytest.fixture(scope="module")
def trial(tmp_path_factory, sums):
    """A store of a few parts."""
    return Trial(tmp_path_factory.mktemp("trial"), sums, 600)


@pytest.fixture(scope="module")
def short_trial(tmp_path_factory, sums):
    """A store of one part, so that one thread makes all calls of a part."""
    return Trial(tmp_path_factory.mktemp("short"), sums, 100)


@pytest.fixture(scope="module")
def long_trial(tmp_path_factory, sums):
    """A store of a hundred parts, which takes a good part of a second to build."""
    return Trial(tmp_path_factory.mktemp("long"), sums, 15_000)
