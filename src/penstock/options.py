"""Options that are declared once, and everything that follows from a declaration.

    errors: Literal["strict", "replace"] = option("strict", "What to do with documents that …")
       │                                      │        │
       name and choices                    default   help

A frozen dataclass declares options as its fields. `build(**options)` fills it, and the flags of the
command, their `--help`, the arguments in the docstring and the record in the manifest are all made
from its fields. An option is checked when the dataclass is made, and code that gets the dataclass
trusts it.
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from textwrap import fill
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from penstock.errors import SourceError, StoreError

Format = Literal["auto", "text", "jsonl", "json", "csv", "tsv", "parquet", "arrow"]
_Options = TypeVar("_Options")
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Declared:
    """What a field says of an option, besides its name, type and default."""

    help: str
    metavar: str | None = None
    """What `--help` shows in place of the value."""
    least: float | None = None
    check: Callable[[Any], object] | None = None
    """Raises an error for a value that is not allowed."""


def option(
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    least: float | None = None,
    check: Callable[[Any], object] | None = None,
) -> Any:
    """A field of a dataclass that is an option; see `Declared`."""
    return field(default=default, metadata={"option": Declared(help, metavar, least, check)})


def declared(kind: type) -> dict[str, Declared]:
    """The options of a dataclass, by name."""
    return {each.name: each.metadata["option"] for each in fields(kind) if each.metadata}


def check_options(options: Any) -> None:
    """Raise unless the value of each option is one of its choices, and passes its check.

    Raises:
        SourceError or StoreError: a value is not allowed; the message names the option.
    """
    hints = get_type_hints(type(options))
    for name, about in declared(type(options)).items():
        value, hint = getattr(options, name), hints[name]
        if get_origin(hint) is Literal and value not in get_args(hint):
            known = ", ".join(f'"{each}"' for each in get_args(hint))
            raise SourceError(f"{name}={value!r:.60} ({flag_of(name)}) is not one of {known}.")
        # `not >=` refuses NaN too.
        if about.least is not None and value is not None and not value >= about.least:
            raise StoreError(f"{name}={value!r} ({flag_of(name)}) must be at least {about.least}.")
        if about.check is not None and value is not None:
            about.check(value)


def flag_of(name: str) -> str:
    """The flag of an option on the command line.

    >>> flag_of("max_bad")
    '--max-bad'
    """
    return f"--{name.replace('_', '-')}"


def made_of(kind: type[_Options], keywords: dict[str, Any], function: str) -> _Options:
    """The options that the keywords of a call say.

    Raises:
        TypeError: there is no such option; the message names the nearest one.
    """
    known = declared(kind)
    for name in keywords:
        if name not in known:
            close = get_close_matches(name, known, 1)
            advice = f"Did you mean {close[0]}?" if close else f"It takes {', '.join(known)}."
            raise TypeError(f"{function} has no argument {name!r}. {advice}")
    return kind(**keywords)


def takes(kind: type) -> Callable[[_Function], _Function]:
    """Let a function with `**options` show the options of `kind` in its signature and docstring.

    They take the place of the line `**options: …` among its arguments.
    """

    def documented(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.name != "options"]
        made = [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=each.default,
                annotation=each.type,
            )
            for each in fields(kind)
            if each.metadata
        ]
        function.__signature__ = signature.replace(parameters=[*own, *made])  # type: ignore[attr-defined]
        before, line, after = (function.__doc__ or "").partition("        **options: ")
        if line:
            rest = after.partition("\n")[2]
            function.__doc__ = before + arguments_text(kind) + rest
        return function

    return documented


def arguments_text(kind: type) -> str:
    """The options as the section "Args" of a docstring lists them."""
    first, rest = " " * 8, " " * 12
    return "".join(
        fill(f"{name}: {about.help}", 100, initial_indent=first, subsequent_indent=rest) + "\n"
        for name, about in declared(kind).items()
    )


def default_of(kind: type, name: str) -> Any:
    """The default of an option."""
    (found,) = (each.default for each in fields(kind) if each.name == name)
    assert found is not MISSING
    return found


_RULES = ("auto", "lines", "paragraphs", "file")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSettings:
    """What a document is, and what happens to input that is not a valid document."""

    documents: str = option(
        "auto",
        "What a document is in text files: lines, paragraphs, file (a document is a file) or "
        "sep:SEPARATOR. auto: the text between `<|endoftext|>` or the tokenizer's end token, if "
        "the first 64 MB have one; otherwise the whole file. A JSON record or a row of a table is "
        "always a document.",
        metavar="RULE",
        check=lambda rule: check_rule(rule),  # which is defined below
    )
    field: str = option(
        "text",
        "The JSON field or table column with the text; a.b is the field b inside a. With a chat "
        "template, also two columns: a prompt and its completion, as in question,answer.",
        metavar="NAME",
        check=lambda name: check_field(name),
    )
    format: Format = option(
        "auto",
        "The format of the files. auto: from their suffix; a .json file that begins with [ is an "
        "array, and JSON Lines otherwise. The first line of csv and tsv files names their columns.",
    )
    errors: Literal["strict", "replace"] = option(
        "strict",
        "What to do with documents that are not UTF-8. strict: reject them; replace: put U+FFFD in "
        "place of the invalid bytes.",
    )
    separators: tuple[str, ...] = ("<|endoftext|>",)
    """Separators that "auto" looks for, the first one first. A build takes them from its
    tokenizer, so this is no option."""

    def __post_init__(self) -> None:
        check_options(self)
        # "sep:---" and "---" mean the same, and both are recorded as "---". "sep:lines" stays as it
        # is, because "lines" means something else, and so does "sep:word".
        plain = self.documents.removeprefix("sep:")
        if plain not in _RULES and not plain.startswith("sep:") and not plain.isalnum():
            object.__setattr__(self, "documents", plain)

    def describe(self) -> dict[str, Any]:
        """These settings as plain JSON, for the manifest."""
        found = {"format": self.format, "documents": self.documents, "field": self.field}
        found["errors"] = self.errors
        is_auto = self.documents == "auto"
        return found | ({"separators": list(self.separators)} if is_auto else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildOptions(ReadSettings):
    """How text becomes a store: the options of `build`, of `stream` and of the command."""

    tokenizer: Any = option(
        "gpt2",
        "gpt2, bytes, tiktoken:NAME, hf:NAME on the Hub, a tokenizer.json or its directory; in "
        "Python also a tokenizer object. See `load_tokenizer`.",
        metavar="NAME",
    )
    eos: bool | str = option(
        True, "Whether each document ends with the tokenizer's end token, or the name of a token."
    )
    bos: bool | str = option(
        False,
        "Whether each document begins with the tokenizer's start token, or the name of a token. A "
        "token that is there already is not added a second time.",
    )
    chat: Any = option(
        None,
        "A chat template (chatml, nanochat, a .jinja file, a tokenizer_config.json or its "
        "directory), or in Python a `Chat`. The inputs are then conversations, and the store "
        "records for each token whether it is trained on. `eos` is added only if the template "
        "writes no end token.",
        metavar="TEMPLATE",
    )
    split: str | None = option(
        None,
        "Hold out documents for validation, as STORE/val. tail:0.1 holds out the last tenth of the "
        "input (of a single document, its last characters); hash:0.1 holds out a tenth that is "
        "chosen by a digest of each text.",
        metavar="RULE",
    )
    max_bad: float = option(
        0.001,
        "Stop if more records are rejected. Below 1: a share of all records, but ten are allowed "
        "if there are at least 1,000. Otherwise: a number of records.",
        metavar="NUMBER",
        least=0,
    )
    workers: int | str | None = option(
        None,
        "Who tokenizes: a number of threads, by default one for each core. More than four of them "
        "and more than 1 GB of text use processes of two threads each; threads:N and processes:N "
        "decide that. ray and ray://HOST:PORT use a Ray cluster. The bytes of the store are the "
        "same.",
        metavar="KIND",
        check=lambda workers: parse_workers(workers),
    )


class BuildKeywords(TypedDict, total=False):
    """The options of `penstock.build` for type checkers, which do not run the code above."""

    tokenizer: object
    documents: str
    field: str
    format: Format
    errors: Literal["strict", "replace"]
    eos: bool | str
    bos: bool | str
    chat: object
    split: str | None
    max_bad: float
    workers: int | str | None


def check_rule(documents: str) -> None:
    """Raise unless `documents` is a rule or a separator."""
    if documents in ("", "sep:"):
        raise SourceError(
            f'documents="{documents}" separates nothing. Use "auto", "lines", "paragraphs", "file" '
            "or a separator."
        )
    # A word without "sep:" is a name that was mistyped, far more often than a separator.
    if documents not in _RULES and documents.isalnum():
        close = get_close_matches(documents.lower(), _RULES, n=1)
        known = ", ".join(f'"{each}"' for each in _RULES)
        raise SourceError(
            f"documents={documents!r} is not a rule"
            + (f"; did you mean {close[0]}? " if close else ". ")
            + f'The rules are {known}. A separator of letters and digits is written as "sep:'
            f'{documents}".'
        )


def check_field(field: str) -> None:
    """Raise unless `field` is the name of a field, or a path of names."""
    if not isinstance(field, str):
        raise SourceError(
            f"field={field!r} is not the name of one field. To make one text of several fields, "
            "build from penstock.Texts with the joined texts."
        )
    if not field or not all(field.split(".")):
        raise SourceError(f"field={field!r} contains an empty name.")


def separator_in(documents: str) -> str | None:
    """The separator that `documents` names, or None.

    >>> separator_in("lines"), separator_in("sep:lines"), separator_in("---")
    (None, 'lines', '---')
    """
    return None if documents in _RULES else documents.removeprefix("sep:")


def parse_workers(workers: int | str | None) -> tuple[str, int | None]:
    """What `workers` says: "auto", "threads", "processes" or the address of Ray, and how many.

    >>> parse_workers(None), parse_workers(4), parse_workers("processes:8"), parse_workers("ray")
    (('auto', None), ('auto', 4), ('processes', 8), ('ray', None))
    """
    text = "auto" if workers is None else str(workers)
    kind, _, number = f"auto:{text}".partition(":") if text.isdecimal() else text.partition(":")
    if kind == "ray" and (text == kind or number.startswith("//")):
        return text, None
    if kind in ("auto", "threads", "processes"):
        if text == kind:
            return kind, None
        if number.isdecimal() and int(number) > 0:
            return kind, int(number)
    raise StoreError(
        f"workers={workers!r} (--workers) is not a number of threads, threads:N, processes:N, ray "
        "or ray://HOST:PORT."
    )


def num_cores() -> int:
    """How many cores this process may use: in a container, fewer than the machine has."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
