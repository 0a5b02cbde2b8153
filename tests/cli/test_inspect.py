"""`penstock inspect`, `when`, `seen` and `diff`: what a newcomer sees, types and gets wrong."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock.recipe import read_recipe
from penstock.train.command import run_recipe

torch.set_num_threads(1)

RECIPE = (
    (Path(__file__).parent / "mix.toml").read_text()
    + """
[training]
steps = 5
batch_size = 4
val_every = 5
"""
)
NAUGHTY = "\x1b[31mred\x1b[0m \u202ereversed\u202c [bold]not markup[/bold] \x9b5m\x07"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory with two texts, a recipe, and a run of it."""
    folder = tmp_path_factory.mktemp("inspect")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        lines = [f"Line {n}: {NAUGHTY} and {n * 7 % 13} dogs." for n in range(30)]
        Path("web.txt").write_text("\n".join(lines), encoding="utf-8")
        Path("code.txt").write_text("\n".join(f"def f{n}(): pass" for n in range(40)))
        Path("mix.toml").write_text(RECIPE)
        run_recipe(read_recipe("mix.toml"), device="cpu", log=lambda _: None)
    return folder


@pytest.fixture
def run(invoke, made, tmp_path):
    """Run a command in a copy of that directory."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return invoke


COMMANDS = {
    # These need no tokenizer either.
    "numpy": [
        ["when", "run", "--document", "web.txt:0"],
        ["diff", "run", "run"],
        ["plan", "mix.toml", "--quick"],
    ],
    "tokenizers": [
        ["inspect", "run", "--step", "3", "--around", "1"],
        ["report", "run"],
    ],
}


def test_commands_about_a_run_do_not_import_torch(python, run, tmp_path):
    """It would be most of their time: 2 to 3 s."""
    pytest.importorskip("matplotlib")
    code = """
import json, os, sys
os.chdir(sys.argv[2])
from penstock.cli.app import app
found = {}
for group, commands in json.loads(sys.argv[1]).items():
    for command in commands:
        app(command, standalone_mode=False)
    heavy = {"torch", "transformers", "datasets", "awkward", "pyarrow", "tokenizers", "gigatoken"}
    found[group] = sorted(heavy & set(sys.modules))
sys.stderr.write(json.dumps(found))
"""
    found = json.loads(python(code, json.dumps(COMMANDS), tmp_path).stderr)

    assert found == {
        "numpy": [],
        "tokenizers": ["gigatoken", "tokenizers"],
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "run", "--step", "3", "--rows", "2"],
        ["when", "run", "--document", "web.txt:0"],
        ["info", "run/stores/web"],
    ],
)
def test_a_command_imports_no_other_command_and_no_pydantic(python, run, tmp_path, arguments):
    """Typer imports pydantic to convert values: a fifth of the time of a short command."""
    code = """
import os, sys
os.chdir(sys.argv.pop(1))
from penstock.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
found = {"pydantic", "importlib.metadata"} & set(sys.modules)
found |= {name for name in sys.modules if name in (
    "penstock.cli.build", "penstock.cli.demo", "penstock.cli.fetch", "penstock.cli.diff")}
sys.stderr.write(repr(sorted(found)))
"""
    assert python(code, tmp_path, *arguments).stderr == "[]"


def test_inspect_shows_the_rows_of_a_step_with_documents_mask_and_loss(run):
    shown = run("inspect", "run", "--step", 3, "--around", 1).stdout
    lines = shown.splitlines()

    assert lines[0] == "step 3: positions 8 to 11, 4 rows"
    assert lines[1].startswith("loss 5.")
    assert lines[2] == "+ trained on, - only read, ↵ newline"
    assert lines[3].split() == ["step", "loss", "norm", "web", "code"]
    assert [line.split()[0] for line in lines[4:7]] == ["2", ">", "4"]
    assert sum(line.startswith("row ") for line in lines) == 4
    assert any("│ web.txt:" in line and "of run/stores/web, tokens" in line for line in lines)
    assert any("│ code.txt:" in line for line in lines)
    assert any(line.startswith("  + ") for line in lines)
    assert any(line.startswith("  - ") for line in lines)


def test_a_recipe_that_was_not_run_is_inspected_too(run):
    shown = run("inspect", "mix.toml", "--step", 3, "--set", 'output="new"', "--rows", 1).stdout

    assert "step 3: positions 8 to 11, 4 rows" in shown
    assert "loss" not in shown
    assert "… and 3 more rows; --rows 4 shows all" in shown


@pytest.mark.parametrize("arguments", [[], ["--tokens"], ["--full"]])
def test_no_text_of_a_document_can_control_the_terminal(run, arguments):
    shown = run("inspect", "run", "--step", 2, *arguments).stdout

    assert not set(shown) & {"\x1b", "\u202e", "\x9b", "\x07", "\r"}
    assert r"\x1b" in shown
    if "--full" in arguments:
        assert r"\x1b[31m" in shown


def test_the_token_view_has_a_line_for_each_token(run):
    shown = run("inspect", "run", "--step", 2, "--rows", 1, "--tokens").stdout
    found = run("inspect", "run", "--step", 2, "--rows", 1, "--json").stdout
    row = json.loads(found)["rows"][0]
    tokens = [token for segment in row["segments"] for token in segment["tokens"]]
    lines = [line.split() for line in shown.splitlines() if line[:8].strip().isdigit()]

    assert [int(line[1]) for line in lines] == tokens
    assert [line[2] for line in lines] == [
        "+" if segment["trained"] else "-" for segment in row["segments"] for _ in segment["tokens"]
    ]


def test_a_document_can_be_named_by_its_number(run):
    by_record = run("when", "run", "--document", "web.txt:0", "--json").stdout

    assert run("when", "run", "--document", "0", "--source", "web", "--json").stdout == by_record
    assert "web.txt:0, document 0 of run/stores/web" in run("when", "run", "-d", "0").stdout
    error = run("when", "run", "-d", "1,000,000", code=1).stderr
    assert "No store of this run has a document 1,000,000" in error


def test_ids_of_an_unknown_tokenizer_are_shortened_unless_all_are_asked_for(invoke, tmp_path):
    class Own:
        vocab_size = 300
        eos_token_id = 0

        def encode(self, text):
            return [each + 1 for each in text.encode()]

    ps.build(ps.Texts(["some text " * 90]), tmp_path / "s", tokenizer=Own())
    recipe = '[data]\ntrain = "s"\nlength = 150\n[training]\nsteps = 1\nglobal_batch_size = 1\n'
    (tmp_path / "r.toml").write_text(recipe)
    short, full = (
        invoke("inspect", "r.toml", "-s", 1, *more).stdout.splitlines() for more in ([], ["--full"])
    )

    (cut,) = [line.split() for line in short if line.startswith("  + ids")]
    (whole,) = [line.split() for line in full if line.startswith("  + ids")]
    assert (len(cut), cut[-1]) == (103, "…")
    assert len(whole) == 152
    assert whole[:102] == cut[:-1]


def test_json_has_all_rows_and_stable_names(run):
    found = json.loads(run("inspect", "run", "--step", 3, "--around", 1, "--json").stdout)

    assert sorted(found) == ["around", "metrics", "positions", "rows", "seen", "step"]
    assert len(found["rows"]) == 4
    row = found["rows"][0]
    names = ["documents", "epoch", "number", "position", "sample", "segments", "source"]
    assert sorted(row) == names
    segment = ["column", "document", "text", "tokens", "trained"]
    assert sorted(row["segments"][0]) == segment
    document = ["document", "file", "first_token", "num_tokens", "record", "store"]
    assert sorted(row["documents"][0]) == document
    assert [each["step"] for each in found["around"]] == [2, 3, 4]
    assert found["metrics"]["step"] == 3


def test_colours_are_only_in_terminals(run, monkeypatch):
    def shown(**environment):
        for name in ("FORCE_COLOR", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)  # rich 13.7 sees an empty one as set
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return run("inspect", "run", "-s", 2, "--rows", 1).stdout

    assert "\x1b[32m" in shown(FORCE_COLOR="1")
    assert "\x1b" not in shown(NO_COLOR="1")
    assert "\n  + " in shown(NO_COLOR="1")
    assert "\x1b" not in shown()  # a pipe


def test_every_line_keeps_its_mark_in_a_narrow_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    shown = run("inspect", "run", "--step", 2, "--full").stdout
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    text = [line for line in lines if line.startswith(("  + ", "  - "))]

    assert len(text) > 8
    assert max(map(len, text)) <= 40


def test_a_rank_has_its_share_of_the_rows(run):
    whole = run("inspect", "run", "-s", 2, "--json").stdout
    parts = [
        run("inspect", "run", "-s", 2, "--rank", rank, "--world-size", 2, "--json").stdout
        for rank in (0, 1)
    ]
    rows = [row for each in parts for row in json.loads(each)["rows"]]

    assert rows == json.loads(whole)["rows"]
    assert (
        "--rank 1 needs more than 1 ranks"
        in run("inspect", "run", "-s", 2, "--rank", 1, code=2).output
    )


def test_when_lists_the_steps_of_a_document(run, run_json):
    shown = run("when", "mix.toml", "-d", "code.txt:0", "--set", "training.steps=60").stdout
    found = run_json("when", "mix.toml", "-d", "code.txt:0", "--set", "training.steps=60")
    (document,) = found["documents"]

    assert shown.startswith("code: code.txt:0, document 0 of run/stores/code, 15 tokens\n")
    assert shown.splitlines()[1].split() == ["step", "row", "position", "epoch", "tokens"]
    assert len(document["seen"]) > 1
    for each in document["seen"]:
        row = run_json("inspect", "mix.toml", "-s", each["step"], "--set", "training.steps=60")
        inside = row["rows"][each["row"]]
        assert (inside["position"], inside["source"]) == (each["position"], "code")
        assert any(one["record"] == 0 and one["file"] == "code.txt" for one in inside["documents"])
    assert found["last_step"] == 60


def test_when_names_a_document_that_is_not_seen(run, run_json):
    found = (run_json("when", "run", "-d", n, "--source", "web")["documents"][0] for n in range(30))
    number = next(each["document"] for each in found if not each["seen"])
    shown = run("when", "run", "--document", number, "--source", "web").stdout

    assert f", document {number} of run/stores/web, " in shown
    assert shown.endswith(
        "\n  not seen in the run's steps 1 to 5\n--set training.steps=NUMBER searches more steps\n"
    )


def test_inspect_counts_what_a_checkpoint_has_read(run, run_json):
    shown = run("inspect", "run", "--step", 4).stdout
    found = run_json("inspect", "run", "--step", 4)

    assert "after step 4, 16 rows were read:" in shown
    assert [each["rows"] for each in found["seen"]] == [12, 4]


def test_diff_says_identical_or_what_differs_and_exits_like_diff(run, run_json, made):
    shutil.copytree(made / "run", "copy")
    assert run("diff", "run", "copy").stdout == "identical for 5 steps (20 rows)\n"
    log = Path("copy/fingerprints.jsonl")
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:3]))
    shorter = run("diff", "run", "copy").stdout
    assert "identical for 3 steps (12 rows)\nrun has 2 more steps, which the other" in shorter

    changed = json.loads(lines[1])
    changed["tokens"] = f"{int(changed['tokens'], 16) ^ 7:016x}"
    log.write_text("".join([lines[0], json.dumps(changed) + "\n", *lines[2:]]))
    shown = run("diff", "run", "copy", code=1).stdout
    assert (
        "identical for 1 step (4 rows), then they differ\n  run: step 2\n  copy: step 2\n" in shown
    )
    assert "positions 4 to 7: the same rows with other tokens" in shown
    assert "The stores of copy are not those that the run has read." in shown
    assert run_json("diff", "run", "copy", code=1)["difference"]["kind"] == "tokens"


def test_diff_first_names_the_settings_that_differ(run, run_json, made):
    shutil.copytree(made / "run", "copy")
    path = Path("copy/run.json")
    record = json.loads(path.read_text())
    record["recipe"]["data"]["seed"] = 3
    record["recipe"]["data"]["sources"]["web"]["train"] = "\x1b" + "w" * 300
    del record["recipe"]["training"]["save_every"]
    path.write_text(json.dumps({**record, "world_size": 2}))
    before = json.loads((made / "run" / "run.json").read_text())["recipe"]
    web, saved = before["data"]["sources"]["web"]["train"], before["training"]["save_every"]
    shown = run("diff", "run", "copy").stdout
    found = run_json("diff", "run", "copy")["settings"]

    assert "\n  data.seed: 0, 3\n" in shown
    assert f'\n  data.sources.web.train: "{web}", "\\u001bwww' in shown
    assert f"\n  training.save_every: {saved}, not set\n" in shown
    assert "\n  world_size: 1, 2\nidentical for 5 steps (20 rows)\n" in shown
    assert shown.startswith("settings that differ:\n")
    assert max(map(len, shown.splitlines())) < 300
    assert {"name": "data.seed", "values": [0, 3]} in found
    assert len(found) == 4

    path.unlink()
    assert run("diff", "run", "copy").stdout == "identical for 5 steps (20 rows)\n"
    assert run_json("diff", "run", "copy")["settings"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["inspect", "nope.toml", "-s", 1], 1, "MissingRecipeError: nope.toml does not exist"),
        (["inspect", "run", "-s", 6], 1, "Step 6 is after the end of this run: its last step is 5"),
        (["inspect", "run", "-s", 0], 1, "There is no step 0: the first step of a run is 1"),
        (["inspect", "web.txt", "-s", 1], 1, "web.txt is not the directory of a run"),
        (["when", "run", "-d", "web.txt"], 2, "is not FILE:RECORD, such as web.jsonl:90210"),
        (["when", "run", "-d", "wbe.txt:0"], 1, "Did you mean web.txt"),
        (["when", "run", "-d", "web.txt:1"], 1, "the nearest begin at 0 and "),
        (["diff", "run", "nope"], 2, "nope does not exist"),
        (["diff", "run", "."], 2, "has no fingerprints.jsonl"),
    ],
)
def test_mistakes_are_answered_in_words(run, arguments, code, message):
    shown = run(*arguments, code=code)

    assert message in " ".join(shown.output.split())


@pytest.mark.parametrize("command", [["inspect", "store", "-s", 1], ["when", "store", "-d", "0"]])
def test_a_store_is_not_taken_for_a_run(run, command):
    ps.build("web.txt", "store", tokenizer="bytes")

    assert "store is a store and not a run" in run(*command, code=1).output


def test_a_run_without_metrics_is_shown_without_losses(run):
    Path("run/metrics.jsonl").unlink()
    shown = run("inspect", "run", "-s", 2, "--around", 1).stdout

    assert "the run has not logged a loss for this step" in shown
    assert ">     2     -     -" in " ".join(shown.split()).replace(
        "> 2 - -", ">     2     -     -"
    )
