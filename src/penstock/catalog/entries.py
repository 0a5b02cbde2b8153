"""The datasets of the catalog: URLs, licences, sizes and checksums.

The data is in `entries.toml`. This module reads it into objects and describes its fields.
"""

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.errors import SourceError

Packing = Literal["plain", "zip", "gzip"]
TRAIN_SPLIT_RATIO = 0.9
"""The share of characters used for training, if a dataset is a single text file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryFile:
    """A file that a fetch writes into the target directory."""

    name: str
    split: str | None = None
    """The split of this file, such as "train"; None if `fetch` splits it after the download."""
    member: str = ""
    """Its path inside the archive; "" if the remote file is not an archive of several files."""
    num_bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFile:
    """A file on a server, and the files that a fetch makes from it."""

    name: str
    """Its name upstream and in mirrors."""
    urls: tuple[str, ...]
    """Tried in this order."""
    packing: Packing = "plain"
    num_bytes: int | None = None
    sha256: str | None = None
    files: tuple[EntryFile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One dataset of the catalog."""

    name: str
    title: str
    home: str
    licence: str
    remotes: tuple[RemoteFile, ...]
    train_ratio: float | None = None
    """If the dataset is a single text file: the share of characters used for training."""
    documents: str = "auto"
    """How its files are cut into documents; the `documents=` of `penstock.build`."""
    eos: bool = True
    """Whether `build_stores` ends each document with the end token."""
    reader: str = ""
    """For question sets: the class in `penstock.catalog` that reads the files."""

    @property
    def files(self) -> tuple[EntryFile, ...]:
        """All files that a fetch writes, before a text is split."""
        return tuple(file for remote in self.remotes for file in remote.files)

    @property
    def num_bytes(self) -> int | None:
        """The size of all files together; None unless every size is known."""
        sizes = [file.num_bytes for file in self.files]
        return sum(size for size in sizes if size) if all(sizes) else None

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of its splits."""
        if self.train_ratio:
            return ("train", "val")
        return tuple(file.split or "" for file in self.files)


def _entry(fields: dict[str, Any]) -> Entry:
    """Return an entry from its table in entries.toml."""
    remotes = []
    for remote in fields.pop("remotes"):
        urls = tuple(remote.pop("urls"))
        files = tuple(EntryFile(**file) for file in remote.pop("files"))
        remotes.append(RemoteFile(**remote, urls=urls, files=files))
    return Entry(**fields, remotes=tuple(remotes))


_TABLES = tomllib.loads(Path(__file__).with_name("entries.toml").read_text(encoding="utf-8"))

ENTRIES: tuple[Entry, ...] = tuple(_entry(fields) for fields in _TABLES["entries"])
"""All datasets of the catalog, in the order of entries.toml."""


def find_entry(name: str) -> Entry:
    """Return the entry called `name`.

    >>> find_entry("tinyshakespeare").remotes[0].name
    'input.txt'

    Raises:
        SourceError: the catalog has no such entry.
    """
    known = {entry.name: entry for entry in ENTRIES}
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, 1)
        guess = f" Did you mean {near[0]}?" if near else ""
        raise SourceError(
            f"{name!r} is not in the catalog, which has {', '.join(known)}.{guess} "
            "List them with: penstock fetch --list"
        )
    return known[name]
