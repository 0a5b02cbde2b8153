"""The commands, and the exit codes of the program.

    0    success
    1    an error of penstock or of the system: its name and message on stderr, no traceback;
         of `penstock diff`: the runs differ
    2    a command line that is not valid; of `penstock diff`: any error
    130  Ctrl-C

Any other exception is a bug in penstock, and its traceback is shown.
"""

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from penstock import __version__
from penstock.cli.terminal import message_of, notes_of, print_error
from penstock.cli.values import with_usual_values
from penstock.errors import PenstockError

# The commands in the order of `penstock --help`: building and inspecting stores, training,
# inspecting runs. The command NAME is the function NAME_command in cli/NAME.py.
COMMANDS = [
    *("build", "info", "verify", "copy", "import", "export", "decode"),
    *("fetch", "check", "plan", "train"),
    *("inspect", "when", "diff", "report", "demo"),
]
GROUPS = ["tokenizer"]
"""Commands that have commands: the `app` in cli/NAME.py."""

# As in a shell: 128 + 2, the number of SIGINT.
_INTERRUPTED = 130


class Command(TyperCommand):
    """A command that converts the usual values of its parameters quickly."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters of this command."""
        return with_usual_values(self, super().get_params(ctx))


class Commands(TyperGroup):
    """The group of all commands, which turns exceptions into messages and exit codes."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **settings: Any) -> Any:
        """Parse the arguments and run; with `--json`, a usage error is JSON too."""
        # The arguments are not parsed yet, but the error of a failed parse must be JSON too.
        args = list(sys.argv[1:] if args is None else args)
        if "--json" not in args:
            return super().main(args, *rest, **settings)
        try:
            # In standalone mode, click would print its errors as text and exit.
            settings |= {"standalone_mode": False, "obj": "json"}
            sys.exit(super().main(args, *rest, **settings))
        except Exception as error:
            # New versions of typer contain their own copy of click, so the class of its errors
            # has no fixed import path. They are recognised by their method.
            if not hasattr(error, "format_message"):
                raise
            print_error("UsageError", error.format_message(), as_json=True)
            sys.exit(2)

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters of `penstock` itself."""
        return with_usual_values(self, super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        as_json = ctx.obj == "json"
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            _print_interrupt(error, as_json=as_json)
            raise typer.Exit(_INTERRUPTED) from None
        except (PenstockError, OSError, SystemExit) as error:
            if _is_closed_pipe(error):
                # The run of `train` is not finished, so that is no success. Other commands have
                # shown all that their reader wanted.
                raise typer.Exit(int(ctx.invoked_subcommand == "train")) from None
            if isinstance(error, SystemExit):
                raise
            print_error(type(error).__name__, message_of(error), as_json=as_json)
            # A script must be able to tell runs that differ from runs that cannot be compared.
            raise typer.Exit(2 if ctx.invoked_subcommand == "diff" else 1) from error


def _is_closed_pipe(error: BaseException) -> bool:
    """Whether the reader of the output has closed the pipe, as `| head` does."""
    # rich and click catch the OSError and raise a SystemExit instead.
    cause = error.__context__ if isinstance(error, SystemExit) else error
    return isinstance(cause, OSError) and cause.errno == errno.EPIPE


def _print_interrupt(error: KeyboardInterrupt, *, as_json: bool = False) -> None:
    message = " ".join(["stopped by Ctrl-C.", *notes_of(error)])
    print_error("Interrupted", message, as_json=as_json)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"penstock {__version__}\n")
        raise typer.Exit


def _penstock(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Raw text to training batches for language models."""


def make_app(names: Sequence[str] = (*COMMANDS, *GROUPS)) -> typer.Typer:
    """The command line with these commands. Only their modules are imported."""
    made = typer.Typer(
        cls=Commands,
        callback=_penstock,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # half as many lines, and brackets are not read as markup
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Start with: penstock demo",
    )
    for name in names:
        # `import` is a keyword, so its module has another name.
        module = import_module(f"penstock.cli.{'import_' if name == 'import' else name}")
        if name in GROUPS:
            made.add_typer(module.app, name=name)
        else:
            made.command(name, cls=Command)(vars(module)[f"{name}_command"])
    return made


if TYPE_CHECKING:
    app: typer.Typer
    """The command line with all commands, made when it is first used."""


def __getattr__(name: str) -> typer.Typer:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()["app"] = make_app()
    return made


def _app_of(arguments: Sequence[str]) -> typer.Typer:
    """The command line for these arguments: if the first one is a command, that command alone.

    Importing all commands takes a tenth of the time of a short command.
    """
    first = arguments[:1]
    return make_app(first if set(first) & {*COMMANDS, *GROUPS} else (*COMMANDS, *GROUPS))


def run() -> NoReturn:
    """Run the command line of this process and end it."""
    sys.stdout, sys.stderr = _writable(sys.stdout), _writable(sys.stderr)
    try:
        _app_of(sys.argv[1:])(prog_name="penstock")
        code: object = 0
    # Typer ends every command with SystemExit, also after success.
    except SystemExit as leaving:
        code = 0 if _is_closed_pipe(leaving) else leaving.code
    except OSError as error:  # outside of a command, while the version or the help is written
        code = _on_lost_output(error)
    except KeyboardInterrupt as error:  # outside of a command, while Python still imports
        _print_interrupt(error)
        code = _INTERRUPTED
    _leave(code if isinstance(code, int) else int(code is not None))


def _writable(stream: TextIO | None) -> TextIO:
    """`stream`, or the null device if the caller of the program closed the stream (`>&-`)."""
    if stream is None:
        return Path(os.devnull).open("w", encoding="utf-8")
    # A terminal can have an encoding such as Latin-1. Characters outside that encoding are written
    # as escapes such as "\u2501", instead of raising an error.
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


def _on_lost_output(error: OSError) -> int:
    """Report that output could not be written; returns the exit code.

    It is not an error if the reader of a pipe has closed it, as `| head` does.
    """
    if _is_closed_pipe(error):
        return 0
    with suppress(OSError):
        print_error(type(error).__name__, message_of(error), as_json=False)
    return 1


def _leave(code: int) -> NoReturn:
    """End the process with `code`, at once if it failed."""
    # The last output is still in a buffer, so a full disk may be noticed only here.
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        os._exit(code or _on_lost_output(error))
    if code:
        # A thread can be inside native code. Python would end the interpreter, and the thread
        # could crash when it returns. Nothing needs to be cleaned up here.
        os._exit(code)
    sys.exit(0)
