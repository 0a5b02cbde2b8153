"""Recipes and runs: what they read is opened again from the recipe or from run.json."""

import json
from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock.errors import MissingRecipeError, PlanError, TrainError
from penstock.inspect import compare_runs, forecast, inspect_step, open_run, seen, source_counts
from penstock.recipe import read_recipe
from penstock.train.command import run_recipe
from penstock.train.record import recipe_tables

torch.set_num_threads(1)

RECIPE = """
output = "{output}"
[data]
length = 16
tokenizer = "bytes"
documents = "lines"
[data.sources.web]
train = "{web}"
weight = 3
[data.sources.code]
train = "b.txt"
weight = 1
rows = "packs"
[model]
size = "nano"
layers = 1
width = 8
heads = 1
[training]
steps = 6
batch_size = 4
val_every = 6
save_every = 3
"""


def write_texts():
    lines = [f"Line {n}: the fox jumps over {n * 7 % 13} dogs.\n" for n in range(60)]
    Path("a.txt").write_text("".join(lines))
    Path("b.txt").write_text("".join(lines).replace("fox", "cat"))


def run(output="run", web="a.txt", **changes):
    """Train with the recipe of these tests; returns the directory of the run."""
    recipe = Path(f"{Path(output).name}.toml")
    recipe.write_text(RECIPE.format(output=output, web=web))
    named = {name.replace("__", "."): value for name, value in changes.items()}
    run_recipe(read_recipe(recipe, named), device="cpu", log=lambda _: None)
    return Path(output)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with texts, in which the run "run" was made."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_texts()
        run()
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def test_a_run_and_its_recipe_show_the_same_step(here):
    by_run, by_recipe = open_run("run"), open_run("run.toml")
    steps = [inspect_step(each.plan, each.steps, 5) for each in (by_run, by_recipe)]

    assert steps[0] == steps[1]
    assert steps[0].positions == (16, 20)
    assert by_run.metrics[5]["loss"] == by_recipe.metrics[5]["loss"]
    assert by_run.steps.num_recorded == by_recipe.steps.num_recorded == 6
    loader = ps.Loader(by_run.plan, 4)
    shown = [row.tokens[:16] for row in steps[0].rows]
    for row, inputs in zip(shown, loader[4]["inputs"].tolist(), strict=True):
        assert row == inputs[: len(row)]


def test_a_run_can_be_opened_from_another_directory_and_without_its_text(here, monkeypatch):
    expected = inspect_step(open_run("run").plan, open_run("run").steps, 2)
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    (here / "a.txt").rename(here / "a.moved")
    try:
        found = open_run("../run")
    finally:
        (here / "a.moved").rename(here / "a.txt")
    rows = inspect_step(found.plan, found.steps, 2).rows

    assert [row.tokens for row in rows] == [row.tokens for row in expected.rows]


def test_run_json_has_the_settings_after_all_changes(here):
    record = json.loads(Path("run/run.json").read_text())

    tables = recipe_tables(read_recipe("run.toml"))
    assert record["recipe"] == json.loads(json.dumps(tables))
    assert record["global_batch_size"] == 4
    assert record["world_size"] == 1
    assert record["plan"] == open_run("run").plan.digest


def test_run_json_has_no_password_or_signature_of_a_url(tmp_path):
    text = RECIPE.format(output="run", web="https://me:pass-word@host/web?sig=0123abcd")
    (tmp_path / "recipe.toml").write_text(text)

    tables = json.dumps(recipe_tables(read_recipe(tmp_path / "recipe.toml")))
    assert '"train": "https://host/web"' in tables
    assert "pass-word" not in tables
    assert "0123abcd" not in tables


def test_a_forecast_is_what_the_run_has_read(here):
    opened = open_run("run.toml")
    found = forecast(opened)
    trained = dict.fromkeys(opened.plan.names, 0)
    for each in source_counts(opened.plan, opened.steps, 1, 6):
        trained = {name: trained[name] + each[name] for name in trained}

    assert {each.source: each.run_rows for each in found.sources} == trained
    assert [each.rows for each in found.intervals] == source_counts(opened.plan, opened.steps, 1, 6)
    assert [each.delivered for each in found.sources] == [0.75, 0.25]
    assert [each.asked for each in found.sources] == [0.75, 0.25]
    assert found.sources[1].padding > 0
    assert found.sources[1].split_documents == 60
    assert (found.steps, found.rows_per_step, found.rows) == (6, 4, 24)
    assert found.speed.tokens_per_second > 0
    tokens = opened.metrics[6]["tokens"]
    assert abs(sum(each.run_tokens for each in found.sources) - tokens) < 20
    assert [each.rows for each in seen(opened.plan, opened.steps, 6).sources] == [18, 6]


def test_the_forecast_warns_of_what_matters(here):
    many = forecast(open_run("run.toml", {"training.steps": 2_000}), measured=False)
    web = many.sources[0]

    assert f"web is read {web.epochs:,.1f} times; after 4 epochs" in many.warnings[0]
    plan = open_run("run.toml", {"training.steps": 2_000})
    epoch_at = [
        step
        for step in range(1, 2_001)
        if any(row[1] == "web" and row[2] == 1 for row in plan.plan.samples(*plan.steps.span(step)))
    ]
    assert web.repeats_from == epoch_at[0]
    same = RECIPE.format(output="other", web="b.txt")
    Path("same.toml").write_text(same.replace("tokenizer", 'val = "b.txt"\ntokenizer'))
    found = forecast(open_run("same.toml"), measured=False)
    assert "web and code and the validation read the same store" in found.warnings
    auto = open_run("same.toml", {"training.batch_size": "auto"})
    assert any("set training.steps and" in each for each in forecast(auto, measured=False).warnings)


def test_steps_of_a_resumed_run_with_another_batch_size_are_those_it_took(here):
    output = run("ramp")
    run("ramp", training__steps=9, training__batch_size=8)
    found = open_run(str(output))

    assert [found.steps.span(step) for step in (6, 7, 9)] == [(20, 24), (24, 32), (40, 48)]
    assert [found.steps.at(each) for each in (23, 24, 47)] == [6, 7, 9]
    assert open_run(str(output), {"training.steps": 11}).steps.span(11) == (56, 64)
    wider = open_run("ramp.toml", {"training.steps": 11, "training.batch_size": 2})
    assert [wider.steps.span(step) for step in (9, 10)] == [(40, 48), (48, 50)]
    path = output / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "world_size": 3, "global_batch_size": 24}))
    assert open_run(str(output), {"training.steps": 11}).steps.span(10) == (48, 72)


def test_runs_of_the_same_recipe_are_identical_on_every_step(here):
    run("again")
    found = compare_runs("run", "again")

    assert found.difference is None
    assert (found.identical_steps, found.identical_rows) == ((6, 6), 24)
    assert found.settings == ()


def test_a_changed_token_is_found_with_its_step_row_and_document(here):
    lines = Path("a.txt").read_text().splitlines(keepends=True)
    opened = open_run("run")
    wanted = inspect_step(opened.plan, opened.steps, 4).rows
    row = next(each for each in wanted if each.source == "web" and each.documents[0].num_tokens > 4)
    document = row.documents[0]
    # One byte is one token, so no row moves. Column 2 of a window is in no other window.
    changed = 2
    at = document.first_token + changed
    line = lines[document.document]
    lines[document.document] = f"{line[:at]}#{line[at + 1 :]}"
    Path("c.txt").write_text("".join(lines))
    run("changed", web="c.txt")

    difference = compare_runs("run", "changed").difference
    assert difference.kind == "tokens"
    assert difference.steps == ((4, 4), (4, 4))
    (found,) = difference.rows
    assert difference.num_rows == 1
    assert found.sides[0].document.document == document.document
    assert [side.document.file for side in found.sides] == ["a.txt", "c.txt"]
    assert found.sides[1].token == ord("#") != found.sides[0].token
    assert "#" in found.sides[1].text
    assert (found.row, found.column) == (row.number, changed)
    assert difference.note is None
    places = f"a.txt:{document.record}", f"c.txt:{document.record}"
    (first,) = difference.documents
    assert (first.source, first.document, first.places) == ("web", document.document, places)


def test_a_longer_document_moves_all_later_rows_and_is_named_itself(here):
    lines = Path("a.txt").read_text().splitlines(keepends=True)
    lines[7] = f"Longer {lines[7]}"
    Path("d.txt").write_text("".join(lines))
    run("moved", web="d.txt")

    difference = compare_runs("run", "moved").difference
    assert [each.document for each in difference.documents] == [7]


def test_other_orders_lengths_and_batch_sizes_are_compared(here):
    run("seeded", data__seed=9)
    other = compare_runs("run", "seeded")
    assert (other.difference.kind, other.identical_rows) == ("rows", 0)
    assert [(each.name, each.values) for each in other.settings] == [("data.seed", (0, 9))]
    assert other.difference.num_rows > 0

    run("wide", training__batch_size=8, training__steps=2)
    wide = compare_runs("run", "wide")
    assert wide.difference is None
    assert (wide.identical_steps, wide.identical_rows) == ((4, 2), 16)

    run("odd", training__batch_size=32, training__steps=1)
    with pytest.raises(TrainError, match=r"no step of one ends where .* run to 4 and odd to 32"):
        compare_runs("run", "odd")


def test_logs_alone_can_be_compared_without_the_names_of_rows(here):
    text = Path("run/fingerprints.jsonl").read_text()
    Path("copy.jsonl").write_text(text)
    assert compare_runs("run", "copy.jsonl").difference is None
    lines = text.splitlines()
    entry = json.loads(lines[2])
    lines[2] = json.dumps({**entry, "rows": f"{int(entry['rows'], 16) ^ 1:016x}"})
    Path("copy.jsonl").write_text("\n".join(lines))
    difference = compare_runs("run", "copy.jsonl").difference

    assert difference.steps == ((3, 3), (3, 3))
    assert "The rows that differ cannot be named" in difference.note


def test_a_store_that_changed_after_the_run_is_noticed(here):
    output = run("rebuilt")
    Path("a.txt").rename("a.kept")
    try:
        Path("a.txt").write_text("some other text\n" * 60)
        ps.build("a.txt", output / "stores" / "web", tokenizer="bytes", documents="lines",
                 overwrite=True)  # fmt: skip
        with pytest.raises(TrainError, match="The data of rebuilt has changed since the run"):
            open_run("rebuilt")
    finally:
        Path("a.kept").rename("a.txt")


def test_a_run_that_names_a_text_reads_and_writes_nothing(here):
    record = json.loads(Path("run/run.json").read_text())
    record["recipe"]["data"]["sources"]["web"]["train"] = "secret.txt"
    Path("secret.txt").write_text("a secret\n" * 60)
    Path("hostile").mkdir()
    Path("hostile/run.json").write_text(json.dumps(record))

    with pytest.raises(TrainError, match=r"secret.txt, which hostile.run.json names, is not a st"):
        open_run("hostile")
    assert [each.name for each in Path("hostile").iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("nope.toml", MissingRecipeError, "nope.toml does not exist"),
        ("nope", TrainError, "nope does not exist"),
        (".", TrainError, r"it has no run.json\. Name one of its runs: "),
        ("empty", TrainError, r"it has no run.json\. Name a recipe"),
        ("old", TrainError, "Earlier versions wrote none"),
        ("bad", TrainError, r"run.json cannot be used: .*Name the recipe of the run"),
        ("python", TrainError, "was started from Python, without a recipe"),
    ],
)
def test_what_is_no_run_is_refused_in_words(here, source, error, message):
    for name, files in {
        "empty": {},
        "old": {"metrics.jsonl": ""},
        "bad": {"run.json": '{"format": 9}'},
        "python": {
            "run.json": '{"format": 1, "recipe": null, "directory": "", "plan": null, '
            '"global_batch_size": 4, "world_size": 1}'
        },
    }.items():
        Path(name).mkdir(exist_ok=True)
        for file, text in files.items():
            Path(name, file).write_text(text)

    with pytest.raises(error, match=message):
        open_run(source)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("nope", "nope does not exist"),
        ("unlogged", r"unlogged has no fingerprints.jsonl, so it is not known what the run read"),
        ("unbegun", "has no steps: the run was stopped before its first step ended"),
    ],
)
def test_runs_without_a_log_are_refused_in_words(here, run, message):
    Path("unlogged").mkdir(exist_ok=True)
    Path("unbegun").mkdir(exist_ok=True)
    Path("unbegun/fingerprints.jsonl").write_text("")

    with pytest.raises(TrainError, match=message):
        compare_runs("run", run)


def test_a_step_whose_rows_the_device_decides_is_refused(here):
    found = open_run("run.toml", {"output": "unborn", "training.batch_size": "auto"})

    with pytest.raises(PlanError, match=r"--set training.global_batch_size=256, or name the"):
        inspect_step(found.plan, found.steps, 1)
