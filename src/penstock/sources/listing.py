"""The list of input files that the user named.

Paths, globs, directories and URLs become one list, sorted by the bytes of the names, so that
every machine has the same order. Nothing is guessed silently: a pattern that matches nothing, a
file that is listed twice, and a file with an unknown suffix in a directory are errors.
"""

import glob
import json
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from penstock.errors import MissingExtraError, MissingInputError, SourceError
from penstock.sources.settings import ReadSettings, Texts
from penstock.sources.walk import file_mode, find_files, matching, refuse_unlisted

_COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
_FORMATS = (
    dict.fromkeys((".txt", ".text", ".md"), "text")
    | dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl")
    | {".parquet": "parquet", ".arrow": "arrow"}
)
# Chained protocols are left out, and so are protocols that interpret the file they open
# (reference://, jinja): they would read or run something else than the file that the user named.
_PROTOCOLS = (
    *("abfs", "abfss", "adl", "az", "file", "ftp", "gcs", "gs", "hdfs", "hf", "http"),
    *("https", "memory", "s3", "s3a", "sftp", "webhdfs"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file to read, with its state at the time it was listed."""

    name: str
    """The path or URL as the user wrote it, without credentials."""
    path: str
    """The path or URL to open."""
    size: int
    """Bytes on disk, before decompression."""
    stamp: str
    """Modification time or ETag, to detect a file that changed after it was listed."""
    format: str
    compression: str | None = None
    texts: Texts | None = None
    """The documents, if they are in memory and not in a file."""

    @property
    def remote(self) -> bool:
        """Whether the file is opened through fsspec."""
        return "://" in self.path

    def describe(self) -> dict[str, str | int | None]:
        """The file as JSON, for the manifest."""
        return {
            "name": self.name,
            "bytes": self.size,
            "format": self.format,
            "compression": self.compression,
        }


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


def open_file(file: InputFile) -> BinaryIO:
    """Open `file` for reading; a compressed file is not decompressed.

    Raises:
        SourceError: the file was removed after it was listed.
    """
    try:
        if file.remote:
            return cast(BinaryIO, _filesystem(file.path).open(file.path, "rb"))
        return Path(file.path).open("rb", buffering=0)
    except FileNotFoundError:
        raise _gone(file) from None


def read_fully(stream: BinaryIO, num_bytes: int) -> bytes:
    """Read `num_bytes` of `stream`, fewer only at its end; one `stream.read` may return less."""
    # An unbuffered file returns what one system call gives: on Linux at most 2 GiB.
    data = stream.read(num_bytes)
    while len(data) < num_bytes and (more := stream.read(num_bytes - len(data))):
        data += more
    return data


def _gone(file: InputFile) -> SourceError:
    return SourceError(f"{file.name} was removed while it was read. Restore it and build again.")


def refuse_changed(file: InputFile) -> None:
    """Raise if `file` changed after it was listed.

    Raises:
        SourceError: the size, modification time or ETag differ.
    """
    if file.texts is not None:
        return
    try:
        size, stamp = _state(file.path)
    except FileNotFoundError:
        raise _gone(file) from None
    if (size, stamp) != (file.size, file.stamp):
        raise SourceError(
            f"{file.name} changed while it was read ({file.size:,} bytes when the build began, "
            f"{size:,} now, or another modification time). Its documents would be a mixture of "
            "two versions. Run the build again when nothing writes to the file."
        )


def _expand(pattern: str, reading: ReadSettings) -> list[InputFile]:
    if "://" in pattern:
        return _expand_remote(pattern, reading)
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
    nearby: list[str] = []
    with suppress(OSError):  # the folder may be missing too
        nearby = sorted(entry.name for entry in path.parent.iterdir())
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


def _state(path: str) -> tuple[int, str]:
    """The size of a file, and its modification time or ETag."""
    if "://" in path:
        return _remote_state(_filesystem(path).info(path))
    state = Path(path).stat()
    return state.st_size, str(state.st_mtime_ns)


def _input_file(path: str, reading: ReadSettings) -> InputFile:
    is_remote = "://" in path
    name = _redacted(path) if is_remote else path
    try:
        size, stamp = _state(path)
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
    # These formats compress their columns themselves.
    if kind in ("parquet", "arrow"):
        compression = None
    return InputFile(
        name=name, path=path, size=size, stamp=stamp, format=kind, compression=compression
    )


def _expand_remote(pattern: str, reading: ReadSettings) -> list[InputFile]:
    protocol = pattern.partition("://")[0]
    if "::" in pattern or protocol not in _PROTOCOLS:
        raise SourceError(
            f"{_redacted(pattern)} uses the protocol {protocol}://, which penstock does not read. "
            f"Choose one of: {', '.join(_PROTOCOLS)}."
        )
    filesystem = _filesystem(pattern)
    try:
        is_directory = filesystem.isdir(pattern)
    except OSError as error:
        raise SourceError(
            f"{_redacted(pattern)} cannot be reached: {error}. Check the address and the "
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
        raise MissingInputError(f"{_redacted(pattern)} matches no file.")
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


def _remote_state(info: dict[str, Any]) -> tuple[int, str]:
    if info.get("size") is None:
        raise SourceError(
            f"{_redacted(str(info.get('name')))}: the server does not give the length of the file, "
            "so an incomplete download could not be detected. Download it first."
        )
    # Each file system uses another key for its time or tag. The first key that has a value is used.
    stamps = (info.get(key) for key in ("ETag", "etag", "LastModified", "mtime", "created"))
    return int(info["size"]), next((str(stamp) for stamp in stamps if stamp is not None), "")


def _filesystem(path: str) -> Any:
    import fsspec

    try:
        return fsspec.core.url_to_fs(path)[0]
    except ImportError as error:
        extra = "s3" if path.startswith("s3") else None
        advice = f' Install it with: pip install "penstock[{extra}]"' if extra else ""
        raise MissingExtraError(
            f"Reading {_redacted(path)} needs a package that is not installed: {error}.{advice}"
        ) from error


def _suffixes(name: str) -> tuple[str | None, str | None]:
    """Format and compression by suffix: `a.jsonl.gz` is ("jsonl", "gzip")."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    compression = _COMPRESSED.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    return (_FORMATS.get(suffixes[-1]) if suffixes else None), compression


def _redacted(url: str) -> str:
    """`url` without user, password and query, which may be secret."""
    return re.sub(r"//[^/]*@", "//", url).partition("?")[0]


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
