"""Where a tokenizer lets a text be cut without changing an id.

    left ┆ right      ids(left + right) == ids(left) + ids(right), for every window below

One window could mislead: in a model without a pre-tokenizer, whether a token crosses the cut
may depend on how many equal characters come before it ("aaaa…" pairs up from its beginning). So
the left side is tried with 16 lengths in a row, which covers every remainder of such a run, and
once more with a long window for what reaches further, such as added tokens.
"""

import numpy as np

from penstock.sources.arrow import binary_array
from penstock.sources.whole import IsCutSafe
from penstock.tokenize.engines import Engine

__all__ = ["cut_safety"]

_LENGTHS = range(48, 64)
_LONG = 512


def cut_safety(engine: Engine) -> IsCutSafe:
    r"""A function that says whether `engine` gives the same ids for two texts as for both in one.

    >>> from penstock import load_tokenizer
    >>> is_safe = cut_safety(load_tokenizer("gpt2").engine)
    >>> is_safe("one\n", "two"), is_safe("one\n\n", "two"), is_safe("on", "e")
    (True, False, False)
    """

    def is_safe(left: str, right: str) -> bool:
        windows = [(left[-length:], right[: _LENGTHS.stop]) for length in _LENGTHS]
        windows.append((left[-_LONG:], right[:_LONG]))
        # Most places that are not safe show it in the first window.
        return _agree(engine, windows[:1]) and _agree(engine, windows[1:])

    return is_safe


def _agree(engine: Engine, windows: list[tuple[str, str]]) -> bool:
    """Whether the ids of the two sides of every window are the ids of both in one text."""
    texts = {text for one, two in windows for text in (one, two, one + two)}
    ids, offsets = engine.encode(binary_array([text.encode() for text in texts]))
    parts = dict(zip(texts, np.split(ids, offsets[1:-1]), strict=True))
    return all(
        np.array_equal(np.concatenate((parts[one], parts[two])), parts[one + two])
        for one, two in windows
    )
