"""What users of PyTorch, NumPy and the shell write from habit works, or is refused in words."""

import inspect
import json
import pickle
import re
import warnings
from importlib import import_module
from pathlib import Path

import pytest

import penstock
from penstock import Chat, Documents, Loader, Packs, Plan, Texts, Windows, build
from penstock.catalog import ARCDataLoader, GSM8KDataLoader, MMLUDataLoader
from penstock.disk import locked
from penstock.errors import (
    ChatError,
    MissingInputError,
    PlanError,
    ResumeError,
    SourceError,
    StoreBusyError,
    StoreError,
)
from penstock.integrations.multiplex import create_multiplex_dataloader
from penstock.integrations.pytorch import TextDataset, create_dataloaders
from penstock.preprocess import preprocess
from penstock.recipe import parse_recipe
from penstock.transforms import TokenDropout, Transformed

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
    rows = {"a": Windows(store, 16), "b": Documents(store, 16)}

    with pytest.raises(PlanError, match=r"weights=\[0.5, 0.5\] must be a dict"):
        Plan(rows, weights=[0.5, 0.5])


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
        build(tmp_path / "a.csv", tmp_path / "s", chat=Chat("chatml", "gpt2", add_tokens="auto"))
    assert "carriage return" not in caplog.text


def test_windows_line_ends_of_conversations_are_no_surprise(tmp_path, caplog):
    row = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    (tmp_path / "a.jsonl").write_bytes(json.dumps({"messages": row}).encode() + b"\r\n")

    build(tmp_path / "a.jsonl", tmp_path / "s", chat=Chat("chatml", "gpt2", add_tokens="auto"))
    assert "carriage return" not in caplog.text


def test_an_unknown_argument_of_create_dataloaders_is_named_with_those_that_exist(tmp_path):
    with pytest.raises(TypeError, match=r"shuffle: there is no such argument.*stride, eos, labels"):
        create_dataloaders(tmp_path / "a", tmp_path / "b", "gpt2", shuffle=False)


@pytest.fixture(scope="module")
def chat():
    return Chat("chatml", "gpt2", add_tokens="auto")


@pytest.mark.parametrize("role", ["Assistant", "asistant", "ASSISTANT", "gpt", "bot", "User"])
def test_a_role_that_is_nearly_a_known_one_is_refused_and_its_turns_are_not_left_out(chat, role):
    turns = [{"role": "user", "content": "hi"}, {"role": role, "content": "yes"}]

    with pytest.raises(ChatError, match=r'messages\[1\] has the role .* Write "(assistant|user)"'):
        chat.render(turns)
    chat.render([*turns[:1], {"role": "narrator", "content": "x"}, *CHATS[1:]])  # a template's own


CHATS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def test_a_message_without_content_is_named(chat):
    with pytest.raises(ChatError, match=r'messages\[0\] has no "content"'):
        chat.render([{"role": "user"}, CHATS[1]])


def test_the_field_of_conversations_is_refused_and_not_ignored(tmp_path):
    texts = Texts([json.dumps({"dialog": CHATS})])

    with pytest.raises(
        StoreError, match=r"field=.dialog. .*does not name one column of prompts and one of comp"
    ):
        build(texts, tmp_path / "s", chat=Chat("chatml", "gpt2", add_tokens="auto"), field="dialog")


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
    assert "has Windows line ends" in caplog.text


def shown_objects(store, path):
    """What users make with one call, by the name of its class."""
    from penstock.integrations.huggingface import RowItems, StepLoader
    from penstock.integrations.lightning import LLMDataModule, LocalOpenWebTextDataModule
    from penstock.integrations.multiplex import MultiplexDataset
    from penstock.integrations.pytorch import EpochShuffle, TransformerDataset
    from penstock.integrations.sft import SFTBatches
    from penstock.loader import as_dataloader

    (path / "a.txt").write_text("some text of a document\n\n" * 9)
    rows, cache, pairs = Windows(store, 16), path / "cache", [("a", [{"n": 1}] * 9)]
    modules = [
        LLMDataModule("bytes", 4, data={"train": store}, num_workers=0, cache_dir=cache),
        LocalOpenWebTextDataModule(path / "a.txt", path / "a.txt", max_length=8, batch_size=2),
    ]
    opened = LLMDataModule("bytes", 4, data=dict.fromkeys(("train", "val"), store), num_workers=0)
    opened.setup("fit")
    return [
        *modules,
        opened,
        opened.train_dataloader(),
        opened.val_dataloader(),
        StepLoader(rows, 4),
        RowItems(rows),
        TextDataset(path / "a.txt", 8, "bytes", cache_dir=cache),
        TransformerDataset(path / "a.txt", "bytes", 8, is_jsonl=False, cache_dir=cache),
        *create_dataloaders(path / "a.txt", path / "a.txt", "bytes", 2, 8, cache_dir=cache),
        EpochShuffle(9),
        MultiplexDataset(pairs),
        create_multiplex_dataloader(pairs, 2),
        as_dataloader(Loader(rows, 4, epochs=1), num_workers=0),
        SFTBatches([{"n": 1}] * 9, 2, lambda row: ([1, 2], [0, 1]), pad_token_id=0),
        ARCDataLoader(),
        GSM8KDataLoader(),
        MMLUDataLoader("anatomy"),
        *(rows, Plan(rows), Loader(rows, 4), store),
    ]


def test_what_users_make_is_shown_in_one_line_that_says_what_it_holds(store, tmp_path):
    for each in shown_objects(store, tmp_path):
        text = repr(each)

        if type(each).__module__.startswith("torch."):
            continue  # PyTorch's own DataLoader, whose dataset is shown
        assert " object at 0x" not in text
        assert text.startswith(f"{type(each).__name__}(")
        assert "\n" not in text
        assert any(character.isdigit() for character in text) or "split" in text, text
        assert str(each) == text or isinstance(each, Plan)


# What users only subclass, and what `penstock train` makes for itself.
NOT_SHOWN = {"Rows", "Transform", "Display", "Learner", "Optimizers"}


def test_no_public_class_has_the_representation_of_object():
    names = json.loads(Path(__file__).with_name("public_names.json").read_text(encoding="utf-8"))
    found = {
        name
        for module, listed in names.items()
        for name in listed
        if inspect.isclass(each := getattr(import_module(module), name))
        and each.__repr__ is object.__repr__
    }

    assert found <= NOT_SHOWN


def test_a_dataset_is_shown_after_it_was_unpickled(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    dataset = TextDataset(tmp_path / "a.txt", 4, "bytes", cache_dir=tmp_path)

    assert repr(pickle.loads(pickle.dumps(dataset))) == repr(dataset)
    assert repr(dataset).endswith("a.txt': 5 windows of 4 tokens, 1 apart)")


def test_weights_that_floats_do_not_hold_exactly_are_another_order(store):
    rows = dict.fromkeys(("a", "b"), Windows(store, 16))
    one = Loader(Plan(rows, weights={"a": 1, "b": 99}), 4)
    other = Loader(Plan(rows, weights={"a": 0.01, "b": 0.99}), 4)

    with pytest.raises(ResumeError, match="another order"):
        other.load_state_dict(one.state_dict())


@pytest.mark.filterwarnings("ignore")  # Lightning's own, on workers and loggers
def test_a_model_is_fitted_without_validation_if_the_data_has_none(store, tmp_path, caplog):
    import torch
    from lightning.pytorch import LightningModule, Trainer

    from penstock.integrations.lightning import LLMDataModule

    class Tiny(LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch, _):
            return self.weight * batch["input_ids"].float().mean()

        def validation_step(self, batch, _):
            raise AssertionError("there is nothing to validate on")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module = LLMDataModule("bytes", 4, 256, data={"train": store}, num_workers=0)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_steps=2, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    with caplog.at_level("INFO", "lightning.pytorch.penstock"):
        trainer.fit(Tiny(), datamodule=module)

    assert trainer.global_step == 2
    assert caplog.text.count('data= has no "val", so the Trainer runs without validation.') == 1
    with pytest.raises(PlanError, match='data= has no "val"; it has train'):
        trainer.validate(Tiny(), datamodule=module)


def test_cut_documents_of_a_data_module_are_warned_of(store):
    from penstock.integrations.lightning import LLMDataModule, LocalOpenWebTextDataModule

    module = LLMDataModule("bytes", 4, 20, data={"train": store}, num_workers=0)

    module.setup("fit")
    with pytest.warns(UserWarning, match="are cut at their max_length: 5,250 of 6,450") as caught:
        next(iter(module.train_dataloader()))
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="not read, because use_preprocessed= is False") as caught:
        LocalOpenWebTextDataModule("a.txt", "b.txt", preprocessed_train="a.npy")
    assert caught[0].filename == __file__


def test_a_loader_warns_of_documents_that_are_cut(store):
    rows = Documents(store, 20)
    lost = rf"are cut at .*: {rows.cut_tokens:,} of {store.num_tokens:,} tokens are in no row\."

    with pytest.warns(UserWarning, match=lost + r' Documents\(…, overflow="split"\)') as caught:
        plan = Plan(rows)
    assert [each.filename for each in caught] == [__file__]
    with pytest.warns(UserWarning, match=lost):
        Loader(rows, 4)
    with pytest.warns(UserWarning, match=lost):  # also of transformed rows, and in each format
        Loader(Transformed(rows, TokenDropout(0.1)), 4, format="hf")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Loader(plan, 4)  # the plan has warned already
        Loader(Documents(store, 20, overflow="split"), 4)
        Loader(Documents(store, 256), 4)


def test_an_array_file_has_its_suffix_as_with_numpy_save(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")

    assert preprocess(tmp_path / "a.txt", tmp_path / "tokens", tokenizer="bytes") == 4
    assert [each.name for each in tmp_path.glob("tokens*")] == ["tokens.npy"]


def test_the_same_share_of_a_split_can_be_written_in_two_ways(tmp_path):
    texts = Texts(["one", "two"] * 20)
    first = build(texts, tmp_path / "s", tokenizer="bytes", split="tail:0.100000")

    assert build(texts, tmp_path / "s", tokenizer="bytes", split="tail:0.1").digest == first.digest
    with pytest.raises(StoreError, match=r"split: 'tail:0.100000' -> 'tail:0.2'"):
        build(texts, tmp_path / "s", tokenizer="bytes", split="tail:0.2")


@pytest.mark.parametrize(
    ("loader", "name", "meant"),
    [(ARCDataLoader, "arc-easy", "ARC-Easy"), (MMLUDataLoader, "Anatomy", "anatomy")],
)
def test_a_question_set_that_is_nearly_right_is_named(loader, name, meant):
    with pytest.raises(SourceError, match=f"Did you mean {meant}\\?"):
        loader(name)
    with pytest.raises(SourceError, match=r"Did you mean test\?"):
        GSM8KDataLoader("Test")


def test_a_build_in_each_process_of_torchrun_says_that_one_should_build(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "s").mkdir()

    with locked(tmp_path / "s"), pytest.raises(StoreBusyError, match="let only rank 0 build"):
        build(Texts(["one"]), tmp_path / "s", tokenizer="bytes")


def test_a_schedule_that_was_added_is_named_by_its_weights(store):
    sources = {"a": Windows(store, 16), "b": Documents(store, 16)}
    state = Loader(Plan(sources, weights={"a": 1, "b": 1}), 4).state_dict()
    later = {1000: {"a": 0.6, "b": 0.4}}
    with pytest.raises(ResumeError) as caught:
        Loader(Plan(sources, weights={"a": 1, "b": 1}, schedule=later), 4).load_state_dict(state)

    assert 'written: weight of "a" from position 1,000 on none -> 0.6, weight of "b"' in str(
        caught.value
    )


def test_a_file_name_that_is_nearly_right_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c", "d", "e", "input.txt"):
        (tmp_path / name).write_text("one")

    with pytest.raises(MissingInputError, match=r"Did you mean input\.txt\?"):
        build("inptu.txt", "s")
    with pytest.raises(MissingInputError, match=r"In .*: a, b, c, d, e\.$"):
        build("other.jsonl", "s")


@pytest.mark.parametrize("make", [lambda rows: Loader({"web": rows}, 8), lambda rows: Plan([rows])])
def test_a_mixture_in_the_wrong_place_is_sent_to_plan(store, make):
    with pytest.raises(PlanError, match=r"mixture of several is Plan\(\{.*\}, weights="):
        make(Windows(store, 16))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda rows: Windows(rows.stream, 64.0), "length=64.0"),
        (lambda rows: Documents(rows.stream, "8"), "max_length='8'"),
        (lambda rows: Loader(rows, 4, seed="x"), "seed='x'"),
        (lambda rows: Loader(rows, {0: 8}), "batch_size={0: 8}"),
        (lambda rows: Loader(rows, 4, steps=1.5), "steps=1.5"),
        (lambda rows: Loader(rows, 4).seek(1.0), "position=1.0"),
    ],
)
def test_an_argument_that_is_not_a_whole_number_is_named(store, make, name):
    with pytest.raises(PlanError, match=rf"^{re.escape(name)} is not a whole number\.$"):
        make(Windows(store, 16))


def test_a_position_before_the_first_is_refused_without_the_size_of_an_endless_run(store):
    with pytest.raises(PlanError, match=r"^Position -3 is not in this run\. Use a .* from 0 on\.$"):
        Loader(Windows(store, 16), 4).seek(-3)


@pytest.mark.parametrize("index", ["0", slice(0, 2), 1.0])
def test_a_store_names_an_index_that_is_no_number(store, index):
    with pytest.raises(TypeError, match="is not the number of a document"):
        store.decode(index)
    assert store.vocab_size == 257


def test_one_row_is_not_rows(tmp_path):
    one = build(Texts(["a" * 40]), tmp_path / "s", tokenizer="bytes")

    assert "1 row of at most 64 tokens" in repr(Documents(one, 64))
    assert "1 row of 32 tokens" in repr(Windows(one, 32))
    assert "; 1 document split" in repr(Packs(one, 16))
