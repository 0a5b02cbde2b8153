"""The stores that a merge reads, and which of them can be one store."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.digest import canonical_json
from penstock.errors import StoreError
from penstock.store.existing import renamed
from penstock.store.inputs import recorded_digest
from penstock.store.manifest import FILE_NAME, Manifest, shared_settings
from penstock.store.part import SIDES
from penstock.store.sides import open_stores
from penstock.store.verify import differences

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class MergeSource:
    """One of the stores that are merged, with its manifests as they were at the beginning."""

    path: Path
    sides: dict[str, Manifest]
    """Its manifests by side of the split; without a split, the one side is ""."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its sides, the training side first."""
        return tuple(self.sides)

    @property
    def first(self) -> Manifest:
        """The manifest of the training side, or the only one."""
        return self.sides[self.names[0]]

    @property
    def num_slices(self) -> int:
        """How many slices its builds have, and so how many numbers its parts take."""
        return sum(done["slices"] for done in self.first.builds)


def open_source(path: Path) -> MergeSource:
    """Open the manifests of a store; raises if it cannot be merged with any other."""
    is_split = not (path / FILE_NAME).exists() and (path / SIDES[0] / FILE_NAME).exists()
    names = SIDES if is_split else ("",)
    opened = open_stores([path / name for name in names])
    source = MergeSource(
        path, {name: each.manifest for name, each in zip(names, opened, strict=True)}
    )
    split = source.first.contents["split"]
    if not is_split and source.first.contents.get("side"):
        raise StoreError(
            f"{path} is one side of a store with a split. Name the whole store, {path.parent}: "
            "both sides are merged."
        )
    if (split or "").startswith("tail"):
        raise StoreError(
            f'{path} was built with split="{split}": its validation side is the end of its data. '
            'Merge stores without a split, or with split="hash", which holds out a document '
            "whatever store it is in."
        )
    return source


def refuse_unlike(sources: Sequence[MergeSource]) -> None:
    """Raise if two stores have other settings, so that they cannot be one store."""
    last = sources[-1].first
    for each in sources[:-1]:
        one, two = each.first.contents, last.contents
        old = {**shared_settings(renamed(one, two)), "dtype": one["dtype"]}
        new = {**shared_settings(two), "dtype": two["dtype"]}
        if canonical_json(old) != canonical_json(new):
            raise StoreError(
                f"{each.path} and {sources[-1].path} cannot be merged, because their settings "
                f"differ: {differences(old, new)}. Build one of them again with the settings of "
                "the other, or mix them in a Plan, which takes any number of stores."
            )


def refuse_twice(sources: Sequence[MergeSource]) -> None:
    """Raise if an input is in two of the stores."""
    seen: dict[tuple[str, int, str | None], Path] = {}
    for source in sources:
        keys = {
            (each["name"], each["bytes"], recorded_digest(each)): source.path
            for each in source.first.inputs
        }
        if twice := [name for name, size, digest in keys if (name, size, digest) in seen]:
            other = seen[next(key for key in keys if key in seen)]
            raise StoreError(
                f"{', '.join(twice[:_SHOWN])} {'is' if len(twice) == 1 else 'are'} in {other} and "
                f"in {source.path}. In one store, these documents would be trained on twice as "
                "often. Leave one of the stores out."
            )
        seen |= keys
