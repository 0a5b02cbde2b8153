"""Which tokens begin a word.

    "##"    un ##believ ##able            BERT: the others are marked
    "Ġ"     un believ able Ġstory !       GPT-2, RoBERTa: a space belongs to the word after it
    "▁"     ▁un believ able ▁story !      SentencePiece: likewise

With the last two, a token that starts with neither letter, digit nor part of a character
begins a word as well: the "!" above, "'t", a newline. What a vocabulary cannot tell, this
does not know: the "foo" of "(foo" belongs to the word that "(" begins.
"""

import re
from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError

__all__ = ["WordMark", "begins_word"]

WordMark = Literal["##", "Ġ", "▁"]

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # SentencePiece's spelling of one byte
_BLANKS = "ĠĊĉč"  # how GPT-2 spells space, line feed, tab and carriage return


def begins_word(
    vocabulary: Mapping[str, int], mark: WordMark, *, vocab_size: int | None = None
) -> NDArray[np.bool_]:
    """Whether the token of each id begins a word, from how the vocabulary spells it.

    Ids that the vocabulary lacks begin one.

    >>> begins_word({"[CLS]": 0, "un": 1, "##able": 2}, "##")
    array([ True,  True, False])
    >>> begins_word({"un": 0, "Ġstory": 1, "!": 2, "Ċ": 3, "é": 4}, "Ġ").tolist()
    [False, True, True, True, False]
    """
    if mark not in ("##", "Ġ", "▁"):
        raise PlanError(f'mark={mark!r} is not "##", "Ġ" or "▁", the ways words are marked.')
    size = max(vocabulary.values(), default=-1) + 1
    if vocab_size is not None and vocab_size < size:
        raise PlanError(f"The vocabulary has an id {size - 1:,}, past vocab_size={vocab_size:,}.")
    found = np.ones(size if vocab_size is None else vocab_size, np.bool_)
    for token, number in vocabulary.items():
        found[number] = _begins(token, mark)
    return found


def _begins(token: str, mark: WordMark) -> bool:
    if mark == "##":
        return not token.startswith("##")
    if not token or token[0] == mark:
        return True
    if mark == "▁":
        return not token[0].isalnum() and not _BYTE.fullmatch(token)
    # Past ASCII, a character of GPT-2's spelling is a byte of some other character.
    return token[0] in _BLANKS or (token[0].isascii() and not token[0].isalnum())
