"""Rows: random access to the training sequences of a store.

Rows are cut from stores or from bare token files. They have a length, a digest, and a method
`read` that returns many rows at once as arrays. The same row number always returns the same row,
and tokens that are in no row are counted exactly.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.rows.documents import Documents as Documents
    from penstock.rows.origins import RowOrigin as RowOrigin
    from penstock.rows.packs import Packs as Packs
    from penstock.rows.protocol import Rows as Rows
    from penstock.rows.protocol import as_rows as as_rows
    from penstock.rows.tokens import ArrayFile as ArrayFile
    from penstock.rows.windows import Windows as Windows
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "windows": "Windows",
            "packs": "Packs",
            "documents": "Documents",
            "origins": "RowOrigin",
            "tokens": "ArrayFile",
            "protocol": "Rows as_rows",
        },
    )
