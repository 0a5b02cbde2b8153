"""Runs examples in this process, which has imported torch and Lightning already.

One test of each example starts a fresh process, as a reader does.
"""

import runpy
import subprocess
import sys

import pytest


@pytest.fixture
def run_here(tmp_path, monkeypatch, capsys):
    """Run a script as `python SCRIPT ARGUMENTS` does; returns a finished process.

    Warnings are errors, as they are in all tests, and an error of the script is one of the test.
    """

    def run_here(script, *arguments):
        monkeypatch.chdir(tmp_path)
        words = [str(script), *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", words)
        code = None
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(words, code or 0, shown.out, shown.err)

    return run_here
