"""Runs chat templates in a sandbox, with the extensions that Hugging Face defines.

A template is a program that came with a model, so it runs in Jinja's immutable sandbox: it cannot
use attributes that begin with an underscore, and cannot change its variables. It gets the
extensions that templates expect: `raise_exception`, `tojson` without HTML escapes, `break` and
`continue`, `{% generation %}` blocks, and `strftime_now` if the user gave a date. Without a date
`strftime_now` is undefined, and templates that test for it (`strftime_now is defined`) use the date
of their publication: a store must not depend on the day it was built.

The strings of a conversation are `Traced`, so that the rendered text records which message each of
its characters comes from. `provenance` explains runs and leaves.
"""

import datetime
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial, wraps
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.chat.arguments import is_arguments, items_of
from penstock.chat.compiler import Compiler
from penstock.chat.filters import formatted, install
from penstock.chat.limits import (
    ITEM,
    RUNNING,
    TemplateBudget,
    as_text,
    brace_format,
    charge,
    count,
    percent_format,
    power,
    product,
    times,
    weight,
)
from penstock.chat.provenance import Leaf, Traced, derived, traced_join
from penstock.errors import ChatError, TemplateError

GENERATION = Leaf(-2, "generation", "")
"""The leaf of the runs that mark the text of `{% generation %}` blocks."""

# The result of these methods of a string may be much larger than the string, or a list of pieces.
_GROWING_METHODS = frozenset(
    {"center", "expandtabs", "join", "ljust", "replace", "rjust", "rsplit", "split"}
    | {"splitlines", "zfill"}
)
# Results of these methods could be huge, and no published template uses them.
_UNSAFE_METHODS = frozenset(("encode", "from_bytes", "maketrans", "to_bytes", "translate"))
# The units of a call, which takes longer than a step of a loop.
_CALL = 5 * ITEM
_DICT_NAMES = frozenset(dir(dict))
_TEXTS = frozenset((str, Traced))
# The attributes whose safety is remembered; published templates use a few dozen.
_MOST_NAMES = 4_096
# The longest source of a template, and the longest message of one, in characters.
_MAX_SOURCE, _MAX_MESSAGE = 1_000_000, 1_000
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


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with operators and calls that keep runs and are charged to a budget."""

    code_generator_class = Compiler

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._safe: dict[tuple[type, str], bool] = {}

    # The sandbox calls `call_binop` for these operators, but `Compiler` writes `add` for "+".
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    # `Compiler` writes calls of the next six methods.

    @staticmethod
    def concat(pieces: Iterable[str]) -> Traced:
        """The pieces of a template, of a macro or of a block, as one text."""
        parts = list(pieces)
        # One piece may occur many times, so the pieces together may be larger than any value.
        charge(ITEM + sum(map(len, parts)))
        return traced_join(parts)

    @staticmethod
    def step() -> None:
        """Charge for a step of a loop."""
        charge(ITEM)

    @staticmethod
    def add(*values: Any) -> object:
        """The sum of some values, as `+` makes it from left to right."""
        kinds = {*map(type, values)}
        if kinds <= _TEXTS:
            # All texts are joined at once: a sum of six would copy the first one five times.
            charge(ITEM * len(values) + sum(map(len, values)))
            return traced_join(values) if Traced in kinds else "".join(values)
        result = values[0]
        for value in values[1:]:
            result = result + value
            charge(ITEM + len(result) if isinstance(result, str) else count(result))
        return result

    @staticmethod
    def counted(value: object) -> object:
        """Charge for an operation that reads the items of `value`."""
        charge(count(value))
        return value

    @staticmethod
    def measured(value: object) -> object:
        """Charge for an operation that may read all values inside `value`."""
        charge(weight(value))
        return value

    @staticmethod
    def written(value: object) -> str:
        """`value` as text."""
        kind = type(value)
        return value if kind is Traced or kind is str else as_text(value)  # type: ignore[return-value]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use this attribute."""
        # The sandbox decides by the type of the object, and takes a quarter of a rendering for it.
        key = (type(obj), attr)
        found = self._safe.get(key)
        if found is None:
            found = attr not in _UNSAFE_METHODS and super().is_safe_attribute(obj, attr, value)
            # A template may compute names, from texts of any length.
            if type(attr) is str and len(attr) < 40 and len(self._safe) < _MOST_NAMES:
                self._safe[key] = found
        return found

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute of `obj`; a JSON string with arguments of a tool call also has `items`."""
        if type(obj) is dict and attribute not in _DICT_NAMES:
            # The usual case, `message.role`: a name that no dict has is the name of an item.
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if attribute == "items" and is_arguments(obj):
            charge(count(obj))
            return partial(items_of, obj)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item of `obj`."""
        if type(obj) is dict and isinstance(argument, str):
            # The usual case, `message["role"]`; the sandbox would do the same a call later.
            try:
                return obj[argument]
            except KeyError:
                return super().getitem(obj, argument)
        if type(argument) is tuple:
            charge(weight(argument))
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The method `format` of a string, without unsafe attributes and huge widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @wraps(wrapped)
        def charged(*args: Any, **kwargs: Any) -> str:
            brace_format(value.__self__, (args, kwargs))
            return wrapped(*args, **kwargs)

        return charged

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operators `*` and `**`, and `%`, which formats text."""
        if operator == "*":
            times(left, right)
        elif operator == "**":
            power(left, right)
        elif isinstance(left, str):
            percent_format(left, right)
            return formatted(super().call_binop(context, operator, left, right), (left, right))
        return super().call_binop(context, operator, left, right)

    def call(
        __self,  # noqa: N805  (so that a template may pass any keyword)
        __context: Context,
        __obj: object,
        *args: object,
        **kwargs: object,
    ) -> object:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            return __self._call_method(__context, owner, __obj, *args, **kwargs)
        units = _CALL
        if not isinstance(__obj, Macro):
            # A method of a list compares its argument with all items, and a dict computes a hash.
            units += weight((owner, args) if isinstance(owner, list | tuple) else args)
        charge(units)
        meter = RUNNING.get()
        meter.enter()
        try:
            result = super().call(__context, __obj, *args, **kwargs)
        finally:
            meter.depth -= 1
        if not isinstance(result, str):
            charge(count(result))
        return result

    def _call_method(
        __self,  # noqa: N805
        __context: Context,
        __owner: str,
        __obj: Any,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Call a method of a string."""
        name = __obj.__name__
        if name == "join":
            args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
        given = (*args, *kwargs.values())
        if name in _GROWING_METHODS:
            charge(product(count(__owner), given))
        else:
            charge(len(__owner) + product(1, given))
        # Methods of plain strings (" ".join(parts)) would lose the runs of their arguments.
        if type(__owner) is str and name in ("join", "replace"):
            traced = Traced(__owner, [])
            __obj = traced.join if name == "join" else traced.replace
        result = super().call(__context, __obj, *args, **kwargs)
        # A plain result of another string method still comes from the string and the arguments.
        return derived(result, (__owner, *given)) if type(result) is str else result


@cache  # one environment serves all templates; it has no state that a template could change
def _environment() -> _Environment:
    # The options of `apply_chat_template`; other options would change the blanks that templates
    # write.
    made = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
        optimized=False,  # the optimizer would compute constant operations without `limits`
    )
    # The results of `random` and `lipsum` differ from run to run.
    del made.filters["random"], made.globals["lipsum"]
    install(made.filters, made.tests)
    made.globals["raise_exception"] = _raise
    return made


def _raise(message: object) -> NoReturn:
    text = as_text(message)[:_MAX_MESSAGE]
    raise ChatError("template_refused", f"The template refused the conversation: {text}")


def _date_text(date: datetime.date, form: str) -> str:
    if re.search("%[^a-zA-Z]*s", form.replace("%%", "")):
        raise ChatError(
            "template_failed",
            "The template writes the date in seconds (%s), which depend on the time zone of the "
            "machine. Use a template that writes a date.",
        )
    return date.strftime(form)


class Program:
    """A compiled template; safe to use from many threads."""

    def __init__(self, source: str, name: str) -> None:
        self.name = name
        if len(source) > _MAX_SOURCE:
            raise TemplateError(
                f"The template {name} has {len(source):,} characters; at most {_MAX_SOURCE:,} are "
                "allowed."
            )
        try:
            self._template = _environment().from_string(source)
        # Python refuses numbers of many digits, and loops or brackets that are nested too deeply.
        except (JinjaError, MemoryError, RecursionError, SyntaxError, ValueError) as error:
            line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise TemplateError(
                f"The template {name}{line} is not valid Jinja: {error}."
            ) from error

    def run(self, variables: dict[str, object], date: datetime.date | None) -> Traced:
        """Render the template with these variables.

        Raises:
            ChatError: the template refused the conversation, its code failed, or it needs more
                steps or memory than `limits` allows for a conversation of this size.
        """
        running = RUNNING.set(TemplateBudget(variables))
        if date is not None:
            variables = {**variables, "strftime_now": partial(_date_text, date)}
        try:
            text = self._template.render(variables)
        except ChatError:  # raised by the functions above, inside the template
            raise
        except (JinjaError, *_FAILURES) as error:
            needs_date = "strftime_now" in str(error)
            hint = (
                " It asks for today's date: give one with date= (--chat-date)."
                if needs_date
                else ""
            )
            detail = f"{type(error).__name__}: {str(error)[:_MAX_MESSAGE]}.{hint}"
            raise ChatError(
                "template_failed", f"The template {self.name} failed on the conversation: {detail}"
            ) from error
        finally:
            RUNNING.reset(running)
        assert isinstance(text, Traced)  # made by the environment's `concat`
        return text
