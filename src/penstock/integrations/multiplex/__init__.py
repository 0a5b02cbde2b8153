"""Several datasets in one DataLoader, in shares that hold at every step.

`create_multiplex_dataloader([("arc", arc), ("math", math)], sampling_weights=[7, 3])` returns a
real `torch.utils.data.DataLoader` with workers, pinned memory and all else. Shares are exact:
within two examples at every point of a run, not only on average. The order is the same for any
number of workers and ranks, every epoch has its own, and a state of a few hundred bytes resumes
in the middle of one. Imports torch and NumPy only. `examples/multiplex_example.py` demonstrates it.
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
