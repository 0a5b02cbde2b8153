"""`penstock report`: a page about a store, a recipe or a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import options
from penstock.cli.options import argument, option, path_option
from penstock.cli.terminal import console, print_json, shell_word, visible, write
from penstock.cli.token_files import (
    TokenColumn,
    TokenDtype,
    TokenFormat,
    TokenOptions,
    VocabSize,
    open_files,
    refuse_options,
)
from penstock.cli.train import Settings
from penstock.cli.units import size_text
from penstock.paths import store_path

if TYPE_CHECKING:
    from penstock.report import Subject

AnySource = Annotated[
    str,
    argument(
        "A store, a token file, a recipe (.toml), or the directory of a run.", "STORE|RECIPE|RUN"
    ),
]
TokenizerName = Annotated[
    str | None, option("The tokenizer, if penstock does not find it.", "NAME")
]


def report_command(
    source: AnySource,
    output: Annotated[
        Path, path_option("The HTML file to write.", "FILE", "--output", "-o")
    ] = Path("report.html"),
    settings: Settings = None,
    format: TokenFormat = None,
    dtype: TokenDtype = None,
    column: TokenColumn = None,
    vocab_size: VocabSize = None,
    tokenizer: TokenizerName = None,
    as_json: options.AsJson = False,
) -> None:
    """Write a page about a store, a recipe or a run.

    The page is one HTML file that makes no requests. It shows what a corpus contains, how a run
    mixes, packs and shuffles it, the tokens of some steps, and the loss of a run.
    Large stores are sampled; the page says where. Needs the extra report.

    penstock report runs/mine -o report.html
    """
    from penstock.report.write import write_report

    given = TokenOptions(format, dtype, vocab_size, tokenizer, column)
    subject = opened_subject(source, settings, given, as_json=as_json)
    path = write_report(subject, output)
    size = path.stat().st_size
    if as_json:
        print_json({"report": str(path), "bytes": size})
        return
    write(f"wrote {shell_word(path)}, {size_text(size)}")


def opened_subject(
    source: str, settings: list[str] | None, given: TokenOptions, *, as_json: bool
) -> "Subject":
    """The subject that a command names, after its settings were changed."""
    from penstock.report.subject import Subject, names_run, open_subject

    def log(event: str) -> None:
        if not as_json:
            console(stderr=True).print(visible(event), soft_wrap=True)

    if names_run(source):
        refuse_options(source, given)
        from penstock.train.command import recipe_changes  # it imports torch

        changes = recipe_changes(settings or [])
        return open_subject(source, tokenizer=given.tokenizer, changes=changes, log=log)
    if settings:
        raise typer.BadParameter(
            f"--set changes a setting of a recipe, and {source} is not a recipe or a run. Leave "
            "the option out."
        )
    if (files := open_files(store_path(source), given)) is not None:
        return Subject(source, {source: files}, None, given.tokenizer)
    return open_subject(source, tokenizer=given.tokenizer)
