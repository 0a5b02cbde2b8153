"""`penstock verify`: compare every byte of a store with its manifest."""

import time
from typing import TYPE_CHECKING

from penstock.cli import options
from penstock.cli.options import by_side, open_at
from penstock.cli.progress import bar
from penstock.cli.terminal import print_json, store_json, visible, write
from penstock.cli.token_files import (
    TokenColumn,
    TokenDtype,
    TokenFormat,
    TokenOptions,
    TokenTokenizer,
    VocabSize,
    open_files,
    verify_files,
)
from penstock.cli.units import duration_text, number_of

if TYPE_CHECKING:
    from penstock.store.reader import TokenStore


def verify_command(
    store: options.AnyStore,
    format: TokenFormat = None,
    dtype: TokenDtype = None,
    column: TokenColumn = None,
    vocab_size: VocabSize = None,
    tokenizer: TokenTokenizer = None,
    as_json: options.AsJson = False,
) -> None:
    """Check every byte of a store.

    Reads the whole store and compares it with its manifest, so a single flipped bit is found.
    If something is wrong, names the file and ends with exit code 1. For a store that was built
    with --split, checks both sides.

    Of token files of other tools, which have no checksums, checks that every id is below
    --vocab-size or the vocabulary of --tokenizer.
    """
    from penstock.store.verify import verify

    given = TokenOptions(format, dtype, vocab_size, tokenizer, column)
    if (files := open_files(store, given)) is not None:
        verify_files(files, as_json=as_json)
        return
    started = time.monotonic()
    with bar(shown=not as_json) as draw:

        def report(done: int, total: int) -> None:
            draw(done, total, f"{done:,} of {number_of(total, 'part')}")

        verified = {side: verify(each.path, report) for side, each in open_at(store).items()}
    took = duration_text(time.monotonic() - started)
    if as_json:
        print_json(by_side({side: _to_json(each) for side, each in verified.items()}))
        return
    for each in verified.values():
        counts = [
            number_of(len(each.manifest.parts), "part"),
            number_of(each.manifest.num_documents, "document"),
            number_of(each.num_tokens, "token"),
        ]
        # A large file that is a single document is stored in several pieces.
        if len(each) != each.manifest.num_documents:
            counts.insert(2, number_of(len(each), "piece"))
        write(f"{visible(str(each.path), lines=False)} is intact: {', '.join(counts)} ({took})")


def _to_json(store: "TokenStore") -> dict[str, object]:
    # `verify` raises an error if a byte is wrong, so a result is always whole.
    counts = {"num_parts": len(store.manifest.parts), "num_pieces": len(store)}
    values = {"store": str(store.path), "whole": True, **counts, **store_json(store)}
    del values["path"]
    return values
