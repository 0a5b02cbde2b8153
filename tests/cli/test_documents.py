"""What a document is, on the command line: which rule was used, and documents in pieces."""

import pytest

import penstock as ps
from penstock.sources.slices import cut


def flat(shown):
    return " ".join(shown.split())


@pytest.mark.parametrize(
    ("text", "rule", "count"),
    [
        ("one\ntwo\n\nthree\n", "a whole file", 1),
        ("one\n<|endoftext|>two\n", "the text between '<|endoftext|>'", 2),
    ],
)
def test_a_build_and_a_check_print_the_rule(invoke, run_json, tmp_path, text, rule, count):
    (tmp_path / "a.txt").write_text(text * 30)
    shown = flat(invoke("build", "a.txt", "-o", "store", "--tokenizer", "bytes").stdout)
    looked = flat(invoke("check", "a.txt", "--tokenizer", "bytes").stdout)

    number = 1 if count == 1 else 31
    assert f"documents {number} document is {rule}" in shown
    assert f"document is {rule}" in flat(invoke("info", "store").stdout)
    assert f"read all of it: {number} document{'s' * (number > 1)} " in looked
    assert f"document is {rule}" in looked


def test_one_or_two_files_are_checked_as_a_build_would_read_them(invoke, run_json, tmp_path):
    for name in ("train.txt", "val.txt"):
        (tmp_path / name).write_text("one line\n" * 40)
    pair = run_json("check", "train.txt", "val.txt", "--tokenizer", "bytes")
    one = run_json("check", "train.txt", "--tokenizer", "bytes")

    assert [(file["rule"], file["num_documents"]) for file in pair["files"]] == [("file", 1)] * 2
    assert [(file["rule"], file["num_documents"]) for file in one["files"]] == [("file", 1)]


@pytest.fixture
def pieces(tmp_path, monkeypatch):
    """A store of one document in four pieces."""
    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", 100)
    (tmp_path / "a.txt").write_text("".join(f"line number {number}\n" for number in range(25)))
    store = ps.build(tmp_path / "a.txt", tmp_path / "store", tokenizer="bytes")
    assert len(store) == 4
    return store


def test_documents_in_pieces_are_shown_as_such(invoke, run_json, pieces, tmp_path):
    assert "documents 1, in 4 pieces" in flat(invoke("info", "store").stdout)
    assert "store is intact: 4 parts, 1 document, 4 pieces, " in invoke("verify", "store").stdout
    first = invoke("decode", "store", "--document", 0).stdout
    assert first.startswith("document 0 of 4, ")
    assert "a piece of a longer document" in first
    last = run_json("decode", "store", "--document", -1)["documents"][0]
    assert (last["begins"], last["ends"]) == (False, True)
    assert last["offset"] == pieces.origin(3).offset
    assert repr(pieces).endswith("1 document in 4 pieces, 366 tokens, bytes)")


def test_raw_pieces_in_order_are_the_file(penstock, pieces, tmp_path):
    raw = penstock("decode", "store", "--document", 0, "--count", 4, "--raw").stdout
    assert raw == (tmp_path / "a.txt").read_bytes()
