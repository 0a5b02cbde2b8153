"""Odd values in recipes: each works, or is an error in a few words that names setting and file.

Each case changes a setting of a small recipe, or the bytes of the file, and runs `penstock plan` in
this process, which reads the recipe, opens the data and makes the plan. 80 cases in the default
run, and 10,000 with `make torture`.
"""

import random
import re

import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock import errors
from penstock.cli.app import app
from penstock.recipe import _HINTS

BASE = {
    "output": '"out"',
    "data.train": '"store"',
    "data.length": "16",
    "data.tokenizer": '"bytes"',
    "model.layers": "1",
    "model.heads": "1",
    "model.width": "4",
    "training.steps": "1",
    "training.batch_size": "2",
    "training.prefetch": "0",
}
# These need a text, because an existing store does not ask for them.
OF_TEXT = ("data.documents", "data.eos", "data.field", "data.split", "data.stream")
OF_TEXT += ("data.tokenizer",)
SETTINGS = [
    "output",
    *_HINTS,
    *(f"{table}.{name}" for table, names in _HINTS.items() for name in names),
    *("data.sources.a", "data.sources.a.train", "data.sources.a.weight", "data.sources.a.rows"),
    *('data.sources.""', 'data.sources."../b".train', 'data.sources."a: \\n\\u0000".weight'),
    *("other", "data.other", "model.length", '""', '"two\\nlines"', 'training."a.b: c"'),
]
VALUES = [
    *("true", "false", "0", "1", "-1", "-0.0", "2.5", "50", "1e-320", "1e308"),
    *("nan", "-nan", "inf", "-inf", str(2**63 - 1), str(2**63), str(-(2**63) - 1)),
    *("0x" + "F" * 5_000, "1" + "0" * 400, "1" + "0" * 5_000),
    *('""', '" "', '"1"', r'"\u0000"', r'"\n"', r'"…\u202e\ufeff"', f'"{"a" * 5_000}"', "''"),
    *('"auto"', '"/"', '"nothing"', '"store"', '"text.txt"', '"tail:0.5"', '"tail:nan"', '"gpt5"'),
    *("[]", "[[]]", "[1, 2]", "[nan, 1]", "[0.5, 0.5]", '["a"]', "[true, false]", "[[1], {}]"),
    *("{}", "{a = 1}", "{a = {b = []}}", '{a = {train = "store"}}', '{"" = 1}', '{steps = "x"}'),
    *("1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "[" * 50 + "]" * 50, "[" * 9_999),
]
PIECES = [
    *(b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b"\xff", b"\r", b"\n", b'"', b"'''", b"=", b"[", b"]"),
    *(b"[[data]]\n", b"[training]\n", b"steps = 1\n", b"steps = 1, steps = 2\n", b"x.y.z = {}\n"),
    *(b"#", b"&a", b"*a", b"!!python/object:os.system", b"\xf0\x9f\x98\x80", b"0", b"-", b"."),
]
OWN_ERRORS = "|".join(name for name in vars(errors) if name.endswith("Error"))


def as_toml(values):
    """A recipe with these values, which are TOML already, by dotted names."""
    tables = {}
    for name, value in values.items():
        table, key = re.fullmatch(r'(?:(.*)\.)?("(?:[^"\\]|\\.)*"|[^."]+)', name).groups()
        tables.setdefault(table or "", []).append(f"{key} = {value}\n")
    # Settings without a table come first.
    return "".join(
        (f"[{table}]\n" if table else "") + "".join(lines)
        for table, lines in sorted(tables.items())
    )


def with_setting(draw):
    """The name of a setting, and a recipe in which it has an odd value."""
    name, value = draw.choice(SETTINGS), draw.choice(VALUES)
    values = BASE | ({"data.train": '"text.txt"'} if name in OF_TEXT else {})
    values = {each: values[each] for each in values if not each.startswith(f"{name}.")}
    if name.startswith("data.sources"):
        del values["data.train"]
        if name.endswith((".weight", ".rows")):
            values[f"{name.rpartition('.')[0]}.train"] = '"store"'
    return name, as_toml(values | {name: value}).encode()


def with_other_bytes(draw):
    """A recipe after a few changes of its bytes."""
    data = bytearray(as_toml(BASE).encode())
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(data) + 1)
        kind = draw.choice(["put", "flip", "cut", "drop", "repeat", "other encoding"])
        if kind == "put":
            data[place:place] = draw.choice(PIECES)
        elif kind == "flip" and place < len(data):
            data[place] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del data[place:]
        elif kind == "drop":
            del data[place : place + draw.randrange(20)]
        elif kind == "repeat":
            data[place:place] = data[place : place + draw.randrange(60)]
        elif kind == "other encoding":
            data = bytearray(bytes(data).decode(errors="replace").encode("utf-16"))
    return "", bytes(data)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with a small store and a text, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    texts = [f"document {number}: " + "some words " * (number % 9) for number in range(60)]
    ps.build(ps.Texts(texts), tmp_path / "store", tokenizer="bytes")
    (tmp_path / "text.txt").write_text("\n".join(texts))
    return tmp_path


def answer(command, name, data, place):
    """The exit code of a command with a recipe, and what is wrong with its message, if any."""
    (place / "odd.toml").write_bytes(data)
    ended = CliRunner().invoke(app, [*command, "odd.toml"])
    if ended.exception and not isinstance(ended.exception, SystemExit):
        return 1, f"a traceback: {ended.exception!r}"
    if ended.exit_code == 0:
        return 0, None
    lines = ended.stderr.strip().splitlines()
    if ended.exit_code == 1 and re.fullmatch(r"OSError: .*File name too long.*\n", ended.stderr):
        return 1, None  # the system's own error, which names the file
    if ended.exit_code != 1 or not re.match(rf"({OWN_ERRORS}): .", lines[0] if lines else ""):
        return 1, f"exit code {ended.exit_code}, {lines}"
    if len(lines) > 3:
        return 1, f"many lines: {ended.stderr}"
    # Where tomllib refuses the file, it gives the line and not the name.
    last = name.rpartition(".")[2].strip('"').partition("\\")[0]
    others = ("is not TOML", "A source cannot be named")  # the name of a source may be odd, too
    is_named = any(words in ended.stderr for words in (last, *others))
    if "odd.toml" not in ended.stderr or not is_named:
        return 1, f"a message that does not name {last} and the file: {ended.stderr}"
    return 1, None


@pytest.mark.parametrize(
    "num_cases",
    [80, pytest.param(10_000, marks=[pytest.mark.torture, pytest.mark.timeout(3_600)])],
)
def test_an_odd_value_works_or_is_an_error_that_names_setting_and_file(num_cases, place, figure):
    draw = random.Random(15)
    num_refused, found = 0, []
    for number in range(num_cases):
        name, data = with_other_bytes(draw) if number % 4 == 0 else with_setting(draw)
        code, problem = answer(["plan"], name, data, place)
        num_refused += code
        if problem:
            found.append(f"case {number}: {name}, {data[-200:]!r}: {problem[:1_000]}")

    figure(f"{num_cases:,} odd recipes: {num_refused:,} named errors, the others work")
    assert not found, "\n".join(found)
    assert num_cases / 2 < num_refused < num_cases


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("model.width", "1_000_000", "width 1,000,000 .* Use a smaller model"),
        ("model.layers", str(2**63 - 1), "9,223,372,036,854,775,807 layers"),
        ("model.vocab_size", str(2**63 - 1), "9,223,372,036,854,775,807 ids"),
        ("model.vocab_size", "3", "Set model.vocab_size to"),
        ("training.global_batch_size", "3", "global_batch_size=3 is not a multiple"),
    ],
)
def test_a_model_that_no_memory_holds_is_refused_when_training_begins(
    setting, value, message, place
):
    data = as_toml(BASE | {setting: value}).encode()
    code, problem = answer(["train", "--device", "cpu"], setting, data, place)

    assert (code, problem) == (1, None)
    ended = CliRunner().invoke(app, ["train", "--device", "cpu", "odd.toml"])
    assert re.search(message, ended.stderr)
