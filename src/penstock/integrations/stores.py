"""A cache of stores: a store is built when it is first needed, and found again later.

    ~/.cache/penstock/stores/      or $PENSTOCK_CACHE/stores, or cache_dir=
    ├── 4f0c…e1/                   a store; its name is a digest of what it was built from
    ├── digests/                   digests of large files
    └── texts-90ab….parquet        the texts of a Hugging Face dataset

The name is a digest of the input's contents, of the tokenizer and of the settings. The path of
a file and the name of a tokenizer are not part of it: a relative path, an absolute path and a
copy of the file all find the same store, and so do "gpt2" and the same tokenizer as an object.
A changed file has another digest, so it gets another store. Files of up to 1 GB are digested at
every start (about a second per GB). The digest of a larger file is recorded in `digests`.
The store of a tokenizer without a digest is removed when the process ends.
"""

import os
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from penstock.digest import digest_json
from penstock.disk import cache_directory, digest_file, locked, write_file
from penstock.errors import SourceError, StoreBusyError, StoreError
from penstock.integrations.hf_datasets import export_texts, is_dataset
from penstock.options import ReadSettings
from penstock.paths import expand_user
from penstock.sources.files import InputFile
from penstock.sources.listing import list_files
from penstock.sources.settings import Texts
from penstock.store.build import build
from penstock.store.manifest import FILE_NAME
from penstock.store.reader import TokenStore
from penstock.store.sides import open_stores
from penstock.store.verify import verify
from penstock.streaming.snapshots import StreamedStore
from penstock.streaming.stream import stream
from penstock.tokenize.tokenizer import SpecialTokens, Tokenizer

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

PathLike = str | os.PathLike[str]
Inputs: TypeAlias = "PathLike | Sequence[PathLike] | Texts | Dataset | IterableDataset"
Store = TypeVar("Store", bound=TokenStore | StreamedStore)

# A new release of one of these may split text differently.
_ENGINES = ("gigatoken", "tokenizers", "tiktoken")
_VERSION = 1  # of how a name is computed
_WHOLE_BYTES = 1 << 30  # larger files and stores are not read at every start
_SETTLED_NANOSECONDS = 2_500_000_000
_BUSY_SECONDS = 3_600.0


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """The settings with which text becomes a store."""

    tokenizer: Tokenizer
    eos: bool = False
    documents: str = "lines"
    column: str = "text"
    cache_dir: PathLike | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        ReadSettings(documents=self.documents)  # a rule that is mistyped is refused here


def store_root(cache_dir: PathLike | None) -> Path:
    """The directory of cached stores; it may not exist yet."""
    return (cache_directory() if cache_dir is None else expand_user(cache_dir)) / "stores"


def store_name(
    contents: object,
    encodes: tuple[str | None, SpecialTokens],
    end_id: int | None,
    documents: str,
    column: str = "text",
) -> str | None:
    """Return the name of the store of an input; None if the tokenizer has no digest.

    Args:
        contents: JSON that identifies the input's contents, such as digests of files.
        encodes: The tokenizer's digest, and how it reads special tokens.
        end_id: The id after each document.
        documents: What a document is.
        column: The column that holds the text.
    """
    digest, special_tokens = encodes
    if digest is None:
        return None
    versions = {}
    for package in _ENGINES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    # Not the name of the tokenizer: "gpt2" and the same tokenizer as an object share a store.
    # 32 hexadecimal digits are 128 bits, so two stores do not get one name by chance.
    known = [digest, special_tokens, versions]
    return digest_json([_VERSION, contents, known, end_id, documents, column])[:32]


def store_of(inputs: "Inputs | TokenStore", settings: StoreSettings) -> TokenStore:
    """Return a store of `inputs`, found in the cache or built now.

    Args:
        inputs: A store or its directory; files, as `penstock.build` takes them; a list of texts
            as `penstock.Texts`; or a Hugging Face dataset with a column of text.
        settings: The settings to build it with.
    """
    if (given := _given_store(inputs, settings)) is not None:
        return given
    files, name, arguments = _resolved(inputs, settings)
    root = store_root(settings.cache_dir)
    return cached_store(name, root, lambda store: build(files, store, **arguments))


def stores_together(inputs: "Mapping[str, Inputs]") -> dict[str, TokenStore]:
    """Open those of the inputs that are directories of stores, by their keys in `inputs`.

    Two sides of a split store are of one build.
    """
    paths = {
        side: given
        for side, given in inputs.items()
        if isinstance(given, str | os.PathLike) and (expand_user(given) / FILE_NAME).is_file()
    }
    return dict(zip(paths, open_stores([*paths.values()]), strict=True))


def stream_of(inputs: "Inputs | TokenStore", settings: StoreSettings) -> TokenStore | StreamedStore:
    """Return the store that `store_of` returns, but readable while it is still being built."""
    if (given := _given_store(inputs, settings)) is not None:
        return given
    files, name, arguments = _resolved(inputs, settings)
    if name is None:
        raise SourceError(
            f"{settings.tokenizer.name} has no digest, so an unfinished store of it could not be "
            "recognised. Use streaming=False."
        )
    directory = _private(store_root(settings.cache_dir)) / name
    return _made(directory, lambda store: stream(files, store, **arguments))


def _given_store(inputs: object, settings: StoreSettings) -> TokenStore | None:
    """Return the finished store that `inputs` is or names; None if it is text.

    Raises:
        StoreError: the store was built with another tokenizer, or with a split.
    """
    if isinstance(inputs, str | os.PathLike):
        path = expand_user(inputs)
        # The directory of a build with a split holds stores; TokenStore says which to open.
        if any((path / side / FILE_NAME).is_file() for side in ("", "train", "val")):
            inputs = TokenStore(path)
    if not isinstance(inputs, TokenStore):
        return None
    recorded, now = inputs.manifest.contents["tokenizer"], settings.tokenizer
    # A tokenizer without a digest is recognised by its ids of a test text.
    if (recorded["digest"], recorded["canary"]) == (now.digest, now.canary):
        return inputs
    right = f"penstock.load_tokenizer({recorded['name']!r})"
    if added := list(recorded.get("added_tokens", ())):
        right = f"penstock.load_tokenizer({recorded['name']!r}, add_tokens={added})"
    then, other = recorded["digest"] or recorded["canary"], now.digest or now.canary
    raise StoreError(
        f"{inputs.path} was tokenized with {recorded['name']} (digest {then[:8]}), and the data "
        f"module has the tokenizer {now.name} (digest {other[:8]}). The same id would mean other "
        f"text. Pass the tokenizer of the store: tokenizer={right}."
    )


def _resolved(
    inputs: "Inputs", settings: StoreSettings
) -> tuple["list[str] | Texts", str | None, dict[str, Any]]:
    """Return the inputs for `penstock.build`, the name of the store, and the other arguments."""
    column, root, tokenizer = settings.column, store_root(settings.cache_dir), settings.tokenizer
    files: list[str] | Texts
    contents: object
    if isinstance(inputs, Texts):
        files, contents = inputs, inputs.digest
    else:
        if is_dataset(inputs):
            inputs, column = export_texts(inputs, _private(root), column), "text"
        # By default, the suffix of a file decides its format.
        listed = list_files(inputs, ReadSettings())
        # With absolute paths, a killed build is resumed from any working directory.
        files = [each.path if each.remote else str(Path(each.path).absolute()) for each in listed]
        contents = [_identity(each, root) for each in listed]
    encodes = (tokenizer.digest, tokenizer.special_tokens)
    end_id = tokenizer.eos_id if settings.eos else None
    arguments = {
        "tokenizer": tokenizer,
        "eos": settings.eos,
        "documents": settings.documents,
        "field": column,
        "workers": settings.threads,
    }
    return files, store_name(contents, encodes, end_id, settings.documents, column), arguments


def _identity(file: InputFile, root: Path) -> list[object]:
    """Return JSON that identifies the contents of a file."""
    if file.remote:
        return [file.format, file.compression, [file.name, file.size, file.stamp]]
    return [file.format, file.compression, digest_contents(Path(file.path), root)]


def cached_store(name: str | None, root: Path, make: Callable[[Path], TokenStore]) -> TokenStore:
    """Return the store with this name, found in the cache or made by `make`.

    Several processes may ask for one store: the first makes it, and the others wait.

    Args:
        name: The name, or None for a temporary store of this process.
        root: The directory of cached stores.
        make: Builds the store in a directory, whose parent exists.

    Raises:
        StoreError: the cache directory cannot be used.
    """
    if name is None:
        return _temporary(make)
    directory = _private(root) / name
    until = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            found = _intact(directory)
            # The manifest is written last. If it exists, the build was finished, so a store that
            # is not intact was damaged later.
            if found is None and (directory / FILE_NAME).exists():
                found = _clear(directory)
            return found or _made(directory, make)
        except StoreBusyError:  # another process builds it
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _made(directory: Path, make: Callable[[Path], Store]) -> Store | TokenStore:
    """Make a store in `directory`, which holds nothing, a store or a killed build."""
    directory.mkdir(mode=0o700, exist_ok=True)
    try:
        return make(directory)  # a killed build is resumed
    except StoreBusyError:
        raise
    except StoreError:
        # A build refuses a directory whose inputs had other names or times, such as a copy of the
        # file under another path. It also refuses a finished store whose manifest was lost. The
        # directory is named after the contents of the inputs, so a finished store in it is the
        # right one, and anything else can be built again.
        return _clear(directory) or make(directory)


def _clear(directory: Path) -> TokenStore | None:
    """Remove the files of a store that cannot be used; an intact store is kept and returned."""
    # Another process may have found the same damage and rebuilt the store by now; its readers
    # must not lose their files. So the store is inspected again under the lock.
    with locked(directory):
        if (found := _intact(directory)) is not None:
            return found
        # The manifest is removed first: without it, no process opens the remaining files.
        for path in sorted(directory.iterdir(), key=lambda path: path.name != FILE_NAME):
            if path.is_dir() and not path.is_symlink():
                rmtree(path)
            elif path.name != ".lock":
                path.unlink()
    return None


def _intact(directory: Path) -> TokenStore | None:
    """The finished store in `directory`; None if there is none, or it is damaged."""
    if not (directory / FILE_NAME).exists():
        return None
    try:
        store = TokenStore(directory)
        # Reading 1 GB takes about a second. A larger store is opened without reading it all.
        small = store.num_tokens * store.dtype.itemsize <= _WHOLE_BYTES
        return verify(directory) if small else store
    except StoreError:
        return None


def _private(root: Path) -> Path:
    """Return `root`; a directory that does not exist is created, readable by this user only."""
    try:
        for path in (root.parent, root):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"The cache directory {root} for tokenized text cannot be created ({error.strerror}). "
            "Name another directory with cache_dir= or the environment variable PENSTOCK_CACHE."
        ) from error
    return root


def _temporary(make: Callable[[Path], TokenStore]) -> TokenStore:
    """Return a store that is removed with the object, at the latest when this process ends."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-"))
    try:
        store = make(directory / "store")
    except BaseException:
        rmtree(directory, ignore_errors=True)
        raise
    weakref.finalize(store, _remove, directory, os.getpid())
    return store


def _remove(directory: Path, owner: int) -> None:
    # A forked worker has a copy of the object. When the copy is deleted, the store is still in
    # use in the process that made it.
    if os.getpid() == owner:
        rmtree(directory, ignore_errors=True)


def digest_contents(path: Path, root: Path) -> str:
    """Return the digest of a file; for a large unchanged file, the recorded one.

    Args:
        path: The file.
        root: The directory of cached stores, where digests of large files are recorded.
    """
    before = _state(path)
    if before[0] <= _WHOLE_BYTES:
        return digest_file(path)
    record = root / "digests" / digest_json([os.path.realpath(path), before])[:32]
    if record.is_file() and len(found := record.read_text()) == 32:
        return found
    digest = digest_file(path)
    # A write that follows soon may leave the same times, because clocks of file systems tick at
    # intervals (FAT: 2 s). So a file that has just been written is digested again next time.
    settled = time.time_ns() - max(before[1:3]) > _SETTLED_NANOSECONDS
    if settled and _state(path) == before:
        record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(record, [digest.encode()])
    return digest


def _state(path: Path) -> list[int]:
    """Return the size and times of a file, which a write changes, and its inode and device."""
    found = path.stat()
    # `os.utime` can restore the time of the last write, but not ctime, which it sets to now.
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]
