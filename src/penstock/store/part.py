"""One part of a store, made from one slice of the input; and splits, which hold out documents.

    tokens   the quick fox <eos> jumps <eos> …      uint16 or uint32, documents concatenated
    bounds                    4             6       the end of each document
    origin       (file, offset)  (file, offset)     the origin of each document
    loss       0    1    1     1      0     0       only in chat stores: is the token trained on?
    checks   CRC-32 of each 64 KiB of these files   compared when they are read

A part is assembled in memory (64 MB of text become about 30 MB of tokens), because the header of
an array file contains its length.

With a split, a slice becomes two parts, one of them with the documents that are held out for
validation:

    tail:0.1   The documents that begin in the last tenth of the input. If the input is one document
               in one text file, it is divided into two documents after 90 % of its characters.
    hash:0.1   About a tenth of the documents, chosen by a digest of their text. The choice stays
               the same when data is added, and equal documents are on the same side.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.disk import header, write_file
from penstock.errors import StoreError
from penstock.options import ReadSettings
from penstock.sources.batch import Batch, Edges
from penstock.sources.files import BOM, Expanded, InputFile
from penstock.sources.settings import BLOCK_BYTES
from penstock.sources.tables import num_rows
from penstock.sources.text import file_rule
from penstock.store.manifest import PartRecord, array_layout, part_file
from penstock.tokenize.tokenizer import Tokenizer

TokenArray = NDArray[Any]
"""Token ids, as uint16 or uint32."""
Offsets = NDArray[np.int64]
Flags = NDArray[np.bool_]
Mask = NDArray[np.uint8] | None
"""Whether each token is trained on; None if all are."""
Encoded = tuple[TokenArray, Offsets, NDArray[np.uint64], Mask, int]
"""Tokenized documents: all ids, the end of each document or piece, the file and offset of each,
whether each token is trained on, and how many pieces the next part continues."""

# From so many tokens per document on, a copy of each document takes less time than a mask of all
# tokens: 0.6 ns per token and not 1.1, with 3,000 tokens per document.
_FEW = 256


@dataclass(slots=True)
class PartBuilder:
    """Collects the documents of one part and writes its files."""

    tokenizer: Tokenizer
    eos_id: int | None
    """The token after each document, or None."""
    bos_id: int | None
    num_tokens: int = 0
    num_documents: int = 0
    """Documents, or pieces of documents: entries of the bounds."""
    num_continued: int = 0
    """How many of these are continued in the next part."""
    _bound: int = 0
    _pieces: dict[str, list[NDArray[Any]]] = field(default_factory=dict)
    """The arrays of each kind, one for each batch."""

    def encode(self, batch: Batch) -> Encoded:
        """The tokenized documents of a batch, for `append`; documents without tokens are left out.

        Several threads may encode at a time.
        """
        ids, offsets = self.tokenizer.encode_batch(batch)
        origins, edges = np.stack((batch.files, batch.offsets), axis=1), batch.edges
        # A tokenizer may drop a whole text, by normalising its characters away. The reader has
        # counted it as a document already.
        full = np.diff(offsets) > 0
        if edges is None and not full.all():
            batch.tally.documents -= int((~full).sum())
            batch.tally.skipped += int((~full).sum())
            origins = origins[full]
            offsets = np.concatenate((offsets[:1], offsets[1:][full]))
        tokens, ends, _ = self.join(ids, offsets, edges=edges)
        if edges is None:
            return tokens, ends, origins, None, 0
        # Some texts are not whole documents. Only a text that ends a document, or a stored piece of
        # one, has a bound.
        continued = int((edges.closes & ~edges.ends).sum())
        return tokens, ends[edges.closes], origins[edges.closes], None, continued

    def join(
        self, ids: TokenArray, offsets: Offsets, *, edges: Edges | None = None, loss: Mask = None
    ) -> tuple[TokenArray, Offsets, Mask]:
        """The documents concatenated with begin and end tokens, the end of each, and the loss mask.

        A token that is there already is not added a second time. Texts that begin or end inside
        a document, according to `edges`, get no token there. An end token is trained on if it
        follows a trained token.
        """
        starts, stops = offsets[:-1], offsets[1:]
        first = _absent(self.bos_id, ids, starts, None if edges is None else edges.begins)
        last = _absent(self.eos_id, ids, stops - 1, None if edges is None else edges.ends)
        # Example: ids 5 6 | 7 with eos 9 get the lengths 3 2, the ends 3 5, and 9 at 2 and 4.
        lengths = stops - starts + first + last
        ends = np.cumsum(lengths)
        begin_places, end_places = (ends - lengths)[first], ends[last] - 1
        places = np.sort(np.concatenate((begin_places, end_places)))
        tokens = _spread(ids[offsets[0] : offsets[-1]], places, self.tokenizer.dtype)
        tokens[begin_places], tokens[end_places] = self.bos_id or 0, self.eos_id or 0
        if loss is not None:
            own, loss = loss, _spread(loss, places, np.dtype(np.uint8))
            loss[begin_places], loss[end_places] = 0, own[stops[last] - 1]
        return tokens, ends, loss

    def append(self, documents: Encoded) -> None:
        """Append tokenized documents; all documents of a part have a loss mask, or none has."""
        tokens, ends, origins, loss, num_continued = documents
        # `ends` count from the beginning of this batch, bounds from the beginning of the part.
        bounds = ends.astype(np.uint64) + np.uint64(self.num_tokens)
        full = np.diff(bounds, prepend=np.uint64(self._bound)) > 0
        if not full.all():  # a piece without tokens gets no bound
            bounds, origins = bounds[full], origins[full]
            num_continued = num_continued if full[-1] else 0
        # The arrays are not joined: a joined copy would take as much memory again as the part.
        arrays = {"tokens": tokens, "bounds": bounds, "origin": origins, "loss": loss}
        for kind, array in arrays.items():
            if array is not None:
                self._pieces.setdefault(kind, []).append(array)
        self.num_tokens += len(tokens)
        self.num_documents += len(bounds)
        self.num_continued += num_continued
        self._bound = int(bounds[-1]) if len(bounds) else self._bound

    def seal(self, directory: Path, number: int) -> PartRecord:
        """Write the files of the part and return its record.

        Each file is synced to disk; the caller syncs the directory. A part without documents has no
        files, because the manifest does not list it.
        """
        if not self.num_documents:
            return PartRecord(number, 0, 0, {})
        files, sums = {}, list[int]()
        for kind, pieces in self._pieces.items():
            dtype = self.tokenizer.dtype
            layout = array_layout(kind, dtype, self.num_documents, self.num_tokens)
            path = directory / part_file(number, kind)
            files[kind] = write_file(path, [header(*layout), *pieces], sums=sums)
        table, path = np.array(sums, "<u4"), directory / part_file(number, "checks")
        files["checks"] = write_file(path, [header(table.dtype, table.shape), table])
        return PartRecord(number, self.num_documents, self.num_tokens, files, self.num_continued)


def _spread(own: TokenArray, places: Offsets, dtype: np.dtype[Any]) -> TokenArray:
    """A new array with the values of `own` in order, and with room at the sorted `places`.

    >>> array = _spread(np.array([5, 6, 7]), np.array([2, 4]), np.dtype("u1"))
    >>> array[[0, 1, 3]].tolist(), len(array)
    ([5, 6, 7], 5)
    """
    total = len(own) + len(places)
    # The values are narrowed while they are copied; NumPy releases the GIL for it.
    array = np.empty(total, dtype)
    if len(places) * _FEW > total:
        is_own = np.ones(total, bool)
        is_own[places] = False
        array[is_own] = own
        return array
    # Between two places, the values of `own` have moved by the number of places before them.
    for number, (before, place) in enumerate(pairwise([-1, *places.tolist(), total])):
        array[before + 1 : place] = own[before + 1 - number : place - number]
    return array


def _absent(token: int | None, ids: TokenArray, places: Offsets, wanted: Flags | None) -> Flags:
    """Which texts `token` must be added to: it is wanted there, and their place has another id."""
    if token is None:
        return np.zeros(len(places), bool)
    # Only a text inside a document can have no ids. Then its place holds a token of its neighbour,
    # or is outside the array.
    inside = (places >= 0) & (places < len(ids))
    absent = ~inside
    absent[inside] = ids[places[inside]] != token
    return absent if wanted is None else absent & wanted


SIDES = ("train", "val")


@dataclass(frozen=True, slots=True)
class Split:
    """A rule that decides for each document whether it is held out."""

    kind: str
    share: float
    border: tuple[int, int] = (0, 0)
    """For "tail": documents from this file number and offset on are held out."""
    cut_at: int | None = None
    """The byte where an input of one document is divided, or None."""

    def sides(self, batch: Batch) -> list[tuple[str, Batch]]:
        """The documents of `batch` for each side."""
        if self.kind == "tail":
            file, offset = np.array(self.border, np.uint64)
            later = (batch.files > file) | ((batch.files == file) & (batch.offsets >= offset))
            held_out = np.asarray(later, bool)
        elif batch.edges is not None:
            raise StoreError(
                'split="hash" needs whole documents, and one of them is so long that it is stored '
                'in pieces. Use split="tail", or say what separates documents: '
                'documents="lines", "paragraphs" or "sep:SEPARATOR".'
            )
        else:
            # The digest is uniform in [0, 2^64), so this share of the documents is below the limit.
            limit = int(self.share * 2**64)
            held_out = np.array([_hash(text.as_py()) < limit for text in batch.texts], bool)
        return [("train", batch.where(~held_out)), ("val", batch.where(held_out))]


def parse_split(
    text: str | None, files: Sequence[InputFile], reading: ReadSettings
) -> Split | None:
    """The rule that `text` ("tail:0.1" or "hash:0.1") means for these inputs."""
    if text is None:
        return None
    kind, _, number = str(text).partition(":")
    try:
        share = Decimal(number)
        is_share = 0 < share < 1  # raises for NaN
    except InvalidOperation:
        is_share = False
    if kind not in ("tail", "hash") or not is_share:
        raise StoreError(
            f'split={text!r} must be "tail:SHARE" or "hash:SHARE" with a share between 0 and 1. '
            '"tail:0.1" holds out the last tenth, "hash:0.1" a tenth of the documents, chosen by a '
            "digest of their text."
        )
    if kind == "hash":
        return Split(kind, float(share))
    if len(files) == 1 and _is_one_document(files[0], reading):
        border = _character_border(files[0], reading, share)
        return Split(kind, float(share), (0, border), border)
    return Split(kind, float(share), _tail(files, reading, float(share)))


def same_split(one: str | None, other: str | None) -> bool:
    """Whether two rules hold out the same share in the same way.

    >>> same_split("tail:0.10", "tail:0.1"), same_split("tail:0.1", "hash:0.1")
    (True, False)
    """
    if one is None or other is None:
        return one == other
    (kind, _, share), (kind_now, _, share_now) = one.partition(":"), other.partition(":")
    try:
        return kind == kind_now and Decimal(share) == Decimal(share_now)
    except InvalidOperation:  # a manifest that somebody else wrote may have any text
        return False


def _hash(text: bytes) -> int:
    # Not `hash`, which differs between processes.
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _tail(files: Sequence[InputFile], reading: ReadSettings, share: float) -> tuple[int, int]:
    """The file and offset where the last `share` begins, by bytes of text or rows of tables."""
    kinds = {file.format in ("parquet", "arrow", "texts") for file in files}
    if len(kinds) > 1:
        raise StoreError(
            'split="tail" measures text in bytes and tables in rows, and the inputs have both. '
            'Build them separately, or use split="hash".'
        )
    # The border is counted from the front, so that rounding is the same on every machine.
    lengths = [_length(file, reading) for file in files]
    border = sum(lengths) - round(sum(lengths) * share)
    for number, length in enumerate(lengths):
        if border < length:
            # A file that is one document begins before the border, so none of it is held out.
            began = border > 0 and _is_one_document(files[number], reading)
            return (number + 1, 0) if began else (number, border)
        border -= length
    return len(files), 0


def _is_one_document(file: InputFile, reading: ReadSettings) -> bool:
    if file.format != "text":
        return False
    rule = file_rule(file, reading) if reading.documents == "auto" else reading.documents
    return rule == "file"


def _character_border(file: InputFile, reading: ReadSettings, share: Decimal) -> int:
    """The byte where the last `share` of the characters of a file begins.

    The text from there on is `text[int(len(text) * (1 - share)):]`. `share` is a Decimal, because
    1 - 0.1 as a float is not exactly 0.9. The file is read twice: to count its characters, and to
    find the character at the border.
    """
    # In UTF-8 every character has one byte that is not a continuation byte, so no text is decoded.
    num_characters, mark = 0, 0
    for start, block in _blocks(file, reading):
        mark = int(block.startswith(BOM)) if start == 0 else mark
        num_characters += len(_character_starts(block))
    # A byte order mark is one character, and not part of the text.
    wanted = int((num_characters - mark) * (1 - share)) + mark
    size = 0
    for start, block in _blocks(file, reading):
        begins = _character_starts(block)
        if wanted < len(begins):
            return start + int(begins[wanted])
        wanted -= len(begins)
        size = start + len(block)
    return size


def _blocks(file: InputFile, reading: ReadSettings) -> Iterator[tuple[int, bytes]]:
    """The text of a file in blocks, each with its offset."""
    with closing(Expanded(file)) as stream:
        while block := stream.read(BLOCK_BYTES):
            yield stream.position - len(block), block


def _character_starts(data: bytes) -> Offsets:
    """The offsets where characters begin: all bytes except those of the form 10xxxxxx."""
    return np.flatnonzero((np.frombuffer(data, np.uint8) & 0xC0) != 0x80)


def _length(file: InputFile, reading: ReadSettings) -> int:
    """The bytes of text of a file, or the rows of a table; a compressed file is read to count."""
    if file.texts is not None:
        return len(file.texts)
    if file.format in ("parquet", "arrow"):
        return num_rows(file)
    if file.compression is None:
        return file.size
    return sum(len(block) for _, block in _blocks(file, reading))
