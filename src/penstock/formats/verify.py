"""Checks of every id of token files."""

from collections.abc import Callable

from penstock.errors import StoreError
from penstock.formats.member import Array, Ids
from penstock.formats.sample import all_blocks, check_ids
from penstock.formats.token_files import TokenFiles


def verify_tokens(files: TokenFiles, report: Callable[[int, int], None] | None = None) -> int:
    """Read all ids, and return how many were compared with the vocabulary size.

    Without a vocabulary size, only negative ids are found. Token files have no checksums, so a
    changed id that is in the vocabulary is not found.

    Args:
        files: The files that `open_tokens` opened.
        report: Called with the number of files that are done, and of all files.

    Raises:
        StoreError: an id is negative or not below the vocabulary size, or a mask is not 0 or 1.
    """
    num_parts = len(files.part_tokens)
    for part in range(num_parts):
        check_all(files.part_ids(part), files.part_name(part), files.vocab_size)
        files.check_part(part)
        mask = files.part_loss(part)
        for block in () if mask is None else all_blocks(mask):
            check_mask(block, files.path)
        if report is not None:
            report(part + 1, num_parts)
    return files.num_tokens


def check_all(ids: Ids, path: object, vocab_size: int | None) -> None:
    """Raise StoreError if one of all ids is negative, or not below the vocabulary size."""
    for block in all_blocks(ids):
        check_ids(block, path, vocab_size)


def check_mask(mask: Array, path: object) -> None:
    """Raise StoreError if a value of a loss mask is not 0 or 1."""
    if len(mask) and int(mask.max()) > 1:
        raise StoreError(f"{path} has a loss mask of {int(mask.max())}, not 0 or 1.")
