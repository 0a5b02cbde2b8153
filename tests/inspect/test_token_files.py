"""Searches of runs that read token files: a source is searched, or said not to be."""

import json

import numpy as np
import pytest

import penstock as ps
from penstock.errors import MissingTokenizerError, PlanError, StoreError
from penstock.inspect import RunSteps, find_documents, inspect_step, when
from penstock.inspect.documents import find_numbered
from penstock.inspect.members import not_searched
from penstock.inspect.text import find_texts
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


def text_at(plan, found):
    return bytes(plan.sources[found.source].stream.tokens(*found.span).tolist()).decode()


@pytest.mark.parametrize("name", ["mine.ds", "bare.npy"])
def test_a_text_is_found_in_token_files_with_and_without_documents(folder, name):
    files = ps.open_tokens(name, tokenizer="bytes")
    store = ps.build(ps.Texts(["first", "Document 7: here too"]), "store", tokenizer="bytes")
    plan = plan_of(store, files, ps.ArrayFile("bare.npy"))
    searched = []
    in_store, in_files, in_array = find_texts(
        plan, "Document 7:", tokenizer="bytes", progress=lambda *each: searched.append(each)
    )

    for each in (in_store, in_files, in_array):
        assert text_at(plan, each) == "Document 7:"
        assert when(plan, RunSteps(Steps(4)), each, len(plan))
    assert in_files.document == (7 if name == "mine.ds" else None)
    assert in_array.document is None
    assert in_files.record == in_array.record == sum(map(len, ids_of()[:7]))
    assert searched[-1] == (plan.sources["data"].stream.num_tokens,) * 2


def test_every_text_of_token_files_in_several_parts_is_found_at_its_tokens(folder):
    for number, some in enumerate(np.array_split(np.arange(60), 3)):
        write_datatrove(f"part_{number}.ds", [*(ids_of()[each] for each in some), ids_of([""])[0]])
    plan = plan_of(ps.open_tokens("part_*.ds", tokenizer="bytes"))

    for number in range(60):
        (found,) = find_texts(plan, f"Document {number}:")
        assert text_at(plan, found) == f"Document {number}:"
        assert found.document == number + number // 20
        (same,) = find_numbered(plan, found.document)
        assert same.span == (found.span[0], found.span[0] + len(ids_of()[number]))


def test_a_text_over_two_documents_is_no_match_though_a_bare_file_records_none(folder):
    plan = plan_of(ps.open_tokens("bare.npy", tokenizer="bytes"))

    assert not list(find_texts(plan, "world.Document"))


def test_a_search_without_a_tokenizer_is_refused_and_names_the_files(folder):
    store = ps.build(ps.Texts(["Document 7"]), "store", tokenizer="bytes")
    plan = plan_of(store, ps.open_tokens("mine.ds"))

    with pytest.raises(MissingTokenizerError, match=r"mine\.ds does not record its tokenizer"):
        list(find_texts(plan, "Document 7"))
    assert len(list(find_texts(plan, "Document 7", tokenizer="bytes"))) == 2


class Streamless:
    """Rows of a user that have no stream."""

    length, digest, tokenizer_digest = 8, "mine", None

    def __len__(self):
        return 3

    def read(self, indices):
        return {"tokens": np.zeros((len(indices), 9), np.int64)}


def test_rows_without_a_stream_are_refused_and_not_said_to_lack_the_text():
    with pytest.raises(PlanError, match=r"source data are not cut from stores.*cannot be searched"):
        list(find_texts(ps.Plan(Streamless()), "text"))


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
    found = json.loads(invoke("when", "mine.toml", "--text", "Document 7:", "--json").stdout)

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
    (document,) = json.loads(invoke("when", "mix.toml", "--text", TEXTS[7], "--json").stdout)[
        "documents"
    ]
    assert document["source"] == "b"
