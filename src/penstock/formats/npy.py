"""One-dimensional arrays of integers that NumPy wrote with `numpy.save`."""

import warnings
from pathlib import Path
from tokenize import TokenError

from numpy.lib import format as npy_format

from penstock.errors import StoreError
from penstock.formats.mapped import MappedArray, first_bytes, size_of
from penstock.formats.sample import check_dtype
from penstock.formats.token_files import FilePart
from penstock.paths import naming


def is_npy(path: Path) -> bool:
    """Return whether a file begins with NumPy's magic string."""
    return first_bytes(path, 6) == npy_format.MAGIC_PREFIX


def open_npy(path: Path) -> FilePart:
    """Return the ids of a file."""
    return FilePart(map_npy(path))


def map_npy(path: Path) -> MappedArray:
    """Return the array of a file; its header is parsed, and never executed or unpickled."""
    size_of(path)
    try:
        with naming(path), path.open("rb") as stream, warnings.catch_warnings():
            # NumPy warns of headers that Python 2 wrote, which a damaged header may look like.
            warnings.simplefilter("ignore")
            version = npy_format.read_magic(stream)
            # Version 3 is for named fields only, which are not ids.
            read_header = (
                npy_format.read_array_header_1_0
                if version == (1, 0)
                else npy_format.read_array_header_2_0
            )
            shape, _, dtype = read_header(stream)
            offset = stream.tell()
    # NumPy parses the header as a Python literal: a damaged one fails in many ways, of which
    # TokenError was found by the tests.
    except (ValueError, TypeError, SyntaxError, TokenError, EOFError, RecursionError) as error:
        raise StoreError(
            f"{path} cannot be read as an array: {str(error)[:200]}. dolma and OLMo write arrays "
            'without a header: open_tokens(path, format="olmo", vocab_size=…).'
        ) from error
    check_dtype(dtype, path)
    if len(shape) != 1:
        raise StoreError(
            f"{path} holds an array of shape {shape}; a token file holds a one-dimensional one."
        )
    # `numpy.save` writes nothing after the array. Bytes there mean that the shape is damaged.
    ids = MappedArray(path, dtype, offset)
    if len(ids.array()) != shape[0]:
        raise StoreError(
            f"{path} has {len(ids.array()):,} ids, but its header says {shape[0]:,}. It is damaged."
        )
    return ids
