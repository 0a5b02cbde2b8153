"""Arrays in memory, read as token files are."""

import os
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from penstock.errors import StoreError
from penstock.formats.mapped import HeldArray
from penstock.formats.sample import check_dtype
from penstock.formats.token_files import FilePart


@runtime_checkable
class HasArray(Protocol):
    """An array in memory: of NumPy, or a tensor on the CPU."""

    def __array__(self) -> Any:
        """Return the values as an array of NumPy."""
        ...


def in_memory(given: object, **for_files: str | None) -> FilePart:
    """Return the ids of an array.

    Args:
        given: The array.
        for_files: Arguments of `open_tokens` that only files have.

    Raises:
        StoreError: it is no array of integers of one dimension, or an argument is for files.
    """
    for name, value in for_files.items():
        if value is not None:
            raise StoreError(f"{name}={value!r}: an array in memory has none. Leave it out.")
    kind = type(given).__name__
    if hasattr(given, "save_to_disk"):
        raise StoreError(
            f"{kind} is a dataset in memory. Write it with save_to_disk(path), and open this path."
        )
    # Stores have items too, so NumPy would read all documents before it refuses them.
    if hasattr(given, "part_tokens") or hasattr(given, "snapshot"):
        raise StoreError(
            f"The {kind} is open already. Pass it to Windows, Packs or Documents as it is."
        )
    if isinstance(given, Sequence) and any(isinstance(each, str | os.PathLike) for each in given):
        raise StoreError(
            "A list of paths was given, and one path or pattern is opened at once. Pass a list of "
            "opened files to the rows: Windows([open_tokens(path), …], length)."
        )
    if isinstance(given, np.ma.MaskedArray) and np.ma.is_masked(given):
        raise StoreError(
            "The array has masked ids. Leave them out with array.compressed(), or read them too "
            "with array.data."
        )
    try:
        values = np.asarray(given)
    # What NumPy and torch raise for ragged lists, and for tensors with gradients, of dtypes that
    # NumPy does not have, with sparse layouts, or on other devices.
    except (TypeError, ValueError, RuntimeError) as error:
        raise StoreError(
            f"{kind} cannot be read as an array of ids: {str(error)[:200]} Pass an array of NumPy "
            "or a tensor on the CPU, of integers in one dimension; numpy.concatenate joins "
            "documents."
        ) from error
    if not values.ndim:
        raise StoreError(f"{kind} is neither a path nor an array of ids.")
    check_dtype(values.dtype, "The array")
    if values.ndim != 1:
        raise StoreError(f"The array has the shape {values.shape}; ids have one dimension.")
    return FilePart(HeldArray(values))
