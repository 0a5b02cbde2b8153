"""`penstock verify`: every byte of a store against its manifest."""

import time
from typing import Any

from penstock.cli.options import AsJson, StoreArgument, stores_at
from penstock.cli.progress import bar
from penstock.cli.terminal import print_json, visible, write
from penstock.cli.units import duration_text, number_of

__all__ = ["verify_command"]

_KINDS = ("part", "document", "piece", "token")


def verify_command(store: StoreArgument, as_json: AsJson = False) -> None:
    """Check every byte of a store.

    Reads all of it and compares it with its manifest: one flipped bit anywhere is found.
    Ends with exit code 1 if something is wrong, and says which file and what. Given the
    directory of a store that was built with --split, it checks both sides.
    """
    told: dict[str, Any] = {}
    begun = time.monotonic()
    for side, path in stores_at(store).items():
        told[side] = _verified(path, shown=not as_json)
    if as_json:
        print_json(told.get("") or told)
        return
    took = duration_text(time.monotonic() - begun)
    for each in told.values():
        kinds = [kind for kind in _KINDS if kind != "piece" or _has_pieces(each)]
        counts = ", ".join(number_of(each[f"num_{kind}s"], kind) for kind in kinds)
        write(f"{visible(each['store'], lines=False)} is whole: {counts} ({took})")


def _has_pieces(told: dict[str, Any]) -> bool:
    return bool(told["num_pieces"] != told["num_documents"])


def _verified(path: Any, *, shown: bool) -> dict[str, Any]:
    from penstock.store.verify import verify

    with bar(shown=shown) as draw:

        def tell(done: int, total: int) -> None:
            draw(done, total, f"{done:,} of {number_of(total, 'part')}")

        store = verify(path, tell)
    return {
        "store": str(path),
        "whole": True,
        "num_parts": len(store.manifest.parts),
        "num_documents": store.manifest.num_documents,
        "num_pieces": len(store),
        "num_tokens": store.num_tokens,
        "digest": store.digest,
    }
