"""Where penstock keeps things for a user, when nobody says otherwise."""

import os
from pathlib import Path

__all__ = ["cache_directory"]


def cache_directory() -> Path:
    """`$PENSTOCK_CACHE`, else `penstock` in `$XDG_CACHE_HOME` or `~/.cache`.

    All of it can be made again. It may not exist yet: whoever writes there makes it.
    """
    if chosen := os.environ.get("PENSTOCK_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
