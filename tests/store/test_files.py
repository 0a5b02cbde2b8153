"""Files are there in full or not at all, also when there is no room."""

import errno
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from penstock.disk import HEADER_BYTES, digest_file, header, remove_temporary, room_for, write_file
from penstock.errors import DiskFullError, PenstockError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_with_its_size_and_digest(tmp_path):
    pieces = [b"head", np.arange(5, dtype="<u2"), b"", np.zeros((0, 2), "<u8"), memoryview(b"tail")]
    size, digest = write_file(tmp_path / "a", pieces)
    data = (tmp_path / "a").read_bytes()

    assert data == b"head" + bytes([0, 0, 1, 0, 2, 0, 3, 0, 4, 0]) + b"tail"
    assert (size, digest) == (len(data), xxhash.xxh3_128(data).hexdigest())
    assert digest == digest_file(tmp_path / "a")
    assert names(tmp_path) == ["a"]


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    def pieces():
        yield b"half of the new contents"
        raise KeyboardInterrupt

    write_file(tmp_path / "a", [b"old"])
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "a", pieces())

    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_only_what_writers_left_behind_is_removed(tmp_path):
    for name in (".part-00000.tokens.npy.17.0.tmp", ".hidden", "mine.tmp", ".slice-000000.json"):
        (tmp_path / name).write_text("x")
    remove_temporary(tmp_path)

    assert names(tmp_path) == [".hidden", ".slice-000000.json", "mine.tmp"]


def test_a_full_disk_is_an_error_of_ours_and_of_the_system(tmp_path, python):
    code = """
import pathlib, resource, sys
from penstock.disk import write_file
from penstock.errors import DiskFullError
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000))
try:
    write_file(pathlib.Path(sys.argv[1]), [bytes(600), bytes(600)])
except DiskFullError as error:
    print(error)
"""
    told = python(code, tmp_path / "a").stdout

    assert "No room to write" in told
    assert "bytes are free" in told
    assert "run the same command again to resume" in told
    assert names(tmp_path) == []
    assert issubclass(DiskFullError, OSError)
    assert issubclass(DiskFullError, PenstockError)


def test_a_full_disk_says_how_much_a_build_needs(tmp_path, python):
    """A limit on the size of a file fails a write as a full disk does."""
    code = """
import pathlib, resource, sys
import penstock
from penstock.sources.slices import cut
from penstock.errors import DiskFullError
cut.__kwdefaults__["slice_bytes"] = 3_000
folder = pathlib.Path(sys.argv[1])
lines = ["The fox jumps.\\n" * 200] * 10 + ["The fox jumps.\\n" * 2_000]
for number, text in enumerate(lines):
    (folder / f"{number:02}.txt").write_text(text)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    penstock.build(folder, folder / "store", tokenizer="bytes", documents="file", workers=1)
except DiskFullError as error:
    print(*error.__notes__)
"""
    folder = tmp_path / "in"
    folder.mkdir()
    told = python(code, folder).stdout

    whole, written, more = (
        int(number.replace(",", ""))
        for number in re.findall(r"([\d,]+\d) (?:bytes|are|more)", told)
    )
    text = 15 * (10 * 200 + 2_000)
    assert abs(whole - 2 * text) < 0.1 * 2 * text
    assert 10 * 2 * 15 * 200 <= written < whole
    assert more == whole - written


@pytest.mark.parametrize("shape", [(0,), (1,), (2**62,), (5, 2), (2**62, 2)])
@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<u8", "u1"])
def test_headers_are_those_that_numpy_reads(dtype, shape, tmp_path):
    spelled = header(np.dtype(dtype), shape)
    (tmp_path / "a.npy").write_bytes(spelled)
    with (tmp_path / "a.npy").open("rb") as stream:
        version = np.lib.format.read_magic(stream)
        found = np.lib.format.read_array_header_1_0(stream)

    assert len(spelled) == HEADER_BYTES
    assert version == (1, 0)
    assert found == (shape, False, np.dtype(dtype))


@pytest.mark.parametrize("extra", [-1, 0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 4096])
def test_large_files_hold_every_byte(tmp_path, extra):
    data = np.random.default_rng(extra + 1).bytes((4 << 20) + extra)
    pieces = [data[:128], np.frombuffer(data, np.uint8)[128:3_000_001], data[3_000_001:]]

    size, digest = write_file(tmp_path / "file", pieces)

    assert (tmp_path / "file").read_bytes() == data
    assert (size, digest) == (len(data), xxhash.xxh3_128(data).hexdigest())


def _write_own(folder, number):
    data = np.full(3_000_000, number, np.uint16)
    _, digest = write_file(folder / f"{number}.bin", [data])
    found = np.fromfile(folder / f"{number}.bin", np.uint16)
    return bool((found == number).all()) and digest == xxhash.xxh3_128(data).hexdigest()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_processes_that_were_forked_do_not_write_through_one_buffer(tmp_path):
    write_file(tmp_path / "before", [b"the parent has written"])

    with multiprocessing.get_context("fork").Pool(2) as pool:
        jobs = [(tmp_path, number) for number in range(1, 9)]
        assert pool.starmap(_write_own, jobs, chunksize=1) == [True] * 8


def test_a_piece_may_write_a_file_of_its_own(tmp_path):
    def pieces():
        yield b"a" * 1_000
        write_file(tmp_path / "inner", [b"b" * 2_000])
        yield b"c" * 1_000

    write_file(tmp_path / "outer", pieces())

    assert (tmp_path / "outer").read_bytes() == b"a" * 1_000 + b"c" * 1_000
    assert (tmp_path / "inner").read_bytes() == b"b" * 2_000


# Runs as root of a separate namespace, where it may mount a file system with few inodes.
NO_INODES = """
import os, pathlib, subprocess, sys
import penstock
from penstock.errors import DiskFullError
from penstock.sources.slices import cut
cut.__kwdefaults__["slice_bytes"] = 6_000
inputs, folder = sys.argv[1:]
store = pathlib.Path(folder, "stores", "store")
subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=100", "tmpfs", folder], check=True)

def build():
    penstock.build(inputs, store, tokenizer="bytes", documents="lines", workers=2, max_bad=10)

build()
whole = {path.name: path.read_bytes() for path in store.iterdir()}
needed = 100 - os.statvfs(folder).f_favail
for free in range(needed):
    subprocess.run(f"rm -rf {folder}/*", shell=True, check=True)
    for number in range(os.statvfs(folder).f_favail - free):
        pathlib.Path(folder, f"other-{number}").touch()
    try:
        build()
    except DiskFullError as error:
        assert "inodes of the file system are in use, although" in str(error), error
        print("full", flush=True)
    subprocess.run(f"rm {folder}/other-*", shell=True, check=True)
    build()
    assert whole == {path.name: path.read_bytes() for path in store.iterdir()}
"""


def may_mount():
    tried = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return (
        shutil.which("unshare") is not None
        and not subprocess.run(tried, capture_output=True).returncode
    )


@pytest.mark.skipif(not may_mount(), reason="unshare and mount are not allowed here")
def test_a_file_system_without_free_inodes_is_full(inputs, tmp_path):
    """With every number of free inodes that is too small; when there are more, it resumes."""
    (tmp_path / "disk").mkdir()
    command = ["unshare", "-rm", sys.executable, "-c", NO_INODES, inputs, tmp_path / "disk"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("full") > 5


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no inodes")
@pytest.mark.parametrize(
    ("inodes", "free", "why"),
    [
        (100, 5, "it needs more than 0 bytes, and 4,096 bytes are free"),
        (0, 0, "it needs more than 0 bytes, and 4,096 bytes are free"),
        (100, 0, "all 100 inodes of the file system are in use, although 4,096 bytes are free"),
    ],
)
def test_a_full_disk_names_the_file_and_what_is_missing(tmp_path, monkeypatch, inodes, free, why):
    counts = {"f_frsize": 4096, "f_blocks": 9, "f_bfree": 1, "f_bavail": 1}
    found = SimpleNamespace(**counts, f_files=inodes, f_favail=free)
    monkeypatch.setattr("os.statvfs", lambda path: found)
    path, other = tmp_path / "part.npy", tmp_path / "other.npy"

    for name, named in ((None, path), (str(other), other), (f"{other}.tmp", path)):
        with pytest.raises(DiskFullError) as caught, room_for(path):
            raise OSError(errno.ENOSPC, "No space left", name)
        assert f"No room to write {named}: {why}" in str(caught.value)
