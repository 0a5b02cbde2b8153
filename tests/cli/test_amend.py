"""`penstock amend`: the run that follows reads what the ledger says, from the step on."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock.inspect import amend_recipe, open_run, source_counts
from penstock.ledger import AddedStore
from penstock.recipe import read_recipe
from penstock.train.command import run_recipe

torch.set_num_threads(1)

RECIPE = (
    (Path(__file__).parent / "mix.toml").read_text()
    + """
[training]
steps = 12
batch_size = 4
val_every = 12
save_every = 2
"""
)


def train(output="run", **changes):
    named = {name.replace("__", "."): value for name, value in changes.items()}
    recipe = read_recipe("mix.toml", {"output": output, **named})
    run_recipe(recipe, device="cpu", log=lambda _: None)


def prints(run):
    return Path(run, "fingerprints.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory with texts, a store, a recipe of 12 steps, and 4 steps of its run."""
    folder = tmp_path_factory.mktemp("amend")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        lines = [f"Line {n}: the fox jumps over {n * 7 % 13} dogs." for n in range(40)]
        Path("web.txt").write_text("\n".join(lines), encoding="utf-8")
        Path("code.txt").write_text("\n".join(f"def f{n}(): pass" for n in range(40)))
        sums = ps.Texts([f"{n} + {n} = {2 * n}" for n in range(60)])
        ps.build(sums, "stores/math", tokenizer="bytes")
        Path("mix.toml").write_text(RECIPE)
        train(training__steps=4)
        train("plain")
    return folder


@pytest.fixture
def run(invoke, made, tmp_path):
    """Run a command in a copy of that directory."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return invoke


def test_a_run_that_resumes_reads_what_the_ledger_says(run):
    added = run("amend", "mix.toml", "--from-step", "6", "--add", "math=stores/math",
                "--weights", "web=1,code=1,math=2")  # fmt: skip
    assert run("amend", "mix.toml", "--skip", "8:9").output
    document = ["--exclude-document", "web.txt:0", "--drop", "math"]
    run("amend", "mix.toml", "--from-step", "10", *document)
    train()  # continues after step 4
    train("again")

    assert "from step 6 on" in added.output
    assert "math" in added.output
    assert prints("run") == prints("again")
    assert prints("run")[:5] == prints("plain")[:5]
    assert prints("run")[5] != prints("plain")[5]
    opened = open_run("run")
    assert [each.to_json() for each in opened.plan.amendments] == [
        line.amendment for line in read_recipe("mix.toml").ledger
    ]
    counts = source_counts(opened.plan, opened.steps, 1, 12)
    assert [each["math"] for each in counts] == [0] * 5 + [2] * 4 + [0] * 3
    assert run("diff", "run", "again").output.startswith("identical for 12 steps")
    assert run("diff", "run", "plain", code=1).output.startswith("identical for 5 steps (20 rows)")


def test_a_dry_run_shows_the_amendment_and_writes_nothing(run):
    asked = ["amend", "mix.toml", "--from-step", "6", "--weights", "web=0,code=1"]
    shown = run(*asked, "--dry-run").output
    found = json.loads(run(*asked, "--dry-run", "--json").output)
    assert not Path("mix.ledger.jsonl").exists()
    made = json.loads(run(*asked, "--json").output)

    assert shown.startswith("would be amendment 1 in mix.ledger.jsonl, from step 6 on:")
    assert "nothing was written" in shown
    assert Path("mix.ledger.jsonl").exists()
    assert {**found, "written": True} == made


def test_commands_see_amendments_from_the_recipe_and_from_the_run(run):
    run("amend", "mix.toml", "--from-step", "6", "--weights", "web=0,code=1")
    Path("mix.ledger.jsonl").rename("kept")
    train("old", training__steps=6)
    Path("kept").rename("mix.ledger.jsonl")
    train("new")
    Path("mix.ledger.jsonl").unlink()  # the run has a copy
    planned = json.loads(run("plan", "new", "--json", "--quick").output)
    step = json.loads(run("inspect", "new", "--step", "7", "--json").output)
    last = json.loads(run("inspect", "new", "--step", "12", "--json").output)
    found = json.loads(run("when", "new", "--document", "web.txt:0", "--json").output)

    assert planned["amendments"] == [{"position": 20, "weights": {"web": 0, "code": 1}}]
    assert {row["source"] for row in step["rows"]} == {"code"}
    assert [each["rows"] for each in last["seen"]] == [15, 33]
    assert all(each["step"] < 6 for each in found["documents"][0]["seen"])
    old = json.loads(run("inspect", "old", "--step", "6", "--json").output)
    assert {row["source"] for row in old["rows"]} == {"web", "code"}


def test_a_step_that_was_trained_is_refused_until_its_checkpoints_are_removed(run):
    refused = run("amend", "mix.toml", "--skip", "3:4", code=1)
    assert "has trained 4 steps (its last checkpoint is step 4)" in refused.stderr
    assert "remove the checkpoints after step 2 from run/checkpoints" in refused.stderr
    assert not Path("mix.ledger.jsonl").exists()

    for path in Path("run/checkpoints").glob("step-*4.pt"):
        path.unlink()
    run("amend", "mix.toml", "--skip", "3:4")
    train()
    rows = [json.loads(line)["rows"] for line in prints("run")]
    assert rows[:2] == [json.loads(line)["rows"] for line in prints("plain")[:2]]
    # The rows of step 5 have the positions of step 3 now, so their fingerprints differ.
    opened, plain = open_run("run").plan, open_run("plain").plan
    assert [each[1:] for each in opened.samples(8, 40)] == [
        each[1:] for each in plain.samples(16, 48)
    ]


def test_an_amendment_after_a_checkpoint_of_a_run_that_went_on_is_refused_at_the_resume(run):
    run("amend", "mix.toml", "--from-step", "5", "--weights", "web=1,code=1")
    ledger = Path("mix.ledger.jsonl").read_bytes()
    Path("mix.ledger.jsonl").unlink()
    train(training__steps=8)
    Path("mix.ledger.jsonl").write_bytes(ledger)

    failed = run("train", "mix.toml", code=1)
    assert "Amendment 1 begins after 4 steps (position 16)" in failed.stderr
    assert "saved after 8 steps (position 32)" in failed.stderr


def test_the_output_names_the_rows_of_each_source_and_json_has_the_amendment(run):
    text = run("amend", "mix.toml", "--from-step", "7", "--drop", "code").output
    shown = json.loads(run("amend", "mix.toml", "--from-step", "8", "--json", "--add", "code",
                           "--weights", "web=1,code=1").output)  # fmt: skip

    assert (
        "amendment 1 in mix.ledger.jsonl, from step 7 on:\n  from position 24: drops code" in text
    )
    assert "web      18   24" in text
    assert "code       6    0" in text
    assert shown["amendment"] == {"position": 28, "add": ["code"], "weights": {"web": 1, "code": 1}}
    assert shown["number"] == 2
    assert shown["rows"] == {"web": 10, "code": 10}
    assert sum(shown["rows_before"].values()) == 20


def test_mistakes_are_explained(run):
    ps.build(ps.Texts(["other ids " * 20]), "other", tokenizer="gpt2")
    run("amend", "mix.toml", "--from-step", "8", "--drop", "code")
    before = Path("mix.ledger.jsonl").read_bytes()
    for arguments, code, message in (
        (["--from-step", "7", "--drop", "web"], 1, "Step 7 is before the last amendment, which "
         "begins with step 8."),
        (["--from-step", "9", "--drop", "web"], 1, 'Without "web", no source is left'),
        (["--from-step", "9", "--drop", "code"], 1, "does not read at this position anyway"),
        (["--from-step", "9", "--drop", "cod"], 1, 'drop names "cod", but the sources are "web"'),
        (["--from-step", "9", "--add", "web"], 1, 'add names "web", which the run reads already'),
        (["--from-step", "9", "--add", "math"], 1, 'add has no rows for "math"'),
        (["--from-step", "9", "--add", "code=stores/math"], 1, "by its name alone"),
        (["--from-step", "9", "--add", "code"], 1, "Give the weights of all sources together"),
        (["--from-step", "9", "--add", "x=web.txt"], 1, "web.txt, which an amendment adds, is not"),
        (["--from-step", "9", "--weights", "code=1"], 1, 'weights has no weight for "web"'),
        (["--from-step", "9", "--weights", "web=1,x=1"], 1, 'weights names "x"'),
        (["--from-step", "9", "--weights", "web"], 2, "is not NAME=NUMBER"),
        (["--from-step", "9", "--weights", "web=-1"], 1, "weight"),
        (["--from-step", "99", "--drop", "web"], 1, "its last step is 12"),
        (["--from-step", "9"], 1, "This amendment changes nothing"),
        (["--drop", "web"], 1, "needs the step that it begins with: --from-step"),
        (["--skip", "9-10"], 2, "--skip 9-10 is not A:B"),
        (["--skip", "10:9"], 1, "There are no steps from 10 to 9 to skip"),
        (["--skip", "9:10", "--from-step", "8"], 1, "begin at different steps"),
        (["--from-step", "9", "--exclude-document", "web.txt"], 2, "is not FILE:RECORD"),
        (["--from-step", "9", "--exclude-document", "web.txt:1"], 1, "No document begins at"),
        (["--from-step", "9", "--drop", "web", "--set", "data.seed=3"], 1, "another plan than"),
        (["--from-step", "9", "--add", "x=other", "--weights", "web=1,x=1"], 1, "from different "
         "tokenizers"),
        (["--from-step", "9", "--add", "x=s3://key:secret@b/x"], 1, "without them"),
    ):  # fmt: skip
        done = run("amend", "mix.toml", *arguments, code=code)
        assert message in " ".join(done.stderr.split()), (arguments, done.stderr)
        assert "secret" not in done.stderr
    refused = run("amend", "run", "--from-step", "9", "--drop", "web", code=1)
    assert "is not a recipe" in refused.stderr
    assert Path("mix.ledger.jsonl").read_bytes() == before


def test_a_recipe_that_changed_after_an_amendment_is_refused(run):
    run("amend", "mix.toml", "--from-step", "8", "--drop", "code")
    Path("mix.toml").write_text(RECIPE.replace("weight = 3", "weight = 2"))

    failed = run("plan", "mix.toml", "--quick", code=1)
    assert "Amendment 1 (from step 8 on) belongs to a plan with the digest" in failed.stderr


def test_a_recipe_that_streams_is_refused(run):
    Path("stream.toml").write_text(
        '[data]\ntrain = "web.txt"\nstream = true\nlength = 32\ntokenizer = "bytes"\n'
        "[training]\nsteps = 4\nbatch_size = 4\n"
    )
    failed = run("amend", "stream.toml", "--skip", "2:3", code=1)

    assert "has stream=true" in failed.stderr


def test_a_single_source_becomes_a_mixture_and_packs_can_be_chosen_from_python(run):
    Path("one.toml").write_text(
        '[data]\ntrain = "stores/math"\nlength = 16\n[training]\nsteps = 9\nbatch_size = 4\n'
    )
    sums = ps.Texts([f"{n} * {n} = {n * n}" for n in range(60)])
    ps.build(sums, "stores/squares", tokenizer="bytes")
    plain = open_run("one.toml").plan
    found = amend_recipe(
        "one.toml",
        from_step=4,
        add={"squares": AddedStore("stores/squares", "windows")},
        weights={"data": 1, "squares": 1},
    )
    amended = open_run("one.toml").plan

    assert found.plan.digest == amended.digest
    assert amended.samples(0, 12) == plain.samples(0, 12)
    assert amended.counts(36) == {"data": 24, "squares": 12}
    data = [each[2:] for each in amended.samples(0, 36) if each.source == "data"]
    assert data == [each[2:] for each in plain.samples(0, 24)]
    refused = run("amend", "one.toml", "--from-step", "6", "--add", "more=stores/squares",
                  "--rows", "packs", "--weights", "data=1,squares=1,more=1", code=1)  # fmt: skip
    assert "is a Packs, whose batches have other fields" in " ".join(refused.stderr.split())


def test_a_document_is_excluded_in_the_source_that_is_named_and_not_in_others(run):
    for name, text in (("web", "A long first line.\nMore."), ("code", "Short.\nMore.")):
        Path(name).mkdir()
        Path(name, "train.txt").write_text(f"{text}\n" * 40)
        ps.build(f"{name}/train.txt", f"{name}/store", tokenizer="bytes", documents="lines")
    text = RECIPE.replace('"web.txt"', '"web/store"').replace('"code.txt"', '"code/store"')
    Path("two.toml").write_text(text)
    asked = ["amend", "two.toml", "--from-step", "6", "--dry-run", "--json", "--exclude-document"]

    def excluded(document):
        return json.loads(run(*asked, document).output)["amendment"]["exclude"]

    refused = " ".join(run(*asked, "train.txt:0", code=1).output.split())
    assert "train.txt:0 are several documents" in refused
    assert "such as code=train.txt:0" in refused
    assert [*excluded("code=train.txt:0")] == ["code"]
    # Both inputs are called train.txt in their stores; the size of the file decides.
    assert excluded("code/train.txt:0") == excluded("code=train.txt:0")
    assert [*excluded(f"{Path('web/train.txt').absolute()}:0")] == ["web"]
    shown = run(
        "amend", "two.toml", "--from-step", "6", "--dry-run", *asked[-1:], "web=train.txt:0"
    )
    assert "excluded: web: train.txt:0, document 0 of web/store, 19 tokens" in shown.output
    refused = " ".join(run(*asked, "code=web/train.txt:0", code=1).output.split())
    assert "have another size: train.txt" in refused
    # A file that has changed since, and one whose name has the form of SOURCE=FILE.
    Path("web/train.txt").write_text("Changed.")
    refused = " ".join(run(*asked, "web/train.txt:0", code=1).output.split())
    assert "have another size: train.txt" in refused
    assert "No store" in run(*asked, f"web={'x' * 300}.txt:0", code=1).output
