"""Statistics of a store: counts, lengths of documents, rejected records.

Counts come from the manifest. The lengths of documents are computed from the bounds, a million
at a time. Only the number of documents of each length is kept, so quantiles are exact and memory
is limited: 10^12 tokens are enough for at most 1.4 million different lengths.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StoreError
from penstock.store.explain import describe_rules
from penstock.store.manifest import FILE_NAME, JsonObject, read_manifest
from penstock.store.reader import TokenStore

__all__ = ["Bin", "Lengths", "Summary", "bytes_per_token", "rejects_by_reason", "summarize"]

_AT_ONCE = 1 << 20
# Shorter lengths are counted in an array, which is 20 times as fast as sorting them.
_SHORT = 1 << 16
_OTHER = {"train": "val", "val": "train"}


@dataclass(frozen=True, slots=True)
class Bin:
    """The number of documents that have `first` to `last` tokens."""

    first: int
    last: int
    num_documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """The lengths of documents in tokens, including begin and end tokens.

    A quantile is a length that occurs: the smallest one that the given share of documents does
    not exceed.
    """

    min: int
    p1: int
    p10: int
    median: int
    mean: float
    p90: int
    p99: int
    max: int
    histogram: tuple[Bin, ...]
    """Two bins per power of two (1, 2, 3, 4-5, 6-7, 8-11, …), from the shortest length on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Everything that `penstock info` shows."""

    store: str
    digest: str
    num_documents: int
    """A document that is stored in pieces counts once."""
    num_pieces: int
    """Entries of the bounds; `lengths` describes these."""
    documents: str
    """What a document is, as text."""
    num_tokens: int
    num_trained: int | None
    """Tokens that are trained on; None if the store has no loss mask."""
    bytes_per_token: float | None
    """Bytes of text per token; see `bytes_per_token`."""
    lengths: Lengths | None
    """None if there is no document."""
    tokenizer: JsonObject
    """Name, digest, canary and vocabulary size, as in the manifest."""
    eos_id: int | None
    bos_id: int | None
    dtype: str
    num_parts: int
    disk_bytes: int
    num_builds: int
    """The first build and all appends."""
    inputs: tuple[JsonObject, ...]
    num_skipped: int
    """Empty and blank records, of both sides of a split."""
    num_replaced: int
    """Documents with invalid UTF-8 that was replaced by U+FFFD, of both sides."""
    rejects: dict[str, int]
    """The number of rejected records by reason, of both sides."""
    split: str | None
    side: str | None


def summarize(store: TokenStore) -> Summary:
    """The statistics of `store`; reads all bounds and no tokens.

    >>> import tempfile, penstock
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     texts = penstock.Texts(["a", "a b", "a b c", "a b c d"])
    ...     summary = summarize(penstock.build(texts, f"{folder}/store"))
    >>> summary.num_tokens, summary.lengths.median, summary.lengths.mean
    (14, 3, 3.5)
    """
    contents = store.manifest.contents
    builds = contents["builds"]
    return Summary(
        store=str(store.path),
        digest=store.digest,
        num_documents=store.manifest.num_documents,
        num_pieces=len(store),
        documents=describe_rules(builds),
        num_tokens=store.num_tokens,
        num_trained=_num_trained(store),
        bytes_per_token=bytes_per_token(store),
        lengths=_lengths(*count_lengths(store)) if len(store) else None,
        tokenizer=contents["tokenizer"],
        eos_id=contents["eos_id"],
        bos_id=contents["bos_id"],
        dtype=contents["dtype"],
        num_parts=len(store.manifest.parts),
        disk_bytes=_disk_bytes(store),
        num_builds=len(builds),
        inputs=tuple(each for done in builds for each in done["inputs"]),
        num_skipped=_total(builds, "skipped"),
        num_replaced=_total(builds, "replaced"),
        rejects=rejects_by_reason(builds),
        split=contents["split"],
        side=contents["side"],
    )


def bytes_per_token(store: TokenStore) -> float | None:
    """Bytes of text in the documents of `store`, divided by its tokens.

    Both sides of a split count together. None if the value is unknown: the store is empty or
    holds chats, its other side is missing, or its manifest counts JSON lines and not the texts in
    them.
    """
    builds = store.manifest.contents["builds"]
    if "chat" in store.manifest.contents:  # the template adds tokens
        return None
    # The manifest counts the bytes of both sides together, so the tokens of both are needed.
    num_tokens = store.num_tokens + _other_side_tokens(store)
    num_bytes = 0
    for done in builds:
        counts = done["counts"]
        if any(each["format"] == "jsonl" for each in done["inputs"]) and "text_bytes" not in counts:
            return None
        num_bytes += counts.get("text_bytes", counts.get("document_bytes", 0))
    return num_bytes / num_tokens if num_tokens > 0 else None


def _num_trained(store: TokenStore) -> int | None:
    if "chat" not in store.manifest.contents:
        return None
    parts = range(len(store.manifest.parts))
    return sum(int(store.part_array(part, "loss").sum(dtype=np.int64)) for part in parts)


def rejects_by_reason(builds: list[JsonObject]) -> dict[str, int]:
    """The number of records that all `builds` of a manifest rejected, by reason."""
    total = sum((Counter(done["rejects"]["reasons"]) for done in builds), Counter())
    return dict(sorted(total.items()))


def count_lengths(store: TokenStore) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The different lengths of documents, ascending, and the number of documents of each."""
    short = np.zeros(_SHORT, np.int64)
    held = [(np.zeros(0, np.uint64), np.zeros(0, np.int64))]
    for lengths in _lengths_in_order(store):
        is_short = lengths < _SHORT
        short += np.bincount(lengths[is_short].astype(np.int64), minlength=_SHORT)
        if not is_short.all():
            held.append(np.unique(lengths[~is_short], return_counts=True))
        # Merged now and then, so that memory depends on the different lengths only.
        if sum(len(values) for values, _ in held[1:]) > _AT_ONCE:
            held = [_merged(held)]
    there = np.flatnonzero(short)
    long_values, long_counts = _merged(held)
    return (
        np.concatenate((there.astype(np.uint64), long_values)),
        np.concatenate((short[there], long_counts)),
    )


def _lengths_in_order(store: TokenStore) -> Iterator[NDArray[np.uint64]]:
    for number in range(len(store.manifest.parts)):
        bounds = store.part_array(number, "bounds")
        start = np.uint64(0)
        for first in range(0, len(bounds), _AT_ONCE):
            ends = bounds[first : first + _AT_ONCE]
            yield np.diff(ends, prepend=start)
            start = ends[-1]


def _merged(
    held: list[tuple[NDArray[np.uint64], NDArray[np.int64]]],
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Several lists of values and counts merged into one, with each value once."""
    values, places = np.unique(np.concatenate([each for each, _ in held]), return_inverse=True)
    counts = np.zeros(len(values), np.int64)
    np.add.at(counts, places, np.concatenate([each for _, each in held]))
    return values, counts


def _lengths(values: NDArray[np.uint64], counts: NDArray[np.int64]) -> Lengths:
    upto = np.cumsum(counts)
    num_documents = int(upto[-1])

    def quantile(percent: int) -> int:
        wanted = -(-num_documents * percent // 100)  # rounded up, in exact integers
        return int(values[np.searchsorted(upto, max(1, wanted))])

    return Lengths(
        min=int(values[0]),
        p1=quantile(1),
        p10=quantile(10),
        median=quantile(50),
        # float64 is exact up to 2^53, which is 9,000 times 10^12 tokens.
        mean=float(values.astype(np.float64) @ counts) / num_documents,
        p90=quantile(90),
        p99=quantile(99),
        max=int(values[-1]),
        histogram=_histogram(values, counts),
    )


def _histogram(values: NDArray[np.uint64], counts: NDArray[np.int64]) -> tuple[Bin, ...]:
    # 1 2 3 4 6 8 12 16 …: each edge is twice the one two places before it.
    edges = [1, 2, 3]
    while edges[-1] <= int(values[-1]):
        edges.append(edges[-2] * 2)
    ends = np.searchsorted(values, np.array(edges, np.uint64))
    sums = [int(counts[a:b].sum()) for a, b in pairwise(ends)]
    bins = [Bin(a, b - 1, total) for (a, b), total in zip(pairwise(edges), sums, strict=True)]
    filled = [number for number, each in enumerate(bins) if each.num_documents]
    return tuple(bins[filled[0] : filled[-1] + 1])


def _total(builds: list[JsonObject], name: str) -> int:
    return sum(int(done["counts"].get(name, 0)) for done in builds)


def _disk_bytes(store: TokenStore) -> int:
    manifest = store.manifest
    parts = sum(size for part in manifest.parts for size, _ in part.files.values())
    logs = sum(int(done["rejects"]["bytes"]) for done in manifest.contents["builds"])
    return parts + logs + (store.path / FILE_NAME).stat().st_size


def _other_side_tokens(store: TokenStore) -> float:
    """Tokens of the other side of a split; 0 without a split, -inf if it is missing."""
    side = store.manifest.contents["side"]
    if side is None:
        return 0
    other = store.path.parent / _OTHER[side]
    try:
        found = read_manifest(other)
    except StoreError:
        return float("-inf")
    # If the other side was built again, its tokens are of other bytes.
    same = found.contents["builds"] == store.manifest.contents["builds"]
    return found.num_tokens if same else float("-inf")
