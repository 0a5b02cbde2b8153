"""`penstock merge`: one store of the documents of several."""

import time
from typing import Annotated

import typer

from penstock.cli import options
from penstock.cli.options import by_side, open_at
from penstock.cli.progress import bar
from penstock.cli.terminal import print_json, store_json, visible, write
from penstock.cli.units import duration_text, number_of
from penstock.remote.address import store_path


def merge_command(
    stores: Annotated[
        list[options.Anywhere],
        typer.Argument(
            metavar="STORES",
            show_default=False,
            parser=store_path,
            help="The directories of two stores or more.",
        ),
    ],
    store: options.Output,
    as_json: options.AsJson = False,
) -> None:
    """Make one store of the documents of several.

    Nothing is tokenized again. On one file system the parts are hard links to the files of the
    stores, so a merge takes seconds and little space. On another one they are copied and compared.
    The result is the store that a build of the first store's inputs and --append of the others
    would give, in the order of the arguments.

    The stores must have the same tokenizer, end and start tokens, chat template and split. A merge
    can be killed at any time: the same command resumes it.

    penstock merge stores/web-1 stores/web-2 -o stores/web
    """
    from penstock.store.merge import merge

    started = time.monotonic()
    with bar(shown=not as_json) as draw:
        merge(
            stores,
            store,
            progress=lambda done, total: draw(
                done, total, f"{done:,} of {number_of(total, 'part')}"
            ),
        )
    made = open_at(store)
    if as_json:
        print_json(by_side({side: store_json(each) for side, each in made.items()}))
        return
    took = duration_text(time.monotonic() - started)
    for each in made.values():
        counts = [
            number_of(len(each.manifest.parts), "part"),
            number_of(each.manifest.num_documents, "document"),
            number_of(each.num_tokens, "token"),
        ]
        name = visible(str(each.path), lines=False)
        write(f"{name} merged from {len(stores):,} stores: {', '.join(counts)} ({took})")
