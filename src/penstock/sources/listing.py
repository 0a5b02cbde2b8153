"""The list of input files that the user named.

Paths, globs, directories and URLs become one list, sorted by the bytes of the names, so that
every machine has the same order. Nothing is guessed silently: a pattern that matches nothing, a
file that is listed twice, and a file with an unknown suffix in a directory are errors.
"""

import glob
import json
import logging
import os
import re
import stat
import uuid
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.errors import MissingInputError, SourceError
from penstock.paths import expand_user
from penstock.sources.decompress import Expanded
from penstock.sources.files import BOM, STDIN, InputFile, file_state, file_system, redacted
from penstock.sources.settings import ReadSettings, Texts
from penstock.sources.walk import file_mode, find_files, matching, refuse_unlisted

_log = logging.getLogger("penstock")
_COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
_FORMATS = (
    dict.fromkeys((".txt", ".text", ".md"), "text")
    | dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl")
    | {".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".arrow": "arrow"}
)
# Chained protocols are left out, and so are protocols that interpret the file they open
# (reference://, jinja): they would read or run something else than the file that the user named.
_PROTOCOLS = (
    *("abfs", "abfss", "adl", "az", "file", "ftp", "gcs", "gs", "hdfs", "hf", "http"),
    *("https", "memory", "s3", "s3a", "sftp", "webhdfs"),
)


def list_files(
    inputs: str | os.PathLike[str] | Sequence[Any] | Texts, reading: ReadSettings
) -> list[InputFile]:
    """The files that `inputs` names, sorted by the bytes of their names."""
    if isinstance(inputs, Texts):
        size, stamp = inputs.num_bytes, inputs.digest
        name = f"texts-{stamp[:16]}"  # different texts have different names
        return [InputFile(name=name, path="", size=size, stamp=stamp, format="texts", texts=inputs)]
    wanted = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    if not wanted:
        raise SourceError("No inputs were given. Name files, directories, globs or URLs.")
    files: list[InputFile] = []
    for each in wanted:
        files += _expand(os.fspath(each), reading)
    # Sorted by bytes, because an order by the rules of a language depends on the machine's locale.
    files.sort(key=lambda file: os.fsencode(file.name))
    _refuse_duplicates(files)
    return files


def _stdin(reading: ReadSettings) -> InputFile:
    """Standard input as a file of unknown size."""
    kind = reading.format if reading.format != "auto" else "text"
    if kind in ("parquet", "arrow"):
        raise SourceError(
            f"A {kind} file cannot be read in order, from its beginning to its end, as standard "
            "input (-) has to be. Name the file."
        )
    _log.warning(
        "Standard input (-) is read as %s. If a build from it is interrupted, it cannot be "
        "resumed and has to begin again in an empty directory.",
        kind,
    )
    # No two runs have the same stamp, because their inputs cannot be compared.
    return InputFile(name=STDIN, path=STDIN, size=0, stamp=uuid.uuid4().hex, format=kind)


def _expand(pattern: str, reading: ReadSettings) -> list[InputFile]:
    if pattern == STDIN:
        return [_stdin(reading)]
    protocol, is_url, _ = pattern.partition("://")
    if is_url and not re.search(r"\s", protocol):
        return _expand_remote(pattern, reading)
    pattern = str(expand_user(pattern)) if pattern.startswith("~") else pattern
    path = Path(pattern)
    # Existing files are looked for first, because a file name may contain characters of a glob.
    kind = file_mode(str(path))
    if stat.S_ISDIR(kind):
        return _expand_directory(path, reading)
    if kind:
        return [_input_file(str(path), reading)]
    found = matching(pattern) if glob.has_magic(pattern) else []
    if found:
        return [_input_file(name, reading) for name in found]
    # Several words without the suffix of a file are rather a text than a name.
    if re.search(r"\s", pattern) and _suffixes(pattern)[0] is None:
        raise SourceError(
            f"There is no file {pattern!r:.60} (looked from {Path.cwd()}). Inputs are names of "
            "files. If this is a text, give it as penstock.Texts([text]) in Python, or write it to "
            "a file."
        )
    nearby: list[str] = []
    with suppress(OSError):  # the folder may be missing too
        names = (entry.name for entry in path.parent.iterdir())
        nearby = sorted(name for name in names if not name.startswith("."))
    raise MissingInputError(
        f"{pattern} matches no file (working directory: {Path.cwd()})."
        + (f" In {Path.cwd() / path.parent}: {', '.join(nearby[:5])}." if nearby else "")
    )


def _expand_directory(path: Path, reading: ReadSettings) -> list[InputFile]:
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_bytes()).get("splits", [])
        raise SourceError(
            f"{path} is a Hugging Face DatasetDict with the splits {', '.join(splits)}. "
            f"Name one of them, for example {path / (splits or ['train'])[0]}."
        )
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        names = _dataset_files(path / "state.json")
        return [_input_file(str(path / name), reading) for name in names]
    found = [Path(name) for name in find_files(str(path))]
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


def _is_array(file: InputFile, reading: ReadSettings) -> bool:
    """Whether a .json file is one array; many such files are JSON Lines instead."""
    if not file.size:
        return False
    with closing(Expanded(file, reading.max_expansion)) as stream:
        try:
            return stream.read(1 << 16).removeprefix(BOM).lstrip()[:1] == b"["
        except SourceError:  # a damaged file; the error comes when it is read
            return False


def _expand_remote(pattern: str, reading: ReadSettings) -> list[InputFile]:
    protocol = pattern.partition("://")[0]
    if "::" in pattern or protocol not in _PROTOCOLS:
        raise SourceError(
            f"{redacted(pattern)} uses the protocol {protocol}://, which penstock does not read. "
            f"Choose one of: {', '.join(_PROTOCOLS)}."
        )
    filesystem = file_system(pattern)
    try:
        is_directory = filesystem.isdir(pattern)
    except OSError as error:
        raise SourceError(
            f"{redacted(pattern)} cannot be reached: {error}. Check the address and the "
            "network, or download the file and name the copy."
        ) from error
    if is_directory:
        refuse_unlisted(filesystem, pattern)
        paths = [
            path for path in filesystem.find(pattern) if not path.rsplit("/", 1)[-1].startswith(".")
        ]
    # In an HTTP address, `?` begins the query and is not a wildcard.
    elif glob.has_magic(pattern.partition("?")[0] if protocol.startswith("http") else pattern):
        _refuse_unlisted_glob(filesystem, pattern)
        paths = [path for path in filesystem.glob(pattern) if not filesystem.isdir(path)]
    else:
        paths = [pattern]
    if not paths:
        raise MissingInputError(f"{redacted(pattern)} matches no file.")
    # fsspec returns most paths without their protocol. In file:// and memory:// a leading slash is
    # part of the name; in other protocols it is not.
    prefix, slashes = f"{protocol}://", "" if protocol in ("file", "memory") else "/"
    urls = [path if "://" in path else prefix + path.lstrip(slashes) for path in paths]
    return [_input_file(url, reading) for url in urls]


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
