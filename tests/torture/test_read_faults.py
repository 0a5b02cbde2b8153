"""Reading that fails: every call that examines, opens, reads, lists or maps a file gets a fault.

Each run has one fault in one call: an input/output error, an interrupted call, a short read, an
early end of the file, or zeros in place of the bytes of a store. The result is the same as without
the fault, or an error of penstock in one line. Nothing hangs or crashes, and nothing is different
in silence. After a build that failed, the same command succeeds.
"""

import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import errors

HERE = Path(__file__).parent
OWN_ERRORS = {name for name in vars(errors) if name.endswith("Error")}
WRITERS = ("build", "build again", "resume", "append", "overwrite")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD and /proc/self/fd are Linux's"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (cc)"),
]


class Faults:
    """The server that runs penstock with faults, and the files that it reads."""

    def __init__(self, folder, sums):
        self.folder, self._sums = folder, sums
        self.prefix = f"{folder / 'files'}/"
        self.place = folder / "files" / "place"
        self.store = self.place / "store"
        inputs, more = folder / "files" / "in", folder / "files" / "more.txt"
        write_inputs(inputs, more)
        options = ["--tokenizer", "bytes", "--documents", "lines", "--workers", "1"]
        build = ["build", str(inputs), "-o", str(self.store), *options]
        self.jobs = {
            "build": build,
            "build again": build,
            "resume": build,
            "append": ["build", str(more), "-o", str(self.store), *options, "--append"],
            "overwrite": [*build, "--overwrite", "--no-eos"],
            "verify": ["verify", str(self.store)],
            "info": ["info", str(self.store)],
            "decode": ["decode", str(self.store), "-d", "3", "-n", "4"],
            "load": ["load", str(self.store)],
        }
        library = folder / "read_faults.so"
        cc = ["cc", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", str(HERE / "read_faults.c")]
        subprocess.run([*cc, "-o", str(library), "-ldl"], check=True, timeout=60)
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / "fault_server.py"), str(library), str(folder)],
            env=os.environ
            | {"LD_PRELOAD": str(library), "PENSTOCK_CACHE": str(folder / "files" / "cache")},
            cwd="/",  # relative paths would be files of the test
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.clean = {}

    def __enter__(self):
        self._make_states()
        return self

    def __exit__(self, *error):
        self._server.kill()
        self._server.communicate()

    def run(self, job, number=0, fault="none"):
        """Run a job from its state, with a fault in its call `number`."""
        self._server.stdin.write(json.dumps([self.jobs[job], number, fault]) + "\n")
        self._server.stdin.flush()
        done = json.loads(self._server.stdout.readline())
        done["out"] = re.sub(r" \([\d.]+ m?s\)", "", done["out"])  # how long it took
        done["last"] = "".join(done["err"].strip().splitlines()[-1:])
        return done

    def begin(self, job):
        """Restore the files that the job starts from."""
        shutil.rmtree(self.place)
        shutil.rmtree(self.folder / "files" / "cache", ignore_errors=True)
        shutil.copytree(self.folder / job.replace(" ", "-"), self.place)

    def _make_states(self):
        """Copy the directory as each job finds it, and run the job there without a fault."""
        states = {job: self.folder / job.replace(" ", "-") for job in self.jobs}
        states["build"].mkdir()
        self.place.mkdir()
        for job in self.jobs:
            if job == "resume":
                shutil.copytree(self.folder / "build", states[job], dirs_exist_ok=True)
                self.begin(job)
                assert self.run(job, fault="kill")["code"] == -9
                shutil.rmtree(states[job])
                shutil.copytree(self.place, states[job])
            elif job != "build":
                shutil.copytree(self.folder / "finished", states[job])
            self.begin(job)
            done = self.run(job)
            assert done["code"] == 0, done["err"]
            self.clean[job] = (done["out"], self.sums(), done["calls"])
            if job == "build":
                shutil.copytree(self.place, self.folder / "finished")

    def sums(self):
        """The digests of the files of the store."""
        return self._sums(self.store) if self.store.exists() else {}

    def problem(self, job, number, fault):
        """What is wrong after a fault; None if penstock did what it promises. Also: the call."""
        out, sums, _ = self.clean[job]
        self.begin(job)
        done = self.run(job, number, fault)
        if job not in WRITERS and done["code"] == 0:
            return None if done["out"] == out else "another result without an error", done
        if done["code"] == 0:
            return None if self.sums() == sums else "other bytes without an error", done
        if done["code"] != 1:
            return f"exit code {done['code']}", done
        if "Traceback" in done["err"] or not re.fullmatch(r"\w+: .+", done["last"]):
            return "a traceback", done
        if done["last"].partition(":")[0] not in OWN_ERRORS and self.prefix not in done["last"]:
            return "an error of the system that names no file", done
        if job in WRITERS and self.sums() != sums:
            again = self.run(job)
            if again["code"] or self.sums() != sums:
                return f"the same command fails afterwards: {again['err']}", done
        return None, done

    def every(self):
        """Each job, call and fault that makes sense for the call."""
        for job, (_, _, calls) in self.clean.items():
            for number, call in enumerate(calls, 1):
                kind, path = call.split(" ", 1)
                yield job, number, "EIO"
                # The other calls are not interrupted: see their manual pages.
                if kind in ("open", "read"):
                    yield job, number, "EINTR"
                if kind == "read":
                    yield job, number, "short"
                    yield job, number, "end"
                # Nobody can know that zeros were not the text of an input.
                if kind in ("read", "mmap") and path.startswith(str(self.place)):
                    yield job, number, "zero"


def write_inputs(folder, more):
    """Write a directory of all kinds of files, and a file to append."""
    (folder / "deeper").mkdir(parents=True)
    (folder / "a.txt").write_text("".join(f"line {each} of text\n" for each in range(300)))
    rows = "".join(json.dumps({"text": f"row {each} 你好"}) + "\n" for each in range(60))
    (folder / "b.jsonl").write_text(rows)
    (folder / "deeper" / "c.jsonl.gz").write_bytes(gzip.compress(rows.encode(), mtime=0))
    (folder / "d.csv").write_text("text,id\n" + "".join(f"cell {n},{n}\n" for n in range(40)))
    pq.write_table(pa.table({"text": [f"parquet {n}" for n in range(60)]}), folder / "e.parquet")
    table = pa.table({"text": [f"arrow {n}" for n in range(60)]})
    with pa.ipc.new_stream(str(folder / "f.arrow"), table.schema) as stream:
        stream.write_table(table)
    more.write_text("".join(f"appended {each}\n" for each in range(60)))


@pytest.fixture(scope="module")
def faults(tmp_path_factory, sums):
    with Faults(tmp_path_factory.mktemp("read-faults").resolve(), sums) as running:
        yield running


def drawn(cases, of_each):
    """A seeded sample that has `of_each` cases of each kind of fault."""
    draw = random.Random(15)
    return [
        case
        for fault in dict.fromkeys(fault for _, _, fault in cases)
        for case in draw.sample([each for each in cases if each[2] == fault], of_each)
    ]


@pytest.mark.parametrize(
    "of_each",
    [4, pytest.param(None, marks=[pytest.mark.torture, pytest.mark.timeout(7_200)])],
)
def test_a_fault_in_any_call_that_reads_is_an_error_or_changes_nothing(faults, of_each, figure):
    cases = list(faults.every())
    if of_each is not None:
        cases = drawn(cases, of_each)
    found, fired, refused = [], Counter(), Counter()
    for job, number, fault in cases:
        problem, done = faults.problem(job, number, fault)
        fired[fault] += bool(done["hit"])
        refused[fault] += done["code"] == 1
        if problem:
            found.append((problem, job, fault, done["hit"], done["err"][-300:]))

    for fault in fired:
        figure(
            f"{fault} in {fired[fault]:,} calls that read: {refused[fault]:,} named errors, "
            f"{fired[fault] - refused[fault]:,} without an effect"
        )
    assert not found, "\n".join(map(repr, found))
    assert set(fired) == {"EIO", "EINTR", "short", "end", "zero"}
    assert sum(fired.values()) >= 0.9 * len(cases)


def test_the_jobs_make_the_calls_that_are_to_fail(faults):
    made = {job: {call.split(" ")[0] for call in each[2]} for job, each in faults.clean.items()}

    assert made["build"] >= {"open", "stat", "read", "readdir"}
    assert made["load"] >= {"open", "stat", "read", "mmap"}
