"""A run whose recipe gets other sources or weights continues with them after its last step."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock.errors import ResumeError, TrainError
from penstock.inspect import (
    compare_runs,
    find_documents,
    forecast,
    inspect_step,
    open_run,
    source_counts,
    when,
)
from penstock.loader.fingerprints import RowReader
from penstock.recipe import read_recipe
from penstock.train import RunReport, read_metrics
from penstock.train.command import run_recipe

torch.set_num_threads(1)

RECIPE = """
output = "run"
[data]
length = 16
seed = 5
tokenizer = "bytes"
documents = "lines"
{sources}
[model]
size = "nano"
layers = 1
width = 8
heads = 1
[training]
steps = {steps}
batch_size = 4
val_every = 6
save_every = 3
"""
OLD, NEW = {"web": 3, "code": 1}, {"web": 1, "code": 3}


def write_recipe(weights, steps):
    sources = "".join(
        f'[data.sources.{name}]\ntrain = "{name}.txt"\n' + f"weight = {weight}\n" * bool(weight)
        for name, weight in weights.items()
    )
    Path("run.toml").write_text(RECIPE.format(sources=sources, steps=steps))


def run(weights, steps, stop_at=None):
    """Train up to a step, or until a kill at another one; returns the lines that were logged."""
    logged = []

    def log(event):
        logged.append(str(event))
        if isinstance(event, RunReport) and event.progress.step == stop_at:
            raise KeyboardInterrupt

    write_recipe(weights, steps)
    try:
        run_recipe(read_recipe("run.toml"), device="cpu", log=log)
    except KeyboardInterrupt:
        assert stop_at is not None
    return logged


def losses():
    return [
        each["loss"] for each in read_metrics(Path("run/metrics.jsonl")) if each["kind"] == "step"
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory in which a run has taken six steps."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("web", "code", "math"):
            lines = [f"{name} {n}: the fox jumps over {n * 7 % 13} dogs.\n" for n in range(60)]
            Path(f"{name}.txt").write_text("".join(lines))
        run(OLD, 6)
    return folder


@pytest.fixture
def here(trained, tmp_path, monkeypatch):
    """The current directory: a copy of that directory."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def plan_of(*changes, names=("web", "code")):
    """The plan of the first six steps, and of what comes after them."""
    rows = {name: ps.Windows(Path("run/stores") / name, 16) for name in names}
    plan = ps.Plan({"web": rows["web"], "code": rows["code"]}, weights=OLD, seed=5)
    for position, weights in changes:
        sources = {name: rows[name] for name in weights}
        plan = plan.continued(position, weights=weights, sources=sources)
    return plan


def check_run(plan, num_steps):
    """The run has read the rows of a plan, and the commands show the same."""
    reader = RowReader(plan)
    lines = [json.loads(line) for line in Path("run/fingerprints.jsonl").read_text().splitlines()]
    expected = [reader.fingerprints(4 * step, 4 * step + 4) for step in range(num_steps)]
    assert [(each["rows"], each["tokens"]) for each in lines] == [
        (f"{rows:016x}", f"{tokens:016x}") for rows, tokens in expected
    ]
    for opened in (open_run("run"), open_run("run.toml")):
        assert opened.plan.digest == plan.digest
        assert opened.steps.num_recorded == num_steps
        counts = source_counts(opened.plan, opened.steps, 1, num_steps)
        for step in range(1, num_steps + 1):
            found = plan.samples(4 * step - 4, 4 * step)
            shown = inspect_step(opened.plan, opened.steps, step).rows
            assert [(each.source, each.sample) for each in shown] == [
                (each.source, each.sample) for each in found
            ]
            assert counts[step - 1] == {
                name: sum(each.source == name for each in found) for name in plan.names
            }


def test_changed_weights_apply_after_the_last_step_and_a_kill_changes_nothing(here):
    before = losses()
    shutil.copytree("run", "straight")
    logged = run(NEW, 12)
    assert "the sources or weights have changed: from position 24 on, web 1, code 3" in logged
    plan = plan_of((24, NEW))
    check_run(plan, 12)
    straight = losses()

    shutil.rmtree("run")
    shutil.move("straight", "run")
    run(NEW, 12, stop_at=8)  # the last checkpoint is that of step 6
    assert len(losses()) == 8
    logged = run(NEW, 12, stop_at=11)
    assert not any("have changed" in each for each in logged)
    run(NEW, 12)

    assert losses() == straight
    assert straight[:6] == before
    check_run(plan, 12)


def test_when_finds_a_document_in_both_parts_of_the_run(here):
    run(NEW, 12)
    opened = open_run("run")
    found = 0
    for record in range(0, 600, 37):
        text = Path("code.txt").read_bytes()
        offset = text.rfind(b"\n", 0, record) + 1
        (document,) = find_documents(opened.plan, "code.txt", offset)
        expected = [
            position
            for position in range(48)
            for each in opened.plan.samples(position, position + 1)
            if each.source == "code"
            and any(one.document == document.document for one in opened.plan.origins(position))
        ]
        assert [each.position for each in when(opened.plan, opened.steps, document)] == expected
        found += len(expected)
    assert found > 10


def test_a_new_source_joins_and_another_leaves(here):
    run({"code": 1, "math": 2}, 12)
    plan = plan_of((24, {"code": 1, "math": 2}), names=("web", "code", "math"))
    check_run(plan, 12)

    assert plan.counts(48)["web"] == plan.counts(24)["web"]
    rows = {each.source: each.run_rows for each in forecast(open_run("run")).sources}
    assert rows == plan.counts(48)


def test_a_run_can_be_changed_several_times(here):
    run(NEW, 9)
    run({"web": 1}, 12)
    plan = plan_of((24, NEW), (36, {"web": 1}))
    check_run(plan, 12)
    logged = run({"web": 1}, 15)

    assert not any("have changed" in each for each in logged)
    check_run(plan, 15)


def test_a_change_that_was_never_trained_on_is_forgotten(here):
    run(NEW, 12, stop_at=7)  # before its first checkpoint
    logged = run(OLD, 12)
    check_run(plan_of(), 12)

    assert not any("have changed" in each for each in logged)
    assert json.loads(Path("run/run.json").read_text())["earlier"] == []


def test_the_plan_of_a_changed_recipe_is_shown_before_it_is_trained(here):
    write_recipe(NEW, 12)
    opened = open_run("run.toml")

    assert opened.plan.digest == plan_of((24, NEW)).digest
    assert opened.steps.num_recorded == 6
    assert opened.steps.last == 12
    assert open_run("run").plan.digest == plan_of().digest


def test_two_runs_differ_from_the_change_on(here, trained):
    run(OLD, 12)
    shutil.move("run", "other")
    shutil.copytree(trained / "run", "run")
    run(NEW, 12)
    found = compare_runs("other", "run")

    assert found.identical_steps == (6, 6)
    assert found.difference.kind == "rows"
    assert found.difference.steps == ((7, 7), (7, 7))
    assert found.difference.note is None
    assert found.settings[-1].name == "weights before position 24"
    assert found.settings[-1].values == (None, OLD)


def test_a_change_that_cannot_be_continued_is_explained(here):
    with pytest.raises(ResumeError, match="another order of the data"):
        run({"web": None, "code": None}, 12)
    Path("run/fingerprints.jsonl").unlink()
    with pytest.raises(TrainError, match=r"has no line of step 6, the last checkpoint"):
        run(NEW, 12)
    Path("run/run.json").unlink()
    with pytest.raises(ResumeError, match=r'weight of "code" 1 -> 3, weight of "web" 3 -> 1'):
        run(NEW, 12)


def test_a_run_without_weights_gets_weights(here):
    shutil.rmtree("run")
    run({"web": None, "code": None}, 6)
    run(NEW, 12)
    rows = {name: ps.Windows(Path("run/stores") / name, 16) for name in NEW}
    check_run(ps.Plan(rows, seed=5).continued(24, weights=NEW), 12)


def test_a_source_of_that_name_must_have_the_same_rows(here):
    store = ps.build("math.txt", "elsewhere", tokenizer="bytes", documents="lines")
    write_recipe({"web": 1, "code": 3, "math": 1}, 12)
    text = Path("run.toml").read_text()
    Path("run.toml").write_text(text.replace('"web.txt"', f'"{store.path}"'))
    with pytest.raises(ResumeError, match='the store of "web"'):
        run_recipe(read_recipe("run.toml"), device="cpu", log=lambda _: None)
