"""Fixtures that run commands, in this process or in a separate one."""

import json
import os
import select
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Run a command in this process, from an empty directory; returns click's result."""
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
def run_json(invoke):
    """Run a command with --json; returns the object it prints."""

    def run_json(*arguments, code=0):
        result = invoke(*arguments, "--json", code=code)
        assert not result.stderr
        return json.loads(result.stdout)

    return run_json


@pytest.fixture
def penstock(tmp_path):
    """Run a command in a separate process, without a terminal."""

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
def read_terminal(tmp_path):
    """Run a command whose stderr is a terminal; returns what the terminal got, and stdout."""

    def read_terminal(command):
        ours, theirs = pytest.importorskip("pty").openpty()
        running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs)
        os.close(theirs)
        data = b""
        while select.select([ours], [], [], 60)[0]:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux says EIO when the other end is closed
                break
            if not piece:
                break
            data += piece
        os.close(ours)
        return data.decode(), running.communicate(timeout=60)[0]

    return read_terminal


@pytest.fixture
def corpus(tmp_path):
    """A small text file: five lines, one of them blank."""
    path = tmp_path / "corpus.txt"
    path.write_text(
        "To be, or not to be:\nthat is the question.\n\nWhether 'tis nobler\nin the mind\n"
    )
    return path
