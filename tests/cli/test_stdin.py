"""`-` in place of a file: standard input, which is read once and in order."""

import json

import pytest
from typer.testing import CliRunner

from penstock import TokenStore, build
from penstock.cli.app import app
from penstock.errors import PenstockError
from penstock.sources.slices import cut


@pytest.fixture
def pipe(tmp_path, monkeypatch):
    """Run a command with bytes on its standard input; returns click's result."""
    monkeypatch.chdir(tmp_path)

    def pipe(data, *arguments):
        return CliRunner().invoke(app, arguments, input=data)

    return pipe


@pytest.mark.parametrize("documents", ["lines", "auto", "paragraphs", "file"])
@pytest.mark.parametrize("slice_bytes", [500, 64_000_000])
def test_a_store_from_standard_input_has_the_tokens_of_one_from_a_file(
    pipe, tmp_path, documents, slice_bytes, monkeypatch
):
    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", slice_bytes)
    data = b"".join(b"line %d\nof a text\n\n" % number for number in range(200))
    (tmp_path / "a.txt").write_bytes(data)
    build(tmp_path / "a.txt", tmp_path / "file", documents=documents)
    result = pipe(data, "build", "-", "-o", "piped", "--documents", documents)

    assert result.exit_code == 0, result.output
    one, two = TokenStore(tmp_path / "file"), TokenStore(tmp_path / "piped")
    assert one.num_tokens == two.num_tokens
    assert "".join(one.decode(number) for number in range(len(one))) == "".join(
        two.decode(number) for number in range(len(two))
    )
    assert two.manifest.inputs[0]["name"] == "-"


@pytest.mark.parametrize(
    ("format", "data"),
    [
        ("jsonl", b'{"text": "To be,"}\n{"text": "or not"}\n'),
        ("json", json.dumps([{"text": "To be,"}, {"text": "or not"}]).encode()),
        ("csv", b'id,text\n1,"To be,"\n2,or not\n'),
    ],
)
def test_standard_input_has_the_format_that_is_named(pipe, tmp_path, format, data):
    result = pipe(data, "build", "-", "-o", "store", "--format", format)

    assert result.exit_code == 0, result.output
    store = TokenStore(tmp_path / "store")
    assert [store.decode(0), store.decode(1)] == ["To be,", "or not"]


def test_a_build_from_standard_input_says_that_it_cannot_be_resumed(pipe, caplog):
    assert pipe(b"one\n", "build", "-", "-o", "store").exit_code == 0
    assert "Standard input (-) is read as text" in caplog.text
    assert "cannot be resumed" in caplog.text

    again = pipe(b"one\n", "build", "-", "-o", "store")
    assert isinstance(again.exception, PenstockError) or again.exit_code == 1
    said = " ".join(f"{again.output} {again.exception}".split())
    assert "holds a finished build, and standard input (-) cannot be read again" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("build", "-", "-o", "s", "--format", "parquet"), "cannot be read in order"),
        (("build", "-", "-o", "s", "--split", "tail:0.5"), "can be read only once"),
        (("check", "-"), "standard input (-) can be read only once"),
    ],
)
def test_what_needs_the_input_twice_is_refused(pipe, options, message):
    result = pipe(b"one\ntwo\n", *options)

    assert result.exit_code == 1
    assert message in " ".join(f"{result.output} {result.exception}".split())


def test_a_tokenizer_is_trained_on_standard_input(pipe, tmp_path):
    options = ("-o", "t.json", "--vocab-size", "260")
    result = pipe(b"low lower lowest\n" * 50, "tokenizer", "train", "-", *options)

    assert result.exit_code == 0, result.output
    assert (tmp_path / "t.json").exists()
