"""What users of PyTorch, NumPy and the shell write from habit works, or is refused in words."""

import json

import pytest

import penstock
from penstock import Budget, Chat, Documents, Loader, Plan, Texts, Windows, build
from penstock.errors import ChatError, MissingInputError, PlanError, SourceError, StoreError
from penstock.integrations.pytorch import TextDataset, create_dataloaders
from penstock.preprocess import preprocess
from penstock.recipe import parse_recipe

RECIPE = {"data": {"train": "a.txt"}, "training": {"steps": 1}}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    texts = Texts([f"document {number} " * 9 for number in range(60)])
    return build(texts, tmp_path_factory.mktemp("habits") / "store", tokenizer="bytes")


@pytest.mark.parametrize("shuffle", [False, True, 0, ""])
def test_a_loader_refuses_the_shuffle_of_a_dataloader_and_does_not_shuffle_in_silence(
    store, shuffle
):
    with pytest.raises(PlanError, match=r'shuffle must be "full", "block"'):
        Loader(Windows(store, 16), 4, shuffle=shuffle)


def test_the_modules_of_penstock_are_attributes_after_a_plain_import(python):
    code = "import penstock as ps; print(ps.errors.ResumeError.__name__, ps.transforms.__name__)"

    assert python(code).stdout == "ResumeError penstock.transforms\n"
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        penstock.no_such_name  # noqa: B018


def test_a_process_of_several_is_warned_that_it_reads_all_rows(store, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.warns(UserWarning, match="one of 2 .*each process reads all rows") as caught:
        Loader(Windows(store, 16), 4)
    assert caught[0].filename == __file__
    Loader(Windows(store, 16), 4, rank=0, world_size=1)  # given: no warning


def test_a_loader_is_not_sliced(store):
    with pytest.raises(TypeError, match="no slices"):
        Loader(Windows(store, 16), 4)[0:2]


def test_a_list_of_weights_is_refused_in_words(store):
    rows = {"a": Windows(store, 16), "b": Windows(store, 8)}

    with pytest.raises(PlanError, match=r"weights=\[0.5, 0.5\] must be a dict"):
        Plan(rows, weights=[0.5, 0.5])


def test_a_budget_takes_documents_without_a_plan(store):
    rows = Documents(store, 64)
    direct, planned = (Loader(Budget(each, 1024), epochs=1) for each in (rows, Plan(rows)))

    assert direct.state_dict() == planned.state_dict()


def test_text_with_the_suffix_of_records_is_read_as_text_with_a_warning(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"text": "one"}\n' * 9)

    with pytest.warns(UserWarning, match="as plain text, with the syntax of .jsonl"):
        dataset = TextDataset(path, 8, "bytes", cache_dir=tmp_path)
    assert bytes(dataset.tokenized_data.tolist()).decode() == path.read_text()


def test_a_store_is_not_read_as_text(store, tmp_path):
    with pytest.raises(SourceError, match="is a store: it holds tokens, not text"):
        build(store.path, tmp_path / "other", tokenizer="bytes")


def test_the_suffix_of_wikitext_is_known(tmp_path, caplog):
    (tmp_path / "wiki.valid.raw").write_text("one two\n")

    build(tmp_path / "wiki.valid.raw", tmp_path / "store", tokenizer="bytes")
    assert "suffix" not in caplog.text


def test_an_object_over_several_lines_says_how_to_write_it(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps({"text": "one"}, indent=1))

    with pytest.raises(SourceError, match="write each object on one line, or the whole file as an"):
        build(tmp_path / "one.json", tmp_path / "store", tokenizer="bytes")


def test_a_file_of_another_encoding_keeps_its_suffix_when_it_is_converted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n', encoding="utf-16")

    with pytest.raises(SourceError, match=r"iconv .* > converted\.jsonl"):
        build(tmp_path / "a.jsonl", tmp_path / "store", tokenizer="bytes")


def test_conversations_in_a_csv_file_are_refused_in_one_sentence(tmp_path, caplog):
    (tmp_path / "a.csv").write_bytes(b"id,text\r\n1,one\r\n")

    with pytest.raises(SourceError, match="is CSV, and conversations are read from JSON Lines"):
        build(
            tmp_path / "a.csv", tmp_path / "s", tokenizer="gpt2", chat="chatml", add_tokens="auto"
        )
    assert "carriage return" not in caplog.text


def test_windows_line_ends_of_conversations_are_no_surprise(tmp_path, caplog):
    row = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    (tmp_path / "a.jsonl").write_bytes(json.dumps({"messages": row}).encode() + b"\r\n")

    build(tmp_path / "a.jsonl", tmp_path / "s", tokenizer="gpt2", chat="chatml", add_tokens="auto")
    assert "carriage return" not in caplog.text


def test_an_unknown_argument_of_create_dataloaders_is_named_with_those_that_exist(tmp_path):
    with pytest.raises(TypeError, match=r"shuffle: there is no such argument.*stride, eos, labels"):
        create_dataloaders(tmp_path / "a", tmp_path / "b", "gpt2", shuffle=False)


@pytest.mark.parametrize("role", ["Assistant", "asistant", "ASSISTANT", "gpt", "bot", "User"])
def test_a_role_that_is_nearly_a_known_one_is_refused_and_its_turns_are_not_left_out(role):
    chat = Chat("chatml", "gpt2", add_tokens="auto")
    turns = [{"role": "user", "content": "hi"}, {"role": role, "content": "yes"}]

    with pytest.raises(ChatError, match=r'messages\[1\] has the role .* Write "(assistant|user)"'):
        chat.render(turns)
    chat.render([*turns[:1], {"role": "narrator", "content": "x"}, *CHATS[1:]])  # a template's own


CHATS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def test_a_message_without_content_is_named():
    with pytest.raises(ChatError, match=r'messages\[0\] has no "content"'):
        Chat("chatml", "gpt2", add_tokens="auto").render([{"role": "user"}, CHATS[1]])


def test_the_field_of_conversations_is_refused_and_not_ignored(tmp_path):
    texts = Texts([json.dumps({"dialog": CHATS})])

    with pytest.raises(
        StoreError, match=r"field=.dialog. of penstock.build .* rename the key of the turns"
    ):
        build(texts, tmp_path / "s", chat="chatml", add_tokens="auto", field="dialog")


@pytest.mark.parametrize("split", ["tail:1", "tail:0", "hash:1.5", 0.1])
def test_a_split_that_is_no_share_says_what_a_share_is(tmp_path, split):
    with pytest.raises(StoreError, match="with a share between 0 and 1"):
        build(Texts(["one", "two"]), tmp_path / "s", tokenizer="bytes", split=split)


def test_a_leading_tilde_is_the_home_directory(tmp_path, monkeypatch):
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PENSTOCK_CACHE", "~/cache")
    (home / "a.txt").write_text("some text of a document")

    build("~/a.txt", "~/store", tokenizer="bytes")
    assert build("~/*.txt", "~/store", tokenizer="bytes").path == home / "store"
    assert Windows("~/store", 4)[0] is not None
    assert penstock.verify("~/store").num_tokens == 24
    with penstock.stream("~/a.txt", "~/streamed", tokenizer="bytes") as streamed:
        assert len(next(iter(streamed))) == 24
    assert preprocess("~/a.txt", "~/a.npy", tokenizer="bytes") == 24
    assert parse_recipe({**RECIPE, "output": "~/runs"}, "r.toml").output == home / "runs"
    TextDataset("~/a.txt", 4)
    TextDataset("~/a.txt", 4, cache_dir="~/other")
    # A file whose name begins with "~" is named with "./".
    (work / "~x.txt").write_text("text")
    assert build("./~x.txt", "./~/s", tokenizer="bytes").num_tokens == 5

    assert sorted(each.name for each in work.iterdir()) == ["~", "~x.txt"]
    assert {"a.npy", "cache", "other", "streamed"} <= {each.name for each in home.iterdir()}


def test_verify_of_a_split_store_checks_both_sides(tmp_path):
    build(Texts(["one"] * 50), tmp_path / "s", tokenizer="bytes", split="tail:0.2")

    assert penstock.verify(tmp_path / "s").path == tmp_path / "s" / "train"
    path = next((tmp_path / "s" / "val").glob("*.tokens.npy"))
    path.write_bytes(path.read_bytes()[:-2] + b"zz")
    with pytest.raises(StoreError, match="is damaged"):
        penstock.verify(tmp_path / "s")


def test_another_tokenizer_is_named_in_the_difference_of_two_builds(tmp_path):
    build(Texts(["one"]), tmp_path / "s", tokenizer="bytes")

    with pytest.raises(StoreError, match=r"tokenizer: bytes \w{8} -> gpt2 \w{8}\."):
        build(Texts(["one"]), tmp_path / "s", tokenizer="gpt2")


def test_a_missing_input_lists_no_hidden_files(tmp_path):
    (tmp_path / ".s.stamps.json").write_text("")
    (tmp_path / "a.jsonl").write_text("")

    with pytest.raises(MissingInputError, match=r": a\.jsonl\.$"):
        build(str(tmp_path / "no*.txt"), tmp_path / "s")


def test_the_tokenizer_in_place_of_the_length_is_refused_in_words(tmp_path):
    with pytest.raises(TypeError, match=r"TextDataset\(path, sequence_length, tokenizer\)"):
        TextDataset(tmp_path / "input.txt", "gpt2", 128)


def test_a_build_warns_of_windows_line_ends_and_byte_order_marks(tmp_path, caplog):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    build(tmp_path / "a.txt", tmp_path / "s", tokenizer="bytes", documents="lines")

    assert "begins with a byte order mark" in caplog.text
    assert "--newlines lf" in caplog.text
    caplog.clear()
    lf = build(
        tmp_path / "a.txt", tmp_path / "t", tokenizer="bytes", documents="lines", newlines="lf"
    )
    assert [lf.decode(0), lf.decode(1)] == ["one", "two"]
    assert "--newlines" not in caplog.text
