"""Recipes: TOML to objects, and every mistake named."""

import re
import tomllib
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import MissingInputError, RecipeError, SourceError
from penstock.recipe import parse_recipe, read_recipe
from penstock.train import SIZES
from penstock.train.command import choose_recipe, open_job, recipe_changes


def ignore(_):
    """A log that nobody reads."""


ROOT = Path(__file__).parents[2]
LEAST = {"data": {"train": "store"}, "training": {"steps": 5}}


RECIPES = sorted((ROOT / "src/penstock/recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_shipped_recipe_is_understood(path):
    recipe = read_recipe(path)

    assert recipe.output.parts[0] == "runs"
    assert recipe.model_config(50_257).length == recipe.data.length


def test_the_recipe_for_an_h100_has_its_goal():
    recipe = read_recipe(RECIPES[0].parent / "openwebtext-h100.toml")

    assert recipe.training.target_val_loss == 3.0781
    assert recipe.training.max_minutes == 90


def test_settings_become_the_fields_of_the_objects():
    text = """
    [data]
    length = 256
    [data.sources.web]
    train = "a"
    weight = 0.7
    [data.sources.code]
    train = "b"
    weight = 1
    rows = "packs"
    [model]
    size = "350M"
    qk_norm = true
    [optimization]
    betas = [0.9, 0.99]
    learning_rate = 1
    [training]
    steps = 7
    batch_size = "auto"
    """
    recipe = parse_recipe(tomllib.loads(text), "here")

    assert recipe.data.sources["code"].weight == 1.0
    assert recipe.optimization.betas == (0.9, 0.99)
    assert recipe.optimization.learning_rate == 1.0
    assert recipe.training.batch_size == "auto"
    shape = recipe.model_config(1_000)
    assert (shape.layers, shape.qk_norm, shape.length, shape.vocab_size) == (24, True, 256, 1_000)
    assert shape.width == SIZES["350M"].width


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"trainin": {}},
            r"here sets trainin, but there is no such setting\. Did you mean training\?",
        ),
        ({"training": {"step": 5}}, r"sets training\.step, .* Did you mean steps\?"),
        ({"model": {"sise": "nano"}}, r"sets model\.sise, .* Did you mean size\?"),
        (
            {"model": {"xyzzy": 1}},
            r"sets model\.xyzzy, but there is no such setting\. Use one of layers",
        ),
        ({"model": {"size": "774M"}}, r'model\.size is \'774M\', but must be "nano" or "124M"'),
        ({"training": {"steps": "5"}}, r"training\.steps is '5', but must be a whole number"),
        ({"training": {"steps": True}}, r"training\.steps is True"),
        ({"training": {"steps": 1, "compile": 1}}, r"must be true or false"),
        ({"training": {"steps": 1, "batch_size": "all"}}, r'whole number or "auto"'),
        ({"optimization": {"betas": [0.9]}}, r"betas is \[0\.9\], but must be a list of 2 numbers"),
        ({"model": {"length": 64}}, r"sets model\.length, .* It belongs in \[data\]\."),
        ({"training": {"steps": 1, "learning_rate": 1}}, r"It belongs in \[optimization\]\."),
        ({"model": {"seed": 1}}, r"It belongs in \[data\] or \[training\]\."),
        ({"output": 3}, r"here: output is 3, but must be a string"),
        ({"data": {"sources": {"a": {}}}}, r"\[data\.sources\.a\] is not complete"),
        ({"data": 3}, r"data is 3, but must be a table"),
    ],
)
def test_a_mistake_is_named_with_the_nearest_name(change, message):
    with pytest.raises(RecipeError, match=message):
        parse_recipe({**LEAST, **change}, "here")


def test_a_refused_value_is_named_with_its_table():
    with pytest.raises(RecipeError, match=r"here, in \[training\]: A run needs an end"):
        parse_recipe({**LEAST, "training": {}}, "here")
    with pytest.raises(RecipeError, match=r"here, in \[model\]: .* cannot be split into 5 heads"):
        parse_recipe({**LEAST, "model": {"heads": 5}}, "here")
    with pytest.raises(RecipeError, match=r"has no table \[training\]"):
        parse_recipe({"data": {"train": "x"}}, "here")


@pytest.mark.parametrize("data", [{}, {"train": "x", "sources": {"a": {"train": "y"}}}])
def test_a_recipe_needs_exactly_one_of_train_and_sources(data):
    with pytest.raises(RecipeError, match=r"data\.train or data\.sources: exactly one of them"):
        parse_recipe({**LEAST, "data": data}, "here")


def test_a_file_that_is_no_toml_is_refused(tmp_path):
    (tmp_path / "bad.toml").write_text("[data\n")

    with pytest.raises(RecipeError, match=r"bad\.toml is not TOML"):
        read_recipe(tmp_path / "bad.toml")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"no\.toml does not exist \(working directory"):
        read_recipe(tmp_path / "no.toml")


def test_numbers_that_are_none_are_refused():
    for table, text in (
        ("training", "max_minutes = inf"),
        ("training", "max_minutes = nan"),
        ("optimization", "learning_rate = nan"),
        ("optimization", "weight_decay = inf"),
        ("optimization", "betas = [0.9, 1.0]"),
    ):
        with pytest.raises(RecipeError, match=text.split()[0]):
            parse_recipe({**LEAST, table: tomllib.loads(text)}, "here")


def test_a_file_to_train_on_takes_the_place_of_a_mixture(tmp_path):
    (tmp_path / "a.toml").write_text(
        '[data.sources.web]\ntrain = "x"\n[training]\nsteps = 5\n', encoding="utf-8"
    )
    recipe = choose_recipe(str(tmp_path / "a.toml"), {"data.train": "t"}, None, ignore)

    assert recipe.data.train == "t"
    assert not recipe.data.sources


def test_flags_change_any_recipe(tmp_path):
    (tmp_path / "a.toml").write_text('[data]\ntrain = "x"\n[training]\nsteps = 5\n')
    flags = {"train_file": "t", "val_file": "v", "batch_size": 3, "max_length": 64}
    flags |= {"num_workers": 8, "prefetch_factor": 4, "max_minutes": 2.0, "output": "o"}
    changes = recipe_changes(["training.compile=true", "data.documents=file"], **flags)
    guessed = []
    recipe = choose_recipe(str(tmp_path / "a.toml"), changes, None, guessed.append)

    assert guessed == ['guessed model.size = "124M"']
    assert (recipe.data.train, recipe.data.val, recipe.data.length) == ("t", "v", 64)
    assert recipe.data.documents == "file"
    assert (recipe.training.batch_size, recipe.training.prefetch) == (3, 4)
    assert recipe.training.compile
    assert recipe.training.max_minutes == 2.0
    assert recipe.output == Path("o")


def test_a_size_that_the_recipe_or_a_flag_gives_is_not_guessed(tmp_path):
    (tmp_path / "a.toml").write_text('[data]\ntrain = "x"\n[training]\nsteps = 5\n')
    for name, value in (("model.size", "nano"), ("model.layers", 2)):
        guessed = []
        choose_recipe(str(tmp_path / "a.toml"), {name: value}, None, guessed.append)
        assert not guessed


def test_a_training_file_that_a_flag_names_is_read_line_by_line():
    changes = recipe_changes([], train_file="a.txt")
    assert changes == {"data.train": "a.txt", "data.documents": "lines"}
    changes = recipe_changes(["data.documents=auto"], train_file="a.txt")
    assert changes["data.documents"] == "auto"


@pytest.mark.parametrize(
    ("flags", "minutes"),
    [({"steps": 5}, None), ({"steps": 5, "max_minutes": 2}, 2), ({"batch_size": 1}, 10)],
)
def test_only_a_guessed_time_limit_gives_way_to_steps(tmp_path, flags, minutes):
    (tmp_path / "a.txt").write_text("some words")
    recipe = choose_recipe(str(tmp_path / "a.txt"), recipe_changes([], **flags), "cpu", ignore)

    assert recipe.training.steps == flags.get("steps")
    assert recipe.training.max_minutes == minutes


@pytest.mark.parametrize(
    ("steps", "device", "expected"),
    [
        (50, "cpu", (10, 25)),
        (50, "cuda", (10, 25)),
        (1, "cpu", (1, 1)),
        (4_000, "cpu", (100, 100)),
        (4_000, "cuda", (100, 500)),
    ],
)
def test_a_short_run_is_validated_and_saved_a_few_times(tmp_path, steps, device, expected):
    (tmp_path / "a.txt").write_text("some words")
    logged = []
    changes = recipe_changes([], steps=steps)
    recipe = choose_recipe(str(tmp_path / "a.txt"), changes, device, logged.append)
    given = recipe_changes(["training.val_every=7", "training.save_every=9"], steps=steps)
    chosen = choose_recipe(str(tmp_path / "a.txt"), given, device, ignore)

    assert (recipe.training.val_every, recipe.training.save_every) == expected
    assert f"guessed training.val_every = {expected[0]}" in logged
    assert (chosen.training.val_every, chosen.training.save_every) == (7, 9)


def test_a_recipe_that_comes_with_penstock_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logged = []
    recipe = choose_recipe("tinyshakespeare-cpu", {"training.steps": 3}, None, logged.append)

    assert (recipe.training.steps, recipe.training.target_val_loss) == (3, 5.5)
    assert "tinyshakespeare-cpu.toml; copy it to change it" in logged[0]
    with pytest.raises(RecipeError, match=r"with penstock: penstock train tinyshakespeare-cpu\."):
        read_recipe("recipes/tinyshakespeare-cpu.toml")
    # A text of that name is what the user means.
    Path("web-10min").write_text("some words")
    assert choose_recipe("web-10min", {}, "cpu", ignore).data.train == "web-10min"


def test_no_workers_make_nothing_ahead():
    assert recipe_changes([], num_workers=0) == {"training.prefetch": 0}
    assert recipe_changes([], num_workers=8) == {}
    with pytest.raises(RecipeError, match="--set steps is not NAME=VALUE"):
        recipe_changes(["steps"])


def test_text_is_built_once_and_split(tmp_path):
    (tmp_path / "in.txt").write_text("".join(f"Line {number}.\n\n" for number in range(400)))
    guessed = []
    recipe = choose_recipe(
        str(tmp_path / "in.txt"), {"output": str(tmp_path / "run")}, "cpu", guessed.append
    )
    logged = []
    job = open_job(recipe, logged.append)

    assert 'guessed data.split = "tail:0.1"' in guessed
    assert [each.partition(" from ")[0] for each in logged] == [
        f"building {tmp_path / 'run' / 'stores' / 'train'}",
        "a document is a whole file",
    ]
    sides = [ps.TokenStore(tmp_path / "run/stores/train" / side) for side in ("train", "val")]
    whole = (tmp_path / "in.txt").read_text()
    assert [len(side) for side in sides] == [1, 1]
    assert [side.decode(0) for side in sides] == [
        whole[: int(len(whole) * 0.9)],
        whole[int(len(whole) * 0.9) :],
    ]
    assert job.model.vocab_size == 50_257
    logged.clear()
    assert open_job(recipe, logged.append).plan.digest == job.plan.digest
    assert not logged


def test_a_validation_file_takes_the_place_of_the_split(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("".join(f"{name} {number}.\n" for number in range(200)))
    changes = {"data.train": str(tmp_path / "a.txt"), "data.val": str(tmp_path / "b.txt")}
    changes |= {"output": str(tmp_path / "run"), "data.length": 32, "data.documents": "lines"}
    guessed = []
    recipe = choose_recipe(None, changes, "cpu", guessed.append)
    job = open_job(recipe, lambda _: None)

    assert not [line for line in guessed if line.startswith("guessed data.split")]
    assert len(ps.TokenStore(tmp_path / "run/stores/train")) == 200
    assert job.val.stream.members[0].path == tmp_path / "run/stores/val"


def test_mixtures_and_stores_are_opened(store, tmp_path):
    sources = {"a": {"train": str(store.path), "weight": 3}}
    sources["b"] = {"train": str(store.path), "weight": 1, "rows": "packs"}
    tables = {**LEAST, "data": {"sources": sources, "val": str(store.path), "length": 32}}
    job = open_job(parse_recipe(tables, "here"), lambda _: None)

    assert job.plan.counts(400) == {"a": 300, "b": 100}
    assert job.model.vocab_size == 257
    sources["b"].pop("weight")
    with pytest.raises(RecipeError, match="a weight for every source or for none"):
        parse_recipe(tables, "here")


def test_a_source_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"does not exist \(working directory"):
        choose_recipe(str(tmp_path / "nothing.txt"), {}, None, ignore)
    with pytest.raises(RecipeError, match="Give a recipe"):
        choose_recipe(None, {}, None, ignore)


def test_a_text_that_is_not_to_be_streamed_keeps_its_validation(tmp_path):
    (tmp_path / "in.txt").write_text("a line of text\n" * 500)
    text = str(tmp_path / "in.txt")

    whole = choose_recipe(text, {"data.stream": False}, "cpu", ignore)
    streamed = choose_recipe(text, {"data.stream": True}, "cpu", ignore)

    assert whole.data.split is not None
    assert streamed.data.split is None


def test_a_mistyped_recipe_or_file_is_named(tmp_path):
    (tmp_path / "input.txt").write_text("text")
    for wrong, right in (
        ("tinyshakespear-cpu", "Did you mean the recipe tinyshakespeare-cpu?"),
        (str(tmp_path / "inptu.txt"), f"Did you mean {tmp_path / 'input.txt'}?"),
    ):
        with pytest.raises(MissingInputError, match=re.escape(right)):
            choose_recipe(wrong, {}, None, print)
