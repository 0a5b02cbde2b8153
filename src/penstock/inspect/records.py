"""The documents of a store that were read from a record of an input file.

A build stores documents in the order of its inputs. So the origin of a document is found by
bisection, first over the parts of the store and then inside one part.
"""

import os
from difflib import get_close_matches
from typing import Any

import numpy as np

from penstock.errors import StoreError
from penstock.store.reader import TokenStore, record_unit


def matching_inputs(store: TokenStore, file: str, size: int | None) -> tuple[list[int], list[str]]:
    """Return the numbers of the inputs that have this name, or end with it, or end it.

    Args:
        store: The store.
        file: What the user named.
        size: The size of that file, if there is one.

    Returns:
        The numbers; and the names of inputs that end the name, but have another size.
    """
    inputs = store.manifest.inputs
    names = [each["name"] for each in inputs]
    if exact := [number for number, name in enumerate(names) if name == file]:
        return exact, []
    plain = file.replace(os.sep, "/").removeprefix("./")
    found = [number for number, name in enumerate(names) if f"/{name}".endswith(f"/{plain}")]
    # A store records names below the common directory, and a user may name a path. Inputs of two
    # stores may have one name, so the size decides.
    below = [number for number, name in enumerate(names) if f"/{plain}".endswith(f"/{name}")]
    other = [
        each
        for each in below
        if size is not None
        and inputs[each]["bytes"] != size
        # The manifest of an import has the bytes of the ids, without the headers of the files.
        and record_unit(store, names[each]) != "document"
    ]
    matching = [*found, *(each for each in below if each not in {*found, *other})]
    return matching, [f"{names[each]} ({inputs[each]['bytes']:,} bytes)" for each in other]


def documents_of(store: TokenStore, file: int, record: int) -> tuple[int, int]:
    """Return the documents `[first, stop)` of a record of an input, by its number."""
    # The origins of all documents ascend, by input and then by record.
    low, high = 0, len(store.manifest.parts)
    while low < high:  # the first part whose last document is not before the record
        middle = (low + high) // 2
        origin = store.part_array(middle, "origin")
        if len(origin) and tuple(origin[-1].tolist()) >= (file, record):
            high = middle
        else:
            low = middle + 1
    first = stop = -1
    for part in range(low, len(store.manifest.parts)):
        # Files and records are two columns; one search in each is a search for the pair.
        origin = store.part_array(part, "origin")
        begin, end = _equal(origin[:, 0], file, 0, len(origin))
        begin, end = _equal(origin[:, 1], record, begin, end)
        if first < 0:
            first = store.first_document(part) + begin
        if begin < end:
            stop = store.first_document(part) + end
        # The record may continue in the next part, as a document in pieces does.
        if end < len(origin) or begin == end:
            break
    return first, max(first, stop)


def _equal(column: Any, value: int, begin: int, end: int) -> tuple[int, int]:
    low, high = (
        begin + int(np.searchsorted(column[begin:end], np.uint64(value), side=side))
        for side in ("left", "right")
    )
    return low, high


def beginnings(store: TokenStore, first: int, stop: int) -> list[int]:
    """Return the documents among these that begin, without later pieces of a document."""
    found = [each for each in range(first, stop) if store.edges(each)[0]]
    return found or list(range(first, min(first + 1, stop)))


def neighbours(store: TokenStore, file: int, at: int) -> list[int]:
    """Return the records of an input before and after the document `at`."""
    found = []
    for each in (at - 1, at):
        if 0 <= each < len(store):
            origin = store.origin(each)
            if origin.file == store.manifest.inputs[file]["name"]:
                found.append(origin.offset)
    return found


def not_found(
    file: str,
    record: int,
    names: set[str],
    nearest: list[int],
    resized: list[str],
    others: list[str],
) -> StoreError:
    """Return the error for a record of which no document was found.

    Args:
        file: The file that was named.
        record: The record.
        names: The inputs of all stores that were searched.
        nearest: Records of that input before and after it.
        resized: Inputs of that name with another size.
        others: What was not searched.
    """
    unknown = (
        f" Token files do not record inputs; not searched: {', '.join(others)}." if others else ""
    )
    if nearest:
        near = " and ".join(f"{each:,}" for each in sorted(set(nearest)))
        return StoreError(
            f"No document begins at record {record:,} of {file}; the nearest begin at {near}. A "
            "record is the number that penstock inspect and penstock decode show: the byte offset "
            "in the decompressed file, the row of a Parquet or Arrow file, the item of a JSON "
            "array of conversations, or the document of token files that were imported, counted "
            "from 0. It may also have been rejected: see rejects.jsonl in the store."
            f"{unknown}"
        )
    if resized:
        return StoreError(
            f"No store of this run was built from {file} as it is now; inputs of that name have "
            f"another size: {', '.join(resized[:5])}. Give the name as the store records it."
            f"{unknown}"
        )
    close = get_close_matches(file, sorted(names), 3)
    shown = ", ".join(close or sorted(names)[:5]) or "none, only token files"
    advice = f"Did you mean {shown}?" if close else f"Their inputs are: {shown}."
    more = "" if close or len(names) <= 5 else f" There are {len(names):,} inputs."
    return StoreError(f"No store of this run was built from {file}. {advice}{more}{unknown}")
