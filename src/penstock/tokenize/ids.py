"""Checks ids before they are decoded: engines stop the process, or guess, at an unknown id."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import TokenizerError


def checked_ids(ids: ArrayLike, vocab_size: int, name: str) -> NDArray[np.uint32]:
    """Return `ids` as an array for an engine.

    Args:
        ids: A list, an array or a tensor of the ids of one text.
        vocab_size: The ids must be below this.
        name: The name of the tokenizer, for messages.

    Raises:
        TokenizerError: an id is not in the vocabulary, or not a whole number.
    """
    array = np.asarray(ids)
    if not array.size:
        return np.empty(0, np.uint32)
    if array.ndim > 1:
        raise TokenizerError(
            f"The ids have the shape {array.shape}. Decode one row at a time, such as ids[0]."
        )
    if array.dtype.kind not in "iu":
        raise TokenizerError(f"The ids are {array.dtype}, and token ids are whole numbers.")
    array = np.atleast_1d(array)
    wrong = array[(array < 0) | (array >= vocab_size)]
    if wrong.size:
        why = "-100 marks a target that is ignored" if wrong[0] == -100 else "no text has this id"
        raise TokenizerError(
            f"The id {wrong[0]} is not in the vocabulary of {name}, which has {vocab_size:,} ids; "
            f"{why}. Leave such ids out."
        )
    return np.ascontiguousarray(array, dtype=np.uint32)
