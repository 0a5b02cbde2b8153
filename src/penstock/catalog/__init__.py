"""A catalog of public datasets that `fetch` downloads by name.

`fetch` puts the files of a dataset into a directory, in a layout that `penstock build` reads. Every
file is checked against its recorded size and SHA-256. A file appears under its name only when it is
complete. Existing files with the right contents are not requested again. An interrupted download
resumes.

`ARCDataLoader`, `GSM8KDataLoader` and `MMLUDataLoader` read question sets.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.catalog.download import DownloadLimits as DownloadLimits
    from penstock.catalog.entries import ENTRIES as ENTRIES
    from penstock.catalog.entries import TRAIN_SPLIT_RATIO as TRAIN_SPLIT_RATIO
    from penstock.catalog.entries import Entry as Entry
    from penstock.catalog.entries import find_entry as find_entry
    from penstock.catalog.fetch import Fetched as Fetched
    from penstock.catalog.fetch import FetchProgress as FetchProgress
    from penstock.catalog.fetch import build_stores as build_stores
    from penstock.catalog.fetch import fetch as fetch
    from penstock.catalog.question_sets import ARCDataLoader as ARCDataLoader
    from penstock.catalog.question_sets import GSM8KDataLoader as GSM8KDataLoader
    from penstock.catalog.question_sets import MMLUDataLoader as MMLUDataLoader
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "download": "DownloadLimits",
            "entries": "ENTRIES TRAIN_SPLIT_RATIO Entry find_entry",
            "fetch": "Fetched FetchProgress build_stores fetch",
            "question_sets": "ARCDataLoader GSM8KDataLoader MMLUDataLoader",
        },
    )
