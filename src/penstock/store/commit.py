"""Writing of a manifest, which turns the files of a directory into a store."""

from collections.abc import Sequence
from pathlib import Path

from penstock.store.files import sync_directory, write_file
from penstock.store.manifest import (
    FILE_NAME,
    VERSION,
    JsonObject,
    PartRecord,
    counts,
    manifest_bytes,
    shared_settings,
)


def manifest_contents(
    settings: JsonObject,
    *,
    dtype: str,
    side: str,
    split: JsonObject,
    parts: Sequence[PartRecord],
    builds: Sequence[JsonObject],
) -> JsonObject:
    """The contents of a manifest, without its parts.

    Args:
        settings: Its tokenizer, end and start tokens, split and chat template are used.
        dtype: The type of the tokens.
        side: The side of the split; "" without one.
        split: The generation of the two sides; empty without a split.
        parts: All parts.
        builds: The first build of the store and all appends.
    """
    return {
        "format": "penstock-store",
        "version": VERSION,
        "dtype": dtype,
        **shared_settings(settings),
        "side": side or None,
        **split,
        "counts": counts(parts),
        "builds": [*builds],
    }


def write_manifest(directory: Path, contents: JsonObject, parts: Sequence[PartRecord]) -> None:
    """Write the manifest of a directory whose other files are written."""
    # The manifest is the commit point. Everything that it names must be on disk before it, and
    # its own name must be on disk before the journal is removed.
    sync_directory(directory)
    write_file(directory / FILE_NAME, [manifest_bytes(contents, [*parts])])
    sync_directory(directory)
