"""`penstock repair`: make the damaged files of a store again."""

import time
from pathlib import Path
from typing import Annotated

from penstock.cli import options
from penstock.cli.options import option
from penstock.cli.progress import build_bar
from penstock.cli.terminal import print_json, visible, write
from penstock.cli.units import duration_text, number_of


def repair_command(
    store: options.Store,
    inputs: Annotated[
        list[Path] | None,
        option("A directory that holds the inputs, or an input file. Repeatable.", "DIR"),
    ] = None,
    tokenizer: Annotated[
        str | None, option("The tokenizer of the store, if it is not found by itself.", "NAME")
    ] = None,
    chat: Annotated[
        str | None,
        option("The chat template of the store, if it is not a built-in one.", "TEMPLATE"),
    ] = None,
    threads: Annotated[
        int | None, option("Parts to make at once. By default, one per core.", "NUMBER")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Make the damaged and missing files of a store again.

    Reads the whole store, as verify does. The parts of damaged files are made again from their
    inputs, with the settings of the store, and must get the digests that the manifest says. If an
    input is missing or was changed, the command names it, and changes nothing. For a store that
    was built with --split, repairs both sides.

    Without --inputs, the inputs are looked for where the build found them on this machine.

    penstock repair stores/web --inputs /data/web
    """
    from penstock.store.repair import repair

    started = time.monotonic()
    with build_bar(shown=not as_json) as (_, report):
        repaired = repair(
            store, inputs, tokenizer=tokenizer, chat=chat, threads=threads, progress=report
        )
    if as_json:
        print_json({"store": str(store), "repaired": [str(path) for path in repaired]})
        return
    took, name = duration_text(time.monotonic() - started), visible(str(store), lines=False)
    if not repaired:
        write(f"{name} is intact; nothing had to be repaired ({took})")
        return
    for path in repaired:
        write(visible(str(path), lines=False))
    write(f"{name}: {number_of(len(repaired), 'file')} made again, as recorded ({took})")
