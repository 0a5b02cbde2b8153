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
    >>> is_safe("one\n", "two"), is_safe("one\n", "\ntwo"), is_safe("on", "e")
    (True, False, False)
    """

    def is_safe(left: str, right: str) -> bool:
        windows = {(left[-length:], right[: _LENGTHS.stop]) for length in _LENGTHS}
        windows.add((left[-_LONG:], right[:_LONG]))
        texts = [text for one, two in sorted(windows) for text in (one, two, one + two)]
        ids, offsets = engine.encode(binary_array([text.encode() for text in texts]))
        parts = np.split(ids, offsets[1:-1])
        return all(
            np.array_equal(np.concatenate(parts[n : n + 2]), parts[n + 2])
            for n in range(0, len(parts), 3)
        )

    return is_safe
