"""Runs penstock with a fault in one of its reading calls; see test_read_faults.py.

The process is started with read_faults.c preloaded. For each line of JSON on its standard input it
forks a child, which runs one job with one fault, and answers with a line of JSON. A fork takes
milliseconds; to start Python and import penstock and torch takes seconds. What a child without a
fault imports, the process imports too, so that the next children have it already.
"""

import ctypes
import importlib
import json
import mmap
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch

import penstock
import penstock.cli.app
import penstock.sources.tables
from penstock.errors import PenstockError
from penstock.rows import Documents, Packs, Windows
from penstock.sources.slices import cut
from penstock.store.journal import Journal

PATH_MAX = 4096
FAULTS = ("none", "EIO", "EINTR", "short", "end", "zero")  # the order of the enum in read_faults.c
LONGEST_SECONDS = 60.0


class Plan(ctypes.Structure):
    """What the preloaded library reads and writes; `struct plan` of read_faults.c."""

    _fields_ = (
        ("folder", ctypes.c_char * PATH_MAX),
        ("hit", ctypes.c_char * (2 * PATH_MAX)),
        ("ended", ctypes.c_char * PATH_MAX),
        ("ended_file", ctypes.c_int),
        ("log", ctypes.c_int),
        ("fault", ctypes.c_int),
        ("target", ctypes.c_long),
        ("calls", ctypes.c_long),
    )


def say(*values):
    sys.stdout.write(" ".join(map(str, values)) + "\n")
    sys.stdout.flush()


def load(store):
    """Print rows of every kind, as a training loop would get them."""
    opened = penstock.TokenStore(store)
    say(opened, opened.decode(3), opened.origin(3))
    for rows in (Windows(opened, length=64), Packs(opened, length=64), Documents(opened, 64)):
        loader = penstock.Loader(rows, batch_size=4, prefetch=0)
        for batch, _ in zip(loader, range(4), strict=False):
            say({name: value.tolist() for name, value in batch.items() if torch.is_tensor(value)})
        say(json.dumps(loader.state_dict()))


def run(job):
    """Run a job in this process: a command of penstock, or `load`; returns the exit code."""
    try:
        if job[0] == "load":
            load(*job[1:])
            return 0
        sys.argv = ["penstock", *job]
        penstock.cli.app.run()  # ends with SystemExit, or ends the process
    except SystemExit as ended:
        return ended.code or 0
    except (PenstockError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    except BaseException:  # noqa: BLE001  (as Python does at the end of a program)
        traceback.print_exc()
    return 1


def kill_after_two_parts():
    """Make a build in this process end by SIGKILL when it has sealed two parts."""
    seal = Journal.seal

    def dying(journal, record):
        seal(journal, record)
        if record.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.seal = dying


def attempt(plan, set_plan, folder, job, target, fault):
    """Run a job in a child whose call number `target` has a fault; returns what happened.

    The fault "kill" kills a build in the middle instead.
    """
    out, err, log, modules = (folder / name for name in ("out", "err", "log", "modules"))
    for path in (out, err, log, modules):
        path.write_bytes(b"")
    plan.calls, plan.hit, plan.ended, plan.ended_file = 0, b"", b"", -1
    plan.target, plan.fault = target, FAULTS.index(fault) if fault in FAULTS else 0
    child = os.fork()
    if child == 0:
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY), number)
        plan.log = os.open(log, os.O_WRONLY | os.O_APPEND) if fault == "none" else -1
        set_plan(ctypes.byref(plan))
        if fault == "kill":
            kill_after_two_parts()
        code = run(job)
        if fault == "none":
            modules.write_text("\n".join(sys.modules))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    latest = time.monotonic() + LONGEST_SECONDS
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < latest:
        time.sleep(0.002)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for name in modules.read_text().splitlines():
        with suppress(ImportError):  # some packages make up modules that have no file
            importlib.import_module(name)
    return {
        "code": os.waitstatus_to_exitcode(status) if ended else "hung",
        "out": out.read_text(errors="replace"),
        "err": err.read_text(errors="replace"),
        "hit": plan.hit.decode(),
        "calls": log.read_text().splitlines(),
    }


def main():
    """Serve until standard input ends: argv holds the library and the directory of the test."""
    torch.set_num_threads(1)
    cut.__kwdefaults__["slice_bytes"] = 4_000
    folder = Path(sys.argv[2])
    plan = Plan.from_buffer(mmap.mmap(-1, ctypes.sizeof(Plan)))
    plan.folder = f"{folder / 'files'}/".encode()
    set_plan = ctypes.CDLL(sys.argv[1]).set_plan
    for line in sys.stdin:
        say(json.dumps(attempt(plan, set_plan, folder, *json.loads(line))))


if __name__ == "__main__":
    main()
