"""Commands run in this process, or as a person runs them: in a process of their own."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Run a command in this process, from an empty directory; returns what click's runner does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def invoke(*arguments, code=0):
        result = CliRunner().invoke(app, [str(each) for each in arguments])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return invoke


@pytest.fixture
def told(invoke):
    """Run a command with --json; returns the object it prints."""

    def told(*arguments, code=0):
        result = invoke(*arguments, "--json", code=code)
        assert not result.stderr
        return json.loads(result.stdout)

    return told


@pytest.fixture
def penstock(tmp_path):
    """Run a command in a process of its own, without a terminal."""

    def penstock(*arguments, check=True, **environment):
        return subprocess.run(
            [sys.executable, "-m", "penstock", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            check=check,
            timeout=60,
        )

    return penstock


@pytest.fixture
def corpus(tmp_path):
    """A small text file: five lines, one of them blank."""
    path = tmp_path / "corpus.txt"
    path.write_text(
        "To be, or not to be:\nthat is the question.\n\nWhether 'tis nobler\nin the mind\n"
    )
    return path
