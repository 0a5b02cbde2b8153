"""The directory of caches, a separate module because it must import quickly."""

import os
from pathlib import Path

__all__ = ["cache_directory"]


def cache_directory() -> Path:
    """Return `$PENSTOCK_CACHE`, else `penstock` in `$XDG_CACHE_HOME` or in `~/.cache`.

    Everything in it can be computed or downloaded again. The directory may not exist yet: the
    code that writes to it creates it.
    """
    # The variables are read at each call: tests and notebooks set them after the import.
    if chosen := os.environ.get("PENSTOCK_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
