"""Limits for chat templates: how much work one rendering may do, and which values it may write.

A template is a program that came with a model. A hostile one could loop for hours, or build a
string that fills the memory. So every rendering has a budget, and each operation of the template is
charged before it runs: `ITEM` units for each step and for each item of a list, and one unit for
each character. An operation that can multiply its input, such as `*`, `replace` or `center`, is
charged for the largest result it can have.

The budget is not a time limit, because the same record must be accepted or refused on every
machine. It grows with the record: a long conversation needs more work than a short one.
"""

import re
from collections.abc import Collection, Iterable
from contextvars import ContextVar
from string import Formatter

from jinja2 import Undefined

from penstock.errors import ChatError

ITEM = 10
"""The units that a step of a template costs, and an item of a list."""

# A loop of 200,000 steps, or a text of 2 MB, for the smallest record.
_BASE = 2_000_000
# Units for each character and each value of the record. A template that strips, splits and joins
# every text needs some hundreds.
_PER_UNIT = 2_000
# Python raises RecursionError at a depth that depends on the caller, so these limits are lower.
_MAX_CALLS = 50
_MAX_NESTING = 100
# 3,010 digits. Python refuses to write numbers of more than 4,300 digits.
_MAX_BITS = 10_000

_LISTS: tuple[type[Collection[object]], ...] = (
    list,
    tuple,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
# Values whose text is the same in every process. The text of any other object may contain its
# address in memory.
_STABLE = (int, float, complex, type(None), Undefined, range)
_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?")


class TemplateBudget:
    """The budget of one rendering."""

    __slots__ = ("_variables", "depth", "left")

    def __init__(self, variables: dict[str, object]) -> None:
        self.left = _BASE
        self.depth = 0
        self._variables: dict[str, object] | None = variables

    def extend(self) -> int:
        """Add the part of the budget that depends on the record, once; returns the units left."""
        # Few renderings need this part, and measuring a record takes as long as some filters do.
        if self._variables is not None:
            variables, self._variables = self._variables, None
            spent, self.left = self.left, 1 << 62
            self.left = spent + _PER_UNIT * weight(variables)
        return self.left

    def enter(self) -> None:
        """Count a call that a template makes; `depth` is decremented when the call returns."""
        self.depth += 1
        if self.depth > _MAX_CALLS:
            raise ChatError(
                "template_limit",
                f"The template calls macros that call each other more than {_MAX_CALLS} deep.",
            )


RUNNING: ContextVar[TemplateBudget] = ContextVar("RUNNING")
"""The budget of the rendering that runs in this thread."""


def charge(amount: int) -> None:
    """Take units from the budget of the rendering that runs.

    Raises:
        ChatError: the budget is spent.
        LookupError: no template runs. Jinja's compiler calls filters with constant arguments; after
            this error it leaves the call to the rendering, which has a budget.
    """
    meter = RUNNING.get()
    meter.left -= amount
    if meter.left < 0 and meter.extend() < 0:
        raise _overrun()


def spend(amount: int) -> None:
    """Take units from the budget, if a template runs."""
    if RUNNING.get(None) is not None:
        charge(amount)


def _overrun() -> ChatError:
    return ChatError(
        "template_limit",
        "The template needs far more steps or memory than a conversation of this size should. Use "
        "another template, or split the conversation.",
    )


def count(value: object) -> int:
    """The units of `value` without the values inside it."""
    if isinstance(value, str):
        return ITEM + len(value)
    if isinstance(value, _LISTS) or isinstance(value, dict | range):  # noqa: SIM101  (mypy)
        return ITEM + ITEM * len(value)
    return ITEM


def weight(value: object, *, written: bool = False) -> int:
    """The units of `value` and of all values inside it, each as often as its text contains it.

    Args:
        value: Any value of a template.
        written: Whether the template writes the value as text.

    Raises:
        ChatError: the value is larger than the budget, is nested too deeply, or has no stable text.
    """
    if isinstance(value, str):
        return ITEM + len(value)
    if not isinstance(value, _LISTS) and not isinstance(value, dict):
        return ITEM + _scalar(value, written)
    meter = RUNNING.get()
    total = ITEM
    level: list[object] = [value]
    # Lists that contain one list twice, which contains another one twice, have few objects and a
    # huge text. So nothing is remembered as seen, and the walk stops when the budget is exceeded.
    for _ in range(_MAX_NESTING):
        below: list[object] = []
        for each in level:
            if isinstance(each, str):
                total += len(each)
                continue
            if isinstance(each, dict):
                total += 2 * ITEM * len(each)
                inside: Iterable[object] = (*each, *each.values())
            elif isinstance(each, _LISTS):
                total += ITEM * len(each)
                inside = each
            else:
                total += _scalar(each, written)
                continue
            # Checked only where the walk grows; the caller charges the total.
            if total > meter.left and total > meter.extend():
                raise _overrun()
            below += inside
        if not below:
            return total
        level = below
    raise ChatError(
        "template_limit", f"The template uses a value that is nested over {_MAX_NESTING} deep."
    )


def _scalar(value: object, written: bool) -> int:
    """The units of a value without items, beside those of a step."""
    if isinstance(value, int):
        return value.bit_length() // 3  # about the number of its digits
    if written and not isinstance(value, _STABLE):
        raise ChatError(
            "template_failed",
            f"The template writes an object of type {type(value).__name__}, whose text may differ "
            "from run to run. Use a template that writes only text.",
        )
    return 0


def as_text(value: object) -> str:
    """`value` as text, charged unless it is a string."""
    if not isinstance(value, str):
        charge(weight(value, written=True))
    return str(value)


def product(subject: int, arguments: Iterable[object]) -> int:
    """The units of a call whose result may repeat the subject for each unit of the arguments."""
    given = ITEM
    for each in arguments:
        # A number may be a width or a count.
        if isinstance(each, str):
            given += len(each)
        else:
            given += abs(each) if isinstance(each, int) else weight(each)
    return subject * given


def power(left: object, right: object) -> None:
    """Refuse `left ** right` if the result is a huge number."""
    if isinstance(left, int) and isinstance(right, int):
        _refuse_bits(left.bit_length() * max(right, 0))


def times(left: object, right: object) -> None:
    """Charge for `left * right`; refuses huge numbers."""
    if isinstance(left, int) and isinstance(right, int):
        _refuse_bits(left.bit_length() + right.bit_length())
    elif isinstance(left, int):
        charge(count(right) * max(left, 1))
    elif isinstance(right, int):
        charge(count(left) * max(right, 1))


def _refuse_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise ChatError("template_limit", f"The template computes a number of {bits:,} bits.")


def percent_format(text: str, values: object) -> None:
    """Charge for `text % values`."""
    fields = _PERCENT_FIELD.findall(text)
    _charge_fields([width for field in fields for width in field if width], len(fields), values)


def brace_format(text: str, values: object) -> None:
    """Charge for `text.format(values)`."""
    specs = [spec or "" for _, _, spec, _ in Formatter().parse(text)]
    widths = [width for spec in specs for width in re.findall(r"\d+|\{", spec)]
    _charge_fields(widths, len(specs), values)


def _charge_fields(widths: list[str], fields: int, values: object) -> None:
    """Charge for text with this number of fields, each of which may write all of `values`."""
    # `*` and `{` stand for a width among the values, which could be any number.
    if "*" in widths or "{" in widths:
        raise ChatError("template_limit", "The template takes the width of a text from a variable.")
    charge(ITEM + sum(map(int, widths)) + fields * weight(values, written=True))
