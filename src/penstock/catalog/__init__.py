"""Public datasets by name.

Takes the name of an entry, gives its files in a directory: whole, checked against the
size and SHA-256 that the entry records, in the layout that `penstock build` reads.
Promises: a file appears under its name only when it is complete; a good file is never
requested or overwritten again; a download that was cut or killed goes on where it stopped.

Sets of questions are read with `ARCDataLoader`, `GSM8KDataLoader` and `MMLUDataLoader`.
"""

from penstock.catalog.arc import ARCDataLoader
from penstock.catalog.gsm8k import GSM8KDataLoader
from penstock.catalog.mmlu import MMLUDataLoader

__all__ = ["ARCDataLoader", "GSM8KDataLoader", "MMLUDataLoader"]
