r"""Special tokens in the text of a template, whether or not the tokenizer has them.

A marker is a special token of the tokenizer, or something that looks like one: `<|im_end|>`,
`<end_of_turn>`, `</s>`, `[/INST]`. Which of them the tokenizer must have is decided in
`penstock.chat.needed`.
"""

import re
from collections.abc import Iterable, Iterator

from penstock.chat.script import Span

__all__ = ["Markers"]

_USUAL = (
    r"<\|[^|<>\s]{1,40}\|>",
    "<\uff5c[^\uff5c<>]{1,40}\uff5c>",  # as DeepSeek writes them
    r"</?[A-Za-z_][\w:.-]{0,40}>",
    r"\[/?[A-Z][A-Z_]{1,30}\]",
)


class Markers:
    """Finds markers in a text."""

    def __init__(self, special: Iterable[str]) -> None:
        # The longest first: `re` takes the first alternative that fits.
        self._known = tuple(sorted(filter(None, special), key=len, reverse=True))
        self._pattern = re.compile("|".join([*map(re.escape, self._known), *_USUAL]))

    def ends(self, text: str) -> bool:
        """Whether `text` ends with a special token, or with what looks like one."""
        return text.endswith((*self._known, "|>", "\uff5c>"))

    def find(self, text: str) -> Iterator[Span]:
        """Where markers stand in `text`."""
        return (found.span() for found in self._pattern.finditer(text))

    def first_group(self, text: str) -> Span | None:
        """The first marker in `text`, with those that follow it at once."""
        group: Span | None = None
        for start, stop in self.find(text):
            if group is not None and start != group[1]:
                break
            group = (group[0] if group else start, stop)
        return group
