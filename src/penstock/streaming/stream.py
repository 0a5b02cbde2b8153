"""`stream`: trains on text while it is being tokenized."""

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from penstock.errors import StoreBusyError, StoreError
from penstock.sources.settings import Format, Texts
from penstock.store.build import begin
from penstock.store.job import BuildSettings, prepare
from penstock.store.lock import locked
from penstock.store.manifest import FILE_NAME
from penstock.streaming.builder import Builder
from penstock.streaming.snapshots import StreamedStore
from penstock.tokenize.tokenizer import SpecialTokens

__all__ = ["stream"]


def stream(  # noqa: PLR0913  (the arguments of `build`, and a timeout)
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Texts,
    store: str | os.PathLike[str],
    *,
    tokenizer: Any = "gpt2",
    format: Format = "auto",
    documents: str = "auto",
    field: str = "text",
    errors: Literal["strict", "replace"] = "strict",
    eos: bool | str = True,
    bos: bool | str = False,
    special_tokens: SpecialTokens = "text",
    max_bad: float = 0.001,
    max_document_bytes: int = 1 << 30,
    max_expansion: int = 200,
    engine: Literal["auto", "gigatoken", "tokenizers"] = "auto",
    threads: int | None = None,
    timeout: float = 600.0,
) -> StreamedStore:
    """Start to build a store in the background, and return it while it is being written.

    It has the arguments of `build` and writes the same bytes. Pass the result to `Windows` or
    `Packs`. A `Loader` over them yields the rows of the finished store in the order of
    `shuffle="part"`. The first batch comes after about a second.

    If several processes call it for one directory, one of them builds and all read. If the builder
    dies, another one continues. Machines without a shared disk each build the same store.

    Args:
        inputs: As in `build`, like all arguments up to `threads`.
        store: The directory to write.
        tokenizer: A name, a path or an object.
        format: Of the inputs; "auto" goes by the suffix.
        documents: In text: "auto", "lines", "paragraphs", "file", or "sep:SEPARATOR".
        field: The JSON field or table column that holds the text.
        errors: What to do with documents that are not UTF-8: "strict" rejects them, "replace"
            replaces invalid bytes.
        eos: Whether a document ends with the tokenizer's end token, or which token it is.
        bos: Whether it begins with one.
        special_tokens: "text" takes `<|endoftext|>` in a document as text, "parse" as a token.
        max_bad: How many rejected records to allow: a share of all records, or a number.
        max_document_bytes: Longer documents are rejected.
        max_expansion: Compressed files that expand to more than this many times their size are
            refused.
        engine: The program that tokenizes; the ids are the same.
        threads: How many slices are tokenized at once at most, while a reader waits; changes
            speed and memory only.
        timeout: The most seconds between two sealed slices before a reader raises an error.

    Raises:
        SourceError: an input cannot be read as asked.
        TokenizerError: the tokenizer cannot be loaded.
        StoreError: the directory holds something else.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with stream(Texts(["To be,", "or not to be."]), f"{folder.name}/store") as streamed:
    ...     [tokens.tolist() for tokens in streamed]
    [[2514, 307, 11, 50256], [273, 407, 284, 307, 13, 50256]]
    >>> folder.cleanup()
    """
    if not timeout > 0:
        raise StoreError(f"timeout={timeout} must be more than 0 seconds.")
    job = prepare(
        BuildSettings(
            inputs=inputs,
            store=store,
            tokenizer=tokenizer,
            format=format,
            documents=documents,
            field=field,
            errors=errors,
            eos=eos,
            bos=bos,
            special_tokens=special_tokens,
            max_bad=max_bad,
            max_document_bytes=max_document_bytes,
            max_expansion=max_expansion,
            engine=engine,
            threads=threads,
        )
    )
    if (job.directory / FILE_NAME).exists():
        # A finished store with other settings is refused here, and not at the first batch.
        with suppress(StoreBusyError), locked(job.directory):
            begin(job)
    return StreamedStore(
        job.directory,
        job.stamped,
        job.tokenizer.dtype.name,
        timeout=timeout,
        builder=Builder(job),
    )
