"""Values of options that are valid as they were typed.

Typer converts every value with pydantic, also one that is a string or was not given. The import
takes 0.1 s of processor time, a fifth of a short command. So the usual values are converted here:
text, numbers, choices and paths. All others go to typer, which also writes the error messages.
"""

from collections.abc import Callable
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

# The number of a step or a size. Longer numbers and signs are left to typer.
_MOST_DIGITS = 18


class _UnusualError(Exception):
    """Raised for a value that typer must convert, or refuse."""


def with_usual_values(command: Any, parameters: list[Any]) -> list[Any]:
    """Let the parameters of a command take usual values without typer's conversion.

    Args:
        command: The click command that typer made of a function.
        parameters: Its parameters, which are changed and returned.
    """
    hints = get_type_hints(command.callback, include_extras=True) if command.callback else {}
    for parameter in parameters:
        # A method of click's parameters in all versions of typer, which has no option for it.
        if "process_value" not in vars(parameter):
            convert, hint = parameter.process_value, hints.get(parameter.name)
            parameter.process_value = partial(_processed, parameter, hint, convert)
    return parameters


def _processed(
    parameter: Any, hint: Any, convert: Callable[[Any, Any], Any], ctx: Any, value: Any
) -> Any:
    """The value of a parameter: converted here if that is simple, otherwise by typer."""
    try:
        usual = _usual(parameter, hint, value)
    except _UnusualError:
        return convert(ctx, value)
    return usual if parameter.callback is None else parameter.callback(ctx, parameter, usual)


def _usual(parameter: Any, hint: Any, value: Any) -> Any:
    if value is None and not parameter.required:  # it was not given, and has no default
        return () if parameter.multiple or parameter.nargs == -1 else None
    # --help and the options for completion are of typer, and have no hint.
    if value is None or get_origin(hint) is not Annotated:
        raise _UnusualError
    kind, info = get_args(hint)
    if get_origin(kind) in (Union, UnionType):
        kind, *others = set(get_args(kind)) - {NoneType}
        if others:
            raise _UnusualError
    if get_origin(kind) is not list:
        return _converted(kind, info, value)
    if isinstance(value, str) or not value:
        raise _UnusualError
    return [_converted(get_args(kind)[0], info, each) for each in value]


def _converted(kind: Any, info: Any, value: Any) -> Any:
    if info.parser is not None:
        # typer.BadParameter is the caller's error, and a ValueError is one that typer reports.
        try:
            return info.parser(value)
        except ValueError:
            raise _UnusualError from None
    if get_origin(kind) is Literal and value in get_args(kind):
        return value
    if kind is int and isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value) if len(value) <= _MOST_DIGITS else value
    if kind not in (str, int, float, bool) or type(value) is not kind:
        raise _UnusualError
    if kind in (int, float) and not _within(info, value):
        raise _UnusualError
    return value


def _within(info: Any, value: float) -> bool:
    return (info.min is None or value >= info.min) and (info.max is None or value <= info.max)
