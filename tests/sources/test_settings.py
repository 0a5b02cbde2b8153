"""Settings that cannot be meant are refused before anything is read."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

import penstock
from penstock.check import CheckSettings
from penstock.cli.app import app
from penstock.errors import SourceError
from penstock.options import ReadSettings
from penstock.preprocess import preprocess


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "xlsx"}, r'format=.xlsx. .*is not one of "auto", "text"'),
        ({"errors": "ignore"}, r"errors=.ignore. .*is not one of"),
        ({"documents": ""}, r"separates nothing"),
        ({"field": ""}, r"contains an empty name"),
        ({"field": ["q", "a"]}, r"field=\['q', 'a'\] is not the name of one field.*penstock.Texts"),
        ({"field": "a..b"}, r"field=.a\.\.b. contains an empty name"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(settings, message):
    with pytest.raises(SourceError, match=message):
        ReadSettings(**settings)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("line", "lines"), ("Lines", "lines"), ("paragraph", "paragraphs"), ("files", "file")],
)
def test_a_word_that_is_no_rule_is_refused_and_not_taken_as_a_separator(typed, meant):
    with pytest.raises(
        SourceError, match=rf'documents=.{typed}. is not a rule; did you mean {meant}\?.*"sep:'
    ):
        ReadSettings(documents=typed)


def test_a_separator_of_letters_is_written_with_sep_and_others_need_not_be():
    with pytest.raises(SourceError, match=r"is not a rule\. The rules are .auto., .lines."):
        ReadSettings(documents="ENDE")

    recorded = [
        ReadSettings(documents=documents).describe()["documents"]
        for documents in ("sep:ENDE", "sep:---", "---", "sep:lines", "\n\n", "END OF TEXT")
    ]
    assert recorded == ["sep:ENDE", "---", "---", "sep:lines", "\n\n", "END OF TEXT"]
    # Settings are copied when the tokenizer is known.
    assert replace(ReadSettings(documents="sep:ENDE"), field="a").documents == "sep:ENDE"


def _lightning(data, tmp_path):
    pytest.importorskip("lightning")
    from penstock.integrations.lightning import LocalOpenWebTextDataModule

    module = LocalOpenWebTextDataModule(str(data), str(data), documents="line", cache_dir=tmp_path)
    module.setup("fit")


EVERY_WAY = {
    "build": lambda data, out: penstock.build(data, out / "s", documents="line"),
    "stream": lambda data, out: penstock.stream(data, out / "s", documents="line"),
    "preprocess": lambda data, out: preprocess(data, out / "a.bin", documents="line"),
    "lightning": _lightning,
    "check": lambda data, out: CheckSettings(reading=ReadSettings(documents="line")),
}


@pytest.mark.parametrize("way", EVERY_WAY)
def test_documents_line_is_refused_with_did_you_mean_lines_everywhere(way, tmp_path):
    data = tmp_path / "a.txt"
    data.write_text("one\ntwo\n")

    with pytest.raises(SourceError, match=r"did you mean lines\?"):
        EVERY_WAY[way](data, tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        ["build", "-o", "s"],
        ["check"],
        ["tokenizer", "train", "-o", "t.json", "--vocab-size", "300"],
    ],
)
def test_documents_line_is_refused_on_the_command_line(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    result = CliRunner().invoke(app, [*command, "a.txt", "--documents", "line"])

    assert result.exit_code != 0
    assert "did you mean lines?" in " ".join((result.output + str(result.exception)).split())
