"""Manifests that a test writes itself, for files that it made or changed."""

from penstock.store.manifest import VERSION, PartTable, write_manifest


def write(directory, contents, records, item_size=2):
    """Write the manifest of a store with these parts; `contents` may be those of another store."""
    contents = {"format": "penstock-store", **contents, "version": VERSION}
    write_manifest(directory, contents, PartTable.of(records, item_size))
