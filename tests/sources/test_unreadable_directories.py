"""Every input is listed, or the listing fails: nothing is left out because it cannot be read.

File modes do not bind root. So each listing runs in a process of its own that has given up the
right to pass them by (CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH), as any other user's process.
"""

import ctypes
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

PR_CAPBSET_DROP = 24
CAPABILITIES = (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
LIST = """
import sys
import penstock
from penstock.sources.listing import list_files
from penstock.options import ReadSettings
for pattern in sys.argv[1:]:
    try:
        print(len(list_files(pattern, ReadSettings(format="text"))))
    except penstock.errors.SourceError as error:
        print(type(error).__name__, error)
"""
BUILD = """
import sys
from penstock.cli.app import run
sys.argv = ["penstock", "build", sys.argv[1], "-o", sys.argv[2], "--tokenizer", "bytes"]
run()
"""


def _give_up_rights():
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in CAPABILITIES:
        assert libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0


def unprivileged(code, *arguments, **environment):
    """Run code in a process that file modes bind."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=_give_up_rights if os.getuid() == 0 else None,
    )


@pytest.fixture
def tree(tmp_path):
    """Four documents in three directories."""
    root = tmp_path / "tree"
    for name in ("a/1.txt", "a/2.txt", "b/c/3.txt", "b/4.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    yield root
    for name in ("b", "b/c"):
        (root / name).chmod(0o755)  # for those who remove it


PATTERNS = ["{}", "{}/**/*.txt", "{}/*/*.txt", "{}/b/**", "file://{}", "file://{}/**/*.txt"]


def listed(tree, patterns=PATTERNS, before=""):
    """What listing answers to each pattern: a number of files, or the error."""
    done = unprivileged(before + LIST, *(pattern.format(tree) for pattern in patterns))
    assert done.returncode == 0, done.stderr
    return dict(zip(patterns, done.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("mode", [0o000, 0o111, 0o444])
def test_a_directory_that_cannot_be_read_is_an_error(tree, mode):
    (tree / "b").chmod(mode)
    for pattern, answer in listed(tree).items():
        assert answer.startswith(f"SourceError {tree / 'b'}"), pattern
        assert "Permission denied" in answer


def test_the_same_directories_readable_are_listed(tree):
    expected = {
        pattern: "2" if "/b/" in pattern else "3" if "/*/" in pattern else "4"
        for pattern in PATTERNS
    }
    assert listed(tree) == expected


def test_a_directory_below_that_cannot_be_read_is_an_error(tree):
    (tree / "b" / "c").chmod(0)
    for pattern, answer in listed(tree).items():
        if "/*/" not in pattern:  # which does not reach so deep
            assert answer.startswith(f"SourceError {tree / 'b' / 'c'}"), pattern


def test_a_directory_that_no_pattern_enters_may_be_closed(tree):
    (tree / "b").chmod(0)
    assert set(listed(tree, ("{}/a/*.txt", "{}/a", "file://{}/a")).values()) == {"2"}


@pytest.mark.parametrize("pattern", PATTERNS[:2])
def test_a_build_fails_and_leaves_no_store(tree, tmp_path, pattern):
    (tree / "b").chmod(0)
    done = unprivileged(BUILD, pattern.format(tree), tmp_path / "store", COLUMNS="200")

    assert done.returncode == 1, done
    assert "Permission denied" in done.stderr
    assert not (tmp_path / "store" / "penstock.json").exists()


def test_an_input_output_error_of_a_directory_is_an_error(tree):
    """What the system answers where a disk is bad: EIO from the directory itself."""
    code = f"""
import errno, os
bad = {str(tree / "b")!r}
for name in ("listdir", "scandir"):
    def failing(path=".", real=getattr(os, name)):
        if os.path.realpath(os.fspath(path)).startswith(bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path)
    setattr(os, name, failing)
"""
    for pattern, answer in listed(tree, before=code).items():
        assert answer.startswith("SourceError"), pattern
        assert "Input/output error" in answer


def naive_glob(root, pattern):
    """What a pattern means, by trying it on every path that there is."""
    import glob

    monkey = {str(path) for path in root.rglob("*") if path.is_file()}
    return sorted(monkey & set(glob.glob(pattern, recursive=True)))  # noqa: PTH207


@pytest.mark.parametrize("seed", range(20))
def test_patterns_mean_what_they_mean_to_glob(tmp_path, seed, monkeypatch):
    from penstock.sources.listing import KINDS, _Finder

    rng = random.Random(seed)
    monkeypatch.chdir(tmp_path)
    names = ["a", "b", "ab", ".h", "a[1]", "x y"]
    for _ in range(25):
        folder = Path(*rng.choices(names, k=rng.randint(0, 3)))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{rng.choice(names)}.txt").write_text("x")
    words = ["*", "**", "a*", "[ab]", "?", "a", "*.txt", "**", "a.txt", ".*", "*b*"]
    for _ in range(40):
        pattern = "/".join(rng.choices(words, k=rng.randint(1, 4)))
        prefix = rng.choice(["", "./", f"{tmp_path}/"])
        if not any(letter in pattern for letter in "*?["):
            continue
        root = tmp_path if prefix.startswith("/") else Path()
        expected = naive_glob(root, prefix + pattern)
        if prefix == "./":
            expected = sorted(f"./{name}" for name in naive_glob(root, pattern))
        finder = _Finder({kind: set() for kind in KINDS})
        assert sorted(finder.matching(prefix + pattern)) == expected, prefix + pattern
