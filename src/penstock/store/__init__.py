"""Stores: directories of tokens on disk.

A build takes documents and a tokenizer, and writes a directory of `.npy` files with one manifest.
The bytes of a store depend on its inputs and settings alone. A build that is killed at any moment
can be resumed. `verify` finds any later damage, and the same build makes missing files again.
docs/store-format.md is the specification.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.store.build import build as build
    from penstock.store.copy import copy as copy
    from penstock.store.job import BuildProgress as BuildProgress
    from penstock.store.manifest import Manifest as Manifest
    from penstock.store.manifest import PartRecord as PartRecord
    from penstock.store.manifest import read_manifest as read_manifest
    from penstock.store.reader import Origin as Origin
    from penstock.store.reader import TokenStore as TokenStore
    from penstock.store.sides import open_sides as open_sides
    from penstock.store.summary import Lengths as Lengths
    from penstock.store.summary import Summary as Summary
    from penstock.store.summary import summarize as summarize
    from penstock.store.verify import verify as verify
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "build": "build",
            "copy": "copy",
            "job": "BuildProgress",
            "manifest": "Manifest PartRecord read_manifest",
            "reader": "Origin TokenStore",
            "sides": "open_sides",
            "summary": "Lengths Summary summarize",
            "verify": "verify",
        },
    )
