"""How inputs are to be read: every setting that can change what a document is."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from penstock.errors import SourceError

__all__ = ["BLOCK_BYTES", "RULE_BYTES", "SLICE_BYTES", "Format", "ReadSettings", "separator_in"]

Format = Literal["auto", "text", "jsonl", "parquet", "arrow"]
_NAMED = ("auto", "lines", "paragraphs", "file")

# About 64 MB of text make one part: small enough to redo after a kill (0.2 s a core
# pair), large enough that its fsyncs cost under 1 % of the time.
SLICE_BYTES = 64_000_000

# How much of a text file decides what its documents are.
RULE_BYTES = 64_000_000

# Text goes to the tokenizer in blocks that stay in the L2/L3 cache: 4 MiB measured
# 400 MB/s on two cores, 16 MiB 275, 1 MiB 329.
BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSettings:
    """What a document is, and what to do with bytes that are none."""

    format: Format = "auto"
    """Of the files; "auto" goes by their suffix."""
    documents: str = "auto"
    """In text files: "auto" (see `separators`), "lines", "paragraphs" (split at blank lines),
    "file" (one document a file), or any other string, which separates documents. "sep:lines"
    is the separator `lines`."""
    separators: tuple[str, ...] = ("<|endoftext|>",)
    """Under "auto", the first of these that the first 64 MB of a file contain separates its
    documents. A file that contains none is one document."""
    field: str = "text"
    """The JSON field, Parquet column or Arrow column that holds the text; `a.b` is nested."""
    errors: Literal["strict", "replace"] = "strict"
    """Bytes that are not UTF-8: reject the document, or put U+FFFD in their place."""
    max_document_bytes: int = 1 << 30
    """Longer documents are rejected."""
    max_expansion: int = 200
    """A compressed file that grows more than this many times (past 16 MiB) is refused."""

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise SourceError(
                f"format={self.format!r} is not known. Choose one of {_quoted(get_args(Format))}."
            )
        if self.errors not in ("strict", "replace"):
            raise SourceError(f'errors={self.errors!r} is not "strict" or "replace".')
        if self.documents in ("", "sep:"):
            raise SourceError(
                f'documents="{self.documents}" separates nothing. Use "auto", "lines", '
                '"paragraphs", "file" or a separator.'
            )
        plain = self.documents.removeprefix("sep:")
        if plain not in _NAMED and not plain.startswith("sep:"):
            object.__setattr__(self, "documents", plain)  # one separator is recorded in one way
        if not self.field or not all(self.field.split(".")):
            raise SourceError(f"field={self.field!r} has an empty name in it.")
        if self.max_document_bytes < 1 or self.max_expansion < 1:
            raise SourceError(
                f"max_document_bytes={self.max_document_bytes} and "
                f"max_expansion={self.max_expansion} must be at least 1."
            )

    @property
    def separator(self) -> str | None:
        """The separator of documents, where `documents` is one."""
        return separator_in(self.documents)

    def describe(self) -> dict[str, Any]:
        """These settings as plain JSON, for the manifest."""
        described = asdict(self)
        separators = described.pop("separators")
        return described | ({"separators": list(separators)} if self.documents == "auto" else {})


def separator_in(documents: str) -> str | None:
    """The separator that `documents` names, or None.

    >>> separator_in("lines"), separator_in("sep:lines"), separator_in("---")
    (None, 'lines', '---')
    """
    return None if documents in _NAMED else documents.removeprefix("sep:")


def _quoted(words: tuple[str, ...]) -> str:
    return ", ".join(f'"{word}"' for word in words)
