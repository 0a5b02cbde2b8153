"""The list of input files that the user named.

Paths, globs, directories and URLs become one list, sorted by the bytes of the names, so that
every machine has the same order. Nothing is guessed silently: a pattern that matches nothing, a
file that is listed twice, and a file with an unknown suffix in a directory are errors. So are a
pipe, a socket, a device, a broken link, and a file with contents whose size is given as 0.

`glob`, `os.walk` and fsspec leave out a directory that they cannot list, and documents would be
missing without a sign. So directories are listed here, one by one, and each that cannot be listed
is an error. What is left out on purpose, such as hidden files, is counted by kind and logged, and
a build records it: see `KINDS`.
"""

# Names stay as the user wrote them: Path would make "a.txt" of "./a.txt".
# ruff: noqa: PTH116, PTH118

import errno
import fnmatch
import glob
import json
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.errors import MissingInputError, SourceError
from penstock.options import ReadSettings
from penstock.paths import expand_user, nearby_names, redacted, without_secrets
from penstock.sources.files import BOM, Expanded, InputFile, file_state, file_system, open_file
from penstock.sources.settings import Texts

_log = logging.getLogger("penstock")
_COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
_FORMATS = (
    dict.fromkeys((".txt", ".text", ".md", ".raw"), "text")
    | dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl")
    | {".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".arrow": "arrow"}
)
# Chained protocols are left out, and so are protocols that interpret the file they open
# (reference://, jinja): they would read or run something else than the file that the user named.
_PROTOCOLS = (
    *("abfs", "abfss", "adl", "az", "file", "ftp", "gcs", "gs", "hdfs", "hf", "http"),
    *("https", "memory", "s3", "s3a", "sftp", "webhdfs"),
)

KINDS = {
    "hidden": "hidden",
    "linked": "directories that a link leads to a second time",
    "directories": "directories that match a pattern of files",
}
"""What a listing may leave out. Everything else is read, or is an error."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files that inputs name, and what was left out to find them."""

    files: list[InputFile]
    skipped: dict[str, int]
    """How many paths were left out, by a key of `KINDS`."""


def list_files(
    inputs: str | os.PathLike[str] | Sequence[Any] | Texts, reading: ReadSettings
) -> list[InputFile]:
    """The files that `inputs` names, sorted by the bytes of their names.

    Hidden files and directories are left out; a warning in the log counts them.
    """
    return list_inputs(inputs, reading).files


def list_inputs(
    inputs: str | os.PathLike[str] | Sequence[Any] | Texts, reading: ReadSettings
) -> Listing:
    """The files that `inputs` names, sorted by the bytes of their names, and what was left out."""
    if isinstance(inputs, Texts):
        size, stamp = inputs.num_bytes, inputs.digest
        name = f"texts-{stamp[:16]}"  # different texts have different names
        file = InputFile(name=name, path="", size=size, stamp=stamp, format="texts", texts=inputs)
        return Listing([file], {})
    files: list[InputFile] = []
    skipped: _Skipped = {kind: set() for kind in KINDS}
    for each in [inputs] if isinstance(inputs, str | os.PathLike) else inputs:
        if not isinstance(each, str | os.PathLike):
            raise SourceError(
                f"{each!r:.60} is not a path. Pass texts as penstock.Texts, and a Hugging Face "
                "dataset to penstock.integrations.huggingface.build_dataset."
            )
        files += [_input_file(path, reading) for path in _paths(os.fspath(each), reading, skipped)]
    if not files:
        raise SourceError("No inputs were given. Name files, directories, globs or URLs.")
    # Sorted by bytes, because an order by the rules of a language depends on the machine's locale.
    files.sort(key=lambda file: os.fsencode(file.name))
    _refuse_duplicates(files)
    guessed = [file.name for file in files if _suffixes(file.name)[0] is None]
    if guessed and reading.format == "auto":
        _log.warning(
            "Files whose suffix penstock does not know are read as text: %s of %s (%s).",
            f"{len(guessed):,}",
            f"{len(files):,}",
            _shown(guessed),
        )
    counts = {kind: len(paths) for kind, paths in skipped.items() if paths}
    if counts:
        left_out = "; ".join(
            f"{skipped_text({kind: counts[kind]})} ({_shown(sorted(skipped[kind]))})"
            for kind in counts
        )
        _log.warning("Not read: %s. To read any of these, name them.", left_out)
    return Listing(files, counts)


def skipped_text(counts: Mapping[str, int]) -> str:
    """What a listing left out, from the counts in a manifest.

    >>> skipped_text({"hidden": 2, "directories": 1})
    '2 hidden; 1 directories that match a pattern of files'
    """
    return "; ".join(f"{number:,} {KINDS.get(kind, kind)}" for kind, number in counts.items())


def _shown(paths: Sequence[str]) -> str:
    names = [redacted(path) if "://" in path else path for path in paths[:3]]
    return ", ".join(names) + (", …" if len(paths) > 3 else "")


def _paths(pattern: str, reading: ReadSettings, skipped: "_Skipped") -> list[str]:
    """The paths or URLs of the files that one path, glob, directory or URL names."""
    protocol, is_url, rest = pattern.partition("://")
    if is_url and protocol == "file":
        # A path by another name. fsspec would take a link to a directory for a file, and would
        # wait for ever for somebody to write to a pipe.
        pattern = rest
    elif is_url and not re.search(r"\s", protocol):
        return _remote_paths(pattern, skipped)
    pattern = str(expand_user(pattern)) if pattern.startswith("~") else pattern
    # Existing files are looked for first, because a file name may contain characters of a glob.
    kind = _mode(pattern)
    if stat.S_ISDIR(kind):
        return _directory_files(pattern, reading, skipped)
    if kind:
        return [pattern]
    found = _Finder(skipped).matching(pattern) if glob.has_magic(pattern) else []
    if found:
        return found
    # Several words without the suffix of a file are rather a text than a name.
    if re.search(r"\s", pattern) and _suffixes(pattern)[0] is None:
        raise SourceError(
            f"There is no file {pattern!r:.60} (looked from {Path.cwd()}). Inputs are names of "
            "files. If this is a text, give it as penstock.Texts([text]) in Python, or write it to "
            "a file."
        )
    raise MissingInputError(
        f"{pattern} matches no file (working directory: {Path.cwd()}).{nearby_names(Path(pattern))}"
    )


def _directory_files(folder: str, reading: ReadSettings, skipped: "_Skipped") -> list[str]:
    path = Path(folder)
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_bytes()).get("splits", [])
        raise SourceError(
            f"{path} is a Hugging Face DatasetDict with the splits {', '.join(splits)}. "
            f"Name one of them, for example {path / (splits or ['train'])[0]}."
        )
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        try:
            entries = json.loads((path / "state.json").read_bytes())["_data_files"]
            # The files of a Hugging Face dataset are beside its state.json.
            return [str(path / Path(entry["filename"]).name) for entry in entries]
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(
                f"{path / 'state.json'} does not list the files of a dataset: {error!r}."
            ) from None
    if any((path / side / "penstock.json").is_file() for side in ("", "train", "val")):
        raise SourceError(f"{path} is a store: it holds tokens, not text. Name files of text.")
    found = _Finder(skipped).find(str(path), ["**"])
    if not found:
        raise SourceError(f"{path} is a directory without files.")
    unknown = [file for file in found if _suffixes(file)[0] is None]
    if unknown and reading.format == "auto":
        raise SourceError(
            f"The format of {len(unknown):,} of {len(found):,} files in {path} is not known from "
            f"their suffixes ({_shown(sorted(unknown))}). Name the files to read with a glob such "
            f"as '{path}/**/*.txt', or read all of them as text with format=\"text\" "
            "(--format text) of penstock.build."
        )
    return found


def _remote_paths(pattern: str, skipped: "_Skipped") -> list[str]:
    protocol, _, rest = pattern.partition("://")
    if "::" in pattern or protocol not in _PROTOCOLS:
        raise SourceError(
            f"{redacted(pattern)} uses the protocol {protocol}://, which penstock does not read. "
            f"Choose one of: {', '.join(_PROTOCOLS)}."
        )
    filesystem = file_system(pattern)
    # In an HTTP address, `?` begins the query and is not a wildcard.
    is_http = protocol in ("http", "https")
    finder = _RemoteFinder(skipped, filesystem=filesystem, protocol=protocol)
    try:
        if filesystem.isdir(pattern):
            found = finder.find(pattern.rstrip("/"), ["**"])
        elif glob.has_magic(rest.partition("?")[0] if is_http else rest):
            found = finder.matching(pattern)
        else:
            found = [pattern]
    except SourceError:
        raise
    except Exception as error:  # noqa: BLE001  (of aiohttp, botocore and others, by protocol)
        raise SourceError(
            f"{redacted(pattern)} cannot be reached: {without_secrets(error)}. Check the address "
            "and the network, or download the file and name the copy."
        ) from None
    if not found:
        raise MissingInputError(f"{redacted(pattern)} matches no file.")
    return found


_Skipped = dict[str, set[str]]
"""The paths that a listing left out, by a key of `KINDS`; each path counts once."""


@dataclass(slots=True)
class _Finder:
    """Finds the files that a pattern matches; `**` matches any number of directories."""

    skipped: _Skipped
    entered: set[object] = field(default_factory=set)
    """The directories that `**` has entered, each with the number of parts that follow."""
    links: list[tuple[str, list[str]]] = field(default_factory=list)
    """Links to directories that `**` has found. They are followed after all real directories, so
    a directory with several names has its real name, however the system orders a directory."""

    def matching(self, pattern: str) -> list[str]:
        """The files that a pattern with wildcards matches, each once."""
        parts = pattern.split("/")
        first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
        folder = "/".join(parts[:first]) or "/" * (first > 0)
        return self.find(folder, [part for part in parts[first:] if part])

    def find(self, folder: str, parts: list[str]) -> list[str]:
        """The files below `folder` that match the parts of a pattern, each once."""
        found = list(self.matches(folder, parts)) if self.is_directory(folder) else []
        while self.links:
            links, self.links = sorted(self.links), []
            for link, rest in links:
                found += self.matches(link, rest)
        # Directories that match are left out; those with files that match are only entered.
        parents = {path[:end] for path in found for end in _slashes(path)}
        closed = {path for path in found if path.endswith("/")}
        self.skipped["directories"] |= {path[:-1] for path in closed if path[:-1] not in parents}
        return list(dict.fromkeys(path for path in found if path not in closed))

    def matches(self, folder: str, parts: list[str]) -> Iterator[str]:
        """The files below `folder` that match, and the directories, with a slash at the end."""
        part, rest = parts[0], parts[1:]
        if part == "**":
            if (key := (self.identity(folder), len(parts))) in self.entered:
                self.skipped["linked"].add(folder)
                return
            self.entered.add(key)
            if rest:
                yield from self.matches(folder, rest)
        for path, is_directory, is_link in self.visible(folder, parts):
            if part == "**" and is_directory and is_link:
                self.links.append((path, parts))
            elif part == "**" and is_directory:
                yield from self.matches(path, parts)
            elif fnmatch.fnmatchcase(path.rpartition("/")[2], part):
                if not rest:
                    yield path + "/" * is_directory
                elif is_directory:
                    yield from self.matches(path, rest)

    def visible(self, folder: str, parts: list[str]) -> Iterator[tuple[str, bool, bool]]:
        """The entries of a directory, without hidden ones that the pattern does not name."""
        for path, is_directory, is_link in self.entries(folder):
            name = path.rpartition("/")[2]
            if parts[0].startswith(".") or not name.startswith("."):
                yield path, is_directory, is_link
            # A hidden file counts if the pattern names it, and a hidden directory in any case.
            elif fnmatch.fnmatchcase(name, parts[0]) and (
                is_directory or fnmatch.fnmatchcase(name, parts[-1])
            ):
                self.skipped["hidden"].add(path)

    def is_directory(self, path: str) -> bool:
        """Whether there is a directory at `path`."""
        return stat.S_ISDIR(_mode(path))

    def identity(self, folder: str) -> object:
        """What tells a directory apart from others, whatever its name."""
        with _listing_errors(folder):
            state = os.stat(folder or os.curdir)
        return state.st_dev, state.st_ino

    def entries(self, folder: str) -> list[tuple[str, bool, bool]]:
        """The path of each entry, and whether it is a directory, and a link; sorted by path."""
        found = []
        with _listing_errors(folder), os.scandir(folder or os.curdir) as entries:
            for entry in entries:
                path = os.path.join(folder, entry.name)
                with _listing_errors(path):  # following a link may fail
                    found.append((path, entry.is_dir(), entry.is_symlink()))
        return sorted(found)


@dataclass(slots=True)
class _RemoteFinder(_Finder):
    """Finds files with a file system of fsspec; paths are URLs."""

    filesystem: Any = None
    protocol: str = ""

    def is_directory(self, path: str) -> bool:
        """Whether there is a directory at `path`."""
        return bool(self.filesystem.isdir(path))

    def identity(self, folder: str) -> object:
        """The name of a directory: there are no links."""
        return folder

    def entries(self, folder: str) -> list[tuple[str, bool, bool]]:
        """The URL of each entry, and whether it is a directory; sorted by URL."""
        entries = []
        for entry in self.filesystem.ls(folder, detail=True):
            name, is_directory = str(entry["name"]), entry["type"] == "directory"
            # fsspec returns most paths without their protocol. In memory:// a leading slash is part
            # of the name; in other protocols it is not.
            bare = name if self.protocol == "memory" else name.lstrip("/")
            url = (name if "://" in name else f"{self.protocol}://{bare}").rstrip("/")
            # Object stores may list a folder as an entry of itself.
            if url != folder.rstrip("/"):
                entries.append((url, is_directory, False))
        return sorted(entries)


def _slashes(path: str) -> Iterator[int]:
    """Where the names of the directories above `path` end."""
    place = path.rstrip("/").rfind("/")
    while place > 0:
        yield place
        place = path.rfind("/", 0, place)


def _mode(path: str) -> int:
    """The `st_mode` of the file or directory at `path`; 0 if nothing exists there."""
    with _listing_errors(path):
        try:
            return os.stat(path or os.curdir).st_mode
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
            return 0
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:  # no file has such a name; it may be a text
                raise
            return 0


@contextmanager
def _listing_errors(path: str) -> Iterator[None]:
    """Turn an error of the system into a SourceError that names the path."""
    try:
        yield
    except OSError as error:
        raise SourceError(
            f"{path} cannot be listed or examined ({error.strerror or error}), so its documents "
            "would be missing from the build. Make it readable, move it away, or name the files to "
            "read one by one."
        ) from error


def _input_file(path: str, reading: ReadSettings) -> InputFile:
    is_remote = "://" in path
    name = redacted(path) if is_remote else path
    try:
        size, stamp = file_state(path)
        if not is_remote and not stat.S_ISREG(os.stat(path).st_mode):
            raise SourceError(
                f"{path} is not a regular file, and a build may read it twice. Copy it to a file."
            )
        # The suffix is taken from the name without its query: a signed URL may end with anything.
        guessed, compression = _suffixes(name)
        kind = reading.format if reading.format != "auto" else guessed or "text"
        file = InputFile(
            name=name,
            # A stream reads in the background, perhaps after a change of the working directory.
            path=path if is_remote else os.path.join(Path.cwd(), path),
            size=size,
            stamp=stamp,
            format=kind,
            # These formats compress their columns themselves.
            compression=None if kind in ("parquet", "arrow") else compression,
        )
        if size == 0:
            _refuse_contents(file)
        elif reading.format == "auto" and re.search(r"\.json(\.\w+)?$", name, re.IGNORECASE):
            return replace(file, format="json") if _is_array(file) else file
    except FileNotFoundError:
        raise MissingInputError(
            f"{name} does not exist, or is a broken link. Check the name, or delete the link."
        ) from None
    except OSError as error:
        raise SourceError(f"{name} cannot be read: {error.strerror or error}.") from error
    return file


def _refuse_contents(file: InputFile) -> None:
    """Raise if a file has contents, though its size is given as 0, as in /proc."""
    with open_file(file) as stream:
        if stream.read(1):
            raise SourceError(
                f"{file.name} has contents, but its file system gives its size as 0 bytes, as "
                "/proc and some network mounts do. So it is not known when all of it was read. "
                "Copy it to a disk, and name the copy."
            )


def _is_array(file: InputFile) -> bool:
    """Whether a .json file is one array; many such files are JSON Lines instead."""
    with closing(Expanded(file)) as stream:
        try:
            return stream.read(1 << 16).removeprefix(BOM).lstrip()[:1] == b"["
        except SourceError:  # a damaged file; the error comes when it is read
            return False


def _suffixes(name: str) -> tuple[str | None, str | None]:
    """Format and compression by suffix: `a.jsonl.gz` is ("jsonl", "gzip")."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    compression = _COMPRESSED.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    return (_FORMATS.get(suffixes[-1]) if suffixes else None), compression


def _refuse_duplicates(files: list[InputFile]) -> None:
    seen: dict[str, str] = {}
    for file in files:
        # Files are compared by their real paths, because a link gives one file two names.
        key = file.path if file.remote else os.path.realpath(file.path)
        if key in seen:
            raise SourceError(
                f"{file.name} is listed twice (also as {seen[key]}), so its documents would be "
                "trained on twice as often. Name each file once; to repeat data, give it a weight."
            )
        seen[key] = file.name


def log_surprises(files: Sequence[InputFile], reading: ReadSettings) -> None:
    """Warn of byte order marks and Windows line ends in the first eight files of this machine."""
    for file in [each for each in files if each.path and not each.remote and each.size][:8]:
        if file.format in ("parquet", "arrow"):
            continue
        try:
            with closing(Expanded(file)) as stream:
                first = stream.read(1 << 16)
        except (SourceError, OSError):  # reported when the file is read
            return
        if first.startswith(BOM):
            _log.warning(
                "%s begins with a byte order mark. It is not part of the text, and is left out.",
                file.name,
            )
        by_line = file.format == "text" and reading.documents in ("lines", "paragraphs")
        if by_line and b"\r\n" in first:
            _log.warning(
                "%s has Windows line ends (CRLF), so documents end with a carriage return. If you "
                "want line feeds, convert it first, for example with dos2unix.",
                file.name,
            )
            return
