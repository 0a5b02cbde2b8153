"""The messages and the depth for which lines are rejected are those of no special Python."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sources import json_errors
from penstock.sources.json_errors import is_too_deep, portable_error

PROPERTY = "Expecting property name enclosed in double quotes"


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        ('{"a": 1,}', PROPERTY, 8),
        ('{"a": 1 , \t}', PROPERTY, 11),
        ("[1,]", "Expecting value", 3),
        ("[1, \r ]", "Expecting value", 6),
        ('{"a":[1,],"b":2}', "Expecting value", 8),
        ('[{"a":1,}]', PROPERTY, 8),
        ("{,}", PROPERTY, 1),
        ("[,]", "Expecting value", 1),
        ('"a', "Unterminated string starting at", 0),
        ("[1 2]", "Expecting ',' delimiter", 3),
    ],
)
def test_an_error_is_that_of_python_3_11(text, message, place):
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads(text)
    found = portable_error(caught.value)

    assert (found.msg, found.pos, found.doc) == (message, place, text)


@pytest.mark.parametrize(
    ("text", "kind", "comma", "message", "place"),
    [
        ('{"a": 1 , \t}', "object", 8, PROPERTY, 11),
        ("[1, \r ]", "array", 2, "Expecting value", 6),
    ],
)
def test_the_errors_of_python_3_13_become_those_of_3_11(text, kind, comma, message, place):
    theirs = json.JSONDecodeError(f"Illegal trailing comma before end of {kind}", text, comma)
    found = portable_error(theirs)

    assert (found.msg, found.pos) == (message, place)


def depth(value):
    """The number of levels of a parsed value."""
    children = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth, children), default=0)


VALUES = st.recursive(
    st.text(alphabet='[]{}"\\a') | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='[]{}"\\a'), inner),
)


@given(VALUES, st.integers(0, 4))
def test_levels_are_counted_outside_of_strings(value, levels):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_errors, "MAX_LEVELS", levels)
        assert is_too_deep(json.dumps(value)) == (depth(value) > levels)


def test_brackets_in_a_string_that_was_cut_off_are_no_levels():
    assert not is_too_deep('"' + "\\a[" * 100_000)
