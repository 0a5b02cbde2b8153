"""Which stores a path on the command line means."""

from pathlib import Path

__all__ = ["stores_at"]


def stores_at(path: Path) -> dict[str, Path]:
    """The two sides of a store that was split, by name; else `path` itself, under "".

    A path that holds neither is given back too: opening it says what is wrong.
    """
    from penstock.store.manifest import FILE_NAME

    sides = {side: path / side for side in ("train", "val")}
    whole = (path / FILE_NAME).exists() or (path / ".building.json").exists()
    if whole or not all((each / FILE_NAME).exists() for each in sides.values()):
        return {"": path}
    return sides
