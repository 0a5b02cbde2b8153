"""The comparison that a build does not start without.

A fast tokenizer that differs from the reference in one id in a million is worse than a
slow one: nothing looks wrong. So the first documents of every build are encoded by both.
"""

from typing import Any

import numpy as np

from penstock.errors import TokenizerError
from penstock.sources.arrow import binary_array
from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["ORACLE_BYTES", "ORACLE_DOCUMENTS", "compare"]

ORACLE_DOCUMENTS = 1_000
ORACLE_BYTES = 1_000_000


def compare(tokenizer: Tokenizer, texts: Any) -> int:
    """Encode the first 1,000 documents or 1 MB of `texts` with both engines.

    Returns how many documents were compared.

    Raises:
        TokenizerError: an id differs.
    """
    if tokenizer.reference is None or not len(texts):
        return 0
    offsets = np.frombuffer(texts.buffers()[1], np.int64, count=len(texts) + 1)
    fitting = int(np.searchsorted(offsets, ORACLE_BYTES, side="right")) - 1
    num_documents = max(1, min(len(texts), ORACLE_DOCUMENTS, fitting))
    # One document longer than 1 MB is cut at a character, so that it costs no minute.
    sample = [text.as_py() for text in texts[:num_documents]]
    sample[0] = sample[0][:ORACLE_BYTES].decode(errors="ignore").encode()
    array = binary_array(sample)
    ids, places = tokenizer.engine.encode(array)
    expected, expected_places = tokenizer.reference.encode(array)
    if np.array_equal(ids, expected) and np.array_equal(places, expected_places):
        return num_documents
    for number, text in enumerate(sample):
        found = ids[places[number] : places[number + 1]].tolist()
        right = expected[expected_places[number] : expected_places[number + 1]].tolist()
        if found != right:
            at = next(
                (i for i, pair in enumerate(zip(found, right, strict=False)) if pair[0] != pair[1]),
                min(len(found), len(right)),
            )
            raise TokenizerError(
                f"{tokenizer.engine.name} and {tokenizer.reference.name} disagree on document "
                f"{number:,} from token {at:,} on: {found[at : at + 5]} and {right[at : at + 5]}, "
                f"for {text[:60]!r}. The fast ids cannot be trusted for {tokenizer.name}. "
                'Build with engine="tokenizers".'
            )
    raise AssertionError("arrays differ, so one document must")
