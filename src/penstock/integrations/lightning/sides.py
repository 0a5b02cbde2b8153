"""Reads the argument `data=` of an `LLMDataModule`: the inputs of each side."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.catalog.entries import ENTRIES, find_entry
from penstock.errors import SourceError

if TYPE_CHECKING:
    from penstock.integrations.stores import Inputs

_SIDES = {"valid": "val", "validation": "val", "train": "train", "val": "val", "test": "test"}


def read_sides(data: str | Mapping[str, Any], directory: Path) -> "dict[str, Inputs]":
    """Return the inputs of "train", "val" and "test", of those that `data` has.

    Args:
        data: A dataset of the catalog, or a mapping from sides to inputs.
        directory: The directory of the files of a catalog dataset.

    Raises:
        SourceError: `data` is neither, or has a side of another name.
    """
    if isinstance(data, str) and (
        data in {each.name for each in ENTRIES} or not Path(data).exists()
    ):
        entry = find_entry(data)
        names = {file.split: file.name for file in entry.files}
        # A text that `fetch` splits itself has the names train.txt and val.txt.
        return {side: directory / names.get(side, f"{side}.txt") for side in entry.splits}
    if not isinstance(data, Mapping):
        raise SourceError(
            f"data={str(data)!r:.200} is neither a dataset of the catalog nor a mapping. Name what "
            'is read for each side, such as data={"train": …, "val": …}.'
        )
    if unknown := [side for side in data if side not in _SIDES]:
        raise SourceError(
            f"data= has the key {unknown[0]!r}; its keys must be train, val (or validation) "
            "and test."
        )
    return {_SIDES[side]: given for side, given in data.items()}
