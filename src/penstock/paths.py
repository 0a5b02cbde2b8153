"""Paths as users write them: `~` is the home directory, as in a shell.

A shell expands `~` only at the start of an unquoted word. In Python, in a recipe and after
`--output=` nothing does, and a directory called `~` is dangerous: `rm -r ~` deletes another one.
"""

import os
from pathlib import Path


def expand_user(path: str | os.PathLike[str]) -> Path:
    """`path` with the home directory in place of a leading `~`; a file `./~x` keeps its name."""
    found = Path(os.path.expanduser(path))  # noqa: PTH111  (`Path` would drop "./" before it)
    # An absolute path begins with no "~", so a second call changes nothing.
    return found.absolute() if str(found).startswith("~") else found
