"""The user's own files, looked at before a training run.

Takes names of files and how they would be read, gives six findings with their figures.
Promises: nothing is written but to a temporary directory, and the time is bounded by the
size of the sample, not of the files.
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
