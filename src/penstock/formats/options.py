"""The names of the formats of token files, and the options that describe them.

The command line and recipes load nothing else of this package.
"""

from dataclasses import dataclass
from typing import Literal

TokenFormat = Literal[
    "llmc",
    "megatron",
    "datatrove",
    "npy",
    "nanogpt",
    "olmo",
    "mds",
    "litdata",
    "arrow",
    "parquet",
]
"""`llmc` is also the format of modded-nanogpt, and `arrow` that of Hugging Face datasets."""


@dataclass(frozen=True, slots=True)
class TokenOptions:
    """The arguments of `open_tokens`, as a command or a recipe gives them."""

    format: TokenFormat | None = None
    """The format, for files that have no header."""
    dtype: str | None = None
    """The dtype of ids in files without a header, and in MDS columns of bytes."""
    vocab_size: int | None = None
    """The vocabulary size that ids must be below."""
    tokenizer: str | None = None
    """The tokenizer of the ids, for its vocabulary size and to decode them."""
    column: str | None = None
    """The column with the ids, if its name is not `input_ids` or `tokens`."""
