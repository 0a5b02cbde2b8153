"""All of penstock, naively: from text to batches that resume exactly, in NumPy and plain Python.

    python examples/penstock_in_one_page.py

Nothing is imported from penstock, but the definitions are the same: a test runs both on the same
text, and finds equal tokens, rows, order and batches. What penstock adds is speed, inputs larger
than memory, other formats and tokenizers, and an answer to everything that goes wrong.

The idea: the row at any position of a run is computed from its number alone. So the state of a run
is one integer, and the number of GPUs may change between two steps.
"""

import hashlib
import heapq
import json
import os
import tempfile
from collections import defaultdict
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

WORD = 2**64  # keys and hashes are integers below this, and sums and products are modulo this
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
MIX = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the multipliers of SplitMix64


# 1. Text becomes documents, and documents become ids. Here a document is a line that is not blank,
# its ids are its UTF-8 bytes, and an end token, 256, follows it.
def tokenize(text: bytes) -> list[list[int]]:
    """Return the ids of each document."""
    lines = [line for line in text.split(b"\n") if line.strip(b" \t\r")]
    return [[*line, 256] for line in lines]


# 2. A store is all ids in one array, the end of each document in another, and a manifest with the
# checksums of both. It is written beside its place, forced to disk, and renamed: a reader sees all
# of it or nothing, whenever the process or the power fails.
def build(documents: list[list[int]], store: Path) -> None:
    """Write a store."""
    beside = store.with_name(store.name + ".tmp")
    beside.mkdir()
    np.save(beside / "tokens.npy", np.concatenate(documents).astype(np.uint16))
    np.save(beside / "bounds.npy", np.cumsum([len(document) for document in documents]))
    manifest = {path.name: hash_file(path) for path in sorted(beside.iterdir())}
    (beside / "manifest.json").write_text(json.dumps(manifest))
    for path in [*beside.iterdir(), beside]:
        force_to_disk(path)
    beside.rename(store)
    force_to_disk(store.parent)


def force_to_disk(path: Path) -> None:
    """Return when a file, or the names in a directory, would survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read(store: Path) -> tuple[np.ndarray, list[int]]:
    """Return the ids of a store, mapped into memory, and the end of each document."""
    for name, digest in json.loads((store / "manifest.json").read_text()).items():
        if hash_file(store / name) != digest:
            raise ValueError(f"{store / name} is damaged. Build the store again.")
    return np.load(store / "tokens.npy", mmap_mode="r"), np.load(store / "bounds.npy").tolist()


# 3. A row is a list of pieces, which are ranges of tokens. Windows cut the stream every `length`
# tokens, and have one token more, because the target of each token is the token after it.
Row = list[tuple[int, int]]


def windows(num_tokens: int, length: int) -> list[Row]:
    """Return rows of one piece each; the last tokens, which fill no row, are left out."""
    return [[(start, start + length + 1)] for start in range(0, num_tokens - length, length)]


# 4. Packs keep documents whole instead: each goes to the row where it leaves the least space, the
# longest first. A document longer than a row is cut into pieces, which overlap by one token.
def packs(bounds: list[int], length: int) -> list[Row]:
    """Return rows of at most `length` tokens, in the order of their first documents."""
    pieces = defaultdict(list)  # by size
    for start, stop in pairwise([0, *bounds]):
        for begin in range(start, max(stop - 1, start + 1), length - 1):
            end = min(begin + length, stop)
            pieces[end - begin].append((begin, end))
    full_rows = [[piece] for piece in pieces.pop(length, [])]
    num_tokens = sum(size * len(equal) for size, equal in pieces.items())
    # No packing needs fewer rows than these. If they don't suffice, a new row gets as many equal
    # pieces as fit.
    rows: list[Row] = [[] for _ in range(-(-num_tokens // length))]
    groups = defaultdict(list, {length: [rows[:]]})  # groups of rows, by the space in each row
    for size in sorted(pieces, reverse=True):
        left = pieces[size]
        while left:
            spaces = [space for space in groups if space >= size and groups[space]]
            space, times = min(spaces, default=length), 1
            if not spaces:
                times = min(len(left), length // size)
                groups[length].append([[] for _ in range(len(left) // times)])
                rows += groups[length][-1]
            group = groups[space].pop()
            chosen, others = group[: len(left)], group[len(left) :]
            groups[space] += [others] if others else []
            for row in chosen * times:
                row.append(left.pop(0))
            groups[space - times * size].append(chosen)
    return sorted(sorted(row) for row in full_rows + rows)


# 5. A shuffle is a function from a position to a row, chosen by a key. Small ones sort the rows by
# hashes. Large ones are a Feistel network: each round can be undone, so no two positions collide.
def mix64(number: int) -> int:
    """Return SplitMix64's finaliser, a bijection of 64-bit integers."""
    number = (number ^ number >> 30) * MIX[0] % WORD
    number = (number ^ number >> 27) * MIX[1] % WORD
    return number ^ number >> 31


def derive_key(*labels: object) -> int:
    """Return a 64-bit number for a list of values."""
    text = json.dumps(labels, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def permute(position: int, n: int, key: int) -> int:
    """Return the row at a position of a shuffled order of n rows."""
    if n <= 4096:
        start = mix64(key ^ 0x7C3B8A1F5D92E604)
        return sorted(range(n), key=lambda row: mix64((start + row * GOLDEN) % WORD))[position]
    bits = (n - 1).bit_length() // 2
    size = (n - 1 >> bits) + 1  # of the upper half; the lower one has 2^bits values
    high, low = position >> bits, position % 2**bits
    for number in range(8):
        # Each round changes one half by a hash of the other one.
        noise = (low if number % 2 else high) ^ mix64((key + (number + 1) * GOLDEN) % WORD)
        noise = noise * MIX[0] % WORD
        noise = (noise ^ noise >> 32) * MIX[1] % WORD
        if number % 2:
            high = (high + ((noise >> 32) * size >> 32)) % size
        else:
            low ^= noise >> (64 - bits)
    row = high << bits | low
    return row if row < n else permute(row, n, key)  # a few numbers above n are mapped again


# 6. A mixture is a tree of two-way splits, which joins the two lightest sources first. Of its first
# c rows, a split has given round(c * share) to its lighter side, so shares hold at every position.
def mixture(weights: list[float]) -> int | tuple:
    """Return the tree: a source, or the lighter side's share in units of 2^-64, and both sides."""
    heap = [(Fraction(weight), number, number) for number, weight in enumerate(weights)]
    heapq.heapify(heap)
    for number in range(len(weights), 2 * len(weights) - 1):
        (small, _, light), (large, _, heavy) = heapq.heappop(heap), heapq.heappop(heap)
        share = int(small / (small + large) * WORD + Fraction(1, 2))
        heapq.heappush(heap, (small + large, number, (share, light, heavy)))
    return heap[0][2]


def interleave(tree: int | tuple, position: int) -> tuple[int, int]:
    """Return the source at a position, and how many rows of this source come before it."""
    while not isinstance(tree, int):
        share, light, heavy = tree
        before, after = ((c * share + WORD // 2) // WORD for c in (position, position + 1))
        tree, position = (light, before) if after > before else (heavy, position - before)
    return tree, position


# 7. A plan is the product of both: the mixture says which source is next, and a shuffle says which
# of its rows. Each epoch of each source has a key of its own.
class Plan(NamedTuple):
    """All that decides which row is at which position."""

    sources: list[tuple[str, np.ndarray, list[Row]]]  # name, tokens, rows
    weights: list[float]
    length: int
    seed: int


def locate(plan: Plan, position: int) -> tuple[int, int, int]:
    """Return the source, the epoch and the row at a position."""
    source, earlier = interleave(mixture(plan.weights), position)
    name, _, rows = plan.sources[source]
    epoch, place = divmod(earlier, len(rows))
    return source, epoch, permute(place, len(rows), derive_key("shuffle", plan.seed, name, epoch))


# 8. A step reads the next `size` positions, and each rank an equal slice of them. Targets are the
# inputs one token later; -100 marks those that are padding, or begin another document of a pack.
def batch(plan: Plan, position: int, size: int, rank: int = 0, world: int = 1) -> np.ndarray:
    """Return the inputs and targets of one rank, of the step that begins at a position."""
    share = size // world
    arrays = np.stack([np.zeros((share, plan.length), int), np.full((share, plan.length), -100)])
    for number in range(share):
        source, _, row = locate(plan, position + rank * share + number)
        _, tokens, rows = plan.sources[source]
        inputs, targets = arrays[:, number]
        for start, stop in rows[row]:
            ids = tokens[start:stop]
            inputs[: len(ids)], targets[: len(ids) - 1] = ids[: len(inputs)], ids[1:]
            inputs, targets = inputs[len(ids) :], targets[len(ids) :]
    return arrays


# 9. The state of a run is the position of its next row, with a digest of the plan, because another
# plan has other rows at the same positions. Any number of ranks continues from it.
def save(plan: Plan, position: int) -> dict[str, int]:
    """Return the state of a run."""
    return {"position": position, "plan": digest(plan)}


def resume(plan: Plan, state: dict[str, int]) -> int:
    """Return the position of a state."""
    if state["plan"] != digest(plan):
        raise ValueError("This state belongs to another plan, with other rows at its positions.")
    return state["position"]


def digest(plan: Plan) -> int:
    """Return a hash of all that decides the order and the tokens."""
    return derive_key([(name, ids.tolist(), rows) for name, ids, rows in plan.sources], *plan[1:])


def main() -> None:
    """Run all of it on this file."""
    with tempfile.TemporaryDirectory() as directory:
        build(tokenize(Path(__file__).read_bytes()), Path(directory, "store"))
        tokens, bounds = read(Path(directory, "store"))
    sources = [("windows", tokens, windows(len(tokens), 96)), ("packs", tokens, packs(bounds, 96))]
    print(len(bounds), "documents; source 0 has windows of them, and source 1 has packs")
    plan = Plan(sources, weights=[0.25, 0.75], length=96, seed=17)
    for position in [0, 1, 2, 3, 10**15]:
        print(f"position {position:,}: source, epoch, row are", *locate(plan, position))
    position = resume(plan, save(plan, 10**15))
    rows, rank = batch(plan, position, size=4), batch(plan, position, size=4, rank=1, world=2)
    print("rank 1 of 2 resumes there with rows 2 and 3 of 4:", (rank == rows[:, 2:]).all())


if __name__ == "__main__":
    main()
