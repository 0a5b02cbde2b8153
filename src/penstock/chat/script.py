r"""A conversation as text, before it is tokens.

    text      <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n
    content                     ──                                   ──────
    trained                                                          ────────────────

`content` are the characters that came with the conversation; the others are the template's,
and only those may be special tokens. `trained` are the characters to learn to say.
"""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Script", "Span", "merged"]

Span = tuple[int, int]
"""Characters `[start, stop)`."""


@dataclass(frozen=True, slots=True)
class Script:
    """What a template made of a conversation."""

    text: str
    content: list[Span]
    """Ascending, not touching."""
    trained: list[Span]
    """Ascending, not touching."""
    rewritten: tuple[int, ...] = ()
    """Messages of the assistant of which the template left something out."""
    unthought: int = 0
    """How many turns are not trained on because the template leaves out their thought."""
    unended: tuple[int, ...] = ()
    """Where turns that are trained on stop without a token that ends them."""


def merged(spans: Iterable[Span]) -> list[Span]:
    """Spans in order, with those that touch or overlap made one.

    >>> merged([(4, 6), (0, 2), (2, 3), (5, 9)])
    [(0, 3), (4, 9)]
    """
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            if stop > found[-1][1]:
                found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return found
