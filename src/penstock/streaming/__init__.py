"""Training on a store while it is being written.

    inputs ── build, in a background thread ──► part 0 │ part 1 │ part 2 │ …
                                                  └── rows, order, loader ──► batches

A part can be read as soon as it is sealed, so training begins after the first part and not after
the last one. The rows and their order are those of the finished store.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.streaming.plan import StreamedPlan as StreamedPlan
    from penstock.streaming.snapshots import StreamedStore as StreamedStore
    from penstock.streaming.stream import stream as stream
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stream": "stream",
            "snapshots": "StreamedStore",
            "plan": "StreamedPlan",
        },
    )
