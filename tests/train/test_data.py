"""What a recipe's data may be, and what is said of data that cannot be trained on."""

import json

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PlanError, RecipeError, SourceError, StoreError
from penstock.recipe import parse_recipe
from penstock.train import read_metrics, train
from penstock.train.command import choose_recipe, open_job, run_recipe
from penstock.train.data import open_data


def ignore(_):
    """A log that nobody reads."""


SMALL = {"model.layers": 1, "model.width": 16, "model.heads": 2, "training.steps": 3}
SMALL["training.val_rows"] = 16  # GPT-2's vocabulary makes every row expensive


def job(source, tmp_path, logged=None, **changes):
    """The job of a source that is no recipe, small, with settings by dotted names."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    settings = {**SMALL, "output": str(tmp_path / "run"), "data.length": 16, **changes}
    logged = [] if logged is None else logged
    recipe = choose_recipe(str(source), settings, "cpu", logged.append)
    return open_job(recipe, logged.append)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("".join(f"Line {number}: the fox jumps.\n\n" for number in range(300)))
    return path


def test_a_text_of_one_line_is_validated_on_its_last_tenth(tmp_path):
    (tmp_path / "one.txt").write_text("word " * 200)
    logged = []
    made = job(tmp_path / "one.txt", tmp_path, logged)

    assert logged[-1] == "a document is a whole file"
    held_out = made.val.stream.members[0]
    assert held_out.decode(0) == "word " * 20
    assert train(made, device="cpu").progress.step == 3


def test_files_that_no_split_divides_are_refused_with_what_to_do(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "in" / name).write_text("word " * 200)
    with pytest.raises(StoreError, match=r"The split leaves .*val empty: .* 2 documents"):
        job(tmp_path / "in", tmp_path)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, PlanError),  # one document, and no row of 16 tokens
        ({"data.documents": "lines"}, StoreError),  # no line begins in the last tenth
    ],
)
def test_two_lines_of_text_say_which_split_was_guessed_and_how_to_validate(
    tmp_path, settings, error
):
    (tmp_path / "two.txt").write_text("one line of text\nand two\n")
    with pytest.raises(error) as caught:
        job(tmp_path / "two.txt", tmp_path, **settings)

    notes = " ".join(caught.value.__notes__)
    assert 'data.split = "tail:0.1"' in notes
    assert "guessed" in notes
    assert "--val_file" in notes


def test_less_validation_text_than_a_row_is_one_row(tmp_path, text):
    (tmp_path / "val.txt").write_text("Three words here.")
    made = job(text, tmp_path, data__val=str(tmp_path / "val.txt"), data__length=64)

    assert len(made.val) == 1
    assert train(made, device="cpu").progress.val_loss > 10


def test_too_little_text_says_where_and_what_to_set(tmp_path):
    (tmp_path / "short.txt").write_text("Five tokens.")
    with pytest.raises(PlanError, match="do not make one row") as caught:
        job(tmp_path / "short.txt", tmp_path)

    assert "stores/train" in caught.value.__notes__[0]
    assert "--max_length" in caught.value.__notes__[0]


def test_a_split_directory_given_for_validation_means_its_validation_side(tmp_path, text):
    ps.build(text, tmp_path / "both", split="tail:0.1", tokenizer="gpt2", documents="lines")
    made = job(tmp_path / "both", tmp_path, data__val=str(tmp_path / "both"))

    assert made.val.stream.members[0].path == tmp_path / "both" / "val"


def test_changed_text_needs_another_output(tmp_path, text):
    job(text, tmp_path)
    text.write_text("Other words.\n\n" * 400)

    with pytest.raises(StoreError, match="built differently") as caught:
        job(text, tmp_path)
    assert "use another one (-o)" in caught.value.__notes__[0]


def test_validation_by_another_tokenizer_is_refused(tmp_path, text):
    for name in ("gpt2", "bytes"):
        ps.build(text, tmp_path / name, tokenizer=name, documents="lines")
    made = job(tmp_path / "gpt2", tmp_path, data__val=str(tmp_path / "bytes"))

    with pytest.raises(PlanError, match="validation data has another tokenizer"):
        train(made, device="cpu")


def test_a_vocabulary_that_is_too_small_for_the_data_is_refused(tmp_path, text):
    ps.build(text, tmp_path / "gpt2", documents="lines")
    made = job(tmp_path / "gpt2", tmp_path, model__vocab_size=100)
    with pytest.raises(
        PlanError,
        match=r"gpt2 has token ids up to 50,256, but the vocabulary of the model has 100\.",
    ):
        train(made, device="cpu")

    np.save(tmp_path / "wide.npy", np.arange(60_000, 61_000, dtype=np.uint32))
    with pytest.raises(
        PlanError, match=r"wide\.npy has token ids up to 60,999, .* model\.vocab_size to 61000"
    ):
        train(job(tmp_path / "wide.npy", tmp_path), device="cpu")
    wider = job(tmp_path / "wide.npy", tmp_path, model__vocab_size=61_000)
    assert train(wider, device="cpu").progress.step == 3


def test_a_bare_file_of_nanogpt_is_trained_on(tmp_path):
    np.arange(1_000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    logged = []
    guessed = []
    settings = {**SMALL, "output": str(tmp_path / "run")}
    recipe = choose_recipe(str(tmp_path / "train.bin"), settings, "cpu", guessed.append)
    result = run_recipe(recipe, device="cpu", log=logged.append)

    assert guessed[0] == "guessed data.length = 128"
    assert logged[0].endswith("train.bin is read as uint16, as nanoGPT writes it")
    assert logged[1] == "there is no validation data; set it with data.val or --val_file"
    assert result.progress.step == 3
    assert any("does not record its tokenizer" in str(each) for each in logged)


def test_a_file_of_llmc_is_trained_on_without_its_header(tmp_path):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 1_000
    ids = np.arange(1_000, dtype="<u2")
    (tmp_path / "train.bin").write_bytes(header.tobytes() + ids.tobytes())
    logged = []
    settings = {**SMALL, "output": str(tmp_path / "run")}
    recipe = choose_recipe(str(tmp_path / "train.bin"), settings, "cpu", ignore)
    result = run_recipe(recipe, device="cpu", log=logged.append)

    assert result.progress.step == 3
    assert not any("uint16" in str(each) for each in logged)
    plan, _ = open_data(recipe.data, recipe.output, log=ignore)
    (rows,) = plan.sources.values()
    assert rows.stream.num_tokens == 1_000
    assert rows.stream.tokens(0, 3).tolist() == [0, 1, 2]


def test_a_recipe_opens_token_files_with_their_options(tmp_path):
    """The options are those of `open_tokens`, for `train`, `val` and each source."""
    parquet = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    (np.arange(1000) % 900).astype("<u4").tofile(tmp_path / "ids.npy")
    known = {"data__tokens__format": "olmo", "data__tokens__vocab_size": 1000}
    with pytest.raises(StoreError, match='Pass dtype="uint32"'):
        job(tmp_path / "ids.npy", tmp_path, **known)
    made = job(tmp_path / "ids.npy", tmp_path, **known, data__tokens__dtype="uint32")
    (rows,) = made.plan.sources.values()
    assert rows.stream.tokens(0, 3).tolist() == [0, 1, 2]
    assert made.model.vocab_size == 1000

    parquet.write_table(pa.table({"words": [[*range(40)]] * 9}), tmp_path / "ids.parquet")
    path = str(tmp_path / "ids.parquet")
    made = job(path, tmp_path, data__tokens__column="words", data__val=path)
    assert made.val.stream.tokens(0, 3).tolist() == [0, 1, 2]
    source = {"train": path, "tokens": {"column": "words", "vocab_size": 40}}
    tables = {"data": {"sources": {"a": source}, "length": 16}, "training": {"steps": 1}}
    plan, _ = open_data(parse_recipe(tables, "x.toml").data, tmp_path, log=ignore)
    assert plan.sources["a"].stream.num_tokens == 360


def test_options_for_token_files_are_refused_for_stores_and_splits(tmp_path, text):
    ps.build(text, tmp_path / "store", tokenizer="bytes")
    with pytest.raises(PlanError, match="Remove the table tokens of train"):
        job(tmp_path / "store", tmp_path, data__tokens__vocab_size=300)
    with pytest.raises(RecipeError, match=r"\[data.sources.NAME.tokens\]"):
        job(text, tmp_path, data__tokens__vocab_size=300, data__split="tail:0.1")
    with pytest.raises(RecipeError, match=r"data.tokens.format is 'x', but must be \"llmc\""):
        job(text, tmp_path, data__tokens__format="x")


def test_the_prefix_of_megatron_is_trained_on_and_wider_ids_are_not_read_as_uint16(tmp_path):
    store = ps.build(ps.Texts(["word " * 300]), tmp_path / "store", tokenizer="bytes")
    ps.export_tokens(store, tmp_path / "out", to="megatron")
    made = job(tmp_path / "out" / "train", tmp_path)
    (rows,) = made.plan.sources.values()
    assert rows.stream.num_tokens == store.num_tokens

    np.arange(1000, dtype="<u4").tofile(tmp_path / "wide.bin")
    with pytest.raises(StoreError, match='Pass dtype="uint32"'):
        job(tmp_path / "wide.bin", tmp_path)


def test_a_dataset_of_ids_is_trained_on_in_place_and_one_with_text_is_built(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    ids = [list(range(each, each + 40)) for each in range(20)]
    parquet.write_table(pa.table({"input_ids": ids}), tmp_path / "ids.parquet")
    made = job(tmp_path / "ids.parquet", tmp_path, data__val=str(tmp_path / "ids.parquet"))

    (rows,) = made.plan.sources.values()
    assert rows.stream.tokens(0, 41).tolist() == [*range(40), 1]
    assert train(made, device="cpu").progress.step == 3
    both = pa.table({"input_ids": ids, "text": ["some words of a text"] * 20})
    parquet.write_table(both, tmp_path / "both.parquet")
    made = job(tmp_path / "both.parquet", tmp_path, output=str(tmp_path / "other"))
    (rows,) = made.plan.sources.values()
    assert isinstance(rows.stream.members[0], ps.TokenStore)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A store most of which is not trained on: long questions, short answers."""
    messages = [
        {"role": "user", "content": "Say yes, please, as you always do when you are asked. " * 4},
        {"role": "assistant", "content": "Yes."},
    ]
    texts = ps.Texts([json.dumps({"messages": messages})] * 40)
    return ps.build(
        texts,
        tmp_path_factory.mktemp("chats") / "store",
        chat=ps.Chat("chatml", "gpt2", add_tokens="auto"),
        max_bad=20,
    )


def test_windows_of_a_chat_store_are_validated_on_its_answers(chats, tmp_path):
    made = job(chats.path, tmp_path, data__val=str(chats.path), data__length=32)
    result = train(made, device="cpu")

    assert result.progress.val_loss > 0
    assert result.progress.tokens < 3 * 4 * 32 / 2


def test_a_step_without_any_target_is_no_error(chats, tmp_path):
    made = job(chats.path, tmp_path, data__length=8, training__batch_size=1, training__steps=12)
    train(made, device="cpu")
    losses = [each["loss"] for each in read_metrics(tmp_path / "run" / "metrics.jsonl")]

    assert 0.0 in losses
    assert all(loss is not None for loss in losses)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": "x", "length": 0}, "length must be at least 1 token; got 0"),
        ({"sources": {"a": {"train": "x"}}, "split": "tail:0.1"}, "With several sources, set val"),
        ({"sources": {"../a": {"train": "x"}}}, "A source cannot be named '../a'"),
        ({"sources": {"val": {"train": "x"}}, "val": "y"}, "A source cannot be named 'val'"),
        (
            {"train": "x", "stream": True, "split": "tail:0.1"},
            "cannot be combined with sources or split",
        ),
        ({"train": "x", "stream": True, "shuffle": "full"}, "shuffle='full' needs all rows"),
    ],
)
def test_data_that_makes_no_sense_is_refused_before_anything_is_built(data, message):
    with pytest.raises(RecipeError, match=message):
        parse_recipe({"data": data, "training": {"steps": 1}}, "here")


def test_training_on_text_that_is_still_tokenized_is_training_on_its_parts_in_order(tmp_path, text):
    """A resumed run reads the same rows, although the store is finished by then."""

    def run(name, steps, **changes):
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        train(job(text, place, training__steps=steps, training__save_every=2, **changes))
        metrics = read_metrics(place / "run" / "metrics.jsonl")
        return [(each["loss"], each["fingerprint"]) for each in metrics if each["kind"] == "step"]

    built = tmp_path / "built"
    ps.build(text, built)
    straight = run("straight", 8, data__train=str(built), data__shuffle="part")
    run("streamed", 4, data__stream=True, optimization__floor=1.0)
    fingerprints = [each for _, each in run("streamed", 8, data__stream=True)]

    assert fingerprints == [each for _, each in straight]
    assert run("again", 8, data__stream=True) == straight


def test_a_store_is_not_streamed(tmp_path, text):
    ps.build(text, tmp_path / "store", documents="lines")
    with pytest.raises(PlanError, match="is already tokenized"):
        job(tmp_path / "store", tmp_path, data__stream=True)


@pytest.mark.parametrize("name", ["in.txt", "folder", "folder/*.txt"])
def test_a_text_is_read_by_its_separator_or_whole_wherever_it_is(tmp_path, name):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "in.txt", tmp_path / "folder" / "a.txt"):
        path.write_bytes(b"".join(b"Line %d\r\nof two.\r\n\r\n" % n for n in range(200)))
    guessed = []
    recipe = choose_recipe(str(tmp_path / name), {}, "cpu", guessed.append)

    assert recipe.data.documents == "auto"
    assert 'guessed data.documents = "auto"' in guessed
    assert recipe.output.name == ("in" if name == "in.txt" else "folder")


def test_a_folder_is_named_also_from_within(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text\n")
    monkeypatch.chdir(tmp_path)
    recipe = choose_recipe(".", {}, "cpu", ignore)

    assert recipe.output.name == tmp_path.name
    with pytest.raises(
        PlanError, match=r"is inside \., which is the text to read.*Use an output elsewhere"
    ):
        open_job(recipe, lambda _: None)


def _records(path, field):
    """A file of JSON Lines; returns its path."""
    path.write_text(
        "".join(json.dumps({field: f"Line {n} of the text."}) + "\n" for n in range(99))
    )
    return str(path)


def test_a_setting_names_the_field_of_the_text(tmp_path):
    path = _records(tmp_path / "in.jsonl", "question")
    made = job(path, tmp_path, data__field="question", data__val=path)

    assert (
        made.plan.sources[made.plan.names[0]].stream.members[0].decode(0) == "Line 0 of the text."
    )
    with pytest.raises(SourceError, match='no field "text"; it has "question"') as caught:
        job(path, tmp_path, output=str(tmp_path / "other"))
    assert "data.field names the field" in caught.value.__notes__[0]


def test_each_source_may_name_its_own_field(tmp_path):
    sources = {
        "web": {"train": _records(tmp_path / "web.jsonl", "body")},
        "math": {"train": _records(tmp_path / "math.jsonl", "question"), "field": "question"},
    }
    data = {"length": 16, "tokenizer": "bytes", "field": "body", "sources": sources}
    tables = {"output": str(tmp_path / "run"), "data": data, "training": {"steps": 1}}

    plan = open_job(parse_recipe(tables, "mix.toml"), ignore).plan
    assert plan.names == ("web", "math")


def test_only_the_source_may_be_a_recipe():
    with pytest.raises(RecipeError, match=r"'a\.toml' cannot be the data to train on"):
        choose_recipe(None, {"data.train": "a.toml"}, None, ignore)
    with pytest.raises(RecipeError, match="5 cannot be the data to train on"):
        choose_recipe(None, {"data.train": 5}, None, ignore)
    for nothing in (("", {}), (None, {"data.train": ""})):
        with pytest.raises(RecipeError, match="Give a recipe"):
            choose_recipe(*nothing, None, ignore)
    with pytest.raises(SourceError, match=r"s3://b/\*\.txt is not a local file, and not a store"):
        choose_recipe("s3://b/*.txt", {}, None, ignore)
    with pytest.raises(SourceError, match=r"d/\*\.bin does not exist"):
        choose_recipe("d/*.bin", {}, None, ignore)


def test_ids_below_0_are_refused(tmp_path):
    np.save(tmp_path / "ids.npy", np.array([3, -1, 5] * 50, np.int32))
    with pytest.raises(StoreError, match=r"ids\.npy has the token id -1, and no id is negative"):
        train(job(tmp_path / "ids.npy", tmp_path), device="cpu")


def test_a_model_may_know_more_ids_than_its_tokenizer(tmp_path, text):
    settings = {**SMALL, "output": str(tmp_path / "run"), "data.length": 16}
    recipe = choose_recipe(str(text), {**settings, "model.vocab_size": 100_000}, "cpu", ignore)

    assert run_recipe(recipe, device="cpu", log=lambda _: None).finished
    assert (tmp_path / "run" / "sample.txt").exists()


def test_unreadable_text_advises_penstock_build(tmp_path):
    (tmp_path / "in.jsonl").write_text("no JSON\n" * 40)
    with pytest.raises(SourceError) as error:
        job(tmp_path / "in.jsonl", tmp_path)
    assert "is read, run penstock build on it first" in error.value.__notes__[-1]


def test_the_sample_uses_the_tokenizer_that_the_recipe_gives_for_token_files(tmp_path):
    (tmp_path / "mine.ds").write_bytes((np.arange(1_000, dtype="<u2") % 250).tobytes())
    np.array([400, 1_000], "<u8").tofile(tmp_path / "mine.ds.index")
    settings = {**SMALL, "output": str(tmp_path / "run"), "data.length": 16}
    settings["data.tokens.tokenizer"] = "bytes"
    logged = []
    recipe = choose_recipe(str(tmp_path / "mine.ds"), settings, "cpu", ignore)
    run_recipe(recipe, device="cpu", log=logged.append)

    assert not [each for each in map(str, logged) if "no sample of text" in each]
    assert (tmp_path / "run" / "sample.txt").exists()
