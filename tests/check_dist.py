"""Checks a release: the files of wheel and sdist, and the wheel in a new environment.

    make dist                     # builds dist/, then runs: python tests/check_dist.py dist
    make dist TAG=v1.2.3          # also compares the tag with the version and the changelog

1. The wheel holds the files of src/penstock, and no others. The sdist holds the repository, and
   some of its tests run without the repository.
2. An environment outside of the repository gets the wheel without extras. From an empty directory,
   `penstock demo` runs there.
3. With the extra `report`, the blocks of README.md run there, in order.
4. With all other extras, the packages of each of them can be imported.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUPPORT = ROOT / "tests" / "support"
NOT_RELEASED = (".ci/",)


def main():
    sys.path.append(str(SUPPORT))  # which pytest has from pyproject.toml
    # Not at the top, because pytest collects this file and cannot import its neighbours from it.
    from test_packaging import EXTRAS
    from test_surface import PREAMBLE, examples

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dist", type=Path)
    parser.add_argument("tag", nargs="?")
    options = parser.parse_args()
    (wheel,) = options.dist.glob("*.whl")
    (sdist,) = options.dist.glob("*.tar.gz")
    version = wheel.name.split("-")[1]
    if options.tag:
        check_tag(options.tag, version)
    check_files(wheel, sdist, version)
    with tempfile.TemporaryDirectory() as directory:
        check_sdist(sdist, Path(directory, "sdist"))
        blocks = examples(ROOT / "README.md")
        check_wheel(wheel.resolve(), version, Path(directory, "wheel"), blocks, PREAMBLE, EXTRAS)
    say(f"{wheel.name} and {sdist.name} are complete")


def check_tag(tag, version):
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    expect(tag == f"v{version}", f"The tag is {tag}, and __version__ is {version}.")
    expect(f"\n## {version}" in changes, f"CHANGELOG.md has no heading for {version}.")


def check_files(wheel, sdist, version):
    listed = run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard")
    tracked = {each for each in listed.splitlines() if (ROOT / each).is_file()}

    info = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    packaged = {each.removeprefix("src/") for each in tracked if each.startswith("src/penstock/")}
    packaged |= {f"penstock-{version}.dist-info/{each}" for each in info}
    with zipfile.ZipFile(wheel) as archive:
        compare("wheel", set(archive.namelist()), packaged)

    released = {each for each in tracked if not each.startswith(NOT_RELEASED)} | {"PKG-INFO"}
    with tarfile.open(sdist) as archive:
        found = {each.name.partition("/")[2] for each in archive.getmembers()}
    compare("sdist", found, released)
    say(f"the wheel has {len(packaged)} files, and the sdist {len(released)}")


def compare(what, found, expected):
    expect(not found - expected, f"The {what} has files of no use: {sorted(found - expected)}")
    expect(not expected - found, f"The {what} lacks files: {sorted(expected - found)}")


def check_sdist(sdist, directory):
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    (root,) = directory.iterdir()
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    few = [root / "tests" / each for each in ("test_packaging.py", "test_contributing.py")]
    passed = run(*pytest, *few, cwd=root, env=environment)
    say(f"sdist: {passed.splitlines()[-1]}")


def check_wheel(wheel, version, directory, blocks, preamble, extras):
    environment, empty = directory / "venv", directory / "empty"
    venv.create(environment, with_pip=True)
    programs = environment / "bin"
    empty.mkdir()
    # Nothing of this process's environment may lead to the repository.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    kept |= {"PENSTOCK_CACHE": str(directory / "cache"), "COLUMNS": "80"}
    kept["PATH"] = f"{programs}{os.pathsep}{kept['PATH']}"

    def here(*command):
        return run(*command, cwd=empty, env=kept)

    def install(names=""):
        constraints = ROOT / "constraints.txt"
        pip = (programs / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q")
        here(*pip, "-c", constraints, f"{wheel}{names}")

    install()
    expect(here("penstock", "--version") == f"penstock {version}\n", "--version is another one.")
    imported = here(programs / "python", "-c", "import penstock; print(penstock.__file__)")
    expect(imported.startswith(str(environment.resolve())), f"penstock is at {imported}")
    say(
        "without extras: "
        + here("penstock", "demo", "--train-seconds", "2").strip().splitlines()[-1]
    )

    install("[report]")
    (empty / "input.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 2_000)
    code = "\n".join([preamble.format(programs=str(programs)), *blocks])
    (empty / "readme.py").write_text(code, encoding="utf-8")
    done = subprocess.run([programs / "python", "readme.py"], cwd=empty, env=kept, check=False)
    expect(done.returncode == 0, f"README.md: {(empty / 'log').read_text(encoding='utf-8')}")
    say(f"README.md: {len(blocks)} blocks ran")

    install(f"[{','.join(extras)}]")
    for extra, packages in extras.items():
        here(programs / "python", "-c", f"import {', '.join(packages)}")
        say(f"penstock[{extra}]: {', '.join(packages)}")


def run(*command, **options):
    """The output of a command; ends this script with all output if the command fails."""
    words = [str(each) for each in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    expect(done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def expect(holds, message):
    if not holds:
        sys.exit(f"check_dist: {message}")


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
