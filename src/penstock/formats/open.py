"""`open_tokens`: recognise token files by their contents, and open them.

Several files are one set: a directory of token files, or a pattern such as `data/train_*.bin`.

    train_1.bin  train_2.bin  train_10.bin      in natural order: 2 is before 10
    train_1.bin  val_1.bin                      a directory with both is refused

A directory may have files of several splits or corpora, and one set of all of them would train on
the validation data. So all files of a directory must have one name, apart from the digits in it. A
pattern is taken as it is.
"""

import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from string import digits
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import MissingStoreError, StoreError
from penstock.formats.arrays import (
    in_memory,
    is_llmc,
    is_npy,
    open_llmc,
    open_npy,
    open_olmo,
    open_raw,
)
from penstock.formats.indexed import (
    is_datatrove,
    is_megatron,
    megatron_files,
    open_datatrove,
    open_megatron,
)
from penstock.formats.mapped import FilePart, parsing, size_of
from penstock.formats.options import TokenFormat, TokenOptions
from penstock.formats.shards import is_litdata, is_mds, open_litdata, open_mds, read_index
from penstock.formats.tables import is_table, open_dataset, open_parquet, table_kind
from penstock.formats.token_files import TokenFiles
from penstock.paths import expand_user, is_remote, redacted
from penstock.ranges import whole_number

if TYPE_CHECKING:
    from penstock.tokenize.tokenizer import Tokenizer


class _Format(NamedTuple):
    open: Callable[[Path, TokenOptions], list[FilePart]]
    matches: Callable[[Path], bool] | None
    """Whether the contents of a path show the format; None for files without a header."""
    of: tuple[str, ...] = ("file",)
    """What a path can be: a file, a directory, or either."""


_FORMATS = {
    "llmc": _Format(open_llmc, is_llmc),
    "megatron": _Format(open_megatron, is_megatron),
    "datatrove": _Format(open_datatrove, is_datatrove),
    "npy": _Format(open_npy, is_npy),
    "nanogpt": _Format(open_raw, None),
    "olmo": _Format(open_olmo, None),
    "mds": _Format(open_mds, is_mds, ("directory",)),
    "litdata": _Format(open_litdata, is_litdata, ("directory",)),
    "arrow": _Format(open_dataset, partial(is_table, "arrow"), ("file", "directory")),
    "parquet": _Format(open_parquet, partial(is_table, "parquet")),
}
_SETS = ("mds", "litdata")
_TABLES = ("arrow", "parquet")
TOKEN_SUFFIXES = (".bin", ".idx", ".ds", ".npy")
"""Usual suffixes of token files; the contents decide about the format."""
# A file that belongs to another one, by the ending that is replaced by that of the other one.
_COMPANIONS = {
    ".ds.index": ".ds",
    ".ds.loss": ".ds",
    ".ds.metadata": ".ds",
    ".idx": ".bin",
    ".csv.gz": ".npy",
}
_SHOWN = 5


def open_tokens(
    path: object,
    *,
    format: TokenFormat | None = None,
    dtype: str | None = None,
    vocab_size: int | None = None,
    tokenizer: object = None,
    column: str | None = None,
) -> TokenFiles:
    """Open token files of another tool in place, without copying them.

    Several files are one set: a directory of them, or a pattern such as `data/train_*.bin`, in
    natural order. Parquet files and files that are compressed are decoded into the cache once.

    The format is recognised by the contents of the files, and never by their names alone. Ids are
    checked when the files are opened: all of a small file, and 17 blocks of 64 KiB of a large one.
    `verify_tokens` checks all of them. docs/formats.md describes each format.

    Args:
        path: A file, a directory or a pattern; Megatron's pair of files by their prefix or by
            either file; or an array of NumPy, or a tensor on the CPU.
        format: The format, for files that have no header: "nanogpt" or "olmo". Also decides if a
            file could be of two formats.
        dtype: The dtype of ids in files without a header, if it is not the format's usual one, and
            in MDS columns of bytes. If the file records a dtype, it must be this one.
        vocab_size: The number of ids of the vocabulary. An id that is not below it is an error.
            Files without a header need this, or `tokenizer`.
        tokenizer: The tokenizer of the ids, as `build` takes it. Its vocabulary is used if
            `vocab_size` is not given, and `decode` needs it.
        column: The column with the ids, in MDS, Arrow and Parquet files, if its name is not
            "input_ids" or "tokens".

    Raises:
        StoreError: the format is not known, or the files are damaged, or an id is not valid.
        MissingStoreError: a file does not exist.
    """
    loaded: Tokenizer | None = None
    if tokenizer is not None:
        from penstock.tokenize.tokenizer import load_tokenizer

        loaded = load_tokenizer(tokenizer)
    if vocab_size is not None:
        vocab_size = whole_number("vocab_size", vocab_size)
        if vocab_size < 1:
            raise StoreError(f"vocab_size={vocab_size} must be at least 1.")
    elif loaded is not None:
        vocab_size = loaded.vocab_size
    if isinstance(path, str | os.PathLike):
        place, given = _placed(path), path
        # Another process may have another working directory.
        again: object = place.absolute()
        name, parts = _open_set(place, TokenOptions(format, dtype, vocab_size, None, column))
    else:
        given, again, name = "an array in memory", path, "array"
        if format is not None or column is not None:
            raise StoreError("format= and column= are for files, and not for an array in memory.")
        parts = [in_memory(path)]
    for part in parts:
        found = part.ids.array().dtype
        if dtype is not None and found.name != dtype:
            raise StoreError(
                f"{given} holds {found.name} ids, not dtype={dtype!r}. Leave dtype= out."
            )
    settings = {"format": format, "dtype": dtype, "vocab_size": vocab_size, "tokenizer": tokenizer}
    reopen = partial(open_tokens, again, column=column, **settings)  # type: ignore[arg-type]
    return TokenFiles(given, name, parts, vocab_size, loaded, reopen)


def _placed(path: str | os.PathLike[str]) -> Path:
    """Return the path of token files.

    Raises:
        StoreError: it is a URL.
    """
    if is_remote(path) or str(path).startswith("file://"):
        raise StoreError(
            f"{redacted(str(path))} is a URL, and token files are read from this machine. Copy "
            "them here, and pass their path."
        )
    return expand_user(path)


def recognised(path: Path) -> list[str]:
    """Return the formats that the contents of a file or a directory show.

    Raises:
        MissingStoreError: there is no such file, and it is no prefix of Megatron's files.
    """
    kind = "directory" if path.is_dir() else "file"
    if not path.exists() and is_megatron(path):  # a prefix, or one of the pair is missing
        return ["megatron"]
    if kind == "file":
        size_of(path)
    return [
        name
        for name, format in _FORMATS.items()
        if kind in format.of and format.matches is not None and format.matches(path)
    ]


def _contents(path: Path) -> list[str]:
    """Return the formats that contents show; also of a table without ids, whose reader refuses it.

    The error of the reader says which columns there are, and how to name one.
    """
    return recognised(path) or table_kind(path)


def _open_set(place: Path, given: TokenOptions) -> tuple[str, list[FilePart]]:
    """Return the format, and the tokens of each file."""
    if given.format is not None and given.format not in _FORMATS:
        raise StoreError(f"format={given.format!r} is not one of {', '.join(_FORMATS)}.")
    files = _members(place, given.format)
    opened = [_open_file(each, given) for each in files]
    names = sorted({name for name, _ in opened})
    if len(names) > 1:
        raise StoreError(
            f"{place} has files of several formats: {', '.join(names)}. Pass a pattern of the "
            "files of one format, and open the others on their own."
        )
    if given.column is not None and names[0] not in ("mds", *_TABLES):
        raise StoreError(f"column={given.column!r}: {place} ({names[0]}) has no columns.")
    parts = [part for _, parts in opened for part in parts]
    if not parts:
        raise StoreError(f"{place} ({names[0]}) lists no files of tokens.")
    if names[0] == "olmo":
        # All or none of the files have a table of documents, as they have masks.
        parts = [
            part._replace(path=file, masks=() if part.bounds is None else ("table of documents",))
            for file, part in zip(files, parts, strict=True)
        ]
    _refuse_lost_masks(parts)
    return names[0], parts


def _refuse_lost_masks(parts: Sequence[FilePart]) -> None:
    """Raise if some files of a set have a mask or a table of documents, and others do not."""
    for mask in sorted({mask for part in parts for mask in part.masks}):
        lacking = [part for part in parts if mask not in part.masks]
        if lacking:
            raise StoreError(
                f"{lacking[0].path} has no {mask}, but {len(parts) - len(lacking):,} of "
                f"{len(parts):,} files have it. Without it, tokens would be trained on that should "
                "not be, or documents be lost. Restore it. To read the files as they are, open "
                "each one and pass a list of them."
            )


def _members(place: Path, format: str | None) -> list[Path]:
    """Return the files of a pattern or of a directory, or the place itself."""
    if is_pattern(place):
        return _matching(place)
    if not place.is_dir() or format in _SETS or _contents(place):
        return [place]
    if (place / "penstock.json").exists():
        raise StoreError(f"{place} is a store of penstock. Open it with TokenStore.")
    # Files without a header are not recognised, and the caller says what they are.
    is_raw = format is not None and _FORMATS[format].matches is None
    return _files_of_one_name(place, lambda path: is_raw or bool(_contents(path)))


def _open_file(path: Path, given: TokenOptions) -> tuple[str, list[FilePart]]:
    found = _contents(path)
    if given.format is None and len(found) != 1:
        raise StoreError(_undecided(path, found))
    name = given.format or found[0]
    is_raw = _FORMATS[name].matches is None
    if found and name not in found and (is_raw or name in (*_SETS, *_TABLES)):
        raise StoreError(
            f"{path} has the contents of the format {found[0]!r}, and not of {name!r}: its header "
            f'would become tokens. Leave format= out, or pass format="{found[0]}".'
        )
    if is_raw:
        refuse_member(path)
        if given.vocab_size is None:
            raise StoreError(
                f"{path} has no header, so a wrong dtype would not be noticed. Pass vocab_size= or "
                f'tokenizer= with format="{name}".'
            )
    with parsing(path, name):
        return name, _FORMATS[name].open(path, given)


def refuse_member(path: Path) -> None:
    """Raise StoreError if the index beside a file lists it: its header would become tokens."""
    if (found := set_of(path)) is not None:
        name, directory = found
        raise StoreError(
            f"{path} is one file of a set of the format {name!r}, and its header would become "
            f"tokens. Pass its directory, {directory}, without a format or dtype."
        )


def set_of(path: Path) -> tuple[str, Path] | None:
    """Return the format and the directory of the set with a file, which may be given by a link."""
    for place in (path, path.resolve()):
        index = read_index(place.parent / "index.json")
        # Other files may be in the same directory. The name as `dumps` writes it in the index:
        if json.dumps(place.name) in json.dumps(index):
            for format in _SETS:
                if format in recognised(place.parent):
                    return format, place.parent
    return None


def _undecided(path: Path, found: list[str]) -> str:
    if found:
        names = " or ".join(f'format="{each}"' for each in found)
        return f"{path} could be of several formats: {', '.join(found)}. Pass {names}."
    if path.is_file() and not size_of(path):
        return f"{path} is empty."
    if path.name == "index.json" or path.suffix == ".mds" or set_of(path) is not None:
        return f"{path} is one file of a set. Pass its directory, {path.parent}."
    if path.suffix == ".ds":
        return (
            f"{path} needs the index {path.name}.index, which datatrove writes beside it. It is "
            "missing, or counts another number of ids. Restore it."
        )
    known = ", ".join(name for name, format in _FORMATS.items() if format.matches is not None)
    return (
        f"{path} does not have the contents of a format with a header ({known}). If it "
        'holds ids without a header, name them: open_tokens(path, format="nanogpt", vocab_size=…), '
        'or format="olmo" for an array of dolma; on the command line, --format and --vocab-size; '
        "in a recipe, the same settings in the table data.tokens."
    )


def token_files_at(path: object, **given: Any) -> TokenFiles | None:
    """Open the token files at a path that may also be a store's; None if it is not of token files.

    Every place that takes a store uses this, so all take and refuse the same files. `given` are the
    arguments of `open_tokens`. The reader of stores refuses other files: it says how to build one.
    """
    if not isinstance(path, str | os.PathLike) or is_remote(path):
        return None
    place = expand_user(path)
    is_named = any(given.get(name) is not None for name in ("format", "column"))
    # A table without ids and a pattern without matches are opened too: the error says why not.
    is_refused = bool(table_kind(place)) or (is_pattern(place) and not any(_found_by(place)))
    if (is_named and holds_files(place)) or is_token_file(place) or is_refused:
        return open_tokens(path, **given)
    return None


def is_token_file(path: Path) -> bool:
    """Return whether a path is of token files: by their contents, or by a usual suffix.

    A suffix alone opens nothing: `open_tokens` then says which argument is missing. Any other file
    is left to the reader of text.
    """
    if not path.is_dir() and all(each.exists() for each in megatron_files(path)):
        return True
    if path.is_file():
        return path.suffix in TOKEN_SUFFIXES or bool(recognised(path))
    if is_pattern(path):
        files = [each for each in _without_companions([*_found_by(path)]) if each.exists()]
    else:
        files = _files_in(path) if path.is_dir() else []
        # A store, finished or not, is a directory of arrays.
        if any(each.name == "penstock.json" or each.name.endswith(".tokens.npy") for each in files):
            return False
        if files and (recognised(path) or (path / "dataset_dict.json").is_file()):
            return True
    # One file stands for all: a directory of text may have millions of files.
    usual = [each for each in files if each.suffix in (*TOKEN_SUFFIXES, ".arrow", ".parquet")]
    ordered = sorted(usual or files, key=_natural_key)
    first = next((each for each in ordered if each.is_file()), None)
    return first is not None and is_token_file(first)


def holds_files(path: Path) -> bool:
    """Return whether a path is a file, a pattern, or a directory with files that is no store."""
    if path.is_dir():
        return not (path / "penstock.json").exists() and bool(_files_in(path))
    return path.is_file() or is_pattern(path)


def is_pattern(path: Path) -> bool:
    """Return whether a path is a pattern, and not the name of a file or of Megatron's files."""
    is_name = path.exists() or all(each.exists() for each in megatron_files(path))
    return glob.has_magic(str(path)) and not is_name


def _found_by(pattern: Path) -> Iterator[Path]:
    """Yield the paths that a pattern matches; names of directories that exist are no patterns."""
    root = next((each for each in pattern.parents if each.exists()), Path())
    whole = Path(glob.escape(str(root))) / pattern.relative_to(root)
    return map(Path, glob.iglob(str(whole), recursive=True))  # noqa: PTH207


def _natural_key(path: Path) -> list[tuple[int, int, str]]:
    """Return a key that sorts numbers in paths by their value.

    >>> sorted([Path("a10"), Path("a2"), Path("a1b")], key=_natural_key)
    [PosixPath('a1b'), PosixPath('a2'), PosixPath('a10')]
    """
    pieces = re.findall(r"[0-9]+|[^0-9]+", str(path))
    return [(0, int(each), each) if each[0] in digits else (1, 0, each) for each in pieces]


def _matching(pattern: Path) -> list[Path]:
    """Return the files that a pattern matches, in natural order.

    Raises:
        MissingStoreError: it matches no file.
        StoreError: it matches a directory.
    """
    files = sorted(_without_companions([*_found_by(pattern)]), key=_natural_key)
    if not files:
        raise MissingStoreError(f"{pattern} matches no file (working directory: {Path.cwd()}).")
    if directories := [each for each in files if each.is_dir()]:
        raise StoreError(
            f"{pattern} matches the directory {directories[0]}. Use a pattern of files, or open "
            "each directory and pass a list of them to Windows, Packs or Documents."
        )
    return files


def _without_companions(paths: Sequence[Path]) -> list[Path]:
    """Return the paths without indices, masks and tables of other paths among them."""
    known = {str(each) for each in paths}

    def belongs(path: str) -> bool:
        return any(
            path.endswith(ending) and path.removesuffix(ending) + other in known
            for ending, other in _COMPANIONS.items()
        )

    return [each for each in paths if not belongs(str(each))]


def _files_in(directory: Path) -> list[Path]:
    """Return the files of a directory without hidden ones, in natural order."""
    found = [each for each in directory.iterdir() if not each.name.startswith(".")]
    # A link whose file is missing is kept, so that its reader refuses it.
    files = _without_companions([each for each in found if not each.is_dir()])
    return sorted(files, key=_natural_key)


def _files_of_one_name(directory: Path, is_known: Callable[[Path], bool]) -> list[Path]:
    """Return the token files of a directory, in natural order.

    Raises:
        StoreError: the directory has other files, other directories, or files of several names.
    """
    files = _files_in(directory)
    inside = sorted(each.name for each in directory.iterdir() if each.is_dir())
    inside = [each for each in inside if not each.startswith(".")]
    if not files or inside:
        shown = f" It has the directories {', '.join(inside[:_SHOWN])}." if inside else ""
        raise StoreError(
            f"{directory} is a directory, and not one of token files only.{shown} Pass one "
            f"directory, such as one split of a DatasetDict, or a pattern such as "
            f"'{directory}/**/*.bin'. A store is opened with TokenStore."
        )
    others = [each.name for each in files if not is_known(each)]
    if others:
        raise StoreError(
            f"{directory} has {len(others):,} of {len(files):,} files without the contents of a "
            f"known format: {', '.join(others[:_SHOWN])}. Pass a pattern that matches only token "
            f"files, such as '{directory}/*.bin'. Files without a header need format=."
        )
    stems = sorted({re.sub(r"[0-9]+", "*", each.name) for each in files})
    if len(stems) > 1:
        raise StoreError(
            f"{directory} has files of several names: {', '.join(stems[:_SHOWN])}. They may be of "
            f"several splits, so pass a pattern, such as '{directory / stems[0]}', or "
            f"'{directory}/*' for all."
        )
    return files
