"""Measures what a store or a token file holds, in bounded time and memory.

    lengths       from the bounds, all of them
    tokens        all, or blocks at equal distances
    duplicates    all documents, or all documents of some lengths: equal documents are equally long

A store of 10^9 tokens is measured in seconds. What was not counted in full is described by the
`scope` of each result, and the page shows it.
"""

import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MissingTokenizerError
from penstock.formats.token_files import Member
from penstock.inspect.members import documents_of_parts
from penstock.store.reader import TokenStore
from penstock.store.summary import Lengths, lengths_of
from penstock.tokenize.tokenizer import Tokenizer

Ids = NDArray[Any]
MOST_TOKENS = 1 << 27  # tokens that are counted: about a second
MOST_HASHED = 1 << 28  # tokens of documents that are compared: a few seconds
_MOST_DOCUMENTS = 1 << 22  # 32 MB of hashes
_BLOCK = 1 << 20
_SHOWN_TOKENS = 20
_SHOWN_DUPLICATES = 5
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: spreads neighbouring lengths


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """How often tokens occur."""

    most_frequent: tuple[tuple[int, int], ...]
    """The id and the number of each of the most frequent tokens."""
    num_counted: int
    num_distinct: int
    scope: str
    """Which tokens were counted, as text."""


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Documents whose tokens are equal."""

    num_compared: int
    num_repeats: int
    """Documents that are equal to an earlier one."""
    num_repeated_tokens: int
    most_frequent: tuple[tuple[int, int], ...]
    """The number of a document, and how often it occurs."""
    scope: str
    """Which documents were compared, as text."""


def read_ids(member: Member, part: int, start: int, stop: int) -> Ids:
    """Return some tokens of a part; those of a store are compared with their checksums."""
    if isinstance(member, TokenStore):
        return member.files.span(part, "tokens", start, stop)
    return member.part_ids(part)[start:stop]


def _release(member: Member, part: int) -> None:
    """Let the pages of a part leave the memory of this process; the page cache still has them."""
    # Otherwise a process that has scanned a store holds all of it, until memory gets scarce.
    if isinstance(member, TokenStore) and sys.platform == "linux":
        member.files.open(part, "tokens").mapping.madvise(mmap.MADV_DONTNEED)


def num_tokens(member: Member) -> int:
    """Return the number of tokens of all parts."""
    return int(member.part_tokens.sum())


def find_tokenizer(member: Member, given: object = None) -> Tokenizer | None:
    """Return the tokenizer of a member; None if it is not known on this machine."""
    try:
        return member.load_tokenizer(given)
    except MissingTokenizerError:  # ids can be shown without their text
        return None


def measure_lengths(member: Member) -> Lengths | None:
    """Return the lengths of all documents; None if they are not known, or there are none."""
    if not member.has_documents or not num_tokens(member):
        return None
    return lengths_of(member.part_bounds(part) for part in range(len(member.part_tokens)))


def count_tokens(member: Member, most: int = MOST_TOKENS) -> TokenCounts:
    """Count how often each token occurs, in at most `most` tokens."""
    blocks = list(_blocks(member))
    total = num_tokens(member)
    distance = max(1, -(-total // max(1, most)))
    counts = np.zeros(1, np.int64)
    for part, start, stop in blocks[::distance]:
        found = np.bincount(read_ids(member, part, start, stop).astype(np.intp))
        wider = max(len(found), len(counts))
        counts = np.pad(counts, (0, wider - len(counts))) + np.pad(found, (0, wider - len(found)))
        _release(member, part)
    top = np.argsort(-counts, kind="stable")[:_SHOWN_TOKENS]
    frequent = tuple((int(each), int(counts[each])) for each in top if counts[each])
    counted = int(counts.sum())
    scope = f"all {counted:,} tokens"
    if distance > 1:
        scope = (
            f"a sample of {counted:,} of {total:,} tokens: one block of {_BLOCK:,} tokens in "
            f"{distance:,}, at equal distances"
        )
    return TokenCounts(frequent, counted, int(np.count_nonzero(counts)), scope)


def _blocks(member: Member) -> Iterator[tuple[int, int, int]]:
    """Yield the part, the start and the stop of each block of tokens."""
    for part, size in enumerate(member.part_tokens.tolist()):
        for start in range(0, size, _BLOCK):
            yield part, start, min(size, start + _BLOCK)


def find_duplicates(member: Member, most: int = MOST_HASHED) -> Duplicates | None:
    """Find documents that are equal, token by token; None if documents are not known.

    If there are more than `most` tokens, the documents of some lengths are compared. All copies of
    a document have its length, so none of them is missed, and the share of repeated documents is
    that of the whole store on average. Tokens are hashed to 64 bits: among 4 million different
    documents, the chance that two are taken for equal is less than one in a million.
    """
    if not member.has_documents:
        return None
    num_documents = int(documents_of_parts(member).sum())
    share = max(
        1, -(-num_tokens(member) // max(1, most)), -(-num_documents // max(1, _MOST_DOCUMENTS))
    )
    hashes, numbers, sizes, first, stopped = [], [], [], 0, False
    left = most
    for part in range(len(member.part_tokens)):
        bounds = np.concatenate([np.zeros(1, np.int64), member.part_bounds(part).astype(np.int64)])
        lengths = np.diff(bounds)
        chosen = np.flatnonzero(_is_chosen(lengths, share))
        # Documents that are all equally long are chosen together, or none of them.
        fit = int(np.searchsorted(np.cumsum(lengths[chosen]), left, side="right"))
        stopped |= fit < len(chosen)
        chosen = chosen[:fit]
        left -= int(lengths[chosen].sum())
        hashes.append(_hashes(member, part, bounds, chosen))
        _release(member, part)
        numbers.append(chosen + first)
        sizes.append(lengths[chosen])
        first += len(lengths)
    compared = _Compared(*map(_joined, (hashes, numbers, sizes)))
    scope = f"all {num_documents:,} documents"
    if share > 1 or stopped:
        scope = (
            f"a sample of {len(compared.numbers):,} of {num_documents:,} documents: those of about "
            f"one length in {share:,}{' that come first' if stopped else ''}"
        )
    return compared.duplicates(scope)


def _joined(arrays: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def _is_chosen(lengths: NDArray[np.int64], share: int) -> NDArray[np.bool_]:
    """Return which lengths are in the sample: about one in `share`, spread over all lengths."""
    mixed = (lengths.astype(np.uint64) * _ODD) >> np.uint64(32)
    chosen: NDArray[np.bool_] = mixed % np.uint64(share) == 0
    return chosen


def _hashes(
    member: Member, part: int, bounds: NDArray[np.int64], chosen: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the hash of the bytes of each chosen document of a part."""
    found = np.empty(len(chosen), np.int64)
    begins, ends = bounds[chosen], bounds[chosen + 1]
    at = 0
    while at < len(chosen):
        # Documents up to a block further are read at once: a read of each would take 20 times as
        # long as its hash.
        begin = int(begins[at])
        upto = max(at + 1, int(np.searchsorted(ends, begin + _BLOCK, side="right")))
        ids = read_ids(member, part, begin, int(ends[upto - 1]))
        data = ids.tobytes()
        width = ids.dtype.itemsize
        starts = ((begins[at:upto] - begin) * width).tolist()
        stops = ((ends[at:upto] - begin) * width).tolist()
        # Python's hash of bytes (SipHash) has a random key in each process. Only equality counts.
        found[at:upto] = [hash(data[a:b]) for a, b in zip(starts, stops, strict=True)]
        at = upto
    return found


@dataclass(frozen=True, slots=True)
class _Compared:
    """The documents that were hashed."""

    hashes: NDArray[np.int64]
    numbers: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def duplicates(self, scope: str) -> Duplicates:
        _, first, counts = np.unique(self.hashes, return_index=True, return_counts=True)
        repeats = counts - 1
        # The most frequent first; of equally frequent ones, the earlier document.
        order = np.lexsort((first, -counts))[:_SHOWN_DUPLICATES]
        frequent = [
            (int(self.numbers[first[each]]), int(counts[each]))
            for each in order
            if counts[each] > 1
        ]
        tokens = int((repeats * self.sizes[first]).sum())
        return Duplicates(len(self.hashes), int(repeats.sum()), tokens, tuple(frequent), scope)


def spread_documents(member: Member, most: int) -> list[int]:
    """Return the numbers of at most `most` documents at equal distances."""
    total = int(documents_of_parts(member).sum())
    count = min(most, total)
    return [(2 * each + 1) * total // (2 * count) for each in range(count)]


def document_ids(member: Member, number: int) -> tuple[Ids, Ids | None]:
    """Return the tokens of a document, and its loss mask if the member has one.

    Raises:
        IndexError: there is no such document.
    """
    ends = np.cumsum(documents_of_parts(member))
    if not 0 <= number < (int(ends[-1]) if len(ends) else 0):
        raise IndexError(f"document {number:,} is not in {member.path}")
    # "right": the part that ends at `number` does not contain it.
    part = int(np.searchsorted(ends, number, side="right"))
    bounds = member.part_bounds(part)
    within = number - (int(ends[part - 1]) if part else 0)
    start, stop = int(bounds[within - 1]) if within else 0, int(bounds[within])
    mask = member.part_loss(part)
    return read_ids(member, part, start, stop), None if mask is None else mask[start:stop]


def piece_texts(ids: Ids, tokenizer: Tokenizer) -> list[tuple[int, str]]:
    """Cut tokens into pieces that are text: how many tokens each has, and its text.

    A character may take several tokens, which are one piece. Bytes that are no character are
    written as escapes, with a backslash.
    """
    values = ids.tolist()
    pieces: list[tuple[int, str]] = []
    count, data = 0, b""
    for before, token in pairwise([None, *values]):
        count, data = count + 1, data + _token_bytes(before, token, tokenizer)
        try:
            pieces.append((count, data.decode()))
        except UnicodeDecodeError as error:
            # A character has at most four bytes, so more of them cannot become one.
            if error.reason == "unexpected end of data" and len(data) - error.start < 4:
                continue
            pieces.append((count, data.decode(errors="backslashreplace")))
        count, data = 0, b""
    if count:
        pieces.append((count, data.decode(errors="backslashreplace")))
    return pieces


def _token_bytes(before: int | None, token: int, tokenizer: Tokenizer) -> bytes:
    """Return the bytes of a token after another one: some decoders add a space between the two."""
    alone = tokenizer.decode_bytes([token])
    if before is None:
        return alone
    first, both = tokenizer.decode_bytes([before]), tokenizer.decode_bytes([before, token])
    return both[len(first) :] if both.startswith(first) else alone
