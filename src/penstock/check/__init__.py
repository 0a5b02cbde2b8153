"""Checks the user's own files before a training run.

Takes the names of files and the settings for reading them, and returns six findings with their
figures. Only a temporary directory is written to, and for a moment the directory of the store, if
it is given. The time depends on the size of the sample and not on the size of the files.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.check.check import CHECKS as CHECKS
    from penstock.check.check import CheckReport as CheckReport
    from penstock.check.check import CheckSettings as CheckSettings
    from penstock.check.check import Finding as Finding
    from penstock.check.check import check as check
    from penstock.check.sample import FileSample as FileSample
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "check": "CHECKS CheckReport CheckSettings Finding check",
            "sample": "FileSample",
        },
    )
