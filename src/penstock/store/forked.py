"""Downloads of forked processes, by another process.

A process that was forked after its parent had used obstore cannot use it, see
`penstock.store.objects.is_forked`. So it starts `python -m penstock.store.remote`, which brings
files of a store into the cache that both share, or the manifest of the store.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from penstock import errors
from penstock.errors import RemoteError
from penstock.paths import StoreUrl
from penstock.streaming.waits import pause

_POLL_SECONDS = 0.02


def start(
    url: StoreUrl,
    files: Sequence[tuple[str, int, str]] = (),
    limit: int | None = None,
    output: int = subprocess.PIPE,
) -> "subprocess.Popen[str]":
    """Start a process that downloads files of a store, or else its manifest.

    Args:
        url: The URL of the store.
        files: The name, size and XXH3-128 of each file.
        limit: The most bytes that the cache may have, as for `FileCache`.
        output: Where its result is written, for `finish`.
    """
    # It finds the modules that this process has.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-m", "penstock.store.remote"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=output, env=environment, text=True
    )
    assert process.stdin is not None  # it is a pipe
    # Through a pipe: a command line would show the URL, with its password, to other users.
    with suppress(BrokenPipeError), process.stdin as stream:  # `finish` says that it has ended
        stream.write(json.dumps({"url": url.address, "files": files, "limit": limit}))
    return process


def finish(process: "subprocess.Popen[str]") -> str:
    """Wait for a process; returns the digest of the manifest, or raises its error."""
    while process.poll() is None:
        pause(_POLL_SECONDS)
    assert process.stdout is not None  # it is a pipe
    with process.stdout as stream:
        answer = json.loads(stream.read() or "{}")
    if "error" in answer:
        raise vars(errors)[answer["error"]](*answer["arguments"])
    if "digest" not in answer:
        raise RemoteError(
            "The process that sends the requests of a forked process ended with status "
            f"{process.returncode}. Use workers that are spawned, not forked."
        )
    return str(answer["digest"])
