"""Names of tokenizers and templates: which of them are paths, and what a manifest records."""

import os
import re
from pathlib import Path

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?<!\.json)")
"""The form of a name on the Hub; a path may have it, too."""


def last_part(path: str) -> str:
    """The name of a file or directory, without the directories above it.

    >>> last_part("/home/someone/models/mine.json")
    'mine.json'
    """
    return Path(os.path.abspath(path)).name  # noqa: PTH100  (links are kept)


def is_path(name: str) -> bool:
    """Whether the `name_or_path` of an object of `transformers` is a path."""
    return not HUB_NAME.fullmatch(name) or Path(name).exists()
