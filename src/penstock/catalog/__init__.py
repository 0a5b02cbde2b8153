"""Public datasets by name.

`fetch` takes the name of an entry and returns its files in a directory: complete, checked
against the recorded size and SHA-256, and in a layout that `penstock build` reads. A file
appears under its name only when it is complete. Files that are there with the right contents
are not requested again. An interrupted download resumes.

`ARCDataLoader`, `GSM8KDataLoader` and `MMLUDataLoader` read question sets.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.catalog.arc import ARCDataLoader as ARCDataLoader
    from penstock.catalog.download import DownloadLimits as DownloadLimits
    from penstock.catalog.entries import ENTRIES as ENTRIES
    from penstock.catalog.entries import TRAIN_SPLIT_RATIO as TRAIN_SPLIT_RATIO
    from penstock.catalog.entries import Entry as Entry
    from penstock.catalog.entries import find_entry as find_entry
    from penstock.catalog.fetch import Fetched as Fetched
    from penstock.catalog.fetch import FetchProgress as FetchProgress
    from penstock.catalog.fetch import build_stores as build_stores
    from penstock.catalog.fetch import fetch as fetch
    from penstock.catalog.gsm8k import GSM8KDataLoader as GSM8KDataLoader
    from penstock.catalog.mmlu import MMLUDataLoader as MMLUDataLoader

# Imported on first use: reading question sets does not need the downloader, nor NumPy.
_HOMES = {
    "ARCDataLoader": "penstock.catalog.arc",
    "DownloadLimits": "penstock.catalog.download",
    "ENTRIES": "penstock.catalog.entries",
    "Entry": "penstock.catalog.entries",
    "FetchProgress": "penstock.catalog.fetch",
    "Fetched": "penstock.catalog.fetch",
    "GSM8KDataLoader": "penstock.catalog.gsm8k",
    "MMLUDataLoader": "penstock.catalog.mmlu",
    "TRAIN_SPLIT_RATIO": "penstock.catalog.entries",
    "build_stores": "penstock.catalog.fetch",
    "fetch": "penstock.catalog.fetch",
    "find_entry": "penstock.catalog.entries",
}

__all__ = [
    "ENTRIES",
    "TRAIN_SPLIT_RATIO",
    "ARCDataLoader",
    "DownloadLimits",
    "Entry",
    "FetchProgress",
    "Fetched",
    "GSM8KDataLoader",
    "MMLUDataLoader",
    "build_stores",
    "fetch",
    "find_entry",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock.catalog' has no attribute {name!r}")
    module = import_module(_HOMES[name])
    # All names of the module, not just this one: importing fetch.py has set the attribute
    # `fetch` of this package to the module, and it must be the function.
    for each, home in _HOMES.items():
        if home == module.__name__:
            globals()[each] = getattr(module, each)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
