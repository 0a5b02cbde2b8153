"""Templates run in a sandbox, with what they expect and nothing else."""

import datetime

import pytest

from penstock.chat.jinja import Program
from penstock.errors import ChatError, TemplateError


def run(source, date=None, **variables):
    return Program(source, "test").run(variables, date).plain


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ {}.clear() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ x._runs }}",
        "{% set messages[0] = 1 %}",
        "{{ range(1000000) | list | length }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source):
    try:
        text = run(source, messages=[1], x="x")
    except (ChatError, TemplateError):
        return

    assert text == ""  # what it may not see is not defined, and prints nothing


def test_the_output_and_the_ranges_of_a_template_are_bounded():
    with pytest.raises(ChatError, match="writes more than 100,000,000 characters") as error:
        run("{% for i in range(99999) %}{{ 'text ' * 2000 }}{% endfor %}")
    with pytest.raises(ChatError, match="Range too big") as other:
        run("{% for i in range(100001) %}{% endfor %}")

    assert (error.value.reason, other.value.reason) == ("template_limit", "template_failed")


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("{{ 1 + 2 + 3 }}", "6"),
        ("{{ 1 + (2 + 3) - 1 + 4 }}", "9"),
        ("{{ [1] + [2] + x }}", "[1, 2, 3]"),
        ("{{ 'a' + m.b + 'c' + (m['b'] + 'd') }}", "abcbd"),
        ("{{ 'a' + 'b' ~ 1 + 'c' }}", "ab1c"),
        ("{{ ('a' + 'b') | length + 1 + 1 }}", "4"),
        ("{{ m.none is defined }}{{ m.b }}{{ m['none'] is defined }}", "FalsebFalse"),
        ("{% for k, v in m.items() %}{{ k + v }}{% endfor %}{{ m.keys() | list }}", "bb['b']"),
    ],
)
def test_sums_and_items_are_those_of_jinja(source, written):
    import jinja2.sandbox

    variables = {"x": [3], "m": {"b": "b"}}
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(source)

    assert run(source, **variables) == plain.render(**variables) == written


@pytest.mark.parametrize("source", ["{{ 'a' + 1 }}", "{{ 'a' + none + 'b' }}", "{{ 1 + 'a' + 2 }}"])
def test_a_sum_that_python_refuses_is_a_reject(source):
    with pytest.raises(ChatError, match="TypeError"):
        run(source)


def test_break_and_continue_are_known():
    source = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}"

    assert run(source + "{% if i == 3 %}{% break %}{% endif %}{% endfor %}") == "023"


def test_json_is_not_escaped_for_html():
    assert run("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'


def test_a_date_is_the_one_that_was_given():
    source = "{{ strftime_now('%Y-%m-%d') if strftime_now is defined else 'never' }}"

    assert run(source) == "never"
    assert run(source, datetime.date(2026, 1, 31)) == "2026-01-31"
    with pytest.raises(ChatError, match="give one with date="):
        run("{{ strftime_now('%Y') }}")
