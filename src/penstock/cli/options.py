"""Options and arguments that several commands have."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    cast,
    get_origin,
    get_type_hints,
)

import typer

from penstock.options import declared, default_of
from penstock.paths import expand_user, store_path

if TYPE_CHECKING:
    from penstock.paths import StorePath
    from penstock.store.reader import TokenStore

    Anywhere = StorePath
else:
    # typer takes no unions; the parser decides. Not Path: typer 0.19 would make a Path of a URL.
    Anywhere = object

Command = TypeVar("Command", bound=Callable[..., Any])


def option(
    help: str, metavar: str | None = None, *flags: str, least: float | None = None
) -> object:
    """A typer option. Without `flags`, the name of the parameter is its flag.

    A flag with underscores can be typed with hyphens too.
    """
    # dict.fromkeys removes duplicates and keeps the order.
    both = dict.fromkeys(each for flag in flags for each in (flag, flag.replace("_", "-")))
    return typer.Option(*both, metavar=metavar, min=least, help=help)


def argument(help: str, metavar: str) -> object:
    """A typer argument."""
    return typer.Argument(metavar=metavar, show_default=False, help=help)


def path_option(help: str, metavar: str, *flags: str) -> object:
    """A typer option that takes a path; `~` is the home directory."""
    return typer.Option(*flags, metavar=metavar, parser=expand_user, help=help)


AsJson = Annotated[bool, option("Print one JSON object and nothing else.", None, "--json")]
Inputs = Annotated[
    list[str],
    argument("Files (also .gz, .zst, .bz2, .xz), directories, globs, URLs.", "INPUTS"),
]
Store = Annotated[
    Path,
    typer.Argument(
        metavar="STORE", show_default=False, parser=expand_user, help="The directory of the store."
    ),
]
AnyStore = Annotated[
    Anywhere,
    typer.Argument(
        metavar="STORE",
        show_default=False,
        parser=store_path,
        help="The directory of the store, or its URL (s3://, gs://, az://, https://, hf://).",
    ),
]
Output = Annotated[
    Anywhere,
    typer.Option(
        "--output", "-o", metavar="STORE", parser=store_path, help="The directory or URL to write."
    ),
]


def with_flags(kind: type, *names: str) -> Callable[[Command], Command]:
    """Let a command with `**options` have a flag for each of some options of a dataclass."""

    def decorated(command: Command) -> Command:
        @wraps(command)
        def called(**values: Any) -> Any:
            return command(**values)

        signature = inspect.signature(command)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        needed = [each for each in own if each.default is each.empty]
        rest = [each.replace(kind=each.KEYWORD_ONLY) for each in own if each not in needed]
        hints, about = get_type_hints(kind), declared(kind)
        flags = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default_of(kind, name),
                annotation=Annotated[
                    _typed(hints[name]),
                    option(about[name].help, about[name].metavar, least=about[name].least),
                ],
            )
            for name in names
        ]
        parameters = [*needed, *flags, *rest]
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        return cast(Command, called)

    return decorated


def _typed(hint: Any) -> Any:
    """The type of an option as typer takes it, which knows no unions."""
    if get_origin(hint) is Literal or hint in (str, float, int):
        return hint
    # `Any` and unions: what a command line can say is text.
    return str | None


def open_at(path: Anywhere) -> "dict[str, TokenStore]":
    """The stores of `stores_at`, opened; the two sides of a split store are of one build."""
    from penstock.store.sides import open_stores, stores_at

    paths = stores_at(path)
    return dict(zip(paths, open_stores([*paths.values()]), strict=True))


def by_side(values: dict[str, dict[str, object]]) -> dict[str, object]:
    """The JSON objects of a split store by side; of any other store, its only object."""
    # `stores_at` uses "" as the side of a store that is not split.
    return values.get("") or dict(values)
