"""The order of the data: which sample is at which position of a run.

This package maps positions to sources, epochs and samples, and back, given sizes, weights and a
seed. Every result is a pure function of the arguments, equal on every machine and with every
version of NumPy. It needs constant memory, no files, no torch and no state. `permute` shuffles,
`interleave` mixes by weights, `schedule` changes weights, `epochs` orders plans without weights,
`shuffle` implements the modes of `shuffle=`, `steps` shards positions among ranks, and `plan`
combines these modules.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.order.arguments import Caps as Caps
    from penstock.order.plan import Plan as Plan
    from penstock.order.samples import Sample as Sample
    from penstock.order.shuffle import Block as Block
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "arguments": "Caps",
            "plan": "Plan",
            "samples": "Sample",
            "shuffle": "Block",
        },
    )
