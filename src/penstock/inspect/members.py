"""The stores and token files of a plan, as a search for documents reads them."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from penstock.errors import PlanError
from penstock.formats.mapped import Array, Integers
from penstock.formats.token_files import Member, TokenFiles
from penstock.order.plan import Plan
from penstock.rows.tokens import ArrayFile
from penstock.store.reader import TokenStore


class FileDocuments:
    """The documents of token files, with the methods of `TokenStore` that a search needs.

    Args:
        files: The files, which record where documents end.
    """

    def __init__(self, files: TokenFiles | ArrayFile) -> None:
        self.path = files.path
        parts = range(len(files.part_tokens))
        self._bounds = [files.part_bounds(part) for part in parts]
        self.part_documents: Integers = np.array([*map(len, self._bounds)], np.int64)
        self._document_ends = np.cumsum(self.part_documents)

    def __len__(self) -> int:
        return int(self._document_ends[-1])

    def part_array(self, part: int, kind: Literal["bounds"]) -> Array:
        """Return the offsets within a part at which its documents end."""
        return self._bounds[part]

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
