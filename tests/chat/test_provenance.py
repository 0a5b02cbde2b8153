"""Strings know where their characters came from, through all that templates do to them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.chat.jinja import GENERATION, Program
from penstock.chat.provenance import Leaf, Traced, trace
from penstock.errors import ChatError


def traced(text, message=0):
    return trace(text, Leaf(message, "content", ""))


def whole(value):
    """Every character that has a run is the one of its leaf that the run says."""
    for start, stop, leaf, offset in value._runs:
        assert 0 <= start < stop <= len(value)
        if offset >= 0:
            assert value.plain[start:stop] == leaf.text[offset : offset + stop - start]
    return value


TEXTS = st.text("ab \n<>", max_size=12)
METHODS = [
    lambda s, x: s.strip(),
    lambda s, x: s.lstrip("a"),
    lambda s, x: s.rstrip(),
    lambda s, x: s.split(x or "a"),
    lambda s, x: s.split(),
    lambda s, x: s.split(None, 1),
    lambda s, x: s.rsplit(x or "b", 1),
    lambda s, x: s.rsplit(),
    lambda s, x: s.splitlines(),
    lambda s, x: s.splitlines(True),
    lambda s, x: s.partition(x or "a"),
    lambda s, x: s.rpartition(x or "a"),
    lambda s, x: s.replace(x, "<>"),
    lambda s, x: s.replace(x or "a", s, 1),
    lambda s, x: s.removeprefix(x),
    lambda s, x: s.removesuffix(x),
    lambda s, x: s + x,
    lambda s, x: x + s,
    lambda s, x: s[1:-1],
    lambda s, x: s[::-1],
    lambda s, x: s[-1:] + s[:1],
    lambda s, x: list(s),
    lambda s, x: s.upper(),
    lambda s, x: s.lower(),
    lambda s, x: s.title(),
    lambda s, x: s.capitalize(),
    lambda s, x: s.join([x, s, x]),
]


@given(st.sampled_from(METHODS), TEXTS, TEXTS)
def test_methods_give_the_same_text_and_true_runs(method, text, other):
    found = method(traced(text), other)
    expected = method(text, other)

    pieces = found if isinstance(found, list | tuple) else [found]
    assert [str.__str__(piece) for piece in pieces] == (
        list(expected) if isinstance(expected, list | tuple) else [expected]
    )
    for piece in pieces:
        if isinstance(piece, Traced):
            whole(piece)


@pytest.mark.parametrize("method", ["split", "rsplit"])
def test_a_piece_is_traced_to_its_own_characters_and_not_to_the_separator(method):
    # The second "b" is a piece; the first one belongs to the separator "ab".
    pieces = getattr(traced("xabbab"), method)("ab")

    assert pieces == ["x", "b", ""]
    assert [offset for piece in pieces for _, _, _, offset in piece._runs] == [0, 3]


def runs_of(source, **variables):
    text = whole(Program(source, "test").run(variables, None))
    return text.plain, [(text.plain[a:b], leaf.message) for a, b, leaf, _ in text._runs]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("<{{ x }}>", "< hi >"),
        ("<{{ x | trim }}>", "<hi>"),
        ("<{{ x.strip() ~ '!' }}>", "<hi!>"),
        ("{% macro m(y) %}[{{ y }}]{% endmacro %}{{ m(x) }}", "[ hi ]"),
        ("{% set y %}[{{ x }}]{% endset %}{{ y | trim }}", "[ hi ]"),
        ("{{ ['a', x, 'b'] | join('-') }}", "a- hi -b"),
        ("{{ '-'.join(['a', x]) }}", "a- hi "),
        ("{{ 'a?b'.replace('?', x) }}", "a hi b"),
        ("{{ x | replace(' ', '') }}", "hi"),
        ("{{ x | upper }}", " HI "),
        ("{{ x.upper() }}{{ x.title() }}", " HI  Hi "),
        ("{{ x | tojson }}", '" hi "'),
        ("{{ {'k': [x]} | tojson(indent=1) }}", '{\n "k": [\n  " hi "\n ]\n}'),
        ("{% for c in x %}{{ c }}.{% endfor %}", " .h.i. ."),
        ("{{ x[1:] }}{{ x[0] }}{{ x | last }}", "hi   "),
        ("{{ x | indent }}", " hi "),
        ("{{ x | safe }}{{ x | string }}", " hi  hi "),
        ("{% filter trim %}a{{ x }}{% endfilter %}", "a hi"),
        ("{{ x if x is string else 'no' }}", " hi "),
        ("{% set ns = namespace(y='') %}{% set ns.y = ns.y + x %}{{ ns.y }}", " hi "),
    ],
)
def test_templates_keep_track_of_content(source, text):
    found, runs = runs_of(source, x=traced(" hi "))

    assert found == text
    assert "hi" in "".join(piece for piece, message in runs if message == 0).lower()
    assert all(message == 0 for _, message in runs)


def test_a_generation_block_marks_what_it_writes():
    text = Program("a{% generation %}b{{ x }}{% endgeneration %}c", "test").run(
        {"x": traced("hi")}, None
    )
    marked = [(a, b) for a, b, leaf, _ in text._runs if leaf is GENERATION]

    assert text.plain == "abhic"
    assert marked == [(1, 4)]


def test_objects_that_are_not_json_never_reach_a_template():
    with pytest.raises(ChatError, match="is a PosixPath, not JSON"):
        trace({"content": __import__("pathlib").Path("/")}, Leaf(0, "", ""))
