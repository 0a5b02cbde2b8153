"""The order of the data: which sample is at which position of a run.

Takes sizes, weights, a seed and positions; returns sources, epochs and samples, and the inverse.
Every result is a pure function of the arguments, equal on every machine and with every version
of NumPy, and needs constant memory: no files, no torch, no state. `permute` shuffles,
`interleave` mixes by weights, `schedule` changes weights, `epochs` reads everything once an epoch,
`shuffle` has the modes, `steps` shards positions among ranks, and `plan` combines them.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.order.arguments import Caps as Caps
    from penstock.order.budget import Budget as Budget
    from penstock.order.plan import Plan as Plan
    from penstock.order.plan import Sample as Sample
    from penstock.order.shuffle import Block as Block
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "arguments": "Caps",
            "budget": "Budget",
            "plan": "Plan Sample",
            "shuffle": "Block",
        },
    )
