"""`open_tokens`: recognise token files by their contents, and open them."""

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import MissingStoreError, StoreError
from penstock.formats.datatrove import is_datatrove, open_datatrove
from penstock.formats.index_file import read_index
from penstock.formats.litdata import is_litdata, open_litdata
from penstock.formats.llmc import is_llmc, open_llmc
from penstock.formats.mapped import first_bytes, size_of
from penstock.formats.mds import is_mds, open_mds
from penstock.formats.megatron import is_megatron, open_megatron
from penstock.formats.memory import HasArray, in_memory
from penstock.formats.names import TokenFormat
from penstock.formats.npy import is_npy, open_npy
from penstock.formats.raw import open_olmo, open_raw
from penstock.formats.sets import is_pattern, matching, token_files_in
from penstock.formats.tables import (
    is_table,
    open_dataset,
    open_parquet,
    table_kind,
)
from penstock.formats.token_files import FilePart, Settings, TokenFiles
from penstock.paths import expand_user, is_remote, redacted
from penstock.ranges import whole_number

if TYPE_CHECKING:
    from penstock.tokenize.tokenizer import Tokenizer

# Formats that their contents show, each with its test: of files, and of directories.
_KNOWN: dict[str, Callable[[Path], bool]] = {
    "llmc": is_llmc,
    "megatron": is_megatron,
    "datatrove": is_datatrove,
    "npy": is_npy,
    "arrow": partial(is_table, "arrow"),
    "parquet": partial(is_table, "parquet"),
}
_DIRECTORIES = {"mds": is_mds, "litdata": is_litdata, "arrow": _KNOWN["arrow"]}
_ONE_FILE: dict[str, Callable[[Path], FilePart]] = {
    "llmc": open_llmc,
    "megatron": open_megatron,
    "datatrove": open_datatrove,
    "npy": open_npy,
}
_WITH_COLUMNS: dict[str, Callable[[Path, Settings], list[FilePart]]] = {
    "mds": open_mds,
    "litdata": open_litdata,
    "arrow": open_dataset,
    "parquet": open_parquet,
}
_RAW = ("nanogpt", "olmo")
_FORMATS = (*_ONE_FILE, *_RAW, *_WITH_COLUMNS)


def open_tokens(
    path: str | os.PathLike[str] | HasArray,
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
    loaded = _loaded(tokenizer)
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
        name, parts = _open_set(place, format, Settings(dtype, vocab_size, column))
    else:
        given, again, name = "an array in memory", path, "array"
        parts = [in_memory(path, format=format, column=column)]
    for part in parts:
        found = part.ids.array().dtype
        if dtype is not None and found.name != dtype:
            raise StoreError(
                f"{given} holds {found.name} ids, not dtype={dtype!r}. Leave dtype= out."
            )
    settings = {"format": format, "dtype": dtype, "vocab_size": vocab_size, "tokenizer": tokenizer}
    reopen = partial(open_tokens, again, column=column, **settings)  # type: ignore[arg-type]
    return TokenFiles(given, name, parts, vocab_size, loaded, reopen)


def _loaded(tokenizer: object) -> "Tokenizer | None":
    if tokenizer is None:
        return None
    from penstock.tokenize.tokenizer import load_tokenizer

    return load_tokenizer(tokenizer)


def _placed(path: str | os.PathLike[str]) -> Path:
    """Return the path of token files.

    Raises:
        StoreError: it is a URL.
    """
    if is_remote(path):
        url = redacted(str(path))
        raise StoreError(f"{url} is not on this machine. Copy the token files here first.")
    if str(path).startswith("file://"):
        raise StoreError(f"{path} is a URL. Pass the path alone, without file://.")
    return expand_user(path)


def recognised(path: Path) -> list[str]:
    """Return the formats that the contents of a file or a directory show.

    Raises:
        MissingStoreError: there is no such file, and it is no prefix of Megatron's files.
    """
    if path.is_dir():
        return [name for name, matches in _DIRECTORIES.items() if matches(path)]
    if not path.exists() and is_megatron(path):  # a prefix, or one of the pair is missing
        return ["megatron"]
    size_of(path)
    return [name for name, matches in _KNOWN.items() if matches(path)]


def _open_set(place: Path, format: str | None, given: Settings) -> tuple[str, list[FilePart]]:
    """Return the format, and the tokens of each file."""
    if format is not None and format not in _FORMATS:
        raise StoreError(f"format={format!r} is not one of {', '.join(_FORMATS)}.")
    files = _members(place, format)
    opened = [_open_file(each, format, given) for each in files]
    names = sorted({name for name, _ in opened})
    if len(names) > 1:
        raise StoreError(
            f"{place} has files of several formats: {', '.join(names)}. Pass a pattern of the "
            "files of one format, and open the others on their own."
        )
    if given.column is not None and names[0] not in ("mds", "arrow", "parquet"):
        raise StoreError(f"column={given.column!r}: {place} ({names[0]}) has no columns.")
    if names[0] == "olmo":
        _refuse_lost_documents(files, [parts[0] for _, parts in opened])
    parts = [part for _, parts in opened for part in parts]
    if not parts:
        raise StoreError(f"{place} ({names[0]}) lists no files of tokens.")
    _refuse_lost_masks(parts)
    return names[0], parts


def _refuse_lost_masks(parts: Sequence[FilePart]) -> None:
    """Raise if some files of a set have a mask, and others do not."""
    for mask in sorted({mask for part in parts for mask in part.masks}):
        lacking = [part for part in parts if mask not in part.masks]
        if lacking:
            raise StoreError(
                f"{lacking[0].path} has no {mask}, but {len(parts) - len(lacking):,} of "
                f"{len(parts):,} files have it. Tokens that it would exclude would be trained on. "
                "Restore it. To read the files as they are, open each one and pass a list of them."
            )


def _refuse_lost_documents(files: Sequence[Path], parts: Sequence[FilePart]) -> None:
    """Raise if some files of a set have a table of documents, and others do not."""
    lacking = [file for file, part in zip(files, parts, strict=True) if part.bounds is None]
    if 0 < len(lacking) < len(files):
        raise MissingStoreError(
            f"{lacking[0].with_suffix('.csv.gz')} does not exist, but {len(files) - len(lacking):,}"
            f" of {len(files):,} files have such a table, and the documents of all would be lost. "
            "Restore it. To read the ids without documents, open each file and pass a list of them."
        )


def _contents(path: Path) -> list[str]:
    """Return the formats that contents show; also of a table without ids, whose reader refuses it.

    The error of the reader says which columns there are, and how to name one.
    """
    return recognised(path) or table_kind(path)


def _members(place: Path, format: str | None) -> list[Path]:
    """Return the files of a pattern or of a directory, or the place itself."""
    if is_pattern(place):
        return matching(place)
    if not place.is_dir() or format in ("mds", "litdata") or _contents(place):
        return [place]
    if (place / "penstock.json").exists():
        raise StoreError(f"{place} is a store of penstock. Open it with TokenStore.")
    # Files without a header are not recognised, and the caller says what they are.
    return token_files_in(place, (lambda _: [format]) if format in _RAW else _contents)


def _open_file(path: Path, format: str | None, given: Settings) -> tuple[str, list[FilePart]]:
    found = _contents(path)
    if format is None and len(found) != 1:
        raise StoreError(_undecided(path, found))
    name = format or found[0]
    if found and name not in found and name in _WITH_COLUMNS:
        raise StoreError(
            f"{path} has the contents of the format {found[0]!r}, and not of {name!r}. Leave "
            f'format= out, or pass format="{found[0]}".'
        )
    if name in _WITH_COLUMNS:
        return name, _WITH_COLUMNS[name](path, given)
    if name in _ONE_FILE:
        return name, [_ONE_FILE[name](path)]
    if found:
        raise StoreError(
            f"{path} has the contents of the format {found[0]!r}. Read as {format!r}, its header "
            "would become tokens, or its index would be ignored. Leave format= out, or pass "
            f'format="{found[0]}".'
        )
    refuse_member(path)
    if given.vocab_size is None:
        raise StoreError(
            f"{path} has no header, so a wrong dtype would not be noticed. Pass vocab_size= or "
            f'tokenizer= with format="{format}".'
        )
    if name == "olmo":
        return name, [open_olmo(path, given.dtype, given.vocab_size)]
    return name, [open_raw(path, given.dtype, "uint16", given.vocab_size)]


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
        name = json.dumps(place.name)  # as `dumps` writes it in the index
        for format in ("mds", "litdata"):
            # Other files may be in the same directory.
            if not _DIRECTORIES[format](place.parent):
                continue
            if name in json.dumps(read_index(place.parent / "index.json")):
                return format, place.parent
    return None


def _undecided(path: Path, found: list[str]) -> str:
    if found:
        names = " or ".join(f'format="{each}"' for each in found)
        return f"{path} could be of several formats: {', '.join(found)}. Pass {names}."
    if path.is_file() and not size_of(path):
        return f"{path} is empty."
    if path.is_file() and any(_DIRECTORIES[name](path.parent) for name in ("mds", "litdata")):
        return f"{path} is one file of a set. Pass its directory, {path.parent}."
    if path.is_file() and first_bytes(path, 6) == b"ARROW1":
        return f"{path} is a Feather file. Write it as Parquet, or with Dataset.save_to_disk."
    return (
        f"{path} does not have the contents of a format with a header ({', '.join(_KNOWN)}). If it "
        'holds ids without a header, name them: open_tokens(path, format="nanogpt", vocab_size=…), '
        'or format="olmo" for an array of dolma; on the command line, --format and --vocab-size; '
        "in a recipe, the same settings in the table data.tokens."
    )
