"""Where a tokenizer lets a text be cut without changing an id.

    left ┆ right      ids(left + right) == ids(left) + ids(right), for every window below,
                      and left and right share no pre-token

The second condition makes the first one hold beyond the window. A model sees one pre-token at a
time, so what is further away cannot reach across the cut. Without it, ids could depend on
anything: a model that pairs up "aaaa…" from its beginning may or may not end with a token that
crosses the cut, as the number of letters is odd or even.

Where the engine cannot tell pre-tokens (an object of the user), the windows alone decide. They
have 16 lengths in a row on each side, which covers the remainders of such runs.
"""

import numpy as np

from penstock.sources.arrow import binary_array
from penstock.sources.whole import IsCutSafe
from penstock.tokenize.engines import Engine, TokenizersEngine

__all__ = ["cut_safety"]

_LENGTHS = range(48, 64)
_LONG = 512


def cut_safety(engine: Engine, reference: Engine | None = None) -> IsCutSafe:
    r"""A function that says whether `engine` gives the same ids for two texts as for both in one.

    Args:
        engine: What tokenizes.
        reference: What else knows the same tokenizer, and its pre-tokens.

    >>> from penstock import load_tokenizer
    >>> is_safe = cut_safety(load_tokenizer("gpt2").reference)
    >>> is_safe("one\n", "two"), is_safe("one\n\n", "two"), is_safe("on", "e")
    (True, False, False)
    """
    known = next((each for each in (engine, reference) if isinstance(each, TokenizersEngine)), None)

    def is_safe(left: str, right: str) -> bool:
        last = _LENGTHS.stop
        if known is not None and not known.splits(left[-last:], right[:last]):
            return False
        windows = [(left[-length:], right[:last]) for length in _LENGTHS]
        windows += [(left[-last:], right[:length]) for length in _LENGTHS]
        return _agree(engine, [*windows, (left[-_LONG:], right[:_LONG])])

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
