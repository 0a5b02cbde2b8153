"""Mixes several datasets in one DataLoader, with shares that hold at every step.

`create_multiplex_dataloader([("arc", arc), ("math", math)], sampling_weights=[7, 3])` returns a
`torch.utils.data.DataLoader` with workers, pinned memory and its other features. With "uniform"
and "weighted", each dataset stays within two examples of its share at every point of a run, not
only on average. The default, "proportional", shuffles all examples together: shares are exact in
each epoch, and random inside it. Every epoch has a new order, which is the same for any number of
workers and ranks. A small state resumes in the middle of an epoch. Importing this package imports
only torch and NumPy.
`examples/multiplex_example.py` is an example.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.integrations.multiplex.dataset import MultiplexDataset as MultiplexDataset
    from penstock.integrations.multiplex.dataset import default_collate_fn as default_collate_fn
    from penstock.integrations.multiplex.dataset import get_dataset_stats as get_dataset_stats
    from penstock.integrations.multiplex.dataset import (
        print_dataloader_stats as print_dataloader_stats,
    )
    from penstock.integrations.multiplex.loader import MultiplexDataLoader as MultiplexDataLoader
    from penstock.integrations.multiplex.loader import (
        create_multiplex_dataloader as create_multiplex_dataloader,
    )
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "dataset": "MultiplexDataset default_collate_fn get_dataset_stats "
            "print_dataloader_stats",
            "loader": "MultiplexDataLoader create_multiplex_dataloader",
        },
    )
