"""`penstock verify`: compare every byte of a store with its manifest."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import options
from penstock.cli.options import by_side, stores_at
from penstock.cli.progress import bar
from penstock.cli.terminal import print_json, visible, write
from penstock.cli.units import duration_text, number_of

if TYPE_CHECKING:
    from penstock.store.reader import TokenStore


def verify_command(store: options.Store, as_json: options.AsJson = False) -> None:
    """Check every byte of a store.

    Reads the whole store and compares it with its manifest, so a single flipped bit is found.
    If something is wrong, names the file and ends with exit code 1. For a store that was built
    with --split, checks both sides.
    """
    started = time.monotonic()
    verified = {side: _verify(path, shown=not as_json) for side, path in stores_at(store).items()}
    took = duration_text(time.monotonic() - started)
    if as_json:
        print_json(by_side({side: _to_json(each) for side, each in verified.items()}))
        return
    for each in verified.values():
        counts = [
            number_of(len(each.manifest.parts), "part"),
            number_of(each.manifest.num_documents, "document"),
            number_of(each.num_tokens, "token"),
        ]
        # A large file that is a single document is stored in several pieces.
        if len(each) != each.manifest.num_documents:
            counts.insert(2, number_of(len(each), "piece"))
        write(f"{visible(str(each.path), lines=False)} is intact: {', '.join(counts)} ({took})")


def _verify(path: Path, *, shown: bool) -> "TokenStore":
    from penstock.store.verify import verify

    with bar(shown=shown) as draw:

        def report(done: int, total: int) -> None:
            draw(done, total, f"{done:,} of {number_of(total, 'part')}")

        return verify(path, report)


def _to_json(store: "TokenStore") -> dict[str, object]:
    return {
        "store": str(store.path),
        # `verify` raises an error if a byte is wrong, so a result is always whole.
        "whole": True,
        "num_parts": len(store.manifest.parts),
        "num_documents": store.manifest.num_documents,
        "num_pieces": len(store),
        "num_tokens": store.num_tokens,
        "digest": store.digest,
    }
