"""The filters and tests of chat templates: they keep runs, and are charged to a budget.

`provenance` explains runs, and `limits` the budget.
"""

from collections.abc import Callable, Iterable, Iterator, Sized
from functools import wraps
from typing import Any

from jinja2.filters import FILTERS

from penstock.chat.arguments import is_arguments, items_of, to_json
from penstock.chat.limits import ITEM, as_text, charge, count, percent_format, product, weight
from penstock.chat.provenance import Traced, derived, leaves_in
from penstock.errors import ChatError

Function = Callable[..., Any]

# Jinja's filters that change text; their own results would have no runs.
_CHANGING_FILTERS = """
    indent wordwrap truncate center striptags urlencode reverse lower upper capitalize title escape
    e string forceescape pprint urlize xmlattr
"""
# Filters that take one step, however large the value is.
_QUICK_FILTERS = frozenset(("abs", "attr", "count", "first", "last", "length", "safe"))
# Filters that use the items of a value, and not the values inside them.
_SHALLOW_FILTERS = """
    batch float int items list map reject rejectattr reverse round select selectattr slice
"""
# Filters that read an iterator to its end, and then all values in it.
_READING_FILTERS = frozenset(("groupby", "join", "max", "min", "sort", "sum", "unique"))
# Jinja and MarkupSafe search the rest of the text again for each tag or line.
_QUADRATIC_FILTERS = frozenset(("striptags", "urlize", "wordwrap"))
# The tests that compare two values.
_COMPARING_TESTS = """
    in == eq equalto != ne > gt greaterthan ge >= < lt lessthan <= le
"""


def formatted(text: str, values: Iterable[object]) -> str:
    """`text`, formatted with `values`; every leaf in the values is an origin of the whole result.

    Raises:
        ChatError: the content of a message is among the values, so its position is unknown.
    """
    given = list(values)
    if any(leaf.path.startswith("content") for leaf in leaves_in(given)):
        raise ChatError(
            "untraceable",
            f"The template formats the content of a message into {text[:60]!r}, so penstock cannot "
            "know which characters are the assistant's. Use a template that writes the content "
            "as it is.",
        )
    return derived(text, given)


def _charged_filter(name: str, original: Function) -> Function:
    """The filter `original`, which is charged for the largest result that it can have."""
    # Jinja passes a context or its environment as the first argument to some filters.
    skipped = 0 if getattr(original, "jinja_pass_arg", None) is None else 1
    is_shallow, is_reading = name in _SHALLOW_FILTERS.split(), name in _READING_FILTERS
    is_quadratic = name in _QUADRATIC_FILTERS
    is_writing = name == "join" or not (is_shallow or is_reading)

    @wraps(original)
    def quick(*args: object, **kwargs: object) -> object:
        charge(ITEM)
        return original(*args, **kwargs)

    @wraps(original)
    def charged(*args: object, **kwargs: object) -> object:
        if len(args) == 1 and not kwargs and isinstance(args[0], str) and not is_quadratic:
            # The usual case, `text | trim`, without the calls below.
            charge(ITEM * (ITEM + len(args[0])))
            return original(args[0])
        subject, *rest = args[skipped:]
        if is_reading and isinstance(subject, Iterator | range):
            subject = list(subject)
        units = count(subject) if is_shallow else weight(subject, written=not is_reading)
        if is_quadratic:
            units *= 1 + units // 100
        elif name == "sum" and (rest or kwargs):  # a sum of lists copies all lists for each list
            units *= len(subject) if isinstance(subject, Sized) else 1
        given = (*rest, *kwargs.values())
        if is_writing:
            charge(weight(given, written=True))
        charge(product(units, given))
        return original(*args[:skipped], subject, *rest, **kwargs)

    return quick if name in _QUICK_FILTERS else charged


def _charged_test(original: Function) -> Function:
    def charged(*values: object) -> object:
        charge(weight(values))
        return original(*values)

    return charged


def _tracing_filter(original: Function) -> Function:
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
    return Traced(d, []).join(map(as_text, pieces))


def _items(value: object) -> Iterator[tuple[object, object]]:
    """The filter `items`, also for a JSON string with the arguments of a tool call."""
    return iter(items_of(value)) if is_arguments(value) else FILTERS["items"](value)


def _format(text: str, *args: object, **kwargs: object) -> str:
    percent_format(as_text(text), (args, kwargs))
    return formatted(FILTERS["format"](text, *args, **kwargs), (text, *args, *kwargs.values()))


def install(filters: dict[str, Any], tests: dict[str, Any]) -> None:
    """Replace filters and tests in the dictionaries of a Jinja environment, in place."""
    for name in _CHANGING_FILTERS.split():
        filters[name] = _tracing_filter(FILTERS[name])
    # Nothing is escaped, so every string is safe.
    filters |= {"tojson": to_json, "join": _join, "safe": lambda value: value}
    filters |= {"items": _items, "format": _format}
    # `default` returns one of its arguments, and `_format` charges for itself.
    for name in {*filters} - {"default", "d", "format"}:
        filters[name] = _charged_filter(name, filters[name])
    for name in _COMPARING_TESTS.split():
        tests[name] = _charged_test(tests[name])
