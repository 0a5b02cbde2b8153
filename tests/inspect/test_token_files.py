"""Searches of runs that read token files: a source is searched, or said not to be."""

import json

import numpy as np
import pytest

import penstock as ps
from penstock.errors import StoreError
from penstock.inspect import RunSteps, find_documents, inspect_step
from penstock.inspect.documents import find_numbered
from penstock.inspect.members import not_searched
from penstock.order.steps import Steps

TEXTS = [f"Document {number}: hello world." for number in range(60)]
RECIPE = """
output = "run"
[data]
length = 16
train = "mine.ds"
[data.tokens]
tokenizer = "bytes"
[training]
steps = 60
batch_size = 4
"""


def ids_of(texts=TEXTS):
    return [np.array([*text.encode(), 256], "<u2") for text in texts]


def write_datatrove(path, documents):
    np.concatenate(documents).tofile(path)
    np.cumsum([len(each) for each in documents]).astype("<u8").tofile(f"{path}.index")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_datatrove("mine.ds", ids_of())
    np.save("bare.npy", np.concatenate(ids_of()))
    return tmp_path


def plan_of(*members, length=16):
    return ps.Plan(ps.Windows(list(members), length), seed=1)


def test_a_document_of_token_files_is_found_by_its_number(folder):
    files = ps.open_tokens("mine.ds", tokenizer="bytes")
    plan = plan_of(files, ps.open_tokens("bare.npy", tokenizer="bytes"))
    (found,) = find_numbered(plan, 7)

    assert found.document == 7
    assert np.array_equal(plan.sources["data"].stream.tokens(*found.span), files.document(7))
    with pytest.raises(
        StoreError,
        match=r"a document 1,000: mine\.ds has 60; bare\.npy does not record where documents end",
    ):
        find_numbered(plan, 1_000)


def test_token_files_are_named_as_not_searched_for_a_record_of_an_input(folder):
    store = ps.build(ps.Texts(["one"]), "store", tokenizer="bytes")
    plan = plan_of(store, ps.open_tokens("mine.ds"))
    name = store.manifest.inputs[0]["name"]

    assert len(find_documents(plan, name, 0)) == 1
    assert not_searched(plan) == ["mine.ds"]
    with pytest.raises(StoreError, match=r"was built from other\.txt.* not searched: mine\.ds"):
        find_documents(plan, "other.txt", 0)


def test_inspect_uses_the_tokenizer_with_which_token_files_were_opened(folder):
    plan = ps.Plan(ps.Windows(ps.open_tokens("mine.ds", tokenizer="bytes"), 16), shuffle="none")
    step = inspect_step(plan, RunSteps(Steps(1)), 1)

    assert "".join(each.text for each in step.rows[0].segments) == TEXTS[0][:17]


def test_the_commands_search_token_files_of_a_recipe(folder, invoke):
    (folder / "mine.toml").write_text(RECIPE)
    found = json.loads(invoke("when", "mine.toml", "--document", "7", "--json").stdout)

    (document,) = found["documents"]
    assert document["document"] == 7
    assert document["seen"]
    shown = invoke("when", "mine.toml", "--document", "7").stdout
    assert f"data: document 7 of mine.ds, {len(ids_of()[7])} tokens" in shown
    assert "the tokenizer is not known" not in invoke("inspect", "mine.toml", "--step", "1").stdout
    assert "hello" in invoke("inspect", "mine.toml", "--step", "1").stdout


def test_the_command_says_which_files_a_record_was_not_searched_in(folder, invoke):
    ps.build(ps.Texts(["one"] * 60), "store", tokenizer="bytes")
    sources = (
        '[data.sources.a]\ntrain = "store"\n[data.sources.b]\ntrain = "mine.ds"\n'
        '[data.sources.b.tokens]\ntokenizer = "bytes"\n'
    )
    text = RECIPE.replace('train = "mine.ds"\n[data.tokens]\ntokenizer = "bytes"\n', sources)
    (folder / "mix.toml").write_text(text)
    name = ps.TokenStore("store").manifest.inputs[0]["name"]
    shown = invoke("when", "mix.toml", "--document", f"{name}:0").stdout

    assert "not searched: mine.ds" in shown
