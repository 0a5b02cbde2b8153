"""`penstock amend`: change the data of a run from a step on."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from penstock.cli import options
from penstock.cli.options import argument, option
from penstock.cli.terminal import aligned, console, print_json, visible, write
from penstock.cli.train import Settings
from penstock.cli.units import number_of

if TYPE_CHECKING:
    from penstock.inspect import AmendedRecipe
    from penstock.ledger import AddedStore


def amend_command(
    recipe: Annotated[str, argument("A recipe (.toml).", "RECIPE")],
    from_step: Annotated[
        int | None,
        option("The first step that changes; the first step of a run is 1.", "S", "--from-step"),
    ] = None,
    weights: Annotated[
        str | None,
        option(
            "The weights of all sources from there on, as ratios: 7 and 3 are 70 % and 30 %.",
            "NAME=W,…",
        ),
    ] = None,
    add: Annotated[
        list[str] | None,
        option("A new source; or NAME alone, of one that was dropped.", "NAME=STORE", "--add"),
    ] = None,
    rows: Annotated[
        Literal["windows", "packs"] | None,
        option("How rows of new sources are cut, if not as data.rows says.", None, "--rows"),
    ] = None,
    drop: Annotated[
        list[str] | None, option("A source that is not read any more.", "NAME", "--drop")
    ] = None,
    skip: Annotated[
        str | None,
        option("Leave out the rows of the steps A to B; later rows take their place.", "A:B"),
    ] = None,
    exclude_document: Annotated[
        list[str] | None,
        option(
            "Do not train on this document any more; rows stay where they are.",
            "[SOURCE=]FILE:RECORD",
            "--exclude-document",
        ),
    ] = None,
    settings: Settings = None,
    dry_run: Annotated[
        bool, option("Show what would change, and write nothing.", None, "--dry-run")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Change the data of a run from a step on: nothing before it changes.

    Sources continue where they are, so no row is repeated before its epoch ends, and none is lost.
    The amendment is a line of a file beside the recipe, RECIPE.ledger.jsonl, to which lines are
    only added. A run that is training reads it when it is started again. Several changes can be
    made at once. See them first with --dry-run.

    penstock amend mix.toml --from-step 1001 --weights web=0.5,code=0.5

    penstock amend mix.toml --from-step 1001 --add math=stores/math --weights web=6,code=3,math=1

    penstock amend mix.toml --skip 1201:1210

    penstock amend mix.toml --from-step 1001 --exclude-document web.jsonl:90210
    """
    from penstock.cli.when import file_and_record
    from penstock.inspect import amend_recipe
    from penstock.train.command import recipe_changes

    # With --json, stdout must hold one JSON object and nothing else.
    def log(event: str) -> None:
        if not as_json:
            console(stderr=True).print(visible(event), soft_wrap=True)

    found = amend_recipe(
        recipe,
        from_step=from_step,
        weights=None if weights is None else _weights(weights),
        add=dict(_added(each, rows) for each in add or ()),
        drop=drop or (),
        skip=None if skip is None else _steps(skip),
        exclude=[file_and_record("--exclude-document", each) for each in exclude_document or ()],
        settings=recipe_changes(settings or []),
        dry_run=dry_run,
        log=log,
    )
    if as_json:
        print_json(found.to_json())
        return
    _show(found)


def _weights(text: str) -> dict[str, float]:
    found = {}
    for each in text.split(","):
        name, equals, weight = each.rpartition("=")
        try:
            found[name.strip()] = float(weight)
        except ValueError:
            equals = ""
        if not equals:
            raise typer.BadParameter(f"--weights {text} is not NAME=NUMBER,NAME=NUMBER,….")
    return found


def _added(text: str, rows: str | None) -> "tuple[str, AddedStore | None]":
    from penstock.ledger import AddedStore

    name, equals, store = text.partition("=")
    if not name or (equals and not store):
        raise typer.BadParameter(f"--add {text} is not NAME=STORE, such as math=stores/math.")
    return name, AddedStore(store, rows) if equals else None


def _steps(text: str) -> tuple[int, int]:
    first, colon, last = text.replace(",", "").replace("_", "").partition(":")
    if not colon or not first.isdecimal() or not last.isdecimal():
        raise typer.BadParameter(f"--skip {text} is not A:B, such as 1201:1210.")
    return int(first), int(last)


def _show(found: "AmendedRecipe") -> None:
    would = "" if found.written else "would be "
    write(f"{would}amendment {found.number:,} in {found.ledger}, from step {found.step:,} on:")
    write(f"  {visible(str(found.amendment), lines=False)}")
    for each in found.excluded:
        size = number_of(each.span[1] - each.span[0], "token")
        write(f"  excluded: {visible(f'{each.source}: {each}', lines=False)}, {size}")
    if found.amendment.drop and not found.plan.is_weighted:
        dropped = ", ".join(found.amendment.drop)
        write(f"  without weights, the epoch is read to its end; after it, {dropped} has no rows")
    if found.rows:
        table = [["rows until the end", "before", "now"]]
        for name, rows in found.rows.items():
            table.append([name, f"{found.rows_before.get(name, 0):,}", f"{rows:,}"])
        for line in aligned(table):
            write(f"  {line}")
    if found.written:
        write("a run that is training reads the ledger when it is started again")
    else:
        write("nothing was written: this was a dry run")
