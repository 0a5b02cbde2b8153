"""PyTorch Datasets and DataLoaders over text files, as drop-ins for hand-written ones.

The classes and functions keep the names, arguments and shapes of the code that they replace. The
text is tokenized once and kept as a store; token ids stay in a memory-mapped file; a batch is one
read; and the shuffled order is computed, not stored.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.integrations.pytorch.batches import check_dataloader as check_dataloader
    from penstock.integrations.pytorch.batches import label_convention as label_convention
    from penstock.integrations.pytorch.batches import pad_collate as pad_collate
    from penstock.integrations.pytorch.batches import test_dataloader as test_dataloader
    from penstock.integrations.pytorch.datasets import TextDataset as TextDataset
    from penstock.integrations.pytorch.datasets import TransformerDataset as TransformerDataset
    from penstock.integrations.pytorch.encoders import SpecialIds as SpecialIds
    from penstock.integrations.pytorch.encoders import special_ids as special_ids
    from penstock.integrations.pytorch.loaders import EpochShuffle as EpochShuffle
    from penstock.integrations.pytorch.loaders import create_dataloaders as create_dataloaders
    from penstock.integrations.pytorch.loaders import (
        create_text_dataloaders as create_text_dataloaders,
    )
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "batches": "check_dataloader label_convention pad_collate test_dataloader",
            "datasets": "TextDataset TransformerDataset",
            "encoders": "SpecialIds special_ids",
            "loaders": "EpochShuffle create_dataloaders create_text_dataloaders",
        },
    )
