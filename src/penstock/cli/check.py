"""`penstock check`: inspect files before a training run."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options
from penstock.cli.options import argument, option, path_option, with_flags
from penstock.cli.terminal import print_facts, print_json, visible, write
from penstock.cli.units import duration_text, number_of, size_text
from penstock.options import BuildOptions, ReadSettings

if TYPE_CHECKING:
    from penstock.check.check import CheckReport
    from penstock.check.sample import FileSample

# The files that LocalOpenWebTextDataModule reads by default.
_DEFAULT_FILES = ("training_data/owt_train.txt", "training_data/owt_valid.txt")
_SHOWN_CHARACTERS = 72
# The wording of the script that this command replaces.
_PASSED = {"Performance": "PASSED (>100K tokens/sec)"}


@with_flags(BuildOptions, "tokenizer", "format", "documents", "field", "errors")
def check_command(
    files: Annotated[list[str] | None, argument("The files to check.", "FILES")] = None,
    length: Annotated[int, option("Tokens per row of the test loader.", "NUMBER", least=1)] = 1024,
    batch_size: Annotated[
        int, option("Rows per batch of the test loader.", "NUMBER", least=1)
    ] = 32,
    sample: Annotated[float, option("Megabytes of text to read.", "MB", least=0.001)] = 16,
    directory: Annotated[
        Path | None, path_option("Try to build a store here.", "DIRECTORY", "--output", "-o")
    ] = None,
    as_json: options.AsJson = False,
    **given: Any,
) -> None:
    """Check your files before you train on them.

    Reads a sample of each file, tokenizes it, and reads batches back, as a training run would.
    The report says how much of each file was read. If anything is wrong, ends with exit code 1.
    With -o, also checks that the directory is writable, has room, and holds no other store.
    Without FILES, checks training_data/owt_train.txt and training_data/owt_valid.txt, line by line.

    penstock check train.txt val.txt
    """
    from penstock.check.check import CheckSettings, check

    # LocalOpenWebTextDataModule reads these two files line by line.
    if not files and given["documents"] == "auto":
        given["documents"] = "lines"
    trial = CheckSettings(
        tokenizer=given.pop("tokenizer"),
        reading=ReadSettings(**given),
        length=length,
        batch_size=batch_size,
        sample_bytes=round(sample * 1e6),
        directory=directory,
    )
    report = check(files or list(_DEFAULT_FILES), trial)
    try:
        if as_json:
            print_json(_to_json(report))
        else:
            _show(report)
            # Only the default files can be fetched by a name.
            if not files and not report.findings[0].passed:
                write("next: penstock fetch openwebtext --output training_data")
    finally:
        # Also with --json, so that a script can test it, and with `| head`, which closes the pipe.
        if not report.passed:
            raise typer.Exit(1)


def _show(report: "CheckReport") -> None:
    for file in report.files:
        if file.num_bytes:  # a missing or empty file has only a finding
            print_facts(file.name, _rows(file))
    for finding in report.findings:
        message = visible(finding.message, lines=False)
        if finding.passed:
            write(f"✅ {finding.name} {_PASSED.get(finding.name, 'PASSED')}: {message}")
        elif message.startswith("not tried"):
            write(f"❔ {finding.name}: {message}")
        else:
            write(f"❌ {finding.name} FAILED: {message}")
    passed = sum(finding.passed for finding in report.findings)
    write(f"{passed} of {len(report.findings)} passed ({duration_text(report.seconds)})")


def _rows(file: "FileSample") -> list[tuple[str, str]]:
    from penstock.store.summary import rule_text

    compression = f", {file.compression}" if file.compression else ""
    rows = [("size", f"{size_text(file.num_bytes)}{compression}")]
    if file.sample_bytes:
        part = "all of it" if file.whole else f"a sample of {size_text(file.sample_bytes)}"
        rows.append(("read", f"{part}: {number_of(len(file.texts), 'document')}"))
        rows.append(("as", f"{file.format}, UTF-8"))
        rows.append(("document is", rule_text(file.rule)))
    for number, text in enumerate(file.shown):
        short = f"{text[:_SHOWN_CHARACTERS]}…" if len(text) > _SHOWN_CHARACTERS else text
        rows.append((f"document {number}", short))
    return [*rows, *(("hint", hint) for hint in file.hints)]


def _to_json(report: "CheckReport") -> dict[str, object]:
    files = []
    for file in report.files:
        values = asdict(file)
        # There are many texts, so only their number and the first of them are printed.
        values["num_documents"], values["documents"] = len(values.pop("texts")), file.shown
        values["num_rejects"] = len(values.pop("rejects"))
        files.append(values)
    checks = [asdict(finding) for finding in report.findings]
    seconds = round(report.seconds, 3)
    return {"passed": report.passed, "checks": checks, "files": files, "seconds": seconds}
