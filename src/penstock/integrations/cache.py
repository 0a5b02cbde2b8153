"""Stores that are made when they are first asked for, and found the next time.

    ~/.cache/penstock/datasets/          or $PENSTOCK_CACHE/datasets, or cache_dir=
    ├── 4f0c…e1/                         a store, under a digest of what it was made from
    ├── 4f0c…e1.making/                  one that is being made
    └── locks/4f/                        held by the process that makes it

The name is a digest of the file's contents (all bytes are read and digested at every start,
at about 1 GB/s: a date or a size can lie), of the tokenizer, and of every setting that
decides an id. So there is nothing to invalidate: another file is another name. A store that
does not verify is made again. A tokenizer without a digest has no name to be found under; its
store lies in a temporary directory and goes with the process.
"""

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.digest import digest_json
from penstock.errors import SourceError, StoreBusyError, StoreError, TokenizerError
from penstock.integrations.encode import Encoder
from penstock.integrations.samples import Layout, TextFile
from penstock.paths import cache_directory
from penstock.sources.document import Tally
from penstock.store.files import digest_file, sync_directory, write_file
from penstock.store.lock import locked
from penstock.store.manifest import FILE_NAME, PartRecord, manifest_bytes, part_file, rejects_file
from penstock.store.npy import header
from penstock.store.part import join_documents
from penstock.store.reader import TokenStore
from penstock.store.verify import verify

__all__ = ["cache_directory", "cached_store"]

_VERSION = 1  # of what is below; another way to read or join samples needs another
# The tokenizer is called with so many characters at once.
_BATCH_CHARACTERS = 1 << 20
_COPY_BYTES = 1 << 22


def cached_store(
    path: str | os.PathLike[str],
    layout: Layout,
    encoder: Encoder,
    *,
    eos_id: int | None,
    cache_dir: str | os.PathLike[str] | None,
) -> TokenStore:
    """A store of the ids of `path`, found or made.

    Several processes may ask at once: one makes it, the others wait. The store has one part,
    so that its ids lie in one array.

    Raises:
        SourceError: the file cannot be read, or is being written all the time.
        StoreError: the cache directory cannot be used.
    """
    if encoder.digest is None:
        return _temporary(path, layout, encoder, eos_id)
    root = _private(Path(cache_dir) if cache_dir is not None else cache_directory())
    for _ in range(3):
        content = _digest(path)
        settings = [_VERSION, content, layout, encoder.digest, eos_id]
        place = root / digest_json(settings)
        if found := _found(place):
            return found
        with _alone(place):
            if found := _found(place):  # made by another process while this one waited
                return found
            making = place.with_suffix(".making")
            if _make(making, TextFile(path, layout), encoder, eos_id) != content:
                continue  # it was written while it was read
            shutil.rmtree(place, ignore_errors=True)
            making.rename(place)
            sync_directory(root)
            return TokenStore(place)
    raise SourceError(
        f"{os.fspath(path)} changed each of three times that it was read. Wait until it is "
        "complete, and start again."
    )


def _digest(path: str | os.PathLike[str]) -> str:
    try:
        return digest_file(Path(path))
    except FileNotFoundError:
        raise SourceError(
            f"{os.fspath(path)} does not exist (working directory: {Path.cwd()})."
        ) from None
    except IsADirectoryError:
        raise SourceError(f"{os.fspath(path)} is a directory; give one file.") from None


def _private(base: Path) -> Path:
    """The directory of stores under `base`, for this user's eyes only."""
    root = base / "datasets"
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"{root} cannot be made ({error.strerror}), and tokenized text is kept there. Name "
            "another directory with cache_dir= or the environment variable PENSTOCK_CACHE."
        ) from error
    return root


def _found(place: Path) -> TokenStore | None:
    """The store at `place`, if there is one and every byte of it is as it was written."""
    if not (place / FILE_NAME).exists():
        return None
    try:
        return verify(place)
    except StoreError:
        return None


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Wait until no other process makes the store at `place`, and keep others waiting.

    The lock is the kernel's and ends with the process that holds it, so a killed one blocks
    nobody. There are at most 256 locks, which stay.
    """
    lock = place.parent / "locks" / place.name[:2]
    lock.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(locked(lock))
                break
            except StoreBusyError:
                time.sleep(0.02)
        yield


def _temporary(
    path: str | os.PathLike[str], layout: Layout, encoder: Encoder, eos_id: int | None
) -> TokenStore:
    """A store for this process and its workers alone."""
    place = Path(tempfile.mkdtemp(prefix="penstock-"))
    try:
        _make(place / "store", TextFile(path, layout), encoder, eos_id)
        store = TokenStore(place / "store")
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    weakref.finalize(store, _remove, place, os.getpid())
    return store


def _remove(place: Path, owner: int) -> None:
    # A forked worker holds a copy of the store; when its copy goes, ours is still in use.
    if os.getpid() == owner:
        shutil.rmtree(place, ignore_errors=True)


def _make(making: Path, text: TextFile, encoder: Encoder, eos_id: int | None) -> str:
    """Write a store of `text` to `making`; returns the digest of the bytes it was made from."""
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(mode=0o700, parents=True)
    spool = _Spool(making / ".spool", encoder, eos_id)
    try:
        for batch in _batches(text.samples()):
            spool.add(batch)
        part = spool.seal(making)
    finally:
        spool.close()
    size, digest = write_file(making / rejects_file(0), [b""])
    contents = {
        "format": "penstock-store",
        "version": 1,
        "dtype": encoder.dtype.name,
        "tokenizer": _described(encoder, spool),
        "eos_id": eos_id,
        "bos_id": None,
        "split": None,
        "side": None,
        "counts": {"documents": part.num_documents, "tokens": part.num_tokens},
        "builds": [
            {
                "slices": 1,
                "counts": asdict(spool.tally(text)),
                "rejects": {"bytes": size, "sha256": digest, "reasons": {}},
                "reading": {"samples": text.layout, "sha256": text.digest},
                "inputs": [
                    {
                        "name": Path(text.path).name,
                        "bytes": text.num_bytes,
                        "format": "jsonl" if text.layout == "jsonl" else "text",
                        "compression": None,
                    }
                ],
            }
        ],
    }
    write_file(making / FILE_NAME, [manifest_bytes(contents, [part] if part.num_documents else [])])
    sync_directory(making)
    return text.digest


def _batches(samples: Iterator[str]) -> Iterator[list[str]]:
    held: list[str] = []
    size = 0
    for sample in samples:
        held.append(sample)
        size += len(sample)
        if size >= _BATCH_CHARACTERS:
            yield held
            held, size = [], 0
    if held:
        yield held


def _described(encoder: Encoder, spool: "_Spool") -> dict[str, Any]:
    """The tokenizer as the manifest records it; objects may know nothing but their ids."""
    vocab_size = max(encoder.vocab_size or 0, spool.largest_id + 1)
    canary = getattr(encoder.tokenizer, "canary", "") if encoder.described else ""
    named = encoder.described or {"name": encoder.name, "digest": None}
    rest = {"vocab_size": vocab_size, "eos_id": encoder.eos_id, "bos_id": None}
    return {**named, "canary": canary, **rest, "special_tokens": "text"}


class _Spool:
    """Ids on their way to one array file, whose header has to say how many there are."""

    def __init__(self, path: Path, encoder: Encoder, eos_id: int | None) -> None:
        self.largest_id = -1 if eos_id is None else eos_id
        self._path = path
        self._encoder = encoder
        self._eos_id = eos_id
        self._file = path.open("w+b", buffering=0)
        self._num_tokens = 0
        self._num_samples = 0
        self._num_characters = 0
        self._bounds: list[NDArray[np.uint64]] = []
        self._origins: list[NDArray[np.uint64]] = []

    def add(self, texts: list[str]) -> None:
        """Encode some texts; one without a single id is no document."""
        ids, offsets = self._encoder.encode(texts)
        full = np.diff(offsets) > 0
        offsets = np.concatenate((offsets[:1], offsets[1:][full]))
        if len(ids):
            self.largest_id = max(self.largest_id, int(ids.max()))
            self._refuse_too_large()
        joined, ends = join_documents(ids, offsets, self._encoder.dtype, eos_id=self._eos_id)
        self._write(joined)
        self._bounds.append(ends.astype(np.uint64) + np.uint64(self._num_tokens))
        ordinals = np.flatnonzero(full).astype(np.uint64) + np.uint64(self._num_samples)
        self._origins.append(np.stack((np.zeros_like(ordinals), ordinals), axis=1))
        self._num_tokens += len(joined)
        self._num_samples += len(texts)
        self._num_characters += sum(map(len, texts))

    def seal(self, directory: Path) -> PartRecord:
        """Write the files of the one part, where there is a document."""
        bounds = np.concatenate([np.zeros(0, np.uint64), *self._bounds])
        if not len(bounds):
            return PartRecord(0, 0, 0, {})
        origins = np.concatenate(self._origins)
        narrow, wide = self._encoder.dtype, np.dtype("<u8")
        contents: dict[str, Any] = {
            "tokens": chain([header(narrow, (self._num_tokens,))], self._copied()),
            "bounds": [header(wide, bounds.shape), bounds],
            "origin": [header(wide, origins.shape), origins],
        }
        files = {
            kind: write_file(directory / part_file(0, kind), pieces)
            for kind, pieces in contents.items()
        }
        return PartRecord(0, len(bounds), self._num_tokens, files)

    def tally(self, text: TextFile) -> Tally:
        """What was read, as the manifest counts it."""
        return Tally(
            documents=sum(map(len, self._bounds)),
            skipped=self._num_samples - sum(map(len, self._bounds)),
            document_bytes=text.num_bytes,
            text_bytes=self._num_characters,
        )

    def close(self) -> None:
        """Remove the spool file."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _write(self, array: NDArray[Any]) -> None:
        view = np.ascontiguousarray(array).data.cast("B")
        while view:
            view = view[self._file.write(view) :]

    def _copied(self) -> Iterator[bytes]:
        self._file.seek(0)
        while block := self._file.read(_COPY_BYTES):
            yield block

    def _refuse_too_large(self) -> None:
        limit = self._encoder.vocab_size
        if limit is not None and self.largest_id >= limit:
            raise TokenizerError(
                f"{self._encoder.name} gave the id {self.largest_id:,}, and its vocabulary has "
                f"{limit:,}."
            )
