"""The names of the formats of token files; the command line loads nothing else of this package."""

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
