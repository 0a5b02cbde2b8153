r"""Strings that record which message each of their characters comes from.

A template joins messages with its own text, and may strip, split, slice and repeat them. `Traced`
strings keep track through all of these operations:

    text   <|im_start|>assistant\nHello there<|im_end|>\n
    runs                          └─ message 1, from its character 0 on

A leaf is one string of the conversation. A run is a range of characters that comes from one leaf.
The template wrote all characters that are in no run. Searching the text for the content of a
message would be a guess: it fails as soon as the content occurs twice.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, SupportsIndex

from penstock.errors import ChatError

# The usual roles, which stay plain strings; see `trace`.
_ROLES = frozenset(
    ("system", "developer", "user", "assistant", "model", "tool", "function", "ipython")
)


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One string of a conversation: the content of a message, or an argument of a tool call."""

    message: int
    """The number of the message; -1 for strings outside messages, such as tool definitions."""
    path: str
    """The path of the string in the message: "content", "tool_calls[0].function.name"."""
    text: str
    train: bool = True
    """Whether the string is trained on if its message is trained on."""


Run = tuple[int, int, Leaf, int]
"""`(start, stop, leaf, offset)`: the characters `[start, stop)` come from this leaf.

`offset` is the index of the first of them in the leaf, or -1 if they were changed (escaped as JSON,
put in lower case)."""


class Traced(str):
    """A string with runs. Methods that keep characters also keep their runs.

    Methods that change characters, such as `upper`, return plain strings. The environment (see
    `jinja`) then makes a `Traced` of the result, whose origin is the whole string.
    """

    __slots__ = ("_runs",)
    _runs: list[Run]

    def __new__(cls, text: str, runs: list[Run]) -> "Traced":
        """`text` with the runs of its characters."""
        self = str.__new__(cls, text)
        self._runs = runs
        return self

    @property
    def plain(self) -> str:
        """The characters as a plain `str`, without the record of where they come from."""
        return str.__str__(self)

    def __str__(self) -> str:
        # Jinja calls `str` on every value that it writes; a plain string would lose the runs.
        return self

    def __add__(self, other: str) -> "Traced":
        return traced_join((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> "Traced":
        return traced_join((other, self)) if isinstance(other, str) else NotImplemented

    def __iter__(self) -> Iterator[str]:
        return (self._cut(at, at + 1) for at in range(len(self)))

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if not isinstance(key, slice):
            at = range(len(self))[key]
            return self._cut(at, at + 1)
        start, stop, step = key.indices(len(self))
        if step == 1:
            return self._cut(start, max(start, stop))
        # Reversed or skipped characters are not a range of the original, so their offset is -1.
        return derived(self.plain[key], [self])

    def _cut(self, start: int, stop: int) -> "Traced":
        """Characters `[start, stop)`, with their runs."""
        runs = []
        for first, last, leaf, offset in self._runs:
            low, high = max(first, start), min(last, stop)
            if low < high:
                # The run starts `low - first` characters later, also in the leaf.
                moved = offset if offset < 0 else offset + low - first
                runs.append((low - start, high - start, leaf, moved))
        return Traced(self.plain[start:stop], runs)

    def strip(self, chars: str | None = None, /) -> str:
        """Return the string without blanks (or `chars`) at both ends."""
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> str:
        """Return the string without blanks (or `chars`) at the start."""
        return self._cut(len(self) - len(self.plain.lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        """Return the string without blanks (or `chars`) at the end."""
        return self._cut(0, len(self.plain.rstrip(chars)))

    def removeprefix(self, prefix: str, /) -> str:
        """Return the string without `prefix`, if it begins with it."""
        return self._cut(len(self) - len(self.plain.removeprefix(prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> str:
        """Return the string without `suffix`, if it ends with it."""
        return self._cut(0, len(self.plain.removesuffix(suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """Return the texts between separators."""
        return self._pieces(self.plain.split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """Return the texts between separators; `maxsplit` counts from the end."""
        return self._pieces(self.plain.rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        """Return the lines of the string."""
        return self._pieces(self.plain.splitlines(keepends))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        """Return the text before the first separator, the separator, and the text after it."""
        before, found, after = self._pieces(self.plain.partition(sep))
        return before, found, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        """Return the text before the last separator, the separator, and the text after it."""
        before, found, after = self._pieces(self.plain.rpartition(sep))
        return before, found, after

    def _pieces(self, pieces: Iterable[str], sep: str | None = None) -> list[str]:
        """Return `pieces`, which are consecutive parts of this string, with their runs.

        `sep` is the text between two pieces. If it is None, blanks, line ends or nothing may be
        between them.
        """
        found: list[str] = []
        done = 0
        for piece in pieces:
            # With `sep`, the piece begins at `done`. Without it, blanks or line ends may come
            # before the piece, which does not begin with them: the first match is the piece.
            done = self.plain.index(piece, done)
            found.append(self._cut(done, done + len(piece)))
            done += len(piece) + len(sep or "")
        return found

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        """Return the string with `old` replaced by `new`."""
        if not old:  # Python then puts `new` between all characters
            return derived(self.plain.replace(old, new, count), [self, new])
        pieces: list[str] = []
        done, left = 0, int(count)
        while left and (found := self.plain.find(old, done)) >= 0:
            pieces += [self._cut(done, found), new]
            done, left = found + len(old), left - 1
        return traced_join([*pieces, self._cut(done, len(self))])

    def join(self, pieces: Iterable[str], /) -> str:
        """Return the concatenation of `pieces`, with this string between them."""
        joined: list[str] = []
        for piece in pieces:
            joined += [self, piece] if joined else [piece]
        return traced_join(joined)

    def __mul__(self, number: SupportsIndex) -> "Traced":
        return traced_join([self] * int(number))


def trace(value: Any, leaf: Leaf) -> Any:
    """A copy of `value` in which every string is `Traced`, also inside lists and dicts.

    The usual roles stay plain strings, because a template may build a special token from one ("<|"
    + role + "|>"). Any other role is text of the user's record.
    """
    if isinstance(value, str):
        kept = Leaf(leaf.message, leaf.path, value, leaf.train)
        return Traced(value, [(0, len(value), kept, 0)]) if value else value
    if isinstance(value, dict):
        train = leaf.train and value.get("train", True) is not False
        traced = {}
        for key, item in value.items():
            # "train" is a note for penstock, and no template should write it.
            if key == "train" and leaf.message >= 0:
                continue
            path = f"{leaf.path}.{key}" if leaf.path else str(key)
            inside = Leaf(leaf.message, path, "", train)
            # The model also writes the names of arguments, so they are traced too.
            name = trace(key, inside) if "arguments" in leaf.path else key
            is_role = key == "role" and item in _ROLES
            traced[name] = item if is_role else trace(item, inside)
        return traced
    if isinstance(value, list | tuple):
        return [
            trace(item, Leaf(leaf.message, f"{leaf.path}[{number}]", "", leaf.train))
            for number, item in enumerate(value)
        ]
    if value is None or isinstance(value, bool | int | float):
        return value
    # Other objects are refused for safety: a template could call any of their methods.
    raise ChatError(
        "bad_content", f"{leaf.path or 'A message'} is a {type(value).__name__}, not JSON."
    )


def traced_join(pieces: Iterable[str]) -> Traced:
    """The concatenation of all pieces, with their runs.

    >>> leaf = Leaf(0, "content", "Hi")
    >>> joined = traced_join(["<user>", Traced("Hi", [(0, 2, leaf, 0)])])
    >>> joined.plain, [(start, stop) for start, stop, *_ in joined._runs]
    ('<user>Hi', [(6, 8)])
    """
    parts = list(pieces)
    runs: list[Run] = []
    done = 0
    for piece in parts:
        if type(piece) is Traced:
            for start, stop, leaf, offset in piece._runs:
                runs.append((start + done, stop + done, leaf, offset))
        done += len(piece)
    return Traced("".join(parts), runs)


def derived(text: str, values: Iterable[object]) -> str:
    """`text`, with every leaf of `values`, from which it was computed, as an origin."""
    leaves = leaves_in(list(values))
    if not leaves or not text:  # all of it is the template's
        return text
    return Traced(str.__str__(text), [(0, len(text), leaf, -1) for leaf in leaves])


def leaves_in(value: object) -> list[Leaf]:
    """The leaves of all strings in `value`, each once."""
    # Leaves are compared by identity: two messages may have equal leaves, and both are returned.
    return list({id(leaf): leaf for leaf in _leaves(value)}.values())


def _leaves(value: object) -> Iterator[Leaf]:
    if type(value) is Traced:
        yield from (leaf for _, _, leaf, _ in value._runs)
    elif isinstance(value, dict):
        yield from _leaves([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
