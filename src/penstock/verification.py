"""`verify`: check every byte of a store, or every id of token files."""

import os
from collections.abc import Callable

from penstock.formats.open import token_files_at
from penstock.formats.token_files import TokenFiles, verify_tokens
from penstock.paths import StoreUrl
from penstock.store.reader import TokenStore
from penstock.store.verify import verify as verify_stores


def verify(
    path: str | os.PathLike[str] | StoreUrl | TokenFiles,
    progress: Callable[[int, int], None] | None = None,
) -> TokenStore | TokenFiles:
    """Check the whole store in `path`, and open it.

    Of a store that was built with a split, checks both sides and opens the first. Of a remote
    store, all files are downloaded, also those that are on this machine. Of token files of another
    tool, which have no checksums, checks that no id is negative, and that all are below the
    vocabulary that was given to `open_tokens`.

    Args:
        path: The store, or token files: a path, or what `open_tokens` returned.
        progress: Called with the number of checked parts and the number of all parts.

    Raises:
        StoreError: something is wrong; the message names the file and the problem.
    """
    files = path if isinstance(path, TokenFiles) else token_files_at(path)
    if files is not None:
        verify_tokens(files, progress)
        return files
    assert not isinstance(path, TokenFiles)
    return verify_stores(path, progress)
