"""Statistics of a store: counts, lengths of documents, rejected records.

Counts come from the manifest. The lengths of documents are computed from the bounds, a million
at a time. Only the number of documents of each length is kept, so quantiles are exact and memory
is limited: a store of 10^12 tokens has at most 1.4 million different document lengths.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StoreError
from penstock.options import separator_in
from penstock.paths import StoreUrl
from penstock.store.manifest import FILE_NAME, JsonObject
from penstock.store.reader import TokenStore, manifest_at

_AT_ONCE = 1 << 20
# Shorter lengths are counted in an array, which is 20 times as fast as sorting them.
_SHORT = 1 << 16
_COPIED = ("tokenizer", "eos_id", "bos_id", "dtype", "split", "side")
_QUANTILES = {"p1": 1, "p10": 10, "median": 50, "p90": 90, "p99": 99}
_RULES = {"lines": "a line", "paragraphs": "a paragraph", "file": "a whole file"}


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
    """Bytes of text per token, of both sides of a split; see the function `bytes_per_token`."""
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
    skipped_files: dict[str, int]
    """Paths that the listings of all builds left out, by kind, such as "hidden"."""
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
    manifest, contents = store.manifest, store.manifest.contents
    builds = manifest.builds
    files = manifest.parts.num_bytes + manifest.contents["parts"]["bytes"]
    masks = (store.part_array(part, "loss") for part in range(len(manifest.parts)))
    is_chat = "chat" in contents
    logs = sum(done["rejects"]["bytes"] for done in builds)
    rejects = sum((Counter(done["rejects"]["reasons"]) for done in builds), Counter())
    totals: Counter[str] = sum((Counter(done["counts"]) for done in builds), Counter())
    skipped: Counter[str] = sum(
        (Counter(done.get("skipped_files", {})) for done in builds), Counter()
    )
    return Summary(
        store=str(store.path),
        digest=store.digest,
        num_documents=manifest.num_documents,
        num_pieces=len(store),
        documents=describe_rules(contents),
        num_tokens=store.num_tokens,
        num_trained=sum(map(np.count_nonzero, masks)) if is_chat else None,
        bytes_per_token=bytes_per_token(store),
        lengths=_lengths(*count_lengths(store)) if len(store) else None,
        num_parts=len(manifest.parts),
        disk_bytes=files + logs + _manifest_bytes(store),
        num_builds=len(builds),
        inputs=tuple(manifest.inputs),
        num_skipped=totals["skipped"],
        skipped_files=dict(skipped),
        num_replaced=totals["replaced"],
        rejects=dict(sorted(rejects.items())),
        **{name: contents[name] for name in _COPIED},
    )


def _manifest_bytes(store: TokenStore) -> int:
    path = store.directory
    if isinstance(path, StoreUrl):
        from penstock.store.objects import Objects

        return Objects(path.address).size(FILE_NAME)
    return (path / FILE_NAME).stat().st_size


def bytes_per_token(store: TokenStore) -> float | None:
    """Bytes of text in the documents of `store`, divided by its tokens.

    Both sides of a split count together. None if the value is unknown: the store is empty or
    holds chats, or its other side is missing.
    """
    manifest = store.manifest
    num_tokens = store.num_tokens
    if side := manifest.contents["side"]:
        # The manifest counts the bytes of both sides together, so the tokens of both are needed.
        try:
            other = manifest_at(store.directory.parent / ("val" if side == "train" else "train"))
        except StoreError:
            return None
        # The other side was built from other inputs, or by another build.
        generations = {each.contents.get("generation") for each in (manifest, other)}
        if other.builds != manifest.builds or len(generations) > 1:
            return None
        num_tokens += other.num_tokens
    num_bytes = sum(done["counts"].get("text_bytes", 0) for done in manifest.builds)
    is_known = num_tokens and num_bytes and "chat" not in manifest.contents  # chats add tokens
    return num_bytes / num_tokens if is_known else None


def count_lengths(store: TokenStore) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The different lengths of documents, ascending, and the number of documents of each."""
    return _count(store.part_array(part, "bounds") for part in range(len(store.manifest.parts)))


def lengths_of(bounds: Iterable[NDArray[np.uint64]]) -> Lengths:
    """The lengths of the documents that end at the `bounds` of each part; there must be one."""
    return _lengths(*_count(bounds))


def _count(
    bounds: Iterable[NDArray[np.uint64]],
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    short = np.zeros(_SHORT, np.int64)
    long: Counter[int] = Counter()
    for lengths in _lengths_in_order(bounds):
        is_short = lengths < _SHORT
        short += np.bincount(lengths[is_short].astype(np.int64), minlength=_SHORT)
        long.update(lengths[~is_short].tolist())
    found = {int(length): int(short[length]) for length in np.flatnonzero(short)}
    found |= sorted(long.items())
    return np.array([*found], np.uint64), np.array([*found.values()], np.int64)


def _lengths_in_order(bounds: Iterable[NDArray[np.uint64]]) -> Iterator[NDArray[np.uint64]]:
    for part in bounds:
        start = np.uint64(0)
        for first in range(0, len(part), _AT_ONCE):
            ends = part[first : first + _AT_ONCE]
            yield np.diff(ends, prepend=start)
            start = ends[-1]


def _lengths(values: NDArray[np.uint64], counts: NDArray[np.int64]) -> Lengths:
    upto = np.cumsum(counts)
    num_documents = int(upto[-1])

    def quantile(percent: int) -> int:
        wanted = -(-num_documents * percent // 100)  # rounded up, in exact integers
        return int(values[np.searchsorted(upto, max(1, wanted))])

    return Lengths(
        min=int(values[0]),
        # float64 is exact up to 2^53, which is 9,000 times 10^12 tokens.
        mean=float(values.astype(np.float64) @ counts) / num_documents,
        max=int(values[-1]),
        histogram=_histogram(values, counts),
        **{name: quantile(percent) for name, percent in _QUANTILES.items()},
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


def describe_rules(contents: JsonObject) -> str:
    """What a document is in the inputs of all builds, from the contents of a manifest.

    >>> reading = {"documents": "auto"}
    >>> text, table = {"format": "text"}, {"format": "parquet"}
    >>> whole = {"reading": reading, "inputs": [text], "documents": {"file": 1}}
    >>> describe_rules({"builds": [whole]})
    'a whole file'
    >>> both = {"reading": {"documents": "lines"}, "inputs": [text, table]}
    >>> describe_rules({"builds": [both]})
    'a line (1 file), a record (1 file)'
    """
    if "chat" in contents:  # JSON Lines of conversations are read as lines of text
        return rule_text(None)
    total: Counter[str] = Counter()
    for done in contents["builds"]:
        texts = [each for each in done["inputs"] if each.get("format") == "text"]
        rules = done.get("documents") or {done["reading"].get("documents", "lines"): len(texts)}
        for rule, number in rules.items():
            total[rule_text(rule)] += number
        total["a record"] += len(done["inputs"]) - len(texts)
    found = {words: number for words, number in total.items() if number}
    if len(found) < 2:
        return "".join(found)
    return ", ".join(
        f"{words} ({number:,} file{'s' * (number != 1)})" for words, number in found.items()
    )


def rule_text(rule: str | None) -> str:
    """What a document is by one rule; None means files of records.

    >>> rule_text("lines"), rule_text("<|endoftext|>"), rule_text(None)
    ('a line', "the text between '<|endoftext|>'", 'a record')
    """
    if rule is None:
        return "a record"
    separator = separator_in(rule)
    return _RULES.get(rule, rule) if separator is None else f"the text between {separator!r}"
