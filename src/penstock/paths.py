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


def nearby_names(path: Path) -> str:
    """Return a sentence for a message about a missing file: which names its folder has."""
    nearby: list[str] = []
    with suppress(OSError):  # the folder may be missing too
        names = (entry.name for entry in path.parent.iterdir())
        nearby = sorted(name for name in names if not name.startswith("."))
    if close := get_close_matches(path.name, nearby, 1, 0.75):
        return f" Did you mean {path.with_name(close[0])}?"
    return f" In {Path.cwd() / path.parent}: {', '.join(nearby[:5])}." if nearby else ""
