"""Fixtures that run commands in a separate process; `invoke` runs them in this one."""

import os
import select
import subprocess

import pytest
import zygote


@pytest.fixture
def penstock(tmp_path):
    """Run a command in a separate process, without a terminal."""

    def penstock(*arguments, check=True, **environment):
        return zygote.run(
            ["-m", "penstock", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            check=check,
            timeout=240,
        )

    return penstock


@pytest.fixture
def read_terminal(tmp_path):
    """Run Python with stderr as a terminal; returns what the terminal got, and stdout."""

    def read_terminal(command):
        ours, theirs = pytest.importorskip("pty").openpty()
        running = zygote.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs)
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
        return data.decode(), running.communicate(timeout=240)[0]

    return read_terminal


@pytest.fixture
def corpus(tmp_path):
    """A small text file: five lines, one of them blank."""
    path = tmp_path / "corpus.txt"
    path.write_text(
        "To be, or not to be:\nthat is the question.\n\nWhether 'tis nobler\nin the mind\n"
    )
    return path
