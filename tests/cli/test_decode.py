"""`penstock decode`: text, origin, and nothing that acts on a terminal."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.tokenize.tokenizer import _find

UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def store(invoke, corpus):
    return ps.build(str(corpus), "store", tokenizer="bytes", documents="lines")


def test_a_document_is_shown_with_its_origin(invoke, store, corpus):
    shown = invoke("decode", "store", "--document", 1).stdout

    assert shown == (
        f"document 1 of 4, 22 tokens\nfrom {corpus.name}, offset 21\nthat is the question.\n"
    )


@pytest.mark.parametrize(("name", "unit"), [("chats.json", "item 1"), ("rows.parquet", "row 1")])
def test_a_number_that_is_not_an_offset_is_named(invoke, name, unit):
    pairs = [[{"role": role, "content": "hi"} for role in ("user", "assistant")]] * 2
    Path("chats.json").write_text(json.dumps([{"messages": each} for each in pairs]))
    pq.write_table(pa.table({"text": ["one", "two"]}), "rows.parquet")
    tokenizer = ps.load_tokenizer("gpt2", add_tokens=["<|im_start|>", "<|im_end|>"])
    chat = "chatml" if name == "chats.json" else None
    store = ps.build(name, "numbered", tokenizer=tokenizer, chat=chat)

    assert f"from {name}, {unit}\n" in invoke("decode", "numbered", "-d", 1).stdout
    assert f"({name}, {unit})" in str(ps.Plan(ps.Packs(store, 64), shuffle="none").origins(0)[-1])


def test_several_documents_are_set_apart(invoke, store):
    shown = invoke("decode", "store", "-d", 2, "-n", 2).stdout

    assert shown.split("\n\n")[1].startswith("document 3 of 4, 12 tokens\n")


def test_the_first_document_is_shown_without_a_number(invoke, store):
    assert invoke("decode", "store").stdout == invoke("decode", "store", "-d", 0).stdout


def test_negative_numbers_count_from_the_end(run_json, store):
    assert run_json("decode", "store", "--document", -1)["documents"][0]["text"] == "in the mind"


def test_json_has_text_and_origin(run_json, store, corpus):
    assert run_json("decode", "store", "--document", 0) == {
        "documents": [
            {
                "document": 0,
                "file": corpus.name,
                "offset": 0,
                "num_tokens": 21,
                "text": "To be, or not to be:",
                "begins": True,
                "ends": True,
            }
        ]
    }


@pytest.fixture
def chats(invoke, tmp_path):
    turns = [
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "It is 2,\nof course."},
    ]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    tokenizer = ps.load_tokenizer("gpt2", add_tokens=["<|im_start|>", "<|im_end|>"])
    return ps.build("chats.jsonl", "chats", tokenizer=tokenizer, chat="chatml")


def test_the_mask_shows_what_is_trained_on_in_a_conversation(invoke, chats):
    lines = invoke("decode", "chats", "-d", 0, "--mask").stdout.splitlines()

    assert lines[2:] == [
        "+ trained on, - only read, ↵ newline",
        "  - <|im_start|>user↵",
        "  - What is 1 + 1?<|im_end|>↵",
        "  - <|im_start|>assistant↵",
        "  + It is 2,↵",
        "  + of course.<|im_end|>",
        "  - ↵",
    ]


def test_the_mask_wraps_lines_in_a_terminal_only(invoke, monkeypatch):
    text = "\tlong words " * 30
    ps.build(ps.Texts([text]), "long", tokenizer="bytes")
    lines = invoke("decode", "long", "-d", 0, "--mask").stdout.splitlines()

    assert lines[3:] == [f"  + {text}"]
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert len(invoke("decode", "long", "-d", 0, "--mask").stdout.splitlines()) > 5


def test_the_pieces_of_the_mask_are_the_whole_document(run_json, chats):
    (found,) = run_json("decode", "chats", "-d", 0, "--mask", "--json")["documents"]

    assert "pieces" not in run_json("decode", "chats", "-d", 0, "--json")["documents"][0]
    text = "".join(each["text"] for each in found["pieces"])
    assert text.startswith(found["text"])
    trained = [each["text"] for each in found["pieces"] if each["trained"]]
    assert trained == ["It is 2,\nof course.<|im_end|>"]


def test_without_a_mask_in_the_store_everything_is_trained_on(invoke, store):
    lines = invoke("decode", "store", "-d", 1, "--mask").stdout.splitlines()

    assert lines[3].startswith("  + that is the question.")
    assert not any(line.startswith("  - ") for line in lines)
    error = invoke("decode", "store", "-d", 1, "--mask", "--raw", code=2).stderr
    assert "--raw and --mask cannot be combined" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-d", 4], "store has no document 4; it has 4 documents, numbered from 0."),
        (["-d", -5], "store has no document -5; it has 4 documents"),
    ],
)
def test_documents_that_are_not_there_are_an_error(invoke, store, arguments, message):
    assert message in invoke("decode", "store", *arguments, code=1).stderr


def test_a_count_beyond_the_end_shows_what_there_is_as_head_does(invoke, store):
    shown = json.loads(invoke("decode", "store", "-d", 2, "-n", 10, "--json").stdout)

    assert [each["document"] for each in shown["documents"]] == [2, 3]


def test_raw_and_json_cannot_be_combined(invoke, store):
    result = invoke("decode", "store", "-d", 0, "--raw", "--json", code=2)

    assert "cannot be combined" in json.loads(result.stdout)["error"]["message"]


def test_another_tokenizer_is_refused(invoke, store):
    result = invoke("decode", "store", "-d", 0, "--tokenizer", "gpt2", code=1)

    assert "The store was tokenized with bytes" in result.stderr


@pytest.fixture
def other_user(tmp_path, monkeypatch):
    """Go on as somebody who has loaded no tokenizer yet."""

    def change():
        monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "other"))
        _find.cache_clear()

    return change


def test_a_tokenizer_that_moved_is_found_by_its_digest(invoke, corpus, tmp_path, data, other_user):
    config = (data / "gpt2" / "tokenizer.json").read_bytes()
    (tmp_path / "old.json").write_bytes(config)
    ps.build(str(corpus), "other", tokenizer="old.json", documents="lines")
    (tmp_path / "old.json").rename(tmp_path / "new.json")
    other_user()

    for given in ((), ("--tokenizer", "new.json")):  # it is also bundled, as "gpt2"
        shown = invoke("decode", "other", "-d", 0, *given).stdout
        assert shown.endswith("To be, or not to be:\n")


HOSTILE = [
    b"\x1b]0;owned\x07 \x1b[31mred\x1b[0m",
    b"null \x00 bell \x07 back \x08",
    "c1 \x9b31m csi".encode(),
    "gpj.\u202eexe \u2066x\u2069".encode(),
    b"over\rwritten",
    "emoji 👩‍👩‍👧‍👦 stays".encode(),
]


def test_hostile_text_is_escaped_and_raw_is_exact(invoke, penstock, tmp_path):
    (tmp_path / "hostile.txt").write_bytes(b"\n".join(HOSTILE) + b"\n")
    ps.build("hostile.txt", "store", tokenizer="bytes", documents="lines")

    shown = invoke("decode", "store", "-d", 0, "-n", len(HOSTILE)).stdout
    raw = penstock("decode", "store", "-d", 0, "-n", len(HOSTILE), "--raw").stdout

    assert not UNSAFE.search(shown)
    assert r"\x1b]0;owned\x07 \x1b[31mred\x1b[0m" in shown
    assert "emoji 👩‍👩‍👧‍👦 stays" in shown
    assert raw == b"".join(HOSTILE)


def test_naughty_strings_are_inert_and_raw_gives_them_back(invoke, penstock, data):
    path = data / "unicode" / "blns.txt"
    store = ps.build(str(path), "store", documents="lines")

    shown = invoke("decode", "store", "-d", 0, "-n", len(store)).stdout
    raw = penstock("decode", "store", "-d", 0, "-n", len(store), "--raw").stdout

    assert not UNSAFE.search(shown)
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip(b" \t\r")]
    assert raw == b"".join(lines)


def test_a_tokenizer_that_is_not_found_can_be_set(
    invoke, corpus, tmp_path, monkeypatch, other_user
):
    command = ("tokenizer", "train", corpus, "-o", "own.json", "--vocab-size", 258)
    invoke(*command)
    ps.build(str(corpus), "store", tokenizer="own.json", documents="lines")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    other_user()

    assert (
        "with tokenizer= (--tokenizer), once"
        in invoke("decode", "../store", "-d", 0, code=1).stderr
    )
    shown = invoke("decode", "../store", "-d", 0, "--tokenizer", "../own.json").stdout
    assert shown.endswith("To be, or not to be:\n")
    again = invoke("decode", "../store", "-d", 0, "--tokenizer", "nowhere.json", code=1).stderr
    assert "(--tokenizer)" not in again


@pytest.mark.skipif(os.name == "nt", reason="the shell of Windows is another")
@pytest.mark.parametrize("option", ["", "--raw", "--json"])
def test_decode_into_head_exits_0(tmp_path, option):
    ps.build(ps.Texts(["many words\n" * 100] * 500), tmp_path / "long", tokenizer="bytes")
    decode = f"{sys.executable} -m penstock decode long -d 0 -n 500 {option}"
    code = f"{decode} | head -n 1; exit ${{PIPESTATUS[0]}}"

    done = subprocess.run(
        ["bash", "-c", code], cwd=tmp_path, capture_output=True, timeout=240, check=False
    )

    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"\n") == 1


def test_inputs_are_found_below_the_directory_that_is_named(invoke, run_json, store, corpus):
    folder = corpus.parent
    shown = invoke("decode", "store", "-d", 1, "--inputs", folder).stdout
    assert f"from {corpus}, offset 21" in shown
    found = run_json("decode", "store", "-d", 1, "--inputs", folder)
    assert found["documents"][0]["file"] == str(corpus)
    refused = invoke("decode", "store", "-d", 1, "--inputs", "elsewhere", code=1).stderr
    assert "elsewhere/corpus.txt does not exist" in refused
