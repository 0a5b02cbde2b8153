"""The list of input files that the user named.

Paths, globs, directories and URLs become one list, sorted by the bytes of the names, so that
every machine has the same order. Nothing is guessed silently: a pattern that matches nothing, a
file that is listed twice, and a file with an unknown suffix in a directory are errors. So are a
pipe, a socket, a device, a broken link, and a file with contents whose size is given as 0. What is
left out, such as hidden files, is counted by kind and logged, and a build records it.
"""

import glob
import json
import logging
import os
import re
import stat
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import MissingInputError, SourceError
from penstock.options import ReadSettings
from penstock.paths import expand_user, nearby_names, redacted
from penstock.sources.decompress import Expanded
from penstock.sources.files import BOM, InputFile, file_state, open_file
from penstock.sources.remote import file_system, without_secrets
from penstock.sources.settings import Texts
from penstock.sources.walk import Skipped, file_mode, find_files, matching, refuse_unlisted

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


@dataclass(frozen=True, slots=True)
class Listing:
    """The files that inputs name, and what was left out to find them."""

    files: list[InputFile]
    skipped: dict[str, int]
    """How many paths were left out, by kind; the kinds are in `penstock.sources.walk`."""


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
    wanted = []
    for each in [inputs] if isinstance(inputs, str | os.PathLike) else inputs:
        if not isinstance(each, str | os.PathLike):  # checked one by one: datasets are large
            raise SourceError(
                f"{each!r:.60} is not a path. Pass texts as penstock.Texts, and a Hugging Face "
                "dataset to penstock.integrations.huggingface.build_dataset."
            )
        wanted.append(each)
    if not wanted:
        raise SourceError("No inputs were given. Name files, directories, globs or URLs.")
    files: list[InputFile] = []
    skipped = Skipped()
    for each in wanted:
        files += _expand(os.fspath(each), reading, skipped)
    # Sorted by bytes, because an order by the rules of a language depends on the machine's locale.
    files.sort(key=lambda file: os.fsencode(file.name))
    _refuse_duplicates(files)
    _log_guesses(files, reading)
    if skipped.counts:
        _log.warning("Not read: %s. To read any of these, name them.", skipped)
    return Listing(files, skipped.counts)


def _log_guesses(files: list[InputFile], reading: ReadSettings) -> None:
    """Log which files are read as text only because their suffix is not known."""
    guessed = [file.name for file in files if _suffixes(file.name)[0] is None]
    if guessed and reading.format == "auto":
        _log.warning(
            "Files whose suffix penstock does not know are read as text: %s of %s (%s).",
            f"{len(guessed):,}",
            f"{len(files):,}",
            ", ".join(guessed[:3]) + (", …" if len(guessed) > 3 else ""),
        )


def _expand(pattern: str, reading: ReadSettings, skipped: Skipped) -> list[InputFile]:
    protocol, is_url, rest = pattern.partition("://")
    if is_url and protocol == "file":
        # A path by another name. fsspec would take a link to a directory for a file, and would
        # wait for ever for somebody to write to a pipe.
        pattern = rest
    elif is_url and not re.search(r"\s", protocol):
        return _expand_remote(pattern, reading, skipped)
    pattern = str(expand_user(pattern)) if pattern.startswith("~") else pattern
    path = Path(pattern)
    # Existing files are looked for first, because a file name may contain characters of a glob.
    kind = file_mode(str(path))
    if stat.S_ISDIR(kind):
        return _expand_directory(path, reading, skipped)
    if kind:
        return [_input_file(str(path), reading)]
    found = matching(pattern, skipped) if glob.has_magic(pattern) else []
    if found:
        return [_input_file(name, reading) for name in found]
    # Several words without the suffix of a file are rather a text than a name.
    if re.search(r"\s", pattern) and _suffixes(pattern)[0] is None:
        raise SourceError(
            f"There is no file {pattern!r:.60} (looked from {Path.cwd()}). Inputs are names of "
            "files. If this is a text, give it as penstock.Texts([text]) in Python, or write it to "
            "a file."
        )
    raise MissingInputError(
        f"{pattern} matches no file (working directory: {Path.cwd()}).{nearby_names(path)}"
    )


def _expand_directory(path: Path, reading: ReadSettings, skipped: Skipped) -> list[InputFile]:
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_bytes()).get("splits", [])
        raise SourceError(
            f"{path} is a Hugging Face DatasetDict with the splits {', '.join(splits)}. "
            f"Name one of them, for example {path / (splits or ['train'])[0]}."
        )
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        names = _dataset_files(path / "state.json")
        return [_input_file(str(path / name), reading) for name in names]
    if any((path / side / "penstock.json").is_file() for side in ("", "train", "val")):
        raise SourceError(f"{path} is a store: it holds tokens, not text. Name files of text.")
    found = [Path(name) for name in find_files(str(path), skipped)]
    if not found:
        raise SourceError(f"{path} is a directory without files.")
    unknown = [file for file in found if _suffixes(file.name)[0] is None]
    if unknown and reading.format == "auto":
        shown = ", ".join(str(file) for file in sorted(unknown)[:5])
        raise SourceError(
            f"The format of {len(unknown):,} of {len(found):,} files in {path} is not known from "
            f"their suffixes ({shown}). Name the files to read with a glob such as "
            f"'{path}/**/*.txt', or read all of them as text with format=\"text\" (--format text) "
            "of penstock.build."
        )
    return [_input_file(str(file), reading) for file in found]


def _dataset_files(state: Path) -> list[str]:
    """The names of the files of a Hugging Face dataset; they are beside its state.json."""
    try:
        entries = json.loads(state.read_bytes())["_data_files"]
        return [Path(entry["filename"]).name for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{state} does not list the files of a dataset: {error!r}.") from None


def _input_file(path: str, reading: ReadSettings) -> InputFile:
    is_remote = "://" in path
    name = redacted(path) if is_remote else path
    try:
        size, stamp = file_state(path)
    except FileNotFoundError:
        raise MissingInputError(
            f"{name} does not exist, or is a broken link. Check the name, or delete the link."
        ) from None
    except OSError as error:
        raise SourceError(f"{name} cannot be read: {error.strerror or error}.") from error
    if not is_remote and not stat.S_ISREG(file_mode(path)):
        raise SourceError(
            f"{path} is not a regular file, and a build may read it twice. Copy it to a file."
        )
    if size == 0:
        _refuse_contents(name, path)
    # The suffix is taken from the name without its query: a signed URL may end with anything.
    guessed, compression = _suffixes(name)
    kind = reading.format if reading.format != "auto" else guessed or "text"
    # A stream reads in the background, perhaps after a change of the working directory.
    opened = path if is_remote else os.path.join(Path.cwd(), path)  # noqa: PTH118
    # These formats compress their columns themselves.
    if kind in ("parquet", "arrow"):
        compression = None
    file = InputFile(
        name=name, path=opened, size=size, stamp=stamp, format=kind, compression=compression
    )
    is_json = reading.format == "auto" and re.search(r"\.json(\.\w+)?$", name, re.IGNORECASE)
    return replace(file, format="json") if is_json and _is_array(file, reading) else file


def _refuse_contents(name: str, path: str) -> None:
    """Raise if a file has contents, though its size is given as 0, as in /proc."""
    file = InputFile(name=name, path=path, size=0, stamp="", format="text")
    try:
        with open_file(file) as stream:
            is_empty = not stream.read(1)
    except OSError as error:
        raise SourceError(f"{name} cannot be read: {error.strerror or error}.") from error
    if not is_empty:
        raise SourceError(
            f"{name} has contents, but its file system gives its size as 0 bytes, as /proc and "
            "some network mounts do. So it is not known when all of it was read. Copy it to a "
            "disk, and name the copy."
        )


def _is_array(file: InputFile, reading: ReadSettings) -> bool:
    """Whether a .json file is one array; many such files are JSON Lines instead."""
    if not file.size:
        return False
    with closing(Expanded(file)) as stream:
        try:
            return stream.read(1 << 16).removeprefix(BOM).lstrip()[:1] == b"["
        except SourceError:  # a damaged file; the error comes when it is read
            return False


def _expand_remote(pattern: str, reading: ReadSettings, skipped: Skipped) -> list[InputFile]:
    protocol = pattern.partition("://")[0]
    if "::" in pattern or protocol not in _PROTOCOLS:
        raise SourceError(
            f"{redacted(pattern)} uses the protocol {protocol}://, which penstock does not read. "
            f"Choose one of: {', '.join(_PROTOCOLS)}."
        )
    filesystem = file_system(pattern)
    try:
        is_directory = filesystem.isdir(pattern)
    except Exception as error:  # noqa: BLE001  (of aiohttp, botocore and others, by protocol)
        raise SourceError(
            f"{redacted(pattern)} cannot be reached: {without_secrets(error)}. Check the address "
            "and the network, or download the file and name the copy."
        ) from None
    if is_directory:
        refuse_unlisted(filesystem, pattern)
        paths = _visible_below(filesystem, pattern, skipped)
    # In an HTTP address, `?` begins the query and is not a wildcard.
    elif glob.has_magic(pattern.partition("?")[0] if protocol.startswith("http") else pattern):
        _refuse_unlisted_glob(filesystem, pattern)
        matched = filesystem.glob(pattern)
        paths = [path for path in matched if not filesystem.isdir(path)]
        # Directories that `**` enters are matched too; only their own files would be missing.
        skipped.add(
            "directories",
            *(
                redacted(path)
                for path in matched
                if path not in paths and not any(each.startswith(f"{path}/") for each in matched)
            ),
        )
    else:
        paths = [pattern]
    if not paths:
        raise MissingInputError(f"{redacted(pattern)} matches no file.")
    # fsspec returns most paths without their protocol. In memory:// a leading slash is part of the
    # name; in other protocols it is not.
    prefix, slashes = f"{protocol}://", "" if protocol == "memory" else "/"
    urls = [path if "://" in path else prefix + path.lstrip(slashes) for path in paths]
    return [_input_file(url, reading) for url in urls]


def _visible_below(filesystem: Any, folder: str, skipped: Skipped) -> list[str]:
    """The files below a remote folder, except hidden ones and those in hidden folders."""
    root = str(filesystem._strip_protocol(folder)).rstrip("/")
    root = root.partition("://")[2] or root  # an HTTP address keeps its protocol
    paths = []
    for path in filesystem.find(folder):
        below = path.partition("://")[2] or path
        parts = below.removeprefix(root).split("/")
        hidden = next((number for number, part in enumerate(parts) if part[:1] == "."), None)
        if hidden is None:
            paths.append(path)
        else:  # a hidden folder counts once
            skipped.add("hidden", redacted(root + "/".join(parts[: hidden + 1])))
    return paths


def _refuse_unlisted_glob(filesystem: Any, pattern: str) -> None:
    """Raise if a directory that the pattern searches cannot be listed."""
    protocol, _, path = pattern.partition("://")
    parts = path.split("/")
    first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    root = "/".join(parts[:first])
    depth = None if "**" in path else len(parts) - first
    refuse_unlisted(filesystem, f"{protocol}://{root}", depth)


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
