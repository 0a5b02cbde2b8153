"""Arrow arrays of texts, made without importing Arrow before the first one is needed.

Commands that only decode need no Arrow, and its import takes 50 ms.
"""

from collections.abc import Sequence
from typing import Any

ArrowTexts = Any
"""A `pa.LargeBinaryArray` of documents; `Any`, because pyarrow has no type annotations."""


def as_texts(texts: Sequence[bytes]) -> ArrowTexts:
    """The texts as an Arrow array."""
    from penstock.sources.document import binary_array

    return binary_array(texts)


def one_text(text: str | bytes) -> ArrowTexts:
    """An Arrow array with this text alone."""
    return as_texts([text.encode() if isinstance(text, str) else text])
