"""What a run reads, before, during and after it: nothing is replayed, everything is computed.

Functions take a plan and the steps of a run, or what `open_run` returns for a recipe or for the
directory of a run. They return frozen dataclasses with `to_json`. The commands `penstock plan`,
`inspect`, `when`, `seen` and `diff` print them.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.inspect.compare import Comparison as Comparison
    from penstock.inspect.compare import compare_runs as compare_runs
    from penstock.inspect.documents import FoundDocument as FoundDocument
    from penstock.inspect.documents import Sighting as Sighting
    from penstock.inspect.documents import find_documents as find_documents
    from penstock.inspect.documents import when as when
    from penstock.inspect.forecast import Forecast as Forecast
    from penstock.inspect.forecast import forecast as forecast
    from penstock.inspect.runs import OpenedRun as OpenedRun
    from penstock.inspect.runs import RunSteps as RunSteps
    from penstock.inspect.runs import open_run as open_run
    from penstock.inspect.seen import Seen as Seen
    from penstock.inspect.seen import seen as seen
    from penstock.inspect.steps import InspectedStep as InspectedStep
    from penstock.inspect.steps import inspect_step as inspect_step
    from penstock.inspect.steps import source_counts as source_counts
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "compare": "Comparison compare_runs",
            "documents": "FoundDocument Sighting find_documents when",
            "forecast": "Forecast forecast",
            "runs": "OpenedRun RunSteps open_run",
            "seen": "Seen seen",
            "steps": "InspectedStep inspect_step source_counts",
        },
    )
