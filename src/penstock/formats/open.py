"""`open_tokens`: recognise token files by their contents, and open them."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from penstock.errors import StoreError
from penstock.formats.datatrove import is_datatrove, open_datatrove
from penstock.formats.llmc import is_llmc, open_llmc
from penstock.formats.mapped import HeldArray, size_of
from penstock.formats.megatron import is_megatron, megatron_files, open_megatron
from penstock.formats.npy import is_npy, open_npy
from penstock.formats.raw import open_olmo, open_raw
from penstock.formats.sample import check_dtype
from penstock.formats.token_files import FilePart, TokenFiles
from penstock.paths import expand_user, is_remote
from penstock.ranges import whole_number

if TYPE_CHECKING:
    from penstock.tokenize.tokenizer import Tokenizer

TokenFormat = Literal["llmc", "megatron", "datatrove", "npy", "nanogpt", "olmo"]
"""`llmc` is also the format of modded-nanogpt."""

# Formats that their contents show, each with its test.
_KNOWN: dict[str, Callable[[Path], bool]] = {
    "llmc": is_llmc,
    "megatron": is_megatron,
    "datatrove": is_datatrove,
    "npy": is_npy,
}
_OPEN: dict[str, Callable[[Path], FilePart]] = {
    "llmc": open_llmc,
    "megatron": open_megatron,
    "datatrove": open_datatrove,
    "npy": open_npy,
}
_RAW = ("nanogpt", "olmo")
_SUFFIXES = (".bin", ".idx", ".ds", ".npy")


@runtime_checkable
class HasArray(Protocol):
    """An array in memory: of NumPy, or a tensor on the CPU."""

    def __array__(self) -> Any:
        """Return the values as an array of NumPy."""
        ...


def open_tokens(
    path: str | os.PathLike[str] | HasArray,
    *,
    format: TokenFormat | None = None,
    dtype: str | None = None,
    vocab_size: int | None = None,
    tokenizer: object = None,
) -> TokenFiles:
    """Open token files of another tool in place, without copying them.

    The format is recognised by the contents of the files, and never by their names alone. Ids are
    checked when the files are opened: all of a small file, and 17 blocks of 64 KiB of a large one.
    `verify_tokens` checks all of them. docs/formats.md describes each format.

    Args:
        path: A file, or Megatron's pair of files by their prefix or by either file; or an array of
            NumPy, or a tensor on the CPU.
        format: The format, for files that have no header: "nanogpt" or "olmo". Also decides if a
            file could be of two formats.
        dtype: The dtype of ids in files without a header, if it is not the format's usual one. If
            the file records a dtype, it must be this one.
        vocab_size: The number of ids of the vocabulary. An id that is not below it is an error.
            Files without a header need this, or `tokenizer`.
        tokenizer: The tokenizer of the ids, as `build` takes it. Its vocabulary is used if
            `vocab_size` is not given, and `decode` needs it.

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
        name, part = _open_file(place, format, dtype, vocab_size)
    else:
        given, again, name = "an array in memory", path, "array"
        part = _in_memory(path)
    found = part.ids.array().dtype
    if dtype is not None and found.name != dtype:
        raise StoreError(f"{given} holds {found.name} ids, not dtype={dtype!r}. Leave dtype= out.")
    settings = {"format": format, "dtype": dtype, "vocab_size": vocab_size, "tokenizer": tokenizer}
    reopen = partial(open_tokens, again, **settings)  # type: ignore[arg-type]
    return TokenFiles(given, name, [part], vocab_size, loaded, reopen)


def _loaded(tokenizer: object) -> "Tokenizer | None":
    if tokenizer is None:
        return None
    from penstock.tokenize.tokenizer import load_tokenizer

    return load_tokenizer(tokenizer)


def _placed(path: str | os.PathLike[str]) -> Path:
    """Return the path of token files.

    Raises:
        StoreError: it is a URL or a directory.
    """
    if is_remote(path):
        raise StoreError(f"{path} is not on this machine. Copy the token files here first.")
    place = expand_user(path)
    if place.is_dir():
        raise StoreError(
            f"{place} is a directory. Open each of its token files, and pass a list of them to "
            "Windows, Packs or Documents. A store is opened with TokenStore."
        )
    return place


def _in_memory(array: HasArray) -> FilePart:
    values = np.asarray(array)
    check_dtype(values.dtype, "The array")
    if values.ndim != 1:
        raise StoreError(f"The array has the shape {values.shape}; ids have one dimension.")
    return FilePart(HeldArray(values))


def recognised(path: Path) -> list[str]:
    """Return the formats that the contents of a file show.

    Raises:
        MissingStoreError: there is no such file, and it is no prefix of Megatron's files.
    """
    if not path.exists() and all(each.exists() for each in megatron_files(path)):
        return ["megatron"] if is_megatron(path) else []
    size_of(path)
    return [name for name, matches in _KNOWN.items() if matches(path)]


def _open_file(
    path: Path, format: str | None, dtype: str | None, vocab_size: int | None
) -> tuple[str, FilePart]:
    found = recognised(path)
    if format is None:
        if len(found) != 1:
            raise StoreError(_undecided(path, found))
        return found[0], _OPEN[found[0]](path)
    if format in _OPEN:
        return format, _OPEN[format](path)
    if format not in _RAW:
        raise StoreError(f"format={format!r} is not one of {', '.join([*_OPEN, *_RAW])}.")
    if found:
        raise StoreError(
            f"{path} has the contents of the format {found[0]!r}. Read as {format!r}, its header "
            f'would become tokens. Leave format= out, or pass format="{found[0]}".'
        )
    if vocab_size is None:
        raise StoreError(
            f"{path} has no header, so a wrong dtype would not be noticed. Pass vocab_size= or "
            f'tokenizer= with format="{format}".'
        )
    if format == "olmo":
        return format, open_olmo(path, dtype, vocab_size)
    return format, open_raw(path, dtype or "uint16", vocab_size)


def _undecided(path: Path, found: list[str]) -> str:
    if found:
        names = " or ".join(f'format="{each}"' for each in found)
        return f"{path} could be of several formats: {', '.join(found)}. Pass {names}."
    return (
        f"{path} does not have the contents of a format with a header ({', '.join(_KNOWN)}). If it "
        'holds ids without a header, name them: open_tokens(path, format="nanogpt", vocab_size=…), '
        'or format="olmo" for an array of dolma; on the command line, --format and --vocab-size. '
        'nanoGPT writes uint16: ArrayFile(path, dtype="uint16") reads that without a check of ids.'
    )


def is_token_file(path: Path) -> bool:
    """Return whether a path is of token files: by their contents, or by a usual suffix.

    A suffix alone opens nothing: `open_tokens` then says which argument is missing. Any other file
    is left to the reader of stores, whose message says how to build one.
    """
    if path.is_dir():
        return False
    if all(each.exists() for each in megatron_files(path)):
        return True
    return path.is_file() and (path.suffix in _SUFFIXES or bool(recognised(path)))
