"""Where the files of an entry are taken from: upstream, a mirror, or a copy on disk."""

from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from penstock.catalog.entries import Entry, Remote
from penstock.catalog.request import shown_url
from penstock.errors import FetchError

__all__ = ["Origin", "find_origin"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Upstream, unless `mirror` or `local` is set."""

    mirror: str | None = None
    """A URL under which the files lie by their upstream names."""
    local: Path | None = None
    """A directory, or the one file."""

    @property
    def network(self) -> bool:
        """Whether files come from a server."""
        return self.local is None

    def urls(self, remote: Remote) -> tuple[str, ...]:
        """The addresses to ask for `remote`, in order."""
        if self.mirror is None:
            return remote.urls
        parts = urlsplit(self.mirror)
        if parts.path.endswith(f"/{remote.name}"):
            return (self.mirror,)
        path = f"{parts.path.rstrip('/')}/{quote(remote.name)}"
        return (urlunsplit(parts._replace(path=path)),)

    def held(self, remote: Remote) -> Path | None:
        """The file on disk that `remote` is; None if it comes from a server.

        Raises:
            FetchError: the directory that was named does not hold it.
        """
        if self.local is None:
            return None
        if self.local.is_file():
            return self.local
        found = self.local / remote.name
        if found.is_file():
            return found
        names = [remote.name, *(name for names in _loose_names(remote).values() for name in names)]
        there = ", ".join(sorted(each.name for each in self.local.iterdir())[:5]) or "nothing"
        raise FetchError(
            f"{self.local} does not hold {remote.name}, nor what is in it; looked for "
            f"{', '.join(dict.fromkeys(names))}. It holds {there}."
        )

    def loose(self, remote: Remote) -> dict[str, Path]:
        """The texts of `remote` by name, where they lie on disk unpacked, all of them."""
        if self.local is None or not self.local.is_dir() or (self.local / remote.name).is_file():
            return {}
        found = {}
        for text, names in _loose_names(remote).items():
            there = [self.local / name for name in names if (self.local / name).is_file()]
            if there:
                found[text] = there[0]
        return found if len(found) == len(remote.texts) else {}


def _loose_names(remote: Remote) -> dict[str, list[str]]:
    """Under which names each text may lie: as in the archive, bare, or as a fetch names it."""
    names: dict[str, list[str]] = {}
    for text in remote.texts:
        bare = Path(text.member).name
        names[text.name] = [name for name in (text.member, bare, text.name) if name]
    return names


def find_origin(entry: Entry, source: str | PathLike[str] | None) -> Origin:
    """What `source` means: None is upstream, else a URL, a directory or a file.

    Raises:
        FetchError: it is none of them.
    """
    if source is None:
        return Origin()
    text = fspath(source)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme in ("http", "https"):
        return Origin(mirror=text)
    if scheme == "file":
        text = unquote(urlsplit(text).path)
    elif scheme:
        raise FetchError(
            f"{shown_url(text)}: {scheme}:// is not a place to fetch from. Name a directory, a "
            "file, or an http(s):// address."
        )
    path = Path(text)
    if not path.exists():
        raise FetchError(f"{text} does not exist (looked from {Path.cwd()}).")
    if path.is_file() and len(entry.remotes) > 1:
        names = ", ".join(remote.name for remote in entry.remotes)
        raise FetchError(
            f"{text} is one file, and {entry.name} has several: {names}. Name the directory."
        )
    return Origin(local=path)
