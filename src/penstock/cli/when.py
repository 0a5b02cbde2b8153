"""`penstock when`: the steps at which a document is seen."""

import math
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import options
from penstock.cli.inspect import Run, opened
from penstock.cli.options import option
from penstock.cli.terminal import aligned, print_json, visible, write
from penstock.cli.train import Settings
from penstock.cli.units import number_of

if TYPE_CHECKING:
    from penstock.inspect import FoundDocument, OpenedRun, Sighting

_SHOWN_DOCUMENTS = 20
_SHOWN_STEPS = 20


def when_command(
    run: Run,
    document: Annotated[
        str,
        option(
            "A document: its input file and record, or its number in the store, as penstock "
            "inspect shows them.",
            "FILE:RECORD|NUMBER",
            "--document",
            "-d",
        ),
    ],
    source: Annotated[str | None, option("Search this source only.", "NAME")] = None,
    settings: Settings = None,
    as_json: options.AsJson = False,
) -> None:
    """List the steps at which a document is seen.

    Steps that are not taken yet are listed too. A record is the byte offset at which it begins in
    the decompressed file; in a Parquet or Arrow file it is the row, and in a JSON array of
    conversations the item, counted from 0.

    penstock when runs/mine --document web.jsonl:90210

    penstock when runs/mine --document 4711 --source web
    """
    found = opened(run, settings, as_json=as_json)
    documents, missed = _documents(found, document, source)
    pairs = [(each, _sightings(found, each)) for each in documents]
    if as_json:
        print_json({**_to_json(found, pairs), "not_searched": missed})
        return
    _show(found, pairs)
    if missed:
        paths = visible(", ".join(missed), lines=False)
        write(f"not searched: {paths}, without a record of such documents")


def _documents(
    run: "OpenedRun", document: str, source: str | None
) -> "tuple[list[FoundDocument], list[str]]":
    """The documents with a number or a record, and the files that cannot be searched for it."""
    from penstock.inspect import find_documents
    from penstock.inspect.documents import find_numbered
    from penstock.inspect.members import not_searched

    number = document.replace(",", "").replace("_", "")  # as penstock prints numbers
    if number.isdecimal() and number.isascii():
        found = find_numbered(run.plan, int(number), source)
        return found, not_searched(run.plan, source, numbered=True)
    found = find_documents(run.plan, *file_and_record("--document", document), source)
    return found, not_searched(run.plan, source)


def file_and_record(flag: str, document: str) -> tuple[str, int]:
    """The input file and the record that an option names."""
    # A file name may contain colons, so the last one is the border.
    file, colon, record = document.rpartition(":")
    number = record.replace(",", "").replace("_", "")  # as penstock prints numbers
    if not colon or not file or not number.isdecimal():
        raise typer.BadParameter(f"{flag} {document} is not FILE:RECORD, such as web.jsonl:90210.")
    return file, int(number)


def _sightings(run: "OpenedRun", document: "FoundDocument") -> "list[Sighting]":
    from penstock.inspect import when

    return when(run.plan, run.steps, document)


def _to_json(
    run: "OpenedRun", pairs: "list[tuple[FoundDocument, list[Sighting]]]"
) -> dict[str, object]:
    from dataclasses import asdict

    documents = [
        {**asdict(each), "seen": [one.to_json() for one in sightings]} for each, sightings in pairs
    ]
    return {"last_step": run.steps.last, "documents": documents}


def _show(run: "OpenedRun", pairs: "list[tuple[FoundDocument, list[Sighting]]]") -> None:
    last = run.steps.last
    span = "" if last is None else f" in the run's steps {run.steps.first:,} to {last:,}"
    # The first to be seen come first.
    pairs = sorted(pairs, key=lambda pair: pair[1][0].position if pair[1] else math.inf)
    for each, sightings in pairs[:_SHOWN_DOCUMENTS]:
        size = number_of(each.span[1] - each.span[0], "token")
        write(f"{each.source}: {each}, {size}")
        if sightings:
            _show_sightings(run, sightings)
        else:
            write(f"  not seen{span}")
    if len(pairs) > _SHOWN_DOCUMENTS:
        write(f"… and {len(pairs) - _SHOWN_DOCUMENTS:,} more; --json lists them")
    if any(not sightings for _, sightings in pairs):
        write("--set training.steps=NUMBER searches more steps")


def _show_sightings(run: "OpenedRun", sightings: "list[Sighting]") -> None:
    table = [["step", "row", "position", "epoch", "tokens"]]
    for each in sightings[:_SHOWN_STEPS]:
        tokens = f"{each.num_tokens:,}"
        row = [f"{each.step:,}", f"{each.row:,}", f"{each.position:,}", f"{each.epoch:,}", tokens]
        table.append(row)
    done = run.steps.num_recorded + run.steps.first
    for number, line in enumerate(aligned(table)):
        # The first line has the headings.
        is_later = number and run.record is not None and sightings[number - 1].step >= done
        notes = "  not yet" * bool(is_later)
        write(f"  {line}{notes}")
    if len(sightings) > _SHOWN_STEPS:
        write(f"  … and {len(sightings) - _SHOWN_STEPS:,} more times; --json lists all")
