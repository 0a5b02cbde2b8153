"""The settings that decide what a document is, and `Texts`, the class for inputs in memory."""

import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args

from penstock.errors import SourceError

Format = Literal["auto", "text", "jsonl", "json", "csv", "tsv", "parquet", "arrow"]
_NAMED = ("auto", "lines", "paragraphs", "file")

# About 64 MB of text become one part. A part is small enough to be made again after a kill (0.2 s
# on two cores), and large enough for its fsyncs to take less than 1 % of the time.
SLICE_BYTES = 64_000_000

# How much of a text file "auto" searches for a separator.
RULE_BYTES = 64_000_000

# Text goes to the tokenizer in blocks that fit into the L2 and L3 caches. Measured on two cores:
# 400 MB/s with 4 MiB, 275 with 16 MiB, 329 with 1 MiB.
BLOCK_BYTES = 4 << 20


def num_cores() -> int:
    """How many cores this process may use: in a container, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSettings:
    """What a document is, and what happens to input that is not a valid document."""

    format: Format = "auto"
    """The format of the files; "auto" decides by the suffix of each name. A .json file is "json",
    an array of records, if it begins with `[`, and JSON Lines otherwise."""
    documents: str = "auto"
    """What a document is in text files: "auto" (see `separators`), "lines", "paragraphs" (split at
    blank lines), "file" (one document per file), or a separator, as "sep:SEPARATOR". "sep:" may
    be left out if the separator contains a character that is not a letter or digit."""
    separators: tuple[str, ...] = ("<|endoftext|>",)
    """Separators that "auto" looks for in the first 64 MB of a file. The first one that is found
    separates the documents of the file; a file without any is one document."""
    field: str = "text"
    """The JSON field or table column that holds the text; `a.b` is the field `b` inside `a`."""
    errors: Literal["strict", "replace"] = "strict"
    """What happens to invalid UTF-8: "strict" rejects the document, "replace" replaces the
    invalid bytes by U+FFFD."""

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            known = ", ".join(f'"{each}"' for each in get_args(Format))
            raise SourceError(f"format={self.format!r} is not known. Choose one of {known}.")
        if self.errors not in ("strict", "replace"):
            raise SourceError(f'errors={self.errors!r} is not "strict" or "replace".')
        if self.documents in ("", "sep:"):
            raise SourceError(
                f'documents="{self.documents}" separates nothing. Use "auto", "lines", '
                '"paragraphs", "file" or a separator.'
            )
        # "sep:---" and "---" mean the same, and both are recorded as "---". "sep:lines" stays as it
        # is, because "lines" means something else, and so does "sep:word".
        plain = self.documents.removeprefix("sep:")
        if plain not in _NAMED and not plain.startswith("sep:") and not plain.isalnum():
            object.__setattr__(self, "documents", plain)
        # A word without "sep:" is a name that was mistyped, far more often than a separator.
        if self.documents not in _NAMED and self.documents.isalnum():
            close = get_close_matches(self.documents.lower(), _NAMED, n=1)
            known = ", ".join(f'"{each}"' for each in _NAMED)
            raise SourceError(
                f"documents={self.documents!r} is not a rule"
                + (f"; did you mean {close[0]}? " if close else ". ")
                + f"The rules are {known}. A separator of letters and digits is written as "
                f'"sep:{self.documents}".'
            )
        if not isinstance(self.field, str):
            raise SourceError(
                f"field={self.field!r} is not the name of one field. To make one text of several "
                "fields, build from penstock.Texts with the joined texts."
            )
        if not self.field or not all(self.field.split(".")):
            raise SourceError(f"field={self.field!r} contains an empty name.")

    def describe(self) -> dict[str, Any]:
        """These settings as plain JSON, for the manifest."""
        described = asdict(self)
        separators = described.pop("separators")
        # Recorded without "sep:" as long as that is clear: stores of earlier versions are found.
        plain = self.documents.removeprefix("sep:")
        if plain not in _NAMED and not plain.startswith("sep:"):
            described["documents"] = plain
        return described | ({"separators": list(separators)} if self.documents == "auto" else {})


class Texts:
    """Strings as the documents of a build.

    Without this class, `build` would take the strings as file names:

    >>> Texts(["one document", "another"])
    Texts(2 documents, 19 bytes)
    """

    may_be_empty = False
    """Whether a build of no documents is accepted: the file of a Dataset may have no samples."""

    def __init__(self, texts: Iterable[str], *, keep_blank: bool = False) -> None:
        """Take each string of `texts` as one document.

        Args:
            texts: One string for each document. A generator is read to its end and kept in memory.
            keep_blank: Whether texts of white space are documents too. By default they are skipped.
        """
        # A string is a sequence too, and each of its characters would become a document.
        if isinstance(texts, str | bytes):
            raise SourceError(
                f"Texts takes a list of texts, and got a single {type(texts).__name__}: "
                f"{texts!r:.60}. Put it into a list: Texts([text])."
            )
        if not isinstance(texts, Sequence):  # a generator can be read only once
            texts = list(texts)
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise SourceError(
                    f"Text {number:,} is of type {type(text).__name__}, not a string: {text!r:.60}."
                )
        self._texts: Sequence[str] = texts
        self.keep_blank = keep_blank

    def __repr__(self) -> str:
        return f"Texts({len(self):,} documents, {self.num_bytes:,} bytes)"

    def __len__(self) -> int:
        return len(self._texts)

    def encoded(self, start: int, stop: int) -> list[bytes]:
        """Texts `[start, stop)` as UTF-8; lone surrogates stay, and `validate` rejects them."""
        return [text.encode("utf-8", "surrogatepass") for text in self._texts[start:stop]]

    def sizes(self, start: int, stop: int) -> list[int]:
        """Bytes of each of the texts `[start, stop)`, as UTF-8."""
        # Encoded one at a time: all at once would take as much memory again as the texts.
        return [len(self.encoded(number, number + 1)[0]) for number in range(start, stop)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all texts."""
        return sum(self.sizes(0, len(self)))

    @property
    def digest(self) -> str:
        """A digest of the texts and their lengths."""
        total = hashlib.sha256()
        for number in range(len(self)):
            (text,) = self.encoded(number, number + 1)
            # The length goes before each text. Otherwise ["ab", "c"] and ["a", "bc"] would have the
            # same digest.
            total.update(b"%d:" % len(text))
            total.update(text)
        return total.hexdigest()


def separator_in(documents: str) -> str | None:
    """The separator that `documents` names, or None.

    >>> separator_in("lines"), separator_in("sep:lines"), separator_in("---")
    (None, 'lines', '---')
    """
    return None if documents in _NAMED else documents.removeprefix("sep:")
