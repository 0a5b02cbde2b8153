"""Templates that want too much work, too much memory, or chance end in a reject."""

import json
import random
import subprocess
import sys

import pytest

from penstock.chat.jinja import Program
from penstock.errors import ChatError, TemplateError

LIMIT = {
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "a loop whose test refuses all": (
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}"
    ),
    "output of a loop": "{% for i in range(99999) %}" + "text " * 2000 + "{% endfor %}",
    "output of a macro": (
        "{% macro m() %}" + "text " * 2000 + "{% endmacro %}"
        "{% for i in range(99999) %}{% set x = m() %}{% endfor %}"
    ),
    "text times a number": "{{ 'a' * 10**10 }}",
    "a number times text": "{{ 10**10 * 'a' }}",
    "content times a number": "{{ messages[0].content * 10**10 }}",
    "a list times a number": "{{ ([0] * 10**10) | length }}",
    "a tower of powers": "{{ 10**(10**10) }}",
    "a product of powers": "{{ 10**3000 * 10**3000 }}",
    "center": "{{ 'a' | center(10**10) }}",
    "a constant center": "{{ 'a' | center(10000000000) }}",
    "the method center": "{{ 'a'.center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "indent": "{{ 'a\nb' | indent(10**10) }}",
    "indent by text": "{{ ('a\n' * 99999) | indent('b' * 99999) }}",
    "indent of JSON": "{{ [[1]] | tojson(indent=10**10) }}",
    "join": "{{ range(99999) | join('a' * 99999) }}",
    "join of a filter's items": "{{ range(99999) | map('string') | join('a' * 99999) }}",
    "the method join": "{{ ('a' * 99999).join(['b'] * 99999) }}",
    "replace": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "the method replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replace nothing": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "a width in %": "{{ '%10000000000d' % 1 }}",
    "a width in the values of %": "{{ '%*d' % (10**9, 1) }}",
    "precision in %": "{{ '%.1000000000f' % 1 }}",
    "repeated fields in %": "{{ ('%(a)s' * 99999) % {'a': 'b' * 99999} }}",
    "a width in the filter format": "{{ '%10000000000d' | format(1) }}",
    "a width in format": "{{ '{:>10000000000}'.format(1) }}",
    "a width in the values of format": "{{ '{:>{}}'.format(1, 10**10) }}",
    "repeated fields in format": "{{ ('{0}' * 99999).format('b' * 99999) }}",
    "batch": "{{ [1] | batch(10**10, 0) | list }}",
    "slice": "{{ [1] | slice(10**10) | list }}",
    "round": "{{ 5 | round(-(10**9)) }}",
    "wordwrap": "{{ ('a' * 99999) | wordwrap(1, true, 'b' * 99999) }}",
    "striptags": "{{ ('<!---->' * 99999) | striptags }}",
    "a sum of lists": "{{ ([[0] * 999] * 9999) | sum(start=[]) }}",
    "a growing list": (
        "{% set ns = namespace(a=[0]) %}"
        "{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}"
    ),
    "a growing text": (
        "{% set ns = namespace(a='a') %}"
        "{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}"
    ),
    "a growing block": (
        "{% set ns = namespace(a='a') %}{% for i in range(99) %}"
        "{% set b %}{{ ns.a }}{{ ns.a }}{% endset %}{% set ns.a = b %}{% endfor %}"
    ),
    "many slices": (
        "{% set a = 'a' * 999999 %}{% for i in range(99999) %}{% set b = a[1:] %}{% endfor %}"
    ),
    "many searches": (
        "{% set a = 'a' * 999999 %}{% for i in range(99999) %}{{ 'ab' in a }}{% endfor %}"
    ),
    "many comparisons": (
        "{% set a = 'a' * 999999 %}{% set b = a ~ '' %}"
        "{% for i in range(99999) %}{{ a == b }}{% endfor %}"
    ),
    "many cuts of a text with many runs": (
        "{% set a = messages[0].content * 9999 %}{% for i in a %}{{ i }}{% endfor %}"
    ),
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}"
    ),
    "a block that calls itself": "{% block b %}{{ self.b() }}{% endblock %}",
    "a loop that calls itself": ("{% for i in [[]] recursive %}{{ loop([[]]) }}{% endfor %}"),
}
# A value that contains the same value twice, and so on: 40 objects, and a text of 2**40 words.
DOUBLED = (
    "{% set ns = namespace(a=BEGIN, b=BEGIN) %}{% for i in range(40) %}"
    "{% set ns.a = PAIR %}{% set ns.b = OTHER %}{% endfor %}"
)
LISTS = (
    DOUBLED.replace("BEGIN", "[1]").replace("PAIR", "[ns.a, ns.a]").replace("OTHER", "[ns.b, ns.b]")
)
TUPLES = (
    DOUBLED.replace("BEGIN", "(1,)")
    .replace("PAIR", "(ns.a, ns.a)")
    .replace("OTHER", "(ns.b, ns.b)")
)
USES = {
    "written": "{{ ns.a }}",
    "joined": "{{ ns.a ~ 'a' }}",
    "written as JSON": "{{ ns.a | tojson }}",
    "printed": "{{ ns.a | pprint }}",
    "a string": "{{ ns.a | string }}",
    "upper": "{{ ns.a | upper }}",
    "formatted": "{{ '%s' % ns.a }}{{ '%s' % (ns.a,) }}",
    "formatted by a method": "{{ '{}'.format(ns.a) }}",
    "compared": "{{ ns.a == ns.b }}",
    "compared by a test": "{{ ns.a is eq ns.b }}",
    "found": "{{ ns.a in [ns.b] }}",
    "sorted": "{{ [ns.a, ns.b] | sort }}",
    "counted": "{{ [ns.a].count(ns.b) }}",
    "a refusal": "{{ raise_exception(ns.a) }}",
}
LIMIT |= {f"doubled lists, {name}": LISTS + use for name, use in USES.items()}
LIMIT |= {
    "doubled tuples, a key": TUPLES + "{% set x = {ns.a: 1} %}",
    "doubled tuples, looked up": TUPLES + "{{ {}[ns.a] }}",
    "doubled tuples, got": TUPLES + "{{ {}.get(ns.a) }}",
    "doubled tuples, unique": TUPLES + "{{ [ns.a, ns.b] | unique | list }}",
    "nested values": (
        "{% set ns = namespace(a=[]) %}"
        "{% for i in range(9999) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}"
    ),
}
FAILED = {
    "a method of a constant": "{{ 'a'.join }}",
    "a method of a constant, joined": "{{ 'a' ~ 'a'.join }}",
    "a method of a constant in a list": "{{ ['a'.join] }}",
    "a method of a constant, set": "{% set x = 'a' ~ 'a'.join %}{{ x }}",
    "a method, put in": "{{ 'x' | replace('x', messages[0].get) }}",
    "a method, at the end": "{{ 'xx xx' | truncate(3, true, messages[0].get, 0) }}",
    "a method between": "{{ ['a', 'b'] | join(messages[0].get) }}",
    "lipsum": "{{ lipsum() }}",
    "the class namespace": "{{ namespace }}",
    "a namespace": "{{ namespace(a=1) }}",
    "a namespace in itself": "{% set n = namespace() %}{% set n.n = n %}{{ n }}",
    "a cycler": "{{ cycler(1, 2) }}",
    "a joiner": "{{ joiner() }}",
    "a function": "{{ range }}",
    "a method": "{{ messages[0].get }}",
    "a method in a list": "{{ [messages[0].get] }}",
    "a method, joined": "{{ 'a' ~ messages[0].get }}",
    "a method, formatted": "{{ '%s' % messages[0].get }}",
    "a method, formatted by a method": "{{ '{}'.format(messages[0].get) }}",
    "a method as a string": "{{ messages[0].get | string }}",
    "methods, joined": "{{ [messages[0].get] | join }}",
    "a generator": "{{ messages | map('upper') }}",
    "translate": "{{ 'a'.translate({97: 'b'}) }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "a huge range": "{{ range(10**9) }}",
}
INVALID = {
    "random": "{{ [1, 2] | random }}",
    "a literal of many digits": "{{ " + "9" * 5000 + " }}",
    "nested brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested lists": "{{ " + "[" * 150 + "1" + "]" * 150 + " }}",
    "nested loops": "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "a long source": "{{ 1 }}" * 200_000,
}
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def outcome(source):
    from penstock.chat.provenance import Leaf, trace

    messages = [trace(each, Leaf(at, "", "")) for at, each in enumerate(MESSAGES)]
    try:
        text = Program(source, "hostile").run({"messages": messages}, None).plain
    except TemplateError:
        return "bad_template"
    except ChatError as error:
        return error.reason
    return f"{len(text)} characters"


def outcomes(sources, memory=600):
    """The outcome of each template, from one process with `memory` MB more than it begins with."""
    program = f"""
import json, resource, sys
sys.path.insert(0, {str(__file__.rpartition("/")[0])!r})
from test_hostile_templates import outcome
outcome("{{{{ 1 }}}}")
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {memory} * 2**20,) * 2)
for source in json.load(sys.stdin):
    print(json.dumps(outcome(source)), flush=True)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(sources), capture_output=True, text=True
    )
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0, (sources[len(found)][:300], run.stderr[-2000:])
    return found


def test_hostile_templates_end_in_a_reject_within_bounded_memory():
    expected = [(source, "template_limit", name) for name, source in LIMIT.items()]
    expected += [(source, "template_failed", name) for name, source in FAILED.items()]
    expected += [(source, "bad_template", name) for name, source in INVALID.items()]
    found = outcomes([source for source, *_ in expected])

    wrong = {
        name: (each, reason)
        for each, (_, reason, name) in zip(found, expected, strict=True)
        if each != reason
    }
    assert not wrong


def test_a_limit_depends_on_the_record_and_on_nothing_else():
    source = "{% for i in range(N) %}{% endfor %}"
    small, large = (Program(source.replace("N", each), "test") for each in ("10", "90000"))

    for _ in range(3):  # an overrun leaves nothing behind for the next rendering
        assert small.run({}, None).plain == ""
        with pytest.raises(ChatError, match="far more steps or memory") as error:
            Program("{% for i in 'ab' * 99999 %}{% endfor %}" * 2, "test").run({}, None)
        assert error.value.reason == "template_limit"
    assert large.run({"messages": [{"content": "a" * 9999}]}, None).plain == ""
    twice = Program((source.replace("N", "99999")) * 3, "test")
    with pytest.raises(ChatError, match="far more steps or memory"):
        twice.run({}, None)
    assert twice.run({"messages": [{"content": "a" * 9999}]}, None).plain == ""


def test_a_template_that_reads_all_messages_for_each_message_stays_within_the_limit():
    source = (
        "{% for a in messages %}{% for b in messages %}{% if b.role == 'tool' %}{{ b.content }}"
        "{% endif %}{% endfor %}{{ messages | length }}{{ a.content | trim }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "Hi"}] * 300

    assert len(Program(source, "test").run({"messages": messages}, None)) == 1500


ATOMS = ["'a'", "7", "10**6", "[1]", "{'a': 2}", "messages", "messages[0].content", "x", "y", "2.5"]
STEPS = [
    *("{} * {}", "{} + {}", "{} ~ {}", "{} ** {}", "{} % {}", "[{}, {}]", "({}, {})"),
    *("{} == {}", "{} in {}", "{}[{}:]", "({}) | center({})", "({}) | indent({})"),
    *("({}) | join({})", "({}) | batch({}) | list", "({}) | list | sort", "({}) | tojson"),
    *("({}) | string | replace('a', {})", "({}) | string | list", "({}) | wordwrap({})"),
    *("({}).center({})", "({}).replace('a', {})", "({}).split({})", "'{{0:>99999}}'.format({})"),
    *("range({}) | list", "({}) | map('string') | list", "m({})", "({}) | sum(start={})"),
    *("({}) | round({})", "'%s%s' % ({}, {})", "({}) | slice({}) | list", "({}) | unique | list"),
]


def made_template(seed):
    """A template whose loop puts together values of the last steps by random operations."""
    chosen = random.Random(seed)
    body = ""
    for _ in range(chosen.randint(2, 9)):
        step = chosen.choice(STEPS)
        pieces = [chosen.choice([*ATOMS, "ns.x", "ns.y", "ns.x"]) for _ in range(2)]
        body += f"{{% set ns.{chosen.choice('xy')} = {step.format(*pieces)} %}}"
    return (
        "{% macro m(v) %}{{ v }}{{ v }}{% endmacro %}{% set ns = namespace(x='ab', y=[3]) %}"
        f"{{% for i in range(999) %}}{body}{{% endfor %}}{{{{ ns.x }}}}"
    )


@pytest.mark.parametrize("count", [15, pytest.param(3000, marks=pytest.mark.torture)])
def test_random_templates_end_within_bounded_memory(count):
    sources = [made_template(seed) for seed in range(count)]

    found = outcomes(sources)
    assert found == outcomes(sources)
    assert "template_limit" in found
