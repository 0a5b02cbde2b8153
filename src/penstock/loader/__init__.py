"""The loader: from positions to batches.

A loader takes a plan (or rows) and yields tensors, on the CPU or on a GPU. Its state is one
position, the same on every rank. Resuming anywhere, on any number of ranks, yields the same rows
as a run without interruption. A batch that was yielded is never changed later.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.loader.batch_format import BatchFormat as BatchFormat
    from penstock.loader.batch_format import LabelBatch as LabelBatch
    from penstock.loader.batch_format import NarrowBatch as NarrowBatch
    from penstock.loader.batch_format import PairBatch as PairBatch
    from penstock.loader.batch_format import TargetBatch as TargetBatch
    from penstock.loader.dataloader import as_dataloader as as_dataloader
    from penstock.loader.dataloader import log_fingerprints as log_fingerprints
    from penstock.loader.dataloader import read_log as read_log
    from penstock.loader.explain import ExplainedRow as ExplainedRow
    from penstock.loader.explain import ExplainedStep as ExplainedStep
    from penstock.loader.fingerprints import FingerprintLog as FingerprintLog
    from penstock.loader.loader import Loader as Loader
    from penstock.loader.packed import keep_documents_apart as keep_documents_apart
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "loader": "Loader",
            "dataloader": "as_dataloader log_fingerprints read_log",
            "batch_format": "BatchFormat LabelBatch NarrowBatch PairBatch TargetBatch",
            "explain": "ExplainedRow ExplainedStep",
            "fingerprints": "FingerprintLog",
            "packed": "keep_documents_apart",
        },
    )
