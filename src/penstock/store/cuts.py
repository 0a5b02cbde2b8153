"""Where a document may be cut without changing a token id."""

import numpy as np

from penstock.sources.batch import binary_array
from penstock.sources.text import IsCutSafe
from penstock.tokenize.engines import Engine, TokenizersEngine

# A cut is tested with texts of these lengths on either side. In a run such as "aaaa…", a model
# pairs letters from the beginning, so the ids may depend on the length. Sixteen lengths in a row
# cover the possible remainders.
_LENGTHS = range(48, 64)
_LONG = 512


def cut_safety(engine: Engine, reference: Engine | None = None) -> IsCutSafe:
    r"""A function that says whether a text may be cut at a place without changing a token id.

        left ┆ right      ids(left + right) == ids(left) + ids(right), for windows of several
                          lengths, and left and right share no pre-token

    The second condition extends the first one beyond the windows. A model sees one pre-token at
    a time, so text further away cannot influence ids across the cut. Without it, a model that
    pairs up "aaaa…" from its beginning may or may not end with a token that crosses the cut,
    depending on whether the number of letters is odd or even. The pre-tokens of a tokenizer object
    that the user wrote are unknown. For such an object, the windows alone decide.

    Args:
        engine: The engine that tokenizes.
        reference: Another engine for the same tokenizer, which may know its pre-tokens.

    >>> from penstock import load_tokenizer
    >>> is_safe = cut_safety(load_tokenizer("gpt2").reference)
    >>> is_safe("one\n", "two"), is_safe("one\n\n", "two"), is_safe("on", "e")
    (True, False, False)
    """
    known = next((each for each in (engine, reference) if isinstance(each, TokenizersEngine)), None)

    def is_safe(left: str, right: str) -> bool:
        last = _LENGTHS.stop
        # First, because it is one call, and the windows below are 33 texts and their halves.
        if known is not None and not known.splits(left[-last:], right[:last]):
            return False
        windows = [(left[-length:], right[:last]) for length in _LENGTHS]
        windows += [(left[-last:], right[:length]) for length in _LENGTHS]
        return _agree(engine, [*windows, (left[-_LONG:], right[:_LONG])])

    return is_safe


def _agree(engine: Engine, windows: list[tuple[str, str]]) -> bool:
    """Whether the ids of the two sides of every window are the ids of both in one text."""
    # A set: most texts occur in several windows. All of them are encoded in one call.
    texts = {text for one, two in windows for text in (one, two, one + two)}
    ids, offsets = engine.encode(binary_array([text.encode() for text in texts]))
    parts = dict(zip(texts, np.split(ids, offsets[1:-1]), strict=True))
    return all(
        np.array_equal(np.concatenate((parts[one], parts[two])), parts[one + two])
        for one, two in windows
    )
