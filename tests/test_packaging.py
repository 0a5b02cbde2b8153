"""What is released: versions, extras, floors of dependencies, and the files that describe them."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import fsspec  # noqa: F401  (a test changes its registry)
import pytest
import yaml

import penstock
from penstock.charts import draw
from penstock.errors import MissingExtraError
from penstock.integrations.hf_format import hf_tokenizer
from penstock.options import ReadSettings
from penstock.sources.listing import list_files
from penstock.store.objects import Objects
from penstock.tokenize.tokenizer import load_tokenizer
from penstock.train import RunProgress, TrainingConfig
from penstock.train.logs import Metrics

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# The packages of each extra that users have; tests/check_dist.py installs and imports them.
EXTRAS = {
    "hf": ["accelerate", "datasets", "transformers"],
    "lightning": ["lightning", "transformers"],
    "ray": ["ray"],
    "remote": ["obstore"],
    "report": ["matplotlib"],
    "s3": ["s3fs"],
    "tensorboard": ["tensorboard"],
    "tiktoken": ["tiktoken"],
    "wandb": ["wandb"],
}
FOR_DEVELOPERS = {"dev", "docs"}
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_table_of_extras_is_the_one_of_the_project():
    declared = {
        name: sorted(re.match(r"\w+", each)[0] for each in packages)
        for name, packages in PROJECT["optional-dependencies"].items()
        if name not in FOR_DEVELOPERS
    }

    assert declared == EXTRAS


def test_the_floors_are_those_of_the_project():
    extras = PROJECT["optional-dependencies"]
    declared = PROJECT["dependencies"] + [each for name in EXTRAS for each in extras[name]]
    floors = {re.sub(r"\[\w+\]|>=", lambda found: "==" * (found[0] == ">="), e) for e in declared}
    text = (ROOT / "constraints-floors.txt").read_text(encoding="utf-8")
    lines = text.partition("# Not declared")[0].splitlines()

    assert sorted(each for each in lines if not each.startswith("#")) == sorted(floors)


def test_the_check_of_a_release_can_import_the_tests_that_it_uses():
    """It runs without pytest, which would add tests/support to the path; --help imports all."""
    check = [sys.executable, "check_dist.py", "--help"]
    done = subprocess.run(
        check, cwd=ROOT / "tests", capture_output=True, text=True, timeout=300, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: check_dist.py [-h] dist [tag]")


def test_the_citation_has_the_version_of_the_package():
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()

    assert f"version: {penstock.__version__}" in lines


def test_the_package_says_that_it_has_types():
    assert Path(penstock.__file__).with_name("py.typed").exists()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def run_again(module):
    with warnings.catch_warnings():  # other tests may have imported it
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        runpy.run_module(module)


def in_lightning(_):
    run_again("penstock.integrations.lightning.base")


def in_a_lightning_callback(_):
    run_again("penstock.integrations.lightning.fingerprints")


def in_a_trainer_callback(_):
    run_again("penstock.integrations.trainer_callback")


def in_a_tokenizer(_):
    hf_tokenizer("gpt2")


def on_ray(path):
    penstock.build(penstock.Texts(["one"]), path / "store", workers="ray")


def on_a_server(_):
    Objects("https://me:SECRET@host/x").read("penstock.json")


def in_a_chart(_):
    draw(print)


def logging_to(**logs):
    config = TrainingConfig(steps=1, **logs)
    return lambda path: Metrics(path / "metrics.jsonl", RunProgress(), config)


def with_tiktoken(_):
    load_tokenizer("tiktoken:gpt2")


def reading(path):
    return lambda _: list_files(path, ReadSettings())


LIGHTNING = ["lightning", "lightning.pytorch", "pytorch_lightning"]
MISSING = [
    (in_lightning, LIGHTNING, "penstock[lightning]"),
    (in_a_lightning_callback, LIGHTNING, "penstock[lightning]"),
    (in_a_trainer_callback, ["transformers"], "penstock[hf]"),
    (in_a_tokenizer, ["transformers"], "penstock[lightning]"),
    (on_ray, ["ray"], "penstock[ray]"),
    (on_a_server, ["obstore", "obstore.store"], "penstock[remote]"),
    (in_a_chart, ["matplotlib"], "penstock[report]"),
    (logging_to(tensorboard=True), ["torch.utils.tensorboard"], "penstock[tensorboard]"),
    (logging_to(wandb=True), ["wandb"], "penstock[wandb]"),
    (with_tiktoken, ["tiktoken"], "penstock[tiktoken]"),
    (reading("s3://key:SECRET@bucket/a.txt"), ["s3fs"], "penstock[s3]"),
    (reading("gs://bucket/a.txt"), ["gcsfs"], "fsspec[gcs]"),
    (reading("https://me:SECRET@host/a.txt"), ["aiohttp"], "fsspec[http]"),
]


@pytest.mark.parametrize(
    ("use", "modules", "package"),
    MISSING,
    ids=[f"{modules[-1]} {package}" for _, modules, package in MISSING],
)
def test_a_missing_package_is_named_with_the_line_that_installs_it(
    use, modules, package, tmp_path, monkeypatch
):
    for each in [*modules, "fsspec.implementations.http"]:  # which imports aiohttp
        monkeypatch.delitem(sys.modules, each, raising=False)
    for each in modules:
        monkeypatch.setitem(sys.modules, each, None)
    for each in ("http", "https", "s3", "gs"):  # fsspec keeps what it has imported
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, each, raising=False)

    with pytest.raises(MissingExtraError) as caught:
        use(tmp_path)

    assert str(caught.value).endswith(f'nstall it with: pip install "{package}"')
    assert "SECRET" not in str(caught.value)


def test_the_message_of_every_extra_is_read():
    named = {
        re.search(r"\[(\w+)\]", package)[1] for *_, package in MISSING if "penstock" in package
    }

    assert named == EXTRAS.keys()


def values_of(tree, name):
    """The values with this name anywhere in a tree of dicts and lists."""
    if isinstance(tree, dict):
        found = [tree[name]] if name in tree else []
        return found + [each for value in tree.values() for each in values_of(value, name)]
    parts = tree if isinstance(tree, list) else []
    return [each for value in parts for each in values_of(value, name)]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_targets_that_exist_and_actions_of_one_commit(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    commands = values_of(workflow["jobs"], "run")
    called = {
        re.fullmatch(r"make (\$\{\{ matrix\.target \}\}|\S+)( .*)?", each)[1] for each in commands
    }
    for chosen in values_of(workflow, "target"):
        called |= {chosen} if isinstance(chosen, str) else set(chosen)

    assert called
    assert called - {"${{ matrix.target }}"} <= set(targets)
    assert workflow["permissions"] == {"contents": "read"}  # a job asks for more where it needs it
    for action in values_of(workflow, "uses"):
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), action


def test_the_tests_run_on_every_python_that_the_project_declares():
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]

    assert matrix["python"] == declared
    assert PROJECT["requires-python"] == f">={declared[0]}"


def test_make_test_says_at_its_start_how_long_it_takes(tmp_path):
    """With a pytest that does nothing, and without setting up the environment again."""
    programs = f"BIN={Path(sys.executable).parent}"
    command = ["make", "--old-file", ".venv/.dev", "test", programs, "PYTEST=echo these:", "TESTS="]
    # As a person calls it: inside of another make, it would also print the directory.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env=outside
    )
    first, second = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]

    assert re.search(r"about \d+ minutes on 2 quiet cores; this machine has \d+", first)
    assert second.strip() == "these:"
