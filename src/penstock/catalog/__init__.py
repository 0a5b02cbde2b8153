"""Public datasets by name.

Takes the name of an entry, gives its files in a directory: whole, checked against the
size and SHA-256 that the entry records, in the layout that `penstock build` reads.
Promises: a file appears under its name only when it is complete; a good file is never
requested or overwritten again; a download that was cut or killed goes on where it stopped.

Sets of questions are read with `ARCDataLoader`, `GSM8KDataLoader` and `MMLUDataLoader`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.catalog.arc import ARCDataLoader as ARCDataLoader
    from penstock.catalog.gsm8k import GSM8KDataLoader as GSM8KDataLoader
    from penstock.catalog.mmlu import MMLUDataLoader as MMLUDataLoader

# Loaded on first use: fetching files needs none of them.
_HOMES = {
    "ARCDataLoader": "penstock.catalog.arc",
    "GSM8KDataLoader": "penstock.catalog.gsm8k",
    "MMLUDataLoader": "penstock.catalog.mmlu",
}

__all__ = ["ARCDataLoader", "GSM8KDataLoader", "MMLUDataLoader"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock.catalog' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
