"""Nothing that comes from data acts on the terminal."""

import io
import json
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import terminal
from penstock.cli.terminal import message_of, print_json, shell_word, visible
from penstock.errors import DiskFullError, StoreError

BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def acts(character):
    """Whether a terminal could do something on `character` other than show it."""
    control = unicodedata.category(character) == "Cc" and character not in "\n\t"
    return control or character in BIDI or unicodedata.category(character) == "Cs"


def test_every_control_character_is_escaped_and_every_other_stays():
    for number in range(0x110000):
        character = chr(number)
        shown = visible(character)

        assert not acts(character) or (shown != character and shown.isascii())
        assert shown == character or not character.isprintable() or number > 0xE0000


@given(st.text())
def test_no_text_has_a_control_left(text):
    assert not any(acts(character) for character in visible(text))


@given(st.text(st.characters(categories=("L", "N", "P", "S", "Zs"))))
def test_ordinary_text_is_unchanged(text):
    assert visible(text) == text


def test_a_field_of_a_table_stays_on_its_line():
    assert visible("a\nb\tc", lines=False) == r"a\nb\tc"
    assert visible("a\nb\tc") == "a\nb\tc"


@pytest.mark.parametrize(
    "hostile",
    [
        "\x1b]0;title\x07",
        "\x1b[2J\x1b[H",
        "\x9b31m",
        "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\",
        "safe\rover",
        "gpj.\u202eexe",
        "\x08\x08\x08",
        "\x1bP+q544e\x1b\\",
        "\U000e0041\U000e0042",
        "\udc80",
    ],
)
def test_known_attacks_are_escaped(hostile):
    assert re.fullmatch(r"[\x20-\x7e]*", visible(hostile))


def test_json_is_ascii(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(terminal.sys, "stdout", out)

    print_json({"text": "\x1b[31m \u202e é"})

    assert out.getvalue().isascii()
    assert "\x1b" not in out.getvalue()
    assert json.loads(out.getvalue()) == {"text": "\x1b[31m \u202e é"}


def test_a_message_has_its_notes_and_no_error_number():
    error = StoreError("It is damaged.")
    error.add_note("Part 7.")

    assert message_of(error) == "It is damaged.\nPart 7."
    assert message_of(DiskFullError(28, "No room")) == "No room"
    assert message_of(FileNotFoundError(2, "No such file", "x")) == "[Errno 2] No such file: 'x'"


def test_suggested_commands_can_be_typed():
    assert shell_word("stores/a b") == "'stores/a b'"
