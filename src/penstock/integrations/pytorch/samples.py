r"""The samples of one file, as a hand-written Dataset reads them.

    "jsonl"        the field `text` of every line
    "paragraphs"   t.strip() for t in text.split("\n\n"), where not empty
    "file"         the whole text

The file is read in blocks and its samples are written to a temporary file, from which
`penstock.build` reads them. So memory holds some blocks and the longest sample, not the file.
"""

import json
import mmap
import os
import warnings
from array import array
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal

import numpy as np

from penstock.disk import map_file
from penstock.errors import MissingInputError, SourceError
from penstock.paths import expand_user
from penstock.sources.settings import BLOCK_BYTES, Texts
from penstock.sources.text import CONTEXT_BYTES, RANGE_BYTES, IsCutSafe, find_cut
from penstock.store.manifest import FILE_NAME

PathLike = str | os.PathLike[str]
Layout = Literal["jsonl", "paragraphs", "file"]

_READ_BYTES = 1 << 20
_PIECE_BYTES = 2 * BLOCK_BYTES
_JSONL = (".jsonl", ".ndjson", ".json")
_TEXT = (".txt", ".text", ".md", ".raw")
_FROM_STORE = (
    "penstock.build makes a store of many files, JSON arrays, CSV, Parquet and compressed files; "
    "read it with penstock.Loader."
)


def suffix_layout(path: PathLike) -> Layout:
    """Return the layout of a file, according to its suffix.

    >>> suffix_layout("data/train.jsonl"), suffix_layout("input.txt")
    ('jsonl', 'paragraphs')
    """
    suffix = Path(path).suffix.lower()
    if suffix in _JSONL:
        return "jsonl"
    if suffix in _TEXT:
        return "paragraphs"
    refuse_no_file(path)
    raise SourceError(
        f"{os.fspath(path)} ends in {suffix!r}; {', '.join(_JSONL)} are read as JSON lines and "
        f"{', '.join(_TEXT)} as text. If the file contains one of these, set is_jsonl=True or "
        f"is_jsonl=False. {_FROM_STORE}"
    )


def refuse_no_file(path: PathLike) -> None:
    """Raise if there is no such file, or if it is a directory, perhaps a store."""
    found = expand_user(path)
    if any((found / side / FILE_NAME).is_file() for side in ("", "train", "val")):
        raise SourceError(
            f"{path} is a store, and here a file of text is tokenized. Read the store with "
            "penstock.Loader and penstock.Windows."
        )
    if found.is_dir():
        raise SourceError(f"{path} is a directory; give one file. {_FROM_STORE}")
    if not found.exists():
        raise MissingInputError(f"{path} does not exist (working directory: {Path.cwd()}).")


def refuse_no_length(sequence_length: object) -> None:
    """Raise if the length of a `TextDataset` is the name of a tokenizer."""
    if isinstance(sequence_length, str):
        raise TypeError(
            f"sequence_length must be a whole number; got {sequence_length!r}. The tokenizer is "
            "the third argument: TextDataset(path, sequence_length, tokenizer)."
        )


def warn_of_records(path: PathLike) -> None:
    """Warn if the suffix of a file that is read as one text says that it holds records."""
    if (suffix := Path(path).suffix.lower()) in (*_JSONL, ".csv", ".tsv", ".parquet", ".arrow"):
        also = ", and TransformerDataset that of JSON lines" if suffix in _JSONL else ""
        warnings.warn(
            f"{os.fspath(path)} is read as plain text, with the syntax of {suffix}. "
            f"penstock.build reads the text field of records{also}.",
            stacklevel=3,
        )


def read_samples(path: Path, layout: Layout) -> Iterator[str]:
    r"""Yield the samples of a file in order; for the layout "file", pieces of about 1 MB.

    `\r\n` and `\r` become `\n`, which is Python's default for text files.
    """
    try:
        with path.open(encoding="utf-8", buffering=_READ_BYTES) as stream:
            if layout == "file":
                yield from iter(lambda: stream.read(_READ_BYTES), "")
            elif layout == "jsonl":
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        yield _json_text(line.removesuffix("\n"), f"{path}, line {number:,}")
            else:
                # Paragraphs are the runs of lines between empty lines.
                for is_empty, lines in groupby(stream, "\n".__eq__):
                    if not is_empty and (paragraph := "".join(lines).strip()):
                        yield paragraph
    except UnicodeDecodeError:
        raise _not_utf8(path) from None


def _not_utf8(path: Path) -> SourceError:
    """An error that names the first byte that is not UTF-8."""
    # A decoder counts bytes from the start of its block. No character contains the byte of a
    # line end, so lines can be decoded one by one.
    place = 0
    with path.open("rb") as stream:
        for line in stream:
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return SourceError(
                    f"{path} is not UTF-8 at byte {place + error.start:,} ({error.reason}). "
                    "Convert it, or decompress it if it is compressed; penstock.build() reads "
                    "compressed files."
                )
            place += len(line)
    return SourceError(
        f"{path} changed while it was read: it was not UTF-8 before, and now it is. Try again when "
        "no program writes to it."
    )


def _json_text(line: str, where: str) -> str:
    """The field `text` of a JSON line."""
    if line.lstrip("\ufeff \t").startswith("["):
        raise SourceError(
            f"{where} begins an array, and JSON lines hold one object each. {_FROM_STORE}"
        )
    try:
        item = json.loads(line.removeprefix("\ufeff"))  # json refuses a byte order mark
    except json.JSONDecodeError as error:
        raise SourceError(
            f"{where} is not JSON: {error.msg} at character {error.pos:,}. Set is_jsonl=False if "
            "the file is plain text."
        ) from None
    if not isinstance(item, dict) or "text" not in item:
        names = list(item)[:5] if isinstance(item, dict) else []
        known = ", ".join(f'"{name}"' for name in names) or "none"
        raise SourceError(f'{where} has no field "text"; its fields: {known}.')
    text = item["text"]
    if not isinstance(text, str):
        raise SourceError(f'{where}: "text" holds {json.dumps(text)[:60]}, not a string.')
    # JSON allows an escape for half of a surrogate pair. UTF-8, which the engines read, does not.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.start + 20]
        raise SourceError(
            f"{where} holds half of a surrogate pair ({text[error.start]!r} in {near!r}), which is "
            "not a character and has no ids. Remove it from the text."
        ) from None
    return text


class SpooledTexts(Texts):
    """The samples of a file, in a temporary file without a name that is removed with the object.

    Blank samples are documents too: a hand-written Dataset has tokens for them.
    """

    keep_blank = True
    may_be_empty = True

    def __init__(
        self,
        path: Path,
        layout: Layout,
        digest: str,
        directory: Path,
        is_cut_safe: IsCutSafe | None = None,
    ) -> None:
        """Read all of a file.

        Args:
            path: The file.
            layout: What it contains.
            digest: The digest of the file.
            directory: Where the temporary file is made.
            is_cut_safe: Says where the text of a "file" may be cut. Without it, a "file" is one
                text, which has to fit into memory.
        """
        ends = array("q", [0])
        # The operating system frees the space of this file when it is closed, also after a kill.
        with TemporaryFile(dir=directory) as stream:
            for sample in read_samples(path, layout):
                ends.append(ends[-1] + stream.write(sample.encode()))
            stream.flush()
            # An empty file cannot be mapped.
            self._data: mmap.mmap | bytes = map_file(stream) if ends[-1] else b""
        if layout == "file":
            ends = array("q", [0, *_cuts(self._data, is_cut_safe), ends[-1]])
        self._ends = np.array(ends, np.int64)
        self._digest = digest

    def __len__(self) -> int:
        return len(self._ends) - 1

    def encoded(self, start: int, stop: int) -> list[bytes]:
        """Texts `[start, stop)`, read from the temporary file."""
        ends = self._ends[start : stop + 1].tolist()
        return [self._data[first:last] for first, last in pairwise(ends)]

    def sizes(self, start: int, stop: int) -> list[int]:
        """Bytes of each of the texts `[start, stop)`."""
        return [int(size) for size in np.diff(self._ends[start : stop + 1])]

    @property
    def digest(self) -> str:
        """The digest of the file that the samples were read from."""
        return self._digest


def _cuts(data: mmap.mmap | bytes, is_cut_safe: IsCutSafe | None) -> Iterator[int]:
    """Offsets where a text can be cut into pieces of about 8 MiB without changing a token id."""
    start = 0
    while is_cut_safe is not None and len(data) - start > 2 * _PIECE_BYTES:
        begin = start + _PIECE_BYTES - CONTEXT_BYTES
        window = data[begin : begin + RANGE_BYTES + 2 * CONTEXT_BYTES]
        found = find_cut(window, CONTEXT_BYTES, is_cut_safe)
        if found < 0:
            return
        start = begin + found
        yield start
