"""Changes rows at random, in a way that repeats exactly.

A transform takes rows and one key per row and returns new rows: tokens masked, documents
rearranged, or tokens dropped. The key is computed from (seed, rows, epoch, sample), and a
plan's position determines epoch and sample. So a row is changed differently in every epoch,
and always the same way at the same position, whatever the world size, batch size or number
of threads. There is no random state to save. The package needs only NumPy.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

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
    from penstock.transforms.transform import Transformed as Transformed
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "draws": "row_keys",
            "dropout": "TokenDropout",
            "fill_in_the_middle": "FillInTheMiddle",
            "mask": "MaskTokens begins_word collate_masked",
            "transform": "Chain Fields Transform Transformed",
        },
    )
