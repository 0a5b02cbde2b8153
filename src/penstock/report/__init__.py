"""A page about a store, a recipe or a run: one HTML file.

    STORE|RECIPE|RUN ── subject ── sections (corpus, runs, viewer) ── page ──► HTML file

The page makes no requests and runs no script, and all text from data is escaped.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.report.subject import Subject as Subject
    from penstock.report.subject import open_subject as open_subject
    from penstock.report.write import write_report as write_report
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "subject": "Subject open_subject",
            "write": "write_report",
        },
    )
