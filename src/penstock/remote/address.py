"""The URL of a remote store, in place of the path of a local one."""

import os
from pathlib import Path

from penstock.paths import expand_user, is_remote, redacted


class StoreUrl:
    """The URL of a store or of a file of it. As text, it has no user, password or query.

    >>> url = StoreUrl("https://me:secret@host/owt?sig=1") / "train"
    >>> str(url), url.name, str(url.parent)
    ('https://host/owt/train', 'train', 'https://host/owt')
    >>> url.address
    'https://me:secret@host/owt/train?sig=1'
    """

    def __init__(self, address: str) -> None:
        self.address = address
        """The whole URL, with its secrets."""

    def __str__(self) -> str:
        return redacted(self.address).rstrip("/")

    def __repr__(self) -> str:
        return f"StoreUrl({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoreUrl) and self.address == other.address

    def __hash__(self) -> int:
        return hash(self.address)

    def __truediv__(self, name: str) -> "StoreUrl":
        base, question, query = self.address.partition("?")
        return StoreUrl(f"{base.rstrip('/')}/{name}".rstrip("/") + question + query)

    @property
    def name(self) -> str:
        """The last part of the URL, without the query."""
        return str(self).rpartition("/")[2]

    @property
    def parent(self) -> "StoreUrl":
        """The URL without its last part, with the query."""
        base, question, query = self.address.partition("?")
        return StoreUrl(base.rstrip("/").rpartition("/")[0] + question + query)

    def absolute(self) -> "StoreUrl":
        """Return this URL: it does not depend on the working directory."""
        return self


StorePath = Path | StoreUrl
"""Where a store is: a directory of this machine, or a URL."""


def store_path(path: str | os.PathLike[str] | StoreUrl) -> StorePath:
    """`path` as a `StoreUrl` if it is a URL, else as a `Path`; see `expand_user`."""
    if isinstance(path, StoreUrl):
        return path
    return StoreUrl(str(path)) if is_remote(path) else expand_user(path)
