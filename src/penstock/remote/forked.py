"""Requests of a forked process, which are sent by a new process.

obstore runs threads of its own. A fork copies no threads, so a call of obstore in a forked process,
such as a worker of a DataLoader, would wait for ever if its parent has used obstore before. Such a
process starts a new interpreter for each call, which takes about 0.2 seconds. Arguments and results
are sent through pipes: a command line would show the URL to other users.
"""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Sequence
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
        operations.head,
        operations.list_names,
        operations.download,
        operations.put,
        operations.delete,
    )
}
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
    """
    request = {"operation": name, "url": place.url, "seconds": place.seconds}
    sent = json.dumps({**request, "arguments": [_packed(each) for each in arguments]}).encode()
    # The new process finds the modules that this one has.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", "from penstock.remote.forked import main; main()"]
    done = subprocess.run(command, input=sent, capture_output=True, env=environment, check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise RemoteError(
            f"{place.shown('')}: the process that sends the requests of a forked process ended "
            f"with status {done.returncode}. Use workers that are spawned, not forked."
        ) from None
    if "error" in answer:
        raise vars(errors)[answer["error"]](answer["message"])
    return _unpacked(answer["result"])


def main() -> None:
    """Perform the operation that stdin describes, and write its result to stdout."""
    request = json.loads(sys.stdin.buffer.read())
    place = Place(request["url"], request["seconds"])
    try:
        arguments = [_unpacked(each) for each in request["arguments"]]
        answer = {"result": _packed(_OPERATIONS[request["operation"]](place, *arguments))}
    except errors.PenstockError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    sys.stdout.write(json.dumps(answer))


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


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork)
