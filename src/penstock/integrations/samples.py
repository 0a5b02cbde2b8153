r"""The texts of one file, as a hand-written Dataset reads them.

    "jsonl"        the field `text` of every line
    "paragraphs"   t.strip() for t in text.split("\n\n"), where something is left
    "file"         all of it

The text is what `open(path, encoding="utf-8")` gives: `\r\n` and `\r` become `\n`, and
nothing else changes. It is read in blocks, and the bytes are digested on the way, so that
what was tokenized is known to be what the digest names, even while someone else writes.
"""

import codecs
import hashlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from penstock.errors import SourceError

__all__ = ["Layout", "TextFile", "layout_of"]

Layout = Literal["jsonl", "paragraphs", "file"]

_BLOCK_BYTES = 1 << 20
_JSONL = (".jsonl", ".ndjson", ".json")
_TEXT = (".txt", ".text", ".md", ".raw")


def layout_of(path: str | os.PathLike[str]) -> Layout:
    """What the suffix of a file says it holds.

    >>> layout_of("data/train.jsonl"), layout_of("input.txt")
    ('jsonl', 'paragraphs')
    """
    suffix = Path(path).suffix.lower()
    if suffix in _JSONL:
        return "jsonl"
    if suffix in _TEXT:
        return "paragraphs"
    raise SourceError(
        f"{os.fspath(path)} ends in {suffix!r}, which does not say what it holds; "
        f"{', '.join(_JSONL)} are JSON lines and {', '.join(_TEXT)} are text. "
        "Say it with is_jsonl=True or is_jsonl=False."
    )


class TextFile:
    """A file that is read once from end to end, and digested as it is."""

    def __init__(self, path: str | os.PathLike[str], layout: Layout) -> None:
        self.path = os.fspath(path)
        self.layout = layout
        self.num_bytes = 0
        """Read so far."""
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes read so far; of the file, once `samples` has come to its end."""
        return self._digest.hexdigest()

    def samples(self) -> Iterator[str]:
        """The texts, in order. Holds a block and the sample at hand, not the file."""
        if self.layout == "file":
            yield "".join(self._blocks())
        elif self.layout == "jsonl":
            number = 0
            for piece in _cut(self._blocks(), "\n"):
                for line in piece.split("\n"):
                    number += 1
                    if line and not line.isspace():
                        yield self._text(line, number)
                number -= 1  # the piece after a line's end is the next line, or nothing
        else:
            # Runs of newlines may be parted anywhere: what is left of them is stripped.
            for piece in _cut(self._blocks(), "\n\n"):
                for part in piece.split("\n\n"):
                    if text := part.strip():
                        yield text

    def _blocks(self) -> Iterator[str]:
        decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), True)
        with _opened(self.path) as stream:
            while block := stream.read(_BLOCK_BYTES):
                self._digest.update(block)
                yield self._decoded(decoder, block, final=False)
                self.num_bytes += len(block)
        yield self._decoded(decoder, b"", final=True)

    def _decoded(self, decoder: io.IncrementalNewlineDecoder, block: bytes, *, final: bool) -> str:
        try:
            return decoder.decode(block, final)
        except UnicodeDecodeError as error:
            # The decoder may have kept the first bytes of a character from the last block.
            place = self.num_bytes + error.start - (len(error.object) - len(block))
            raise SourceError(
                f"{self.path} is not UTF-8 at byte {place:,} ({error.reason}). Convert it, or "
                "decompress it if it is compressed; penstock.build() reads compressed files."
            ) from None

    def _text(self, line: str, number: int) -> str:
        if number == 1:
            line = line.removeprefix("\ufeff")  # json refuses a byte order mark
        try:
            item: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise SourceError(
                f"{self.path}, line {number:,} is not JSON: {error.msg} at character "
                f"{error.pos:,}. Give is_jsonl=False if the file is plain text."
            ) from None
        if not isinstance(item, dict) or "text" not in item:
            known = ", ".join(f'"{key}"' for key in list(item)[:5]) if _is_full(item) else "none"
            raise SourceError(
                f'{self.path}, line {number:,} has no field "text"; its fields: {known}.'
            )
        text = item["text"]
        if not isinstance(text, str):
            raise SourceError(
                f'{self.path}, line {number:,}: "text" holds {json.dumps(text)[:60]}, not a string.'
            )
        return text


def _is_full(item: Any) -> bool:
    return isinstance(item, dict) and bool(item)


def _opened(path: str) -> Any:
    try:
        return Path(path).open("rb", buffering=0)
    except FileNotFoundError:
        raise SourceError(f"{path} does not exist (working directory: {Path.cwd()}).") from None
    except IsADirectoryError:
        raise SourceError(f"{path} is a directory; give one file.") from None


def _cut(blocks: Iterator[str], border: str) -> Iterator[str]:
    """Pieces of text that begin and end at borders, a few blocks long at most where it can be.

    Every piece but the last ends with a border. Blocks without one are only collected, so a
    long record costs no more than its length.
    """
    held: list[str] = []
    edge = ""  # the end of what is held: a border may lie across two blocks
    for block in blocks:
        held.append(block)
        if border in edge + block:
            text = "".join(held)
            cut = text.rfind(border) + len(border)
            yield text[:cut]
            held = [text[cut:]]
            edge = held[0][1 - len(border) :] if len(border) > 1 else ""
        elif len(border) > 1:
            edge = (edge + block)[1 - len(border) :]
    yield "".join(held)
