"""Random changes to rows that repeat exactly.

A transform takes rows and one key per row and returns new rows: tokens masked, documents
rearranged, or tokens dropped. The key is computed from (seed, rows, epoch, sample), and a
plan's position determines epoch and sample. So a row is changed differently in every epoch,
and always the same way at the same position, whatever the world size, batch size or number
of threads. NumPy only; there is no random state to save.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.transforms.draws import row_keys as row_keys
    from penstock.transforms.dropout import TokenDropout as TokenDropout
    from penstock.transforms.fill_in_the_middle import FillInTheMiddle as FillInTheMiddle
    from penstock.transforms.mask import MaskTokens as MaskTokens
    from penstock.transforms.mask import begins_word as begins_word
    from penstock.transforms.mask import collate_masked as collate_masked
    from penstock.transforms.transform import Chain as Chain
    from penstock.transforms.transform import Fields as Fields
    from penstock.transforms.transform import Transform as Transform
    from penstock.transforms.transformed import Transformed as Transformed

# Imported on first use, so that importing this package does not import NumPy.
_HOMES = {
    "Chain": "penstock.transforms.transform",
    "Fields": "penstock.transforms.transform",
    "FillInTheMiddle": "penstock.transforms.fill_in_the_middle",
    "MaskTokens": "penstock.transforms.mask",
    "TokenDropout": "penstock.transforms.dropout",
    "Transform": "penstock.transforms.transform",
    "Transformed": "penstock.transforms.transformed",
    "begins_word": "penstock.transforms.mask",
    "collate_masked": "penstock.transforms.mask",
    "row_keys": "penstock.transforms.draws",
}

__all__ = [
    "Chain",
    "Fields",
    "FillInTheMiddle",
    "MaskTokens",
    "TokenDropout",
    "Transform",
    "Transformed",
    "begins_word",
    "collate_masked",
    "row_keys",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock.transforms' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
