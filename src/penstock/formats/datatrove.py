"""Token files of datatrove: `.ds`, with `.ds.index` and `.ds.loss` beside it.

    x.ds          the ids, uint16 or uint32, without a header
    x.ds.index    where each document ends, in tokens, uint64
    x.ds.loss     one byte for each token: 1 if it is trained on

The file does not record its dtype. But the last end in the index is the number of tokens, so the
size of the file says how many bytes an id has.
"""

from pathlib import Path

import numpy as np

from penstock.errors import StoreError
from penstock.formats.mapped import MappedArray, is_listed, size_of
from penstock.formats.token_files import FilePart, checked_bounds

_ID_SIZES = {2: "<u2", 4: "<u4"}


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def is_datatrove(path: Path) -> bool:
    """Return whether an index is beside a file, and ends with the number of its ids."""
    index = _beside(path, ".index")
    return is_listed(index) and _dtype(path, index) is not None


def _dtype(path: Path, index: Path) -> "np.dtype[np.unsignedinteger] | None":
    """Return the dtype of which the file has as many ids as the index says; None if none is."""
    size = size_of(index)
    if size % 8:
        return None
    ends = MappedArray(index, np.dtype("<u8")).array()
    num_tokens = int(ends[-1]) if len(ends) else 0
    for item in _ID_SIZES:
        if size_of(path) == num_tokens * item:
            return np.dtype(_ID_SIZES[item])
    return None


def open_datatrove(path: Path) -> FilePart:
    """Return the ids, the documents and the loss mask of a file."""
    index = _beside(path, ".index")
    size_of(path)
    if not index.exists():
        raise StoreError(
            f"{index} does not exist, so nothing records the dtype of {path}. Pass "
            'format="nanogpt" with dtype= and vocab_size= to read its ids without documents.'
        )
    dtype = _dtype(path, index)
    if dtype is None:
        raise StoreError(
            f"{path} has {size_of(path):,} bytes, which is neither 2 nor 4 for each token that "
            f"{index} counts. A file is truncated or damaged, or the two do not belong together."
        )
    ids = MappedArray(path, dtype)
    num_tokens = len(ids.array())
    ends = MappedArray(index, np.dtype("<u8")).array()
    mask, loss = _beside(path, ".loss"), None
    if is_listed(mask):
        loss = MappedArray(mask, np.dtype("u1"))
        if len(loss.array()) != num_tokens:
            raise StoreError(
                f"{mask} is for {len(loss.array()):,} tokens, but {path} has {num_tokens:,}."
            )
    # Copied: the file could be changed while it is mapped, after its ends were checked.
    bounds = checked_bounds(ends.copy(), num_tokens, index)
    return FilePart(ids, bounds, loss, path=path, masks=() if loss is None else ("loss mask",))
