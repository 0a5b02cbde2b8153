"""`penstock check`: the user's own files, before a training run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import (
    AsJson,
    Errors,
    ErrorsOption,
    FieldOption,
    Format,
    FormatOption,
)
from penstock.cli.tables import facts
from penstock.cli.terminal import console, print_json, visible, write
from penstock.cli.units import duration_text, number_of, size_text

if TYPE_CHECKING:
    from penstock.check.check import Finding, Report
    from penstock.check.sample import LookedAt

__all__ = ["check_command"]

_USUAL = ("training_data/owt_train.txt", "training_data/owt_valid.txt")
_SHOWN_CHARACTERS = 72
_PASSED = {"Performance": "PASSED (>100K tokens/sec)"}


def check_command(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILES",
            show_default=False,
            help="Training and validation files; training_data/owt_train.txt and owt_valid.txt if "
            "not given.",
        ),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(metavar="NAME", help="The tokenizer to try, as in penstock build.")
    ] = "gpt2",
    format: FormatOption = Format.AUTO,
    documents: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            show_default=False,
            help="In text files: auto, lines, paragraphs, file or sep:SEPARATOR, as in penstock "
            "build. auto if not given; of a training and a validation file, lines.",
        ),
    ] = None,
    field: FieldOption = "text",
    errors: ErrorsOption = Errors.STRICT,
    length: Annotated[
        int, typer.Option(min=1, metavar="NUMBER", help="Tokens in a row of the test loader.")
    ] = 1024,
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="NUMBER", help="Rows in a batch of it.")
    ] = 32,
    sample: Annotated[
        float, typer.Option(min=0.001, metavar="MB", help="Megabytes of text to look at.")
    ] = 16,
    directory: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIRECTORY", help="Where stores would go.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Look at your own files before you train on them.

    Reads a sample of each, tokenizes it, and reads batches back, as a training run would;
    of big files that is a small part, which the report says. Ends with exit code 1 if
    anything is wrong.

    penstock check train.txt val.txt
    """
    from penstock.check.check import Trial, check
    from penstock.sources.settings import ReadSettings

    # A training and a validation file are read as LocalOpenWebTextDataModule reads them.
    usual = "lines" if not files or len(files) == 2 else "auto"
    reading = ReadSettings(
        format=format.value, documents=documents or usual, field=field, errors=errors.value
    )
    trial = Trial(
        reading=reading,
        tokenizer=tokenizer,
        length=length,
        batch_size=batch_size,
        sample_bytes=round(sample * 1e6),
        directory=directory,
    )
    report = check(files or list(_USUAL), trial)
    if as_json:
        print_json(_spell(report))
    else:
        _show(report, usual=not files)
    if not report.passed:
        raise typer.Exit(1)


def _show(report: "Report", *, usual: bool) -> None:
    for file in report.files:
        if file.num_bytes:
            _show_file(file)
    for finding in report.findings:
        write(_line(finding))
    passed = sum(finding.passed for finding in report.findings)
    took = duration_text(report.seconds)
    write(f"{passed} of {len(report.findings)} passed ({took})")
    if usual and not report.findings[0].passed:
        write("next: penstock fetch openwebtext --output training_data")


def _line(finding: "Finding") -> str:
    told = visible(finding.told, lines=False)
    if finding.passed:
        return f"✅ {finding.name} {_PASSED.get(finding.name, 'PASSED')}: {told}"
    return f"❌ {finding.name} FAILED: {told}"


def _show_file(file: "LookedAt") -> None:
    out = console()
    out.print(visible(file.name, lines=False), style="bold", soft_wrap=True)
    out.print(facts(_rows(file)))


def _rows(file: "LookedAt") -> list[tuple[str, Any]]:
    from penstock.store.explain import rule_text

    packed = f", {file.compression}" if file.compression else ""
    rows: list[tuple[str, Any]] = [("size", f"{size_text(file.num_bytes)}{packed}")]
    if file.sample_bytes:
        part = "all of it" if file.whole else f"a sample of {size_text(file.sample_bytes)}"
        rows.append(("read", f"{part}: {number_of(len(file.texts), 'document')}"))
        rows.append(("as", f"{file.format}, UTF-8"))
        rows.append(("document is", visible(rule_text(file.documents), lines=False)))
    for number, text in enumerate(file.shown):
        cut = f"{text[:_SHOWN_CHARACTERS]}…" if len(text) > _SHOWN_CHARACTERS else text
        rows.append((f"document {number}", visible(cut, lines=False)))
    return [*rows, *(("hint", visible(hint, lines=False)) for hint in file.hints)]


def _spell(report: "Report") -> dict[str, Any]:
    return {
        "passed": report.passed,
        "checks": [
            {"name": each.name, "passed": each.passed, "told": each.told}
            for each in report.findings
        ],
        "files": [
            {
                "name": file.name,
                "bytes": file.num_bytes,
                "format": file.format,
                "compression": file.compression,
                "num_documents": len(file.texts),
                "sample_bytes": file.sample_bytes,
                "whole": file.whole,
                "rejects": len(file.rejects),
                "documents": file.shown,
                "rule": file.documents,
                "hints": file.hints,
            }
            for file in report.files
        ],
        "seconds": round(report.seconds, 3),
    }
