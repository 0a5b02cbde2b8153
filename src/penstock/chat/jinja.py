"""Chat templates in a sandbox, as Hugging Face defines them.

A template is a program that came with a model, so it runs in Jinja's immutable sandbox:
no attribute that begins with an underscore, no change to what it is given. It has what
templates expect: `raise_exception`, `tojson` without HTML escapes, `break` and `continue`,
`{% generation %}` blocks, and `strftime_now` where a date was given. Without one the name
is not defined, and templates that ask (`strftime_now is defined`) use the date they were
published with: a store must not depend on the day it was built.

Strings go through as `Traced`, so that the result knows whose characters are whose.
"""

import datetime
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.chat.arguments import is_arguments, items_of, to_json
from penstock.chat.provenance import Leaf, Traced, derived, leaves_in, traced_join
from penstock.errors import ChatError, TemplateError

__all__ = ["GENERATION", "Program"]

GENERATION = Leaf(-2, "generation", "")
"""The leaf of runs that a `{% generation %}` block wrote."""


# Of code that was handed something else than it expects.
_FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class _Refused(Exception):  # noqa: N818  (a verdict of the template, not an error of ours)
    """What `raise_exception` in a template raises."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: what is between is the assistant's."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        marked = traced_join([caller()])
        return Traced(marked.plain, [*marked._runs, (0, len(marked), GENERATION, -1)])


class _Tracing(CodeGenerator):
    """Jinja's compiler, with an operator `~` that keeps runs."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802  (Jinja's name)
        self.write("environment.concat(map(str, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write(")))")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox that keeps track of characters."""

    code_generator_class = _Tracing
    concat = staticmethod(traced_join)
    intercepted_binops = frozenset(("%",))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute; arguments that came as JSON in a string have items."""
        if attribute == "items" and is_arguments(obj):
            return partial(items_of, obj)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operator `%`, which formats text."""
        result = super().call_binop(context, operator, left, right)
        return _formatted(result, (left, right)) if isinstance(left, str) else result

    def call(
        __self,  # noqa: N805  (so that a template may pass any keyword)
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Methods of plain strings (" ".join(parts)) would forget where their arguments are from.
        owner = getattr(__obj, "__self__", None)
        if type(owner) is str and __obj.__name__ in ("join", "replace"):
            __obj = getattr(Traced(owner, []), __obj.__name__)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(owner, str) and type(result) is str:
            given = (owner, *args, *kwargs.values())
            formats = __obj.__name__ in ("format", "format_map")
            return _formatted(result, given) if formats else derived(result, given)
        return result


def _formatted(text: str, values: Iterable[Any]) -> str:
    """`text`, which was formatted with `values`, as belonging to all of them.

    Raises:
        ChatError: what a message says is among them; where in `text` it is cannot be told.
    """
    held = list(values)
    if any(leaf.path.startswith("content") for leaf in leaves_in(held)):
        raise ChatError(
            "untraceable",
            f"The template formats what a message says into {text[:60]!r}, so what is the "
            "assistant's cannot be told. Use a template that writes the content as it is.",
        )
    return derived(text, held)


def _keeping(name: str) -> Callable[..., Any]:
    """A filter of Jinja whose result still belongs to what went in."""
    original = FILTERS[name]

    def kept(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if isinstance(result, str) and type(result) is not Traced:
            return derived(str.__str__(result), args)
        return result

    for mark in ("jinja_pass_arg",):
        if hasattr(original, mark):
            setattr(kept, mark, getattr(original, mark))
    return kept


def _join(pieces: Any, d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        pieces = [each[attribute] for each in pieces]
    return Traced(d, []).join(map(str, pieces))


def _items(value: Any) -> Any:
    """The filter `items`, also of arguments that came as JSON in a string."""
    return iter(items_of(value)) if is_arguments(value) else FILTERS["items"](value)


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    return _formatted(FILTERS["format"](text, *args, **kwargs), (text, *args, *kwargs.values()))


def _same(value: Any) -> Any:
    return value


@cache
def _environment() -> _Environment:
    made = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    changing: tuple[str, ...] = (
        "indent",
        "wordwrap",
        "truncate",
        "center",
        "striptags",
        "urlencode",
        "reverse",
    )
    changing += ("lower", "upper", "capitalize", "title", "escape", "e", "string", "forceescape")
    for name in (*changing, "pprint", "urlize", "xmlattr"):
        made.filters[name] = _keeping(name)
    made.filters |= {"tojson": to_json, "join": _join, "safe": _same}
    made.filters |= {"items": _items, "format": _format}
    made.globals["raise_exception"] = _raise
    return made


def _raise(message: str) -> NoReturn:
    raise _Refused(message)


class Program:
    """A template that is compiled once and rendered many times; safe to use from many threads."""

    def __init__(self, source: str, name: str) -> None:
        self.source = source
        self.name = name
        try:
            self._template = _environment().from_string(source)
        except JinjaError as error:
            number = getattr(error, "lineno", None)
            line = f", line {number}" if number else ""
            raise TemplateError(
                f"The chat template {name}{line} is not valid Jinja: {error}."
            ) from error

    @property
    def marks_generation(self) -> bool:
        """Whether the template says itself, by `{% generation %}`, what is trained on."""
        return "generation" in self.source and "endgeneration" in self.source

    def run(self, variables: dict[str, Any], date: datetime.date | None) -> Traced:
        """The text for these variables.

        Raises:
            ChatError: the template refused the conversation, or failed on it.
        """
        if date is not None:
            variables = {**variables, "strftime_now": date.strftime}
        try:
            text = self._template.render(variables)
        except _Refused as refusal:
            raise ChatError(
                "template_refused", f"The template {self.name} refused the conversation: {refusal}"
            ) from None
        except ChatError:  # of ours, from inside the template
            raise
        except (JinjaError, *_FAILURES) as error:
            raise ChatError("template_failed", self._failure(error)) from error
        assert isinstance(text, Traced)  # by the environment's `concat`
        return text

    def _failure(self, error: Exception) -> str:
        hint = ""
        if "strftime_now" in str(error):
            hint = " It asks for today's date: give one with date=."
        return (
            f"The template {self.name} failed on the conversation: "
            f"{type(error).__name__}: {error}.{hint}"
        )
