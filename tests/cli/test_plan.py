"""`penstock plan`: what a run would read."""

from pathlib import Path

import pytest


@pytest.fixture
def recipe(tmp_path):
    text = "".join(f"Line {number}: the fox jumps.\n" for number in range(300))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text(text)
    (tmp_path / "mix.toml").write_text(
        '[data]\nlength = 16\ntokenizer = "bytes"\nval = "b.txt"\n'
        '[data.sources.web]\ntrain = "a.txt"\nweight = 3\n'
        '[data.sources.code]\ntrain = "b.txt"\nweight = 1\nrows = "packs"\n'
        "[training]\nsteps = 100\nbatch_size = 4\n"
    )


def test_it_draws_the_tree_of_a_recipe(invoke, recipe):
    shown = invoke("plan", "mix.toml").stdout

    assert "in the first 400 rows:" in shown
    assert "web" in shown
    assert "delivered 300 rows" in shown
    assert "delivered 100 rows" in shown
    assert "validation: 461 of 461 rows, the same every time" in shown
    assert "the run: 100 steps, 400 rows of 16 inputs, 6,400 in total" in shown


def test_targets_that_follow_from_a_mean_are_said_to_be_about(invoke, recipe):
    """Windows are all full; rows of `packs` have different numbers of targets."""
    shown = invoke("plan", "mix.toml").stdout
    table = shown.partition("trained on")[2].partition("\n\n")[0]
    line = {line.split()[0]: line for line in table.splitlines()[1:]}

    assert "about" not in line["web"]
    assert line["code"].count("about ") == 2


@pytest.mark.parametrize(
    ("weights", "line"),
    [
        ((0.9, 0.9), "weights: given 0.9, 0.9: read as 0.5, 0.5"),
        ((3, 1), "weights: given 3, 1: read as 0.75, 0.25"),
        ((0.7, 0.3), None),
    ],
)
def test_weights_that_do_not_sum_to_one_are_shown_as_they_are_read(invoke, recipe, weights, line):
    text = Path("mix.toml").read_text()
    for old, new in zip(("weight = 3", "weight = 1"), weights, strict=True):
        text = text.replace(f"{old}\n", f"weight = {new} #\n")
    Path("mix.toml").write_text(text)
    shown = invoke("plan", "mix.toml", "--quick").stdout

    assert line in shown if line else "read as" not in shown


def test_flags_change_it(invoke, recipe):
    shown = invoke("plan", "mix.toml", "--batch_size", 8, "--set", "training.steps=10").stdout

    assert "the run: 10 steps, 80 rows of 16 inputs, 1,280 in total" in shown


def test_as_json_it_is_what_the_digest_is_taken_of(run_json, recipe):
    plan = run_json("plan", "mix.toml")

    assert plan["run_rows"] == 400
    assert [source["name"] for source in plan["sources"]] == ["web", "code"]
    assert len(plan["digest"]) == 64


@pytest.mark.parametrize(("layers", "meaning"), [(1, "it would wait"), (48, "it would not wait")])
def test_the_speed_says_what_it_means_for_this_recipe(invoke, recipe, layers, meaning):
    model = [f"model.{each}" for each in (f"layers={layers}", "heads=1")]
    width = "model.width=8" if layers == 1 else "model.width=8192"
    changes = [word for each in (*model, width) for word in ("--set", each)]
    shown = invoke("plan", "mix.toml", *changes).stdout

    (line,) = [each for each in shown.splitlines() if each.startswith("speed: ")]
    assert " tokens/s here; one " in line
    assert line.endswith(f" for this model, so {meaning} for data")
