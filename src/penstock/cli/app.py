"""The commands, and what becomes of whatever they raise.

    0    done
    1    an error of ours, or of the system: its name and message on stderr, no traceback
    2    a command that cannot be understood
    130  Ctrl-C

Anything else that is raised is a mistake in penstock, and shows its traceback.
"""

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli import (
    bench,
    build,
    check,
    decode,
    demo,
    fetch,
    info,
    plan,
    tokenizer,
    train,
    verify,
)
from penstock.cli.terminal import complain, fail
from penstock.errors import PenstockError

__all__ = ["app", "run"]

_INTERRUPTED = 130


class Commands(TyperGroup):
    """All commands; turns errors into messages and exit codes."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **settings: Any) -> Any:
        """Parse and run; with `--json`, a command that cannot be understood is JSON too."""
        args = list(sys.argv[1:] if args is None else args)
        if "--json" not in args:
            return super().main(args, *rest, **settings)
        try:
            settings |= {"standalone_mode": False, "obj": "json"}
            sys.exit(super().main(args, *rest, **settings))
        except Exception as error:
            # Typer's click has moved over the years: its errors are known by what they can do.
            if not hasattr(error, "format_message"):
                raise
            complain("UsageError", error.format_message(), as_json=True)
            sys.exit(2)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        as_json = ctx.obj == "json"
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            fail(_interruption(error), as_json=as_json)
            raise typer.Exit(_INTERRUPTED) from None
        except (PenstockError, OSError) as error:
            if getattr(error, "errno", None) == errno.EPIPE:
                raise
            fail(error, as_json=as_json)
            raise typer.Exit(1) from error


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with something to say."""


def _interruption(error: KeyboardInterrupt) -> Interrupted:
    return Interrupted(" ".join(["stopped by Ctrl-C.", *getattr(error, "__notes__", [])]))


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # half the lines, and no brackets taken for markup
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: penstock demo",
)
app.command("build")(build.build_command)
app.command("info")(info.info_command)
app.command("verify")(verify.verify_command)
app.command("decode")(decode.decode_command)
app.command("bench")(bench.bench_command)
app.command("fetch")(fetch.fetch_command)
app.command("check")(check.check_command)
app.command("plan")(plan.plan_command)
app.command("train")(train.train_command)
app.command("demo")(demo.demo_command)
app.add_typer(tokenizer.app, name="tokenizer")


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"penstock {__version__}\n")
        raise typer.Exit


@app.callback()
def penstock(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Raw text to training batches for language models."""


def run() -> NoReturn:
    """Run the command line of this process and end it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller (`>&-`), who wants to hear nothing
            stream = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)
        # Latin-1 terminals exist; a character that one lacks is spelled, not a crash.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="penstock")
        code: Any = 0
    except SystemExit as leaving:
        code = leaving.code
    except OSError as error:  # outside of a command: where the version or the help is written
        code = _unwritten(error)
    except KeyboardInterrupt as error:  # outside of a command: while Python still imports
        fail(_interruption(error), as_json=False)
        code = _INTERRUPTED
    _leave(code if isinstance(code, int) else int(code is not None))


def _unwritten(error: OSError) -> int:
    """Say that output was lost, unless its reader (`| head`) has left; returns the exit code."""
    if error.errno != errno.EPIPE:
        with suppress(OSError):
            fail(error, as_json=False)
    return 1


def _leave(code: int) -> NoReturn:
    """End the process with `code`, at once if it failed."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        os._exit(code or _unwritten(error))
    if code:
        # A worker may be deep in native code. Python would pull the interpreter away from
        # under it, and it may crash on its return; there is nothing left to tidy up.
        os._exit(code)
    sys.exit(0)
