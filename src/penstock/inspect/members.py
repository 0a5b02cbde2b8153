"""The stores and token files of a plan, as a search for documents reads them."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from penstock.errors import PlanError
from penstock.formats.arrays import all_blocks
from penstock.formats.mapped import Array, Integers
from penstock.formats.token_files import Member, TokenFiles
from penstock.order.plan import Plan
from penstock.rows.tokens import ArrayFile
from penstock.store.reader import TokenStore


class FileDocuments:
    """The documents of token files, with the methods of `TokenStore` that a search needs.

    Args:
        files: The files.
        eos_id: The end token. Files that do not record documents are cut after each, and are read
            once for that. Without one, each file is one document.
    """

    def __init__(self, files: TokenFiles | ArrayFile, eos_id: int | None = None) -> None:
        self.path = files.path
        self.has_documents = files.has_documents
        """Whether the numbers of documents are those of the format."""
        self.part_tokens = files.part_tokens
        self.num_tokens = int(files.part_tokens.sum())
        self._files = files
        parts = range(len(files.part_tokens))
        self._bounds = [self._ends(part, eos_id) for part in parts]
        self.part_documents: Integers = np.array([*map(len, self._bounds)], np.int64)
        self._document_ends = np.cumsum(self.part_documents)

    def __len__(self) -> int:
        return int(self._document_ends[-1])

    def _ends(self, part: int, eos_id: int | None) -> Array:
        if self.has_documents:
            return self._files.part_bounds(part)
        ids, found, start = self._files.part_ids(part), [np.zeros(0, np.int64)], 0
        for block in all_blocks(ids) if eos_id is not None else ():
            found.append(np.flatnonzero(block == eos_id) + start + 1)
            start += len(block)
        ends = np.concatenate(found)
        is_whole = not len(ids) or (len(ends) and ends[-1] == len(ids))
        return ends if is_whole else np.append(ends, len(ids))

    def part_array(self, part: int, kind: Literal["tokens", "bounds"]) -> Any:
        """Return the ids of one part, or the offsets within it at which its documents end."""
        return self._bounds[part] if kind == "bounds" else self._files.part_ids(part)

    def first_document(self, part: int) -> int:
        """Return the number of the first document of one part."""
        return int(self._document_ends[part - 1]) if part else 0

    def document(self, number: int) -> Array:
        """Return the tokens of a document."""
        part = int(np.searchsorted(self._document_ends, number, side="right"))
        within = number - self.first_document(part)
        start = int(self._bounds[part][within - 1]) if within else 0
        found: Array = self._files.part_ids(part)[start : int(self._bounds[part][within])]
        return found

    def edges(self, number: int) -> tuple[bool, bool]:
        """Return that a document begins and ends at its number: none is in pieces."""
        return True, True


Searched = TokenStore | FileDocuments


def documents_of_parts(member: Member | FileDocuments) -> Integers:
    """Return the number of documents, or pieces of documents, of each part."""
    if isinstance(member, TokenStore):  # no bounds are read
        return member.manifest.part_documents
    if isinstance(member, FileDocuments):
        return member.part_documents
    parts = range(len(member.part_tokens))
    return np.array([len(member.part_bounds(part)) for part in parts], np.int64)


def _names(plan: Plan, source: str | None) -> list[str]:
    """Return the name of a source, or those of all.

    Raises:
        PlanError: the plan has no such source.
    """
    if source is not None and source not in plan.sources:
        raise PlanError(f'There is no source "{source}"; the sources are {", ".join(plan.names)}.')
    return [*plan.names] if source is None else [source]


def members(
    plan: Plan, source: str | None
) -> Iterator[tuple[str, int, TokenStore | TokenFiles | ArrayFile]]:
    """Yield the stores and token files of all sources: the source, the number in it, the store."""
    for name in _names(plan, source):
        stream = plan.sources[name].stream
        for number, member in enumerate(stream.members if stream is not None else ()):
            assert isinstance(member, TokenStore | TokenFiles | ArrayFile)
            yield name, number, member


def not_searched(plan: Plan, source: str | None = None, *, numbered: bool = False) -> list[str]:
    """Return the token files in which a document cannot be found, and rows without a stream.

    Args:
        plan: The plan.
        source: This source only.
        numbered: Whether documents are searched by their numbers, and not by records of inputs.
    """
    names = [each for each in _names(plan, source) if plan.sources[each].stream is None]
    return [f"the rows of {each}" for each in names] + [
        str(member.path)
        for _, _, member in members(plan, source)
        if not (member.has_documents if numbered else isinstance(member, TokenStore))
    ]
