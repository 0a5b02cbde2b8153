"""Chunks of LitData, as its `TokensLoader` reads them.

    chunk-0-0.bin
      uint32      number of documents, n
      uint32      n + 1 offsets in the file: of each document, and of the end
      int32       the ids of all documents
    index.json    the chunks, written last

`TokensLoader` cuts each chunk into blocks and ignores the documents. Ids are int32, as litgpt
writes them: tensors of torch have few operations for uint16.
"""

import json
from itertools import chain
from pathlib import Path

import numpy as np

from penstock.convert.source import TokenSource
from penstock.errors import StoreError
from penstock.store.files import write_file

# The size of the chunks that LitData makes by default.
_CHUNK_BYTES = 1 << 26
_MOST_BYTES = 2**32 - 1
# 16 is LitData's number of torch.int32.
_DATA_FORMAT = "no_header_tensor:16"
# LitData reads the structure of an item from this text: a single tensor.
_DATA_SPEC = '[1, {"type": null, "context": null, "children_spec": []}]'


def write_litdata(
    directory: Path, side: str, source: TokenSource, chunk_bytes: int = _CHUNK_BYTES
) -> None:
    """Write chunks of at most `chunk_bytes`, unless one document is larger."""
    chunks: list[dict[str, object]] = []
    start = 0
    for ends in source.groups(chunk_bytes - 8, 4, 4):
        lengths = np.diff(ends, prepend=start)
        offsets = 4 * (len(ends) + 2) + 4 * np.append(0, np.cumsum(lengths))
        if int(offsets[-1]) > _MOST_BYTES:
            raise StoreError(
                f"{source.member.path} has a document of {int(lengths.max()):,} tokens, and a "
                "chunk of LitData has at most 4 GiB. Choose another format."
            )
        head, stop = np.append(len(ends), offsets).astype("<u4"), int(ends[-1])
        name = f"chunk-0-{len(chunks)}.bin"
        size, _ = write_file(directory / name, chain([head], source.ids(start, stop, "int32")))
        entry = {"chunk_bytes": size, "chunk_size": len(ends), "dim": stop - start}
        chunks.append({**entry, "filename": name})
        start = stop
    config = {
        "chunk_bytes": chunk_bytes,
        "chunk_size": None,
        "compression": None,
        "data_format": [_DATA_FORMAT],
        "data_spec": _DATA_SPEC,
        "encryption": None,
        "item_loader": "TokensLoader",
    }
    index = json.dumps({"chunks": chunks, "config": config}, sort_keys=True)
    write_file(directory / "index.json", [index.encode()])
