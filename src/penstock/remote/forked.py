"""Requests of a forked process, which are sent by helper processes.

obstore runs threads of its own. A fork copies no threads, so a call of obstore in a forked process,
such as a worker of a DataLoader, would wait for ever if its parent has used obstore before. Such a
process starts helpers, one for each call at a time, and keeps them for later calls. A helper ends
when its pipe is closed, also by a kill. Calls and results are lines of JSON in the pipes: a command
line would show the URL to other users.
"""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock import errors
from penstock.errors import RemoteError
from penstock.remote import operations
from penstock.remote.operations import Place

_OPERATIONS = {
    each.__name__: each
    for each in (
        operations.read,
        operations.read_range,
        operations.size,
        operations.list_names,
        operations.download,
        operations.put,
        operations.delete,
    )
}
_idle: "list[subprocess.Popen[bytes]]" = []
_of_parents: "list[subprocess.Popen[bytes]]" = []  # kept, because Popen warns when it is freed
_is_used = False
_is_inherited = False


def must_call_outside() -> bool:
    """Whether obstore was used before this process was forked; if not, it may be used from now."""
    global _is_used
    if not _is_inherited:
        _is_used = True
    return _is_inherited


def call_outside(name: str, place: Place, arguments: Sequence[Any]) -> Any:
    """Return the result of an operation that a new process performs; see `penstock.remote`.

    Raises:
        PenstockError: as the operation raises it.
        OSError: as the operation raises it, for example because the disk is full.
    """
    request = {"operation": name, "url": place.url, "seconds": place.seconds}
    sent = json.dumps({**request, "arguments": [_packed(each) for each in arguments]}).encode()
    try:
        helper = _idle.pop()  # atomic; another thread has the others
    except IndexError:
        helper = _start_helper()
    assert helper.stdin is not None  # both are pipes
    assert helper.stdout is not None
    try:
        helper.stdin.write(sent + b"\n")
        helper.stdin.flush()
        answer = json.loads(helper.stdout.readline())
    except (OSError, ValueError):
        helper.kill()
        raise RemoteError(
            f"{place.shown('')}: the process that sends the requests of a forked process ended "
            f"with status {helper.wait()}. Use workers that are spawned, not forked."
        ) from None
    except BaseException:  # Ctrl-C: its answer would be taken for that of the next call
        helper.kill()
        raise
    _idle.append(helper)
    if "errno" in answer:
        raise OSError(answer["errno"], answer["message"], answer["file"])
    if "error" in answer:
        raise vars(errors)[answer["error"]](answer["message"])
    return _unpacked(answer["result"])


def _start_helper() -> "subprocess.Popen[bytes]":
    # It finds the modules that this process has.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", "from penstock.remote.forked import main; main()"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)


def main() -> None:
    """Perform the operations that lines of stdin describe, and write their results to stdout."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        place = _place(request["url"], request["seconds"])
        try:
            arguments = [_unpacked(each) for each in request["arguments"]]
            answer = {"result": _packed(_OPERATIONS[request["operation"]](place, *arguments))}
        except errors.PenstockError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        except OSError as error:  # of this machine, such as a full disk
            file = None if error.filename is None else str(error.filename)
            answer = {"errno": error.errno, "message": error.strerror, "file": file}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


@lru_cache(maxsize=64)
def _place(url: str, seconds: float) -> Place:
    return Place(url, seconds)  # kept, with its connections


def _packed(value: Any) -> Any:
    """`value` as JSON: bytes and paths as objects, and sequences as lists."""
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Path):
        return {"path": str(value.absolute())}
    return [_packed(each) for each in value] if isinstance(value, list | tuple) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        is_path = "path" in value
        return Path(value["path"]) if is_path else base64.b64decode(value["bytes"])
    return [_unpacked(each) for each in value] if isinstance(value, list) else value


def _after_fork() -> None:
    global _is_inherited
    _is_inherited = _is_inherited or _is_used
    _of_parents.extend(_idle)
    _idle.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork)
