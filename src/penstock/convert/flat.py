"""Files of ids without documents: nanoGPT's `.bin`, and those of llm.c and modded-nanogpt.

train.bin                  nanoGPT: uint16, without a header
tokens_train_000000.bin    llm.c: a header of 256 int32, and 100 million ids
tokens_train_000001.bin
"""

from itertools import chain
from pathlib import Path

import numpy as np

from penstock.convert.source import TokenSource
from penstock.errors import StoreError
from penstock.store.files import write_file

# As in llm.c's scripts. The header counts ids as int32, so a file has at most 2,147,483,647.
_SHARD_IDS = 100_000_000


def write_nanogpt(directory: Path, side: str, source: TokenSource) -> None:
    """Write all ids to one file."""
    if source.vocab_size is not None and not source.is_narrow:
        raise StoreError(
            f"{source.member.path} has a vocabulary of {source.vocab_size:,} ids, and nanoGPT's "
            "files hold uint16 ids, below 65,536. Choose another format, such as llmc."
        )
    write_file(directory / f"{side}.bin", source.all_ids("uint16"))


def write_llmc(
    directory: Path, side: str, source: TokenSource, shard_ids: int = _SHARD_IDS
) -> None:
    """Write all ids to files of at most `shard_ids` ids."""
    # uint32 ids have version 7 in llm.c, which its reader of Llama 3 expects.
    magic, version, dtype = (20240520, 1, "uint16") if source.is_narrow else (20240801, 7, "uint32")
    for number, start in enumerate(range(0, source.num_tokens, shard_ids)):
        stop = min(start + shard_ids, source.num_tokens)
        header = np.zeros(256, "<i4")
        header[:3] = magic, version, stop - start
        path = directory / f"tokens_{side}_{number:06d}.bin"
        write_file(path, chain([header], source.ids(start, stop, dtype)))
