"""The page as a file: complete, closed to the outside, and the same for the same data."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

import penstock as ps
from penstock.errors import MissingExtraError
from penstock.inspect import inspect_step, open_run
from penstock.report import open_subject, write_report
from penstock.report.sections import render, sections_of
from penstock.report.viewer import shown_document


class Parsed(HTMLParser):
    """The tags, attributes and data of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.data = [], [], {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.data.setdefault(self.tags[-1] if self.tags else "", []).append(data)


@pytest.fixture(scope="module")
def page(folder, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        path = write_report("run", tmp_path_factory.mktemp("page") / "report.html")
    return path.read_text(encoding="utf-8")


def sections(text):
    return re.findall(r'<section id="(\w+)"', text)


def test_a_page_has_no_markup_that_its_policy_would_have_to_allow(page):
    parsed = Parsed(page)
    names = {name for name, _ in parsed.attributes}

    assert "style" not in names
    assert not [name for name in names if name.startswith("on")]
    assert not {"img", "iframe", "object", "embed", "base", "form", "b", "script"} & set(
        parsed.tags
    )
    links = [value for name, value in parsed.attributes if name in ("src", "href", "xlink:href")]
    assert all(each.startswith(("#", "data:,")) for each in links)


def test_the_policy_allows_the_style_of_the_page_and_nothing_else(page):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1].replace("&#39;", "'")
    rules = dict(each.split(" ", 1) for each in policy.split("; "))
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.S)

    assert rules.pop("default-src") == rules.pop("base-uri") == rules.pop("form-action") == "'none'"
    assert rules.pop("img-src") == "data:"
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert rules.pop("style-src") == f"'sha256-{digest}'"
    assert not rules


def test_the_page_of_a_run_holds_the_tokens_that_the_run_has_read(page, here):
    run = open_run("run")
    steps = re.search(r'<section id="steps".*?</section>', page, re.S)[0]
    shown = re.findall(r"<summary>step (\d+), loss .*?</summary>(.*?)</details>", steps, re.S)

    assert [int(step) for step, _ in shown] == [1, 2, 3, 4, 5]
    for step, text in shown:
        rows = inspect_step(run.plan, run.steps, int(step)).rows
        tokens = re.findall(r'<div class="tokens".*?>(.*?)</div>', text, re.S)
        for row, each in zip(rows, tokens, strict=True):
            pieces = re.findall(r'<span class="([^"]*)" title="id ([\d ]+)">', each)
            ids = [list(map(int, found.split())) for _, found in pieces]
            assert [number for piece in ids for number in piece] == row.tokens
            trained = [
                len(piece)
                for (kind, _), piece in zip(pieces, ids, strict=True)
                if "untrained" not in kind
            ]
            assert sum(trained) == row.num_trained


def test_a_page_has_the_sections_of_what_it_is_about(page, here, tmp_path):
    recipe, store = open_subject("run.toml"), "run/stores/<b>web"
    np.save(tmp_path / "ids.npy", np.arange(5_000, dtype=np.uint16) % 200)
    texts = [
        write_report(source, tmp_path / f"{number}.html").read_text(encoding="utf-8")
        for number, source in enumerate((store, tmp_path / "ids.npy"))
    ]

    every = ["run", "loss", "steps", "mixture", "packing", "shuffle", "corpus", "documents"]
    assert sections(page) == [each.name for each in sections_of(recipe)] == every
    assert sections(texts[0]) == ["corpus", "documents"]
    assert sections(texts[1]) == ["corpus"]


def test_the_same_data_gives_the_same_page(page, here, tmp_path):
    again = write_report(open_run("run"), tmp_path / "again.html").read_text(encoding="utf-8")

    assert again.replace("<bdi>run</bdi>", "") == page.replace("<bdi>run</bdi>", "")


def test_a_recipe_that_leaves_the_rows_of_a_step_to_the_device_has_a_page(here, tmp_path):
    changes = {"training.batch_size": "auto", "output": str(tmp_path / "other")}
    subject = open_subject("run.toml", changes=changes)

    assert subject.steps.span(1) == (0, 8)
    shown = [render(each, subject) for each in sections_of(subject)[:2]]
    assert "not determined by the recipe" in shown[0]
    assert "step 1" in shown[1]  # without a run, there is no loss


def test_rejected_records_are_listed_with_their_places(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"other": 1}\n' + '{"text": "a"}\n' * 9)
    store = ps.build(tmp_path / "a.jsonl", tmp_path / "s", tokenizer="bytes", max_bad=5)
    text = write_report(store, tmp_path / "r.html").read_text(encoding="utf-8")

    assert "The first rejected records" in text
    assert re.search(r'<th scope="row">a.jsonl</th><td>16</td>', text)
    assert "equal to an earlier one</dt><dd>8, 80.00%" in text


def test_a_conversation_shows_which_tokens_are_trained_on(tmp_path, gpt2_chat):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    store = ps.build(tmp_path / "a.jsonl", tmp_path / "s", tokenizer=gpt2_chat, chat="chatml")
    subject = open_subject(store, tokenizer=gpt2_chat)
    pieces = shown_document(subject, 0, 0)["rows"][0]["pieces"]

    assert "".join(text for _, text, trained, _ in pieces if trained).startswith("Hello.")
    assert "Hi" in [text for _, text, trained, _ in pieces if not trained]
    assert "trained on</dt>" in write_report(subject, tmp_path / "r.html").read_text()


def test_without_matplotlib_the_message_says_what_to_install(here, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)

    with pytest.raises(MissingExtraError, match=r'pip install "penstock\[report\]"'):
        write_report("run/stores/<b>web", tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_a_store_is_reported_without_torch(folder, python, tmp_path):
    code = f"""
import sys
from penstock.report import write_report
write_report({str(folder / "run/stores/<b>web")!r}, {str(tmp_path / "r.html")!r})
assert "torch" not in sys.modules
"""

    python(code)
