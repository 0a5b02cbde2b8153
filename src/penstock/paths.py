"""Names of places as users write them: paths and URLs.

`~` is the home directory, as in a shell. A shell expands it only at the start of an unquoted word.
In Python, in a recipe and after `--output=` nothing does, and a directory called `~` is dangerous:
`rm -r ~` deletes another one.
"""

import os
import re
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

REMOTE_SCHEMES = ("s3", "gs", "az", "hf", "https", "http")
"""How URLs of remote stores begin."""


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is the URL of a remote store, and not a path of this machine.

    >>> is_remote("s3://bucket/owt"), is_remote("stores/owt"), is_remote(Path("s3://bucket/owt"))
    (True, False, False)
    """
    # A `Path` has lost a slash of a URL: it is a path, whatever it looks like.
    scheme, colon, _ = path.partition("://") if isinstance(path, str) else ("", "", "")
    return bool(colon) and scheme in REMOTE_SCHEMES


def redacted(url: str) -> str:
    """`url` without user, password and query, which may be secret.

    >>> redacted("https://me:secret@host/owt?sig=1")
    'https://host/owt'
    """
    return re.sub(r"//[^/]*@", "//", url).partition("?")[0]


def without_secrets(error: BaseException) -> str:
    """The message of an error, without the users, passwords and queries of addresses in it.

    >>> without_secrets(ValueError("403 for 'https://me:pw@host/a.txt?sig=1'"))
    "403 for 'https://host/a.txt?…'"
    """
    text = re.sub(r"//[^/\s]*@", "//", str(error) or type(error).__name__)
    text = re.sub(r"\?[^\s'\")]+", "?…", text)
    # A server decides how long a header is that a message repeats.
    return re.sub(r"(\S{80})\S+", r"\1…", " ".join(text.split()))


def expand_user(path: str | os.PathLike[str]) -> Path:
    """`path` with the home directory in place of a leading `~`; a file `./~x` keeps its name."""
    found = Path(os.path.expanduser(path))  # noqa: PTH111  (`Path` would drop "./" before it)
    # An absolute path begins with no "~", so a second call changes nothing.
    return found.absolute() if str(found).startswith("~") else found


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


def nearby_names(path: Path) -> str:
    """Return a sentence for a message about a missing file: which names its folder has."""
    nearby: list[str] = []
    with suppress(OSError):  # the folder may be missing too
        names = (entry.name for entry in path.parent.iterdir())
        nearby = sorted(name for name in names if not name.startswith("."))
    if close := get_close_matches(path.name, nearby, 1, 0.75):
        return f" Did you mean {path.with_name(close[0])}?"
    return f" In {Path.cwd() / path.parent}: {', '.join(nearby[:5])}." if nearby else ""
