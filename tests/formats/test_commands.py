"""Commands that take a store take token files of other tools, too."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock.cli.app import app
from penstock.errors import SourceError

DOCUMENTS = [list(b"one"), [], list(b"three")]


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_info_shows_a_megatron_set(layouts, tmp_path):
    layouts.write_megatron(tmp_path / "x", DOCUMENTS)
    found = json.loads(run("info", tmp_path / "x", "--json").stdout)

    assert (found["format"], found["num_documents"], found["num_tokens"]) == ("megatron", 3, 8)
    assert "not given" in run("info", tmp_path / "x.idx").stdout


def test_decode_shows_documents_with_a_tokenizer(layouts, tmp_path):
    layouts.write_megatron(tmp_path / "x", DOCUMENTS)
    words = ("decode", tmp_path / "x", "-d", "-1", "--tokenizer", "bytes")

    assert run(*words).stdout == "document 2 of 3, 5 tokens\nthree\n"
    assert json.loads(run(*words, "--json").stdout)["documents"][0]["text"] == "three"
    assert run(*words[:4]).exit_code == 1
    assert run("decode", tmp_path / "x", "-d", "9", "--tokenizer", "bytes").exit_code == 1


def test_verify_finds_an_id_that_the_vocabulary_does_not_have(layouts, tmp_path):
    ids = [0] * 3_000_000
    ids[100_000] = 60_000  # between two of the blocks that are checked when the file is opened
    layouts.write_raw(tmp_path / "x.bin", [ids])
    named = ("--format", "nanogpt", "--vocab-size")

    assert run("info", tmp_path / "x.bin", *named, 50257).exit_code == 0
    assert run("verify", tmp_path / "x.bin", *named, 50257).exit_code == 1
    assert "every id is below 60,001" in run("verify", tmp_path / "x.bin", *named, 60001).stdout


def test_commands_take_directories_and_patterns(layouts, tmp_path):
    layouts.write_mds(tmp_path / "mds", [each for each in DOCUMENTS if each], "int32", shards=1)
    layouts.write_arrow(tmp_path / "arrow", DOCUMENTS, "int32")
    for number in range(2):
        layouts.write_megatron(tmp_path / f"x{number}", DOCUMENTS)

    for name, count in {"mds": 2, "arrow": 3, "x*.bin": 6}.items():
        found = json.loads(run("info", tmp_path / name, "--json").stdout)
        assert (found["num_documents"], found["num_tokens"] % 8) == (count, 0)
        decoded = run("decode", tmp_path / name, "-d", "-1", "--tokenizer", "bytes").stdout
        assert decoded.endswith("three\n")
        words = ("verify", tmp_path / name, "--vocab-size", 256)
        assert "every id is below 256" in run(*words).stdout
    layouts.write_mds(tmp_path / "bytes", DOCUMENTS, "int32", encoding="bytes")
    words = ("info", tmp_path / "bytes", "--format", "mds", "--dtype", "int32", "--json")
    assert json.loads(run(*words, "--vocab-size", 256).stdout)["num_documents"] == 3


def test_files_without_documents_are_not_decoded(layouts, tmp_path):
    layouts.write_llmc(tmp_path / "x.bin", DOCUMENTS)
    found = run("decode", tmp_path / "x.bin", "-d", "0", "--tokenizer", "bytes")

    assert (found.exit_code, "penstock import makes a store of it" in found.stderr) == (1, True)


def test_options_for_token_files_are_refused_for_a_directory(tmp_path):
    assert run("info", tmp_path, "--format", "llmc").exit_code == 2


def write_words(path):
    pq.write_table(pa.table({"words": DOCUMENTS, "label": [1, 2, 3]}), path)


def test_a_column_of_another_name_is_named_with_an_option(tmp_path):
    write_words(tmp_path / "x.parquet")
    path, named = tmp_path / "x.parquet", ("--column", "words")

    assert "--column words" in run("info", path).stderr
    assert json.loads(run("info", path, *named, "--json").stdout)["num_tokens"] == 8
    shown = run("decode", path, "-d", "2", "--tokenizer", "bytes", *named).stdout
    assert shown == "document 2 of 3, 5 tokens\nthree\n"
    assert "every id is below 257" in run("verify", path, *named, "--tokenizer", "bytes").stdout
    words = ("import", path, "-o", tmp_path / "store", "--tokenizer", "bytes", *named)
    assert run(*words).exit_code == 0
    assert run("decode", tmp_path / "store", "-d", "1").stdout.endswith("three\n")
    words = ("export", path, "--to", "megatron", "-o", tmp_path / "out", "--vocab-size", 257)
    assert run(*words, *named).exit_code == 0
    assert run("info", tmp_path / "store", *named).exit_code == 2


def test_a_column_that_is_not_there_is_an_error(layouts, tmp_path):
    write_words(tmp_path / "x.parquet")
    layouts.write_megatron(tmp_path / "x", DOCUMENTS)

    for name in ("x.parquet", "x"):
        found = run("verify", tmp_path / name, "--column", "ids")
        assert (found.exit_code, "Traceback" in found.output) == (1, False)


def test_options_for_token_files_are_refused_for_a_recipe(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra report is not installed")
    (tmp_path / "x.toml").touch()

    assert run("report", tmp_path / "x.toml", "--column", "words").exit_code == 2


@pytest.mark.parametrize("layout", ["llmc", "megatron", "datatrove", "litdata"])
def test_a_build_of_token_files_is_refused_with_the_command_that_imports_them(
    layouts, invoke, tmp_path, layout
):
    # Ids below 128 are UTF-8.
    path, name, given = {
        "llmc": ("x.bin", "x.bin", "x.bin"),
        "megatron": ("x", "x.bin", "x.bin"),
        "datatrove": ("x.ds", "x.ds", "x.ds"),
        "litdata": ("set", "set/chunk-0-0.bin", "set"),
    }[layout]
    getattr(layouts, f"write_{layout}")(tmp_path / path, [[72, 105], [33]])

    for inputs in (name, f"{name[:-4]}*{name[-3:]}"):
        error = " ".join(invoke("build", inputs, "-o", "store", code=1).stderr.split())
        assert f"{name} holds token ids ({layout}), and no text." in error
        assert f"penstock import {given} " in error
    with pytest.raises(SourceError, match="holds token ids"):
        ps.build(tmp_path / name, tmp_path / "store", tokenizer="bytes")
    assert not (tmp_path / "store").exists()
