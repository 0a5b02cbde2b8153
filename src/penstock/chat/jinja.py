"""Runs chat templates in a sandbox, with the extensions that Hugging Face defines.

A template is a program that came with a model, so it runs in Jinja's immutable sandbox: it cannot
use attributes that begin with an underscore, cannot change its variables, and its ranges and its
output are limited. It gets the extensions that templates expect: `raise_exception`, `tojson`
without HTML escapes, `break` and `continue`, `{% generation %}` blocks, and `strftime_now` if the
user gave a date. Without a date `strftime_now` is undefined, and templates that test for it
(`strftime_now is defined`) use the date of their publication: a store must not depend on the day it
was built.

The strings of a conversation are `Traced`, so that the rendered text records which message each of
its characters comes from. `provenance` explains runs and leaves. Jinja itself would lose the runs
in four places, which are replaced here: `~`, the concatenation of a template's pieces, methods of
plain strings, and filters that change text.
"""

import datetime
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial, wraps
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.chat.messages import is_arguments, items_of, to_json
from penstock.chat.provenance import Leaf, Traced, derived, leaves_in, traced_join
from penstock.errors import ChatError, TemplateError

GENERATION = Leaf(-2, "generation", "")
"""The leaf of the runs that mark the text of `{% generation %}` blocks."""

# The longest text that a template may write, in characters; a loop that writes more is a mistake.
_MAX_OUTPUT = 100_000_000
# Jinja's filters that change text; their own results would have no runs.
_CHANGING_FILTERS = """
    indent wordwrap truncate center striptags urlencode reverse lower upper capitalize title escape
    e string forceescape pprint urlize xmlattr
"""
_DICT_NAMES = frozenset(dir(dict))
# The exceptions that a template's code raises if a conversation is not as it expects.
_FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class _Generation(Extension):
    """The tag `{% generation %}…{% endgeneration %}`, which marks text of the assistant."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        marked = traced_join([caller()])
        # One more run covers the whole block; the runs of messages inside the block stay.
        return Traced(marked.plain, [*marked._runs, (0, len(marked), GENERATION, -1)])


class _Compiler(CodeGenerator):
    # Jinja's own code for `~` calls `str_join`, which returns a plain string.
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802  (Jinja's name)
        self.write("environment.concat(map(str, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write(")))")


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with operators and calls that keep runs."""

    code_generator_class = _Compiler
    intercepted_binops = frozenset("%")  # the sandbox calls `call_binop` for it

    @staticmethod
    def concat(pieces: Iterable[str]) -> Traced:
        """The pieces of a template, of a macro or of a block, as one text."""
        parts, size = [], 0
        for piece in pieces:
            parts.append(piece)
            size += len(piece)
            if size > _MAX_OUTPUT:
                raise ChatError(
                    "template_limit",
                    f"The template writes more than {_MAX_OUTPUT:,} characters. Split the "
                    "conversation, or use another template.",
                )
        return traced_join(parts)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute of `obj`; a JSON string with arguments of a tool call also has `items`."""
        if type(obj) is dict and attribute not in _DICT_NAMES:
            # The usual case, `message.role`: a name that no dict has is the name of an item.
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if attribute == "items" and is_arguments(obj):
            return partial(items_of, obj)
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The method `format` of a string, without unsafe attributes."""
        owner = getattr(value, "__self__", None)
        if type(owner) is Traced:
            value = getattr(owner.plain, value.__name__)
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        return lambda *args, **kwargs: _formatted(wrapped(*args, **kwargs), (owner, args, kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operator `%`, which formats text."""
        result = super().call_binop(context, operator, left, right)
        return _formatted(result, (left, right)) if isinstance(left, str) else result

    def call(
        __self,  # noqa: N805  (so that a template may pass any keyword)
        __context: Context,
        __obj: Any,
        *args: object,
        **kwargs: object,
    ) -> object:
        owner = getattr(__obj, "__self__", None)
        if not isinstance(owner, str):
            return super().call(__context, __obj, *args, **kwargs)
        # Methods of plain strings (" ".join(parts)) would lose the runs of their arguments.
        if type(owner) is str and __obj.__name__ in ("join", "replace"):
            __obj = getattr(Traced(owner, []), __obj.__name__)
        result = super().call(__context, __obj, *args, **kwargs)
        # A plain result of another string method still comes from the string and the arguments.
        given = (owner, *args, *kwargs.values())
        return derived(result, given) if type(result) is str else result


def _formatted(text: str, values: object) -> str:
    """`text`, formatted with `values`; every leaf in the values is an origin of the whole result.

    Raises:
        ChatError: the content of a message is among the values, so its position is unknown.
    """
    if any(leaf.path.startswith("content") for leaf in leaves_in(values)):
        raise ChatError(
            "untraceable",
            f"The template formats the content of a message into {text[:60]!r}, so penstock cannot "
            "know which characters are the assistant's. Use a template that writes the content "
            "as it is.",
        )
    return derived(text, [values])


def _tracing(original: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `original`, whose text comes from all strings of the chat in its arguments."""

    @wraps(original)  # also copies Jinja's mark of a filter that takes context or environment
    def traced(*args: object, **kwargs: object) -> object:
        result = original(*args, **kwargs)
        if isinstance(result, str) and type(result) is not Traced:
            return derived(str.__str__(result), args)
        return result

    return traced


def _join(pieces: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        pieces = [each[attribute] for each in pieces]
    return Traced(d, []).join(map(str, pieces))


def _items(value: object) -> Iterator[tuple[object, object]]:
    """The filter `items`, also for a JSON string with the arguments of a tool call."""
    return iter(items_of(value)) if is_arguments(value) else FILTERS["items"](value)


def _format(text: str, *args: object, **kwargs: object) -> str:
    return _formatted(FILTERS["format"](text, *args, **kwargs), (text, args, kwargs))


@cache  # one environment serves all templates; it has no state that a template could change
def _environment() -> _Environment:
    # The options of `apply_chat_template`; other options would change the blanks that templates
    # write.
    made = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    # The results of `random` and `lipsum` differ from run to run.
    del made.filters["random"], made.globals["lipsum"]
    for name in _CHANGING_FILTERS.split():
        made.filters[name] = _tracing(FILTERS[name])
    # Nothing is escaped, so every string is safe.
    made.filters |= {"tojson": to_json, "join": _join, "safe": lambda value: value}
    made.filters |= {"items": _items, "format": _format}
    made.globals["raise_exception"] = _raise
    return made


def _raise(message: object) -> NoReturn:
    raise ChatError("template_refused", f"The template refused the conversation: {message}")


class Program:
    """A compiled template; safe to use from many threads."""

    def __init__(self, source: str, name: str) -> None:
        self.name = name
        try:
            self._template = _environment().from_string(source)
        except JinjaError as error:
            line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise TemplateError(
                f"The template {name}{line} is not valid Jinja: {error}."
            ) from error

    def run(self, variables: dict[str, object], date: datetime.date | None) -> Traced:
        """Render the template with these variables.

        Raises:
            ChatError: the template refused the conversation, its code failed, or its text is too
                long.
        """
        if date is not None:
            variables = {**variables, "strftime_now": date.strftime}
        try:
            text = self._template.render(variables)
        except ChatError:  # raised by the functions above, inside the template
            raise
        except (JinjaError, *_FAILURES) as error:
            hint = ""
            if "strftime_now" in str(error):
                hint = " It asks for today's date: give one with date= (--chat-date)."
            detail = f"{type(error).__name__}: {error}.{hint}"
            raise ChatError(
                "template_failed", f"The template {self.name} failed on the conversation: {detail}"
            ) from error
        assert isinstance(text, Traced)  # made by the environment's `concat`
        return text
