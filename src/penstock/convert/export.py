"""`export_tokens`: write tokens in the format of another tool.

    stores/.owt-bin.export/    the files while they are written; a killed export starts again
    stores/owt-bin/            all files, by one rename

The writers are `flat`, `indexed` and `parquet`, from the description of each format.
`.penstock-export.json` lists the files of an export, so that `overwrite=True` deletes nothing else.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from penstock.convert.flat import write_llmc, write_nanogpt
from penstock.convert.indexed import write_megatron
from penstock.convert.source import Report, TokenSource
from penstock.errors import StoreBusyError, StoreError
from penstock.formats.detect import token_files_at
from penstock.formats.token_files import TokenFiles
from penstock.paths import StoreUrl
from penstock.store.beside import made_beside
from penstock.store.copy import on_this_machine
from penstock.store.files import (
    remove_file,
    room_for,
    sync_directory,
    write_file,
)
from penstock.store.folders import empty_directory, make_tree, remove_tree
from penstock.store.lock import locked
from penstock.store.reader import TokenStore
from penstock.store.sides import open_stores, stores_at

ExportFormat = Literal["megatron", "nanogpt", "llmc", "parquet"]
Exported = str | os.PathLike[str] | StoreUrl | TokenStore | TokenFiles

RECORD = ".penstock-export.json"
_SHOWN = 5


def _write_parquet(directory: Path, side: str, source: TokenSource) -> None:
    from penstock.convert.parquet import write_parquet  # imports pyarrow

    write_parquet(directory, side, source)


_WRITERS: dict[str, Callable[[Path, str, TokenSource], None]] = {
    "megatron": write_megatron,
    "nanogpt": write_nanogpt,
    "llmc": write_llmc,
    "parquet": _write_parquet,
}


def export_tokens(
    source: Exported,
    directory: str | os.PathLike[str],
    *,
    to: ExportFormat,
    overwrite: bool = False,
    drop_loss_mask: bool = False,
    progress: Report | None = None,
) -> list[Path]:
    """Write the tokens of a store, or of token files, in the format of another tool.

    The tokens are written as they are: documents of a store contain their end tokens. Every id is
    checked. The same source gives the same bytes, and the directory appears when all files are on
    disk. Of a store with a split, both sides are written. docs/formats.md lists the files.

    Args:
        source: A store or token files: a path, or an open `TokenStore` or `TokenFiles`. Files
            without a header are opened with `open_tokens` first.
        directory: The directory to write, which must be empty or not exist.
        to: The format.
        overwrite: Replace an earlier export in the directory.
        drop_loss_mask: Write the tokens without their loss mask. Only the format "parquet"
            has one; to export a store of chats to the others, this must be set.
        progress: Called with the number of tokens that are done, and the number of all tokens.

    Returns:
        The files, in the order of their names.

    Raises:
        StoreError: the format cannot hold these tokens, or the directory holds something else.

    >>> import tempfile
    >>> from penstock import Texts, build, open_tokens
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = build(Texts(["To be,", "or not to be."]), f"{folder}/store")
    ...     files = export_tokens(store, f"{folder}/megatron", to="megatron")
    ...     print([path.name for path in files], open_tokens(files[0]).num_tokens)
    ['train.bin', 'train.idx'] 10
    """
    if to not in _WRITERS:
        raise StoreError(f"to={to!r} (--to) is not one of {', '.join(_WRITERS)}.")
    members = _members(source)
    for member in members.values():
        _refuse_unfit(member, to, drop_loss_mask)
    target = on_this_machine(directory)
    _refuse_inside(members, target)
    with room_for(target), _directory(target):
        _refuse_other(target, overwrite)
        with made_beside(target, "export") as new, _removed_on_failure(new):
            empty_directory(new)  # an export was killed
            files = _write(new, members, to, progress)
            # A kill from here on leaves an incomplete old export, which may be replaced.
            _empty(target)
    return [target / each for each in files]


@contextmanager
def _directory(target: Path) -> Iterator[None]:
    """Make and lock the directory for a `with` block, and remove it again if the block fails."""
    existed = target.exists()
    make_tree(target)
    with ExitStack() as held:
        try:
            held.enter_context(locked(target))
            yield
        except StoreBusyError:  # another process exports to it, and may have made it
            raise
        except BaseException:  # also Ctrl-C
            if not existed:
                # Before the lock is released: later, it may be the directory of another export.
                with suppress(OSError):  # it is not empty
                    target.rmdir()
            raise


@contextmanager
def _removed_on_failure(directory: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:  # also Ctrl-C
        remove_tree(directory)
        raise


def _members(source: Exported) -> Mapping[str, TokenStore | TokenFiles]:
    """Return what is exported, by side of the split; the only side of the others is "train"."""
    if isinstance(source, TokenFiles):
        return {"train": source}
    if isinstance(source, TokenStore):
        return {source.manifest.contents["side"] or "train": source}
    if (files := token_files_at(source)) is not None:
        return {"train": files}
    stores = open_stores([*stores_at(source).values()])
    return {each.manifest.contents["side"] or "train": each for each in stores}


def _refuse_unfit(member: TokenStore | TokenFiles, to: str, drop_loss_mask: bool) -> None:
    if not member.num_tokens:
        raise StoreError(f"{member.path} holds no tokens, so there is nothing to export.")
    masks = TokenSource(member).masks(0, member.num_tokens)
    is_lost = member.has_loss and to != "parquet" and not drop_loss_mask
    if is_lost and not all(mask.all() for mask in masks):
        raise StoreError(
            f"{member.path} has a loss mask, and files of the format {to!r} have none: a model "
            "would be trained on all tokens. Choose parquet, or pass "
            "drop_loss_mask=True (--drop-loss-mask)."
        )


def _refuse_inside(members: Mapping[str, TokenStore | TokenFiles], target: Path) -> None:
    """Raise if the source is in the directory that would be replaced."""
    for member in members.values():
        path = member.path
        if not isinstance(path, str | os.PathLike) or path == "an array in memory":
            continue
        place = Path(path).resolve()
        if target.resolve() in (place, *place.parents):
            raise StoreError(
                f"{path} is in {target}, the directory to write. Choose another directory."
            )


def _refuse_other(target: Path, overwrite: bool) -> None:
    """Raise if a directory is neither empty nor an earlier export that may be replaced."""
    names = {each.name for each in target.iterdir()} - {".lock"}
    if not names:
        return
    try:
        ours = {RECORD, *json.loads((target / RECORD).read_bytes())["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        ours = set()
    if others := sorted(names - ours):
        raise StoreError(
            f"{target} is not empty, and holds more than an export: "
            f"{', '.join(others[:_SHOWN])}. Choose another directory."
        )
    if not overwrite:
        raise StoreError(
            f"{target} holds an export already. Choose another directory, or replace it with "
            "overwrite=True (--overwrite)."
        )


def _empty(target: Path) -> None:
    """Delete an earlier export; its list of files last, which says that it is one."""
    for path in sorted(target.iterdir(), key=lambda path: path.name == RECORD):
        if path.name != ".lock":
            remove_file(path)


def _write(
    new: Path,
    members: Mapping[str, TokenStore | TokenFiles],
    to: str,
    progress: Report | None,
) -> Sequence[str]:
    """Write all files and their list; returns their names."""
    total = sum(member.num_tokens for member in members.values())
    described, done = {}, 0
    for side, member in members.items():
        source = TokenSource(member, _report(progress, done, total))
        _WRITERS[to](new, side, source)
        described[side] = _described(source)
        done += source.num_tokens
    names = sorted(each.name for each in new.iterdir())
    contents = {"format": to, "files": names, "sides": described}
    write_file(new / RECORD, [json.dumps(contents, indent=1).encode() + b"\n"])
    sync_directory(new)
    return names


def _report(progress: Report | None, done: int, total: int) -> Report | None:
    return None if progress is None else lambda now, _: progress(done + now, total)


def _described(source: TokenSource) -> dict[str, Any]:
    member = source.member
    tokenizer = member.tokenizer_record or {}
    return {
        "source": member.digest,
        "tokenizer": {name: tokenizer[name] for name in ("name", "digest") if name in tokenizer},
        "vocab_size": source.vocab_size,
        "num_documents": source.num_documents(),
        "num_tokens": source.num_tokens,
    }
