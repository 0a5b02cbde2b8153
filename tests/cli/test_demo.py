"""The demo works on any machine, without a network, and twice."""

import json
import re
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import demo
from penstock.errors import SourceError


@pytest.fixture(scope="module")
def files():
    return demo.library_files()


def test_the_library_is_found_without_its_tests(files):
    names = {file.name for file in files}

    assert {"this.py", "abc.py", "argparse.py"} <= names
    assert not any({"test", "tests", "site-packages"} & set(file.parts) for file in files)
    assert files == sorted(files)


def test_modules_that_are_links_are_left_out(monkeypatch, tmp_path):
    """As Debian has them: a build refuses the same file under two names."""
    (tmp_path / "real.py").write_text("pass\n")
    (tmp_path / "link.py").symlink_to("real.py")
    monkeypatch.setattr(demo.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})

    assert demo.library_files() == [tmp_path / "real.py"]


def test_a_python_without_sources_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(demo.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})

    with pytest.raises(SourceError, match="has no source files of the standard library"):
        demo.library_files()


def test_pages_are_docstrings_under_their_names(files):
    abc = [file for file in files if file.name == "abc.py" and file.parent.name != "collections"]
    pages = dict(demo.prose_pages(abc))

    assert pages["abc"].startswith("abc\n\nAbstract Base Classes (ABCs) according to PEP 3119.\n")
    assert "\n\nregister\n\nRegister a virtual subclass of an ABC." in pages["abc"]
    assert "help: lambda" in pages


def test_prose_is_written_once(files, tmp_path):
    path = tmp_path / "prose.jsonl"
    names = demo.write_prose(path, files[:20])
    written = path.stat().st_mtime_ns

    assert demo.write_prose(path, files[:20]) == names
    assert path.stat().st_mtime_ns == written
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()] == names


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.torture)])
def test_the_demo_shows_all_steps_and_ends_with_what_to_do_next(invoke, monkeypatch, files, every):
    """On every tenth module; `make torture` and `make demo` take all of them."""
    kept = [file for n, file in enumerate(files) if n % every == 0 or file.name == "antigravity.py"]
    monkeypatch.setattr(demo, "library_files", lambda: kept)
    shown = invoke("demo", "--train-seconds", "1").stdout

    assert re.findall(r"^\d+\. ", shown, re.M) == [f"{number}. " for number in range(1, 13)]
    assert "antigravity.py, offset 0" in shown
    assert shown.count("is intact") == 2
    assert shown.count("found finished") == 2
    rows = re.findall(r"^  (?:inputs|targets)  +(.+) …$", shown, re.M)
    assert len(rows) == 4
    for inputs, targets in (rows[:2], rows[2:]):  # a target is the input after it
        assert targets.startswith(inputs.partition(" ")[2] if inputs[1] != " " else "")
    assert "200 steps, the same rows as with one process" in shown
    assert shown.splitlines()[-4] == "What to do next"
    assert max(map(len, shown.splitlines())) <= 100
    assert "open demo/report.html in a browser" in shown
    assert "<svg" in Path("demo/report.html").read_text(encoding="utf-8")
    assert Path("demo/run/curve.svg").exists()
    for name in ("code", "prose"):
        assert len(ps.verify(f"demo/{name}")) > 500 / every


def test_a_second_demo_finds_all_done(invoke, monkeypatch, files):
    monkeypatch.setattr(demo, "library_files", lambda: files[:40])
    invoke("demo", "--directory", "here", "--train-seconds", "0")

    assert (
        invoke("demo", "--directory", "here", "--train-seconds", "0").stdout.count("found finished")
        == 4
    )


def test_the_training_run_ends_with_a_curve(tmp_path):
    store = ps.build(ps.Texts(["some words " * 9] * 99), tmp_path / "store", tokenizer="bytes")
    result = demo.train_shortly(store.path, tmp_path / "run", seconds=1.5)

    assert result.finished
    assert result.progress.step >= 1
    assert "<svg" in (tmp_path / "run" / "curve.svg").read_text()
