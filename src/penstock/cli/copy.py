"""`penstock copy`: a store at another place."""

import time
from typing import Annotated

from penstock.cli import options
from penstock.cli.options import argument
from penstock.cli.progress import bar
from penstock.cli.terminal import print_json, store_json, visible, write
from penstock.cli.units import clock_text, duration_text, number_of, size_text


def copy_command(
    source: Annotated[str, argument("The store: a directory or a URL.", "SOURCE")],
    target: Annotated[str, argument("The directory or URL of the copy.", "TARGET")],
    as_json: options.AsJson = False,
) -> None:
    """Copy a store between directories and object storage.

    Every file is compared with the size and SHA-256 in the manifest, and the manifest is written
    last. The command can be killed at any time: the same command resumes it. If the copy is already
    complete, it does nothing. A target that holds anything else is refused. For a store that was
    built with --split, copies both sides.

    URLs begin with s3://, gs:// or az://; a store can be copied from https:// and hf:// too. Keys
    are taken from the environment, as AWS_ACCESS_KEY_ID.

    penstock copy stores/web s3://bucket/stores/web
    """
    from penstock.store.copy import copy

    started = time.monotonic()
    with bar(shown=not as_json) as draw:

        def report(done: int, total: int) -> None:
            seconds = max(time.monotonic() - started, 1e-9)
            left = clock_text((total - done) * seconds / max(1, done))
            draw(done, total, f"{size_text(done / seconds)}/s  {left} left")

        copied = copy(source, target, progress=report)
    if as_json:
        print_json(store_json(copied))
        return
    took = duration_text(time.monotonic() - started)
    counts = [
        number_of(len(copied.manifest.parts), "part"),
        number_of(copied.num_tokens, "token"),
    ]
    name = visible(str(copied.path), lines=False)
    write(f"{name} is a whole copy: {', '.join(counts)} ({took})")
