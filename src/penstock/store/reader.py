"""Random access to the tokens and documents of a store.

Opening a store reads its manifest only. A part is mapped into memory when it is first used, and
checked as it is read: see `penstock.store.parts`. Reading tokens needs NumPy only. The tokenizer
is loaded only to decode them.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StoreError
from penstock.paths import StorePath, StoreUrl, store_path
from penstock.store.manifest import Manifest, read_manifest
from penstock.store.parts import REPAIR_ADVICE, PartFiles

if TYPE_CHECKING:
    from penstock.tokenize.tokenizer import Tokenizer


def manifest_at(path: StorePath, digest: str | None = None) -> Manifest:
    """The manifest of the store at `path`.

    Args:
        path: The directory of the store, or its URL.
        digest: The digest of a manifest of a remote store that this machine has read before.
    """
    if not isinstance(path, StoreUrl):
        return read_manifest(path)
    from penstock.store.remote import read_remote_manifest

    return read_remote_manifest(path, digest)


@dataclass(frozen=True, slots=True)
class Origin:
    """The input file and offset of a document."""

    file: str
    offset: int
    """Byte offset in the decompressed file; the number of the row in Parquet and Arrow files, of
    the item in JSON arrays and texts from memory, or of the document in imported token files."""


def record_unit(store: "TokenStore", file: str) -> str:
    """What the number of an origin counts: bytes ("offset"), rows, items or documents."""
    units = {"parquet": "row", "arrow": "row", "texts": "item"}
    for done in store.manifest.builds:
        if kinds := [each["format"] for each in done["inputs"] if each["name"] == file]:
            return "document" if "imported" in done["reading"] else units.get(kinds[0], "offset")
    return "offset"


class TokenStore:
    """A finished store, open for reading.

    It may be used from several threads and after a fork, and it can be pickled. An array of tokens
    from one part is a view of its file: it is read-only, and valid as long as you keep it.
    """

    has_documents = True
    sealed: bool = True
    """Whether these are all parts; False for a snapshot of a store that is being written."""

    def __init__(
        self,
        path: str | os.PathLike[str] | StoreUrl,
        manifest: Manifest | None = None,
        *,
        cache_bytes: int | None = None,
    ) -> None:
        """Open the store in a directory, or at a URL such as `s3://bucket/owt`.

        Args:
            path: The directory, or the URL.
            manifest: The manifest, if it was read before.
            cache_bytes: The most bytes that files of remote stores may take on this machine; see
                docs/remote.md. If None, it is `PENSTOCK_CACHE_BYTES`.
        """
        self.path = store_path(path)
        # Files are opened when they are first used, perhaps in another working directory.
        self.directory = self.path.absolute()
        self._cache_bytes = cache_bytes
        self.manifest: Manifest = manifest_at(self.path) if manifest is None else manifest
        self.dtype = np.dtype(self.manifest.contents["dtype"]).newbyteorder("<")
        # Part p holds the tokens [ends[p - 1], ends[p]) of the store, and documents likewise.
        self._token_ends = np.cumsum(self.manifest.part_tokens)
        self._document_ends = np.cumsum(self.manifest.part_documents)
        self.files = self._open_files()
        """The files of its parts, in memory."""

    def _open_files(self) -> PartFiles:
        if not isinstance(self.path, StoreUrl):
            return PartFiles(self.path, self.manifest)
        from penstock.store.remote import FileCache

        return PartFiles(self.path, self.manifest, FileCache(self.path, self._cache_bytes))

    @property
    def fetches_parts(self) -> bool:
        """Whether its files are downloaded when they are first used."""
        return isinstance(self.path, StoreUrl)

    def __repr__(self) -> str:
        documents = self.manifest.num_documents
        noun = "document" if documents == 1 else "documents"
        pieces = f" in {len(self):,} pieces" if len(self) != documents else ""
        return (
            f"TokenStore({str(self.path)!r}: {documents:,} {noun}{pieces}, "
            f"{self.num_tokens:,} tokens, {self.manifest.contents['tokenizer']['name']})"
        )

    def _repr_html_(self) -> str:
        """Return a table of what the manifest says, for notebooks."""
        contents = self.manifest.contents
        facts = {
            "store": self.path,
            "documents": f"{self.manifest.num_documents:,}",
            "tokens": f"{self.num_tokens:,} ({contents['dtype']})",
            "tokenizer": contents["tokenizer"]["name"],
            "parts": f"{len(self.manifest.parts):,}",
            "digest": self.manifest.digest[:16],
        }
        rows = (f"<tr><th>{name}</th><td>{escape(str(facts[name]))}</td></tr>" for name in facts)
        return f"<table>{''.join(rows)}</table>"

    def __getstate__(self) -> dict[str, Any]:
        # Maps and locks are not copied: the other process opens the files it needs.
        state = {"path": self.directory, "digest": self.digest}
        return {**state, "cache_bytes": self._cache_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A remote store may have been appended to: then the manifest that was opened is used.
        known = manifest_at(state["path"], state["digest"])
        self.__init__(state["path"], known, cache_bytes=state["cache_bytes"])  # type: ignore[misc]
        if self.digest != state["digest"]:
            raise StoreError(f"{self.path} changed after the store was pickled. Open it again.")

    def __len__(self) -> int:
        """The number of documents; one that is stored in pieces counts once for each piece."""
        return int(self._document_ends[-1]) if len(self._document_ends) else 0

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """The tokens of each document, in order."""
        for part in range(len(self.manifest.parts)):
            yield from self.part_documents(part)

    @overload
    def __getitem__(self, index: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        """The tokens of one document, or a list of them for a slice; see `document`."""
        if isinstance(index, slice):
            return [self.document(number) for number in range(*index.indices(len(self)))]
        return self.document(index)

    def part_documents(self, part: int) -> Iterator[NDArray[Any]]:
        """The tokens of each document of one part, in order."""
        tokens = self.part_array(part, "tokens")
        bounds = self.part_array(part, "bounds").tolist()
        for start, stop in pairwise([0, *bounds]):
            yield tokens[start:stop]

    def first_document(self, part: int) -> int:
        """The number of the first document of one part."""
        return int(self._document_ends[part - 1]) if part else 0

    @property
    def digest(self) -> str:
        """The digest of the manifest, and so of every byte of the store."""
        return self.manifest.digest

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, including begin and end tokens."""
        return int(self._token_ends[-1]) if len(self._token_ends) else 0

    @property
    def vocab_size(self) -> int:
        """The number of ids of its tokenizer: the rows that a model's embedding needs."""
        return int(self.manifest.contents["tokenizer"]["vocab_size"])

    def document(self, index: int) -> NDArray[Any]:
        """The tokens of one document, including its end token.

        Negative indices count from the end, as in a list.
        """
        part, within = self._find_document(index)
        bounds = self.part_array(part, "bounds")
        start = int(bounds[within - 1]) if within else 0
        return self.files.span(part, "tokens", start, int(bounds[within]))

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """The tokens `[start, stop)` of all documents concatenated.

        A view if they are all in one part, else a copy.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(
                f"tokens [{start:,}, {stop:,}) are not in a store of {self.num_tokens:,}"
            )
        # "right": the offset at which a part ends is that of the first token of the next part.
        part = int(np.searchsorted(self._token_ends, start, side="right"))
        # Copied part by part, because views of all parts would keep all their files open.
        joined = np.empty(stop - start, self.dtype)
        done = 0
        while done < len(joined):
            begin = int(self._token_ends[part - 1]) if part else 0
            upto = min(stop, int(self._token_ends[part])) - begin
            piece = self.files.span(part, "tokens", start + done - begin, upto)
            if len(piece) == len(joined):
                return piece
            joined[done : done + len(piece)] = piece
            done += len(piece)
            part += 1
        return joined

    def origin(self, index: int) -> Origin:
        """The file and offset that document `index` came from."""
        part, within = self._find_document(index)
        file, offset = self.part_array(part, "origin")[within].tolist()
        if file >= len(self._input_names):
            raise StoreError(
                f"{self.path}: document {index:,} names input file {file}, and the manifest lists "
                f"{len(self._input_names)} files. {REPAIR_ADVICE}"
            )
        return Origin(self._input_names[file], offset)

    @cached_property
    def _input_names(self) -> list[str]:
        return [each["name"] for each in self.manifest.inputs]

    def edges(self, index: int) -> tuple[bool, bool]:
        """Whether a document begins at `index`, and whether it ends there.

        Both are true for a whole document.
        """
        part, within = self._find_document(index)
        parts = self.manifest.parts
        # Only the last piece of a part can continue in the next part.
        begins = within > 0 or part == 0 or not parts[part - 1].num_continued
        ends = within < parts[part].num_documents - 1 or not parts[part].num_continued
        return begins, ends

    def decode(self, index: int, tokenizer: object = None, errors: str = "replace") -> str:
        """The text of document `index`, without its begin and end tokens.

        A document that is stored in pieces has one index for each piece.

        Args:
            index: The number of the document.
            tokenizer: The tokenizer of the store, if you did not load it on this machine before.
            errors: What happens to bytes that are not UTF-8, as in `bytes.decode`.
        """
        return self.decode_bytes(index, tokenizer).decode(errors=errors)

    def decode_bytes(self, index: int, tokenizer: object = None) -> bytes:
        """The exact bytes of document `index`; see `decode`."""
        tokens, contents = self.document(index), self.manifest.contents
        begins, ends = self.edges(index)
        # A token is removed only where the build may have added it, not inside a document.
        if ends and tokens[-1:].tolist() == [contents["eos_id"]]:
            tokens = tokens[:-1]
        if begins and tokens[:1].tolist() == [contents["bos_id"]]:
            tokens = tokens[1:]
        return self.load_tokenizer(tokenizer).decode_bytes(tokens)

    def load_tokenizer(self, tokenizer: object = None) -> "Tokenizer":
        """The tokenizer of the store, with the tokens that the build added, to decode batches.

        Args:
            tokenizer: The tokenizer of the store, if you did not load it on this machine before.

        Raises:
            MissingTokenizerError: `tokenizer` is None, and this user has no such tokenizer.
            StoreError: `tokenizer` is not the tokenizer of the store.

        >>> import tempfile
        >>> from penstock import Texts, build
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = build(Texts(["To be, or not to be."]), folder)
        ...     store.load_tokenizer().decode(store.tokens(0, 3))
        'To be,'
        """
        from penstock.tokenize.tokenizer import tokenizer_of

        return tokenizer_of(self.manifest.contents["tokenizer"], tokenizer)

    def part_array(self, part: int, kind: str) -> NDArray[Any]:
        """One array of one part; all of it is checked when it is first used."""
        return self.files.array(part, kind)

    @property
    def part_tokens(self) -> NDArray[np.int64]:
        """The number of tokens of each part."""
        return self.manifest.part_tokens

    @property
    def has_loss(self) -> bool:
        """Whether a part has a loss mask."""
        return self.manifest.has("loss")

    @property
    def tokenizer_record(self) -> dict[str, Any] | None:
        """The name, digest and canary of the tokenizer; None if an import did not know it."""
        recorded = self.manifest.contents["tokenizer"]
        return dict(recorded) if recorded["digest"] or recorded["canary"] else None

    def part_ids(self, part: int) -> NDArray[Any]:
        """The tokens of one part; `files.check` checks those that are used."""
        return self.files.open(part, "tokens").array

    def part_bounds(self, part: int) -> NDArray[Any]:
        """The offsets, within one part, at which its documents end."""
        return self.part_array(part, "bounds")

    def part_continues(self, part: int) -> bool:
        """Whether the last document of one part continues in the next part."""
        return self.manifest.parts[part].num_continued > 0

    def part_loss(self, part: int) -> NDArray[Any] | None:
        """The loss mask of one part, 1 where a token is trained on; None if all are."""
        if "loss" not in self.manifest.parts[part].files:
            return None
        return self.files.open(part, "loss").array

    def want(self, parts: Sequence[int], kinds: Sequence[str]) -> int:
        """Begin to download the files of some parts that are not here; returns their bytes."""
        return self.files.want(parts, kinds)

    def _find_document(self, index: int) -> tuple[int, int]:
        if not isinstance(index, SupportsIndex):
            raise TypeError(f"{index!r:.80} is not the number of a document")
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index:,} is not in a store of {len(self):,} documents")
        index %= len(self)
        # "right": the part that ends at `index` does not contain it.
        part = int(np.searchsorted(self._document_ends, index, side="right"))
        return part, index - self.first_document(part)
