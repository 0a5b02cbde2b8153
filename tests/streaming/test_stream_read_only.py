"""`ps.stream` over a finished store in a directory that cannot be written."""

import os
import shutil
import subprocess
import sys

import pytest

import penstock as ps

_READ = """
import sys
import penstock as ps

texts, path = ps.Texts([f"text {n}" for n in range(int(sys.argv[2]))]), sys.argv[1]
try:
    open(f"{path}/new", "w")
except OSError:
    with ps.stream(texts, path, tokenizer="bytes") as store:
        print(len(store), len(list(store)), store.sealed)
"""


def read_only(path, *arguments):
    """Run `_READ` in a process for which the directory around `path` is read-only."""
    command = [sys.executable, "-c", _READ, str(path), *map(str, arguments)]
    if os.geteuid() == 0:  # permissions do not stop this user, but a read-only mount does
        mount = (
            f"mount --bind {path.parent} {path.parent} && mount -o remount,ro,bind {path.parent}"
        )
        if not shutil.which("unshare") or subprocess.run(["unshare", "-m", "true"]).returncode:
            pytest.skip("a read-only mount is not possible here")
        command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
    else:
        path.chmod(0o555)
        path.parent.chmod(0o555)
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=120)
    finally:
        path.parent.chmod(0o755)
        path.chmod(0o755)


@pytest.fixture
def store(tmp_path):
    texts = ps.Texts([f"text {number}" for number in range(50)])
    return ps.build(texts, tmp_path / "around" / "store", tokenizer="bytes").path


def test_a_finished_store_is_read(store):
    done = read_only(store, 50)

    assert done.stdout.split() == ["50", "50", "True"], done.stderr


def test_a_finished_store_of_other_inputs_is_refused(store):
    done = read_only(store, 51)

    assert "StoreError" in done.stderr
    assert "is a finished store that was built differently" in done.stderr
