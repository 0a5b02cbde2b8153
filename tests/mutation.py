"""Mutation testing: small bugs in the code that orders data, keeps states and commits stores.

    pip install cosmic-ray coverage               `draw` needs the first, `cover` the second
    python tests/mutation.py draw mutants.json    draws 600 mutants with the seed 15
    python tests/mutation.py cover lines.json     notes which tests execute which lines
    python tests/mutation.py run mutants.json lines.json    prints how many are found, and the rest

A mutant is one change by an operator of cosmic-ray, such as `<` to `<=`, `+` to `-` or 1 to 2. For
each mutant, the doctests of its file and then the tests that execute its lines run, the fastest
first, until one fails; a test that hangs has found the mutant, too. Lines that run at import have
no tests of their own: the tests of any line of the file run. A test that fails without a mutant,
such as one that needs a main module of its own, is left out. Each process works in a copy of the
tree. `run` needs nothing but what the tests need.

Not drawn: changes of annotations, and of `==` to `is`. Type checkers find the first, and the second
changes nothing for small integers.
"""

import argparse
import difflib
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue

import pytest

ROOT = Path(__file__).parent.parent
MUTATED = ["src/penstock/order", "src/penstock/loader/state.py"] + [
    f"src/penstock/store/{name}.py"
    for name in ("build", "existing", "journal", "overwrite", "files", "lock")
]
TESTS = [
    "tests/order",
    "tests/loader",
    "tests/rows",
    "tests/store",
    "tests/cli",
    "tests/test_habits.py",
    "--ignore=tests/loader/test_processes.py",
]
# The tests of a mutant take about this long; slower ones than fit are left out.
MOST_SECONDS = 30
# A mutant that needs longer counts as found. Without a mutant, the longest list takes about 50 s
# on two busy cores.
LONGEST_SECONDS = 240
OPTIONS = ["-q", "--tb=line", "-p", "no:randomly", "-p", "no:cacheprovider", "-o", "timeout=40"]
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
OPTIONS += ["-m", "not torture and not gpu and not slow"]
# A process of tests is forked from one that has imported these.
PROCESSES = multiprocessing.get_context("forkserver")
IMPORTED = ["numpy", "torch", "pyarrow.parquet", "hypothesis", "pytest", "tokenizers", "yaml"]


def say(text):
    """Print a line at once, also into a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def targets():
    """Each file to mutate."""
    for place in MUTATED:
        path = ROOT / place
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            if file.name != "__init__.py":
                yield file


class Lines:
    """A plugin of pytest that notes the lines of the mutated files that each test executes."""

    def __init__(self):
        import coverage

        files = [str(file) for file in targets()]
        self._coverage = coverage.Coverage(data_file=None, config_file=False, include=files)
        self._seconds, self._failed = {}, set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._coverage.switch_context(item.nodeid)
        begun = time.monotonic()
        result = yield
        if item.nodeid not in self._failed:
            self._seconds[item.nodeid] = time.monotonic() - begun
        return result

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionstart(self):
        self._coverage.start()

    def pytest_sessionfinish(self):
        self._coverage.stop()

    def found(self):
        """For each file and line, the tests that execute it, the fastest first."""
        data = self._coverage.get_data()
        return {
            str(file.relative_to(ROOT)): {
                line: sorted((self._seconds[test], test) for test in tests if test in self._seconds)
                for line, tests in data.contexts_by_lineno(str(file)).items()
            }
            for file in targets()
        }


def cover(arguments):
    """Run the tests once, and write which of them execute which lines."""
    child = PROCESSES.Process(target=pytest_in, args=(ROOT, TESTS, None, arguments.lines))
    child.start()
    child.join()


def tests_of(mutant, lines):
    """The tests to run against a mutant: those of its lines, else those of its file."""
    found = lines[mutant["file"]]
    first, last = mutant["lines"]
    own = [each for line in range(first + 1, last + 1) for each in found.get(str(line), [])]
    chosen, seconds = [], 0.0
    for took, test in sorted(
        set(map(tuple, own or [each for line in found.values() for each in line]))
    ):
        if chosen and seconds + took > MOST_SECONDS:
            break
        chosen.append(test)
        seconds += took
    return [mutant["file"], *chosen]


def places_of(source):
    """Each place that can be changed, with the (operator, number) pairs that change it."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    found = {}
    tree = get_ast(source)
    for name in operator_names():
        is_to_same = name.endswith(("_Is", "_IsNot")) and "Operator_Is" not in name
        if is_to_same or "Variable" in name or name.endswith("NoOp"):
            continue
        operator, number = get_operator(name)(), 0
        for node in ast_nodes(tree):
            for start, _ in operator.mutation_positions(node):
                if not is_annotation(node):
                    found.setdefault(start, []).append((name, number))
                number += 1
    return found


def is_annotation(node):
    """Whether a node of parso's tree is inside of an annotation."""
    while (parent := node.parent) is not None:
        place = parent.children.index(node)
        if parent.type in ("tfpdef", "annassign") and parent.children[place - 1] == ":":
            return True
        if parent.type == "funcdef" and parent.children[place - 1] == "->":
            return True
        node = parent
    return False


def draw(arguments):
    """Write a sample of mutants: places are equally likely, and so are the changes of a place."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    chance, mutants = random.Random(arguments.seed), []
    sources = {file: file.read_text() for file in targets()}
    places = [
        (file, place, changes)
        for file, source in sources.items()
        for place, changes in sorted(places_of(source).items())
    ]
    chance.shuffle(places)
    for file, place, changes in places:
        name, number = chance.choice(changes)
        changed = mutate_code(sources[file], get_operator(name)(), number)
        old, new = sources[file].splitlines(), changed.splitlines()
        if old == new:
            continue
        same = [
            len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*both, strict=False))))
            for both in ((old, new), (old[::-1], new[::-1]))
        ]
        last = min(same[1], len(old) - same[0], len(new) - same[0])
        mutants.append(
            {
                "file": str(file.relative_to(ROOT)),
                "sha256": hashlib.sha256(sources[file].encode()).hexdigest(),
                "operator": name.removeprefix("core/"),
                "line": place[0],
                "lines": [same[0], len(old) - last],
                "new": new[same[0] : len(new) - last],
            }
        )
        if len(mutants) == arguments.count:
            break
    Path(arguments.mutants).write_text(json.dumps(mutants, indent=0))
    say(f"{len(mutants)} mutants of {len(places):,} places in {len(sources)} files")


class Trees:
    """Copies of the repository, one for each process."""

    def __init__(self, folder, number):
        self._free = SimpleQueue()
        for each in range(number):
            tree = Path(folder) / f"tree-{each}"
            ignored = shutil.ignore_patterns("__pycache__")
            for name in ("src", "tests"):
                shutil.copytree(ROOT / name, tree / name, ignore=ignored)
            shutil.copy(ROOT / "pyproject.toml", tree)
            self._free.put(tree)

    def test(self, tests, file=None, source=None):
        """Run tests in a free tree, where `file` has other contents; "survived" if all pass."""
        tree = self._free.get()
        try:
            if file is not None:
                (tree / file).write_text(source)
                remove_bytecode(tree / file)
            return run_tests(tree, tests)
        finally:
            if file is not None:
                shutil.copy(ROOT / file, tree / file)
                remove_bytecode(tree / file)
            self._free.put(tree)


def remove_bytecode(path):
    """Remove the compiled file: a change within a second that keeps the size would not be seen."""
    for each in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        each.unlink()


def run_tests(tree, tests):
    """Run tests in a new process that has imported the libraries already."""
    with tempfile.NamedTemporaryFile("r", dir=tree) as output:
        child = PROCESSES.Process(target=pytest_in, args=(tree, tests, output.name))
        child.start()
        child.join(LONGEST_SECONDS)
        code = child.exitcode
        end(child)
        text = output.read()[-2_000:]
    if code is None:
        return "timed out", ""
    return ("survived" if code == 0 else "killed"), text


def pytest_in(tree, tests, output, lines=None):
    """Run pytest in a tree; its result is the exit code of this process.

    With `lines`, all tests run, and the lines that they execute are written to that file.
    """
    os.setsid()
    # Processes that a test starts would import this file as their main module.
    sys.modules["__main__"] = types.ModuleType("__main__")
    if output is not None:
        log = os.open(output, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(log, stream)
    os.chdir(tree)
    sys.path.insert(0, str(tree / "src"))
    paths = [str(tree / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if lines is None:
        sys.exit(pytest.main([*OPTIONS, "-x", *tests]))
    plugin = Lines()
    code = pytest.main([*OPTIONS, *tests], plugins=[plugin])
    Path(lines).write_text(json.dumps(plugin.found()))
    sys.exit(code)


def end(child):
    """End the process of the tests, and what they have started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.join()


def run(arguments):
    """Run the tests of each mutant, and print how many were found and which were not."""
    mutants = json.loads(Path(arguments.mutants).read_text())[arguments.skip :][: arguments.first]
    lines_of = json.loads(Path(arguments.lines).read_text())
    sources = {file: (ROOT / file).read_text() for file in lines_of}
    begun, done, lock = time.monotonic(), Counter(), threading.Lock()
    survivors = []
    PROCESSES.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        trees = Trees(folder, arguments.processes)

        def test(mutant):
            file = mutant["file"]
            source = sources[file]
            if hashlib.sha256(source.encode()).hexdigest() != mutant["sha256"]:
                raise SystemExit(
                    f"{file} has changed after the mutants were drawn. Draw them again."
                )
            lines, (first, last) = source.splitlines(), mutant["lines"]
            changed = [*lines[:first], *mutant["new"], *lines[last:]]
            result, _ = trees.test(tests_of(mutant, lines_of), file, "\n".join(changed) + "\n")
            with lock:
                done[result] += 1
                if result == "survived":
                    survivors.append((file, mutant["line"], mutant["operator"], lines, changed))
                if sum(done.values()) % 20 == 0:
                    say(
                        f"{sum(done.values())} of {len(mutants)}: {dict(done)}, "
                        f"{time.monotonic() - begun:.0f} s"
                    )

        with ThreadPoolExecutor(arguments.processes) as pool:
            list(pool.map(test, mutants))
    for file, line, operator, lines, changed in sorted(survivors, key=lambda each: each[:2]):
        say(f"\nsurvived: {file}:{line} {operator}")
        for each in list(difflib.unified_diff(lines, changed, lineterm="", n=1))[3:]:
            say(f"    {each}")
    found = done["killed"] + done["timed out"]
    say(
        f"\nfigure: {found} of {len(mutants)} mutants were found ({found / len(mutants):.1%}), "
        f"{done['timed out']} of them because a test hung"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    drawing, covering, running = map(commands.add_parser, ("draw", "cover", "run"))
    for each, action in ((drawing, draw), (covering, cover), (running, run)):
        each.set_defaults(action=action)
    for each in (drawing, running):
        each.add_argument("mutants", help="a JSON file")
    for each in (covering, running):
        each.add_argument("lines", help="a JSON file")
    drawing.add_argument("--seed", type=int, default=15)
    drawing.add_argument("--count", type=int, default=600)
    running.add_argument("--processes", type=int, default=os.cpu_count())
    running.add_argument("--skip", type=int, default=0, help="leave out this many of them")
    running.add_argument("--first", type=int, help="run only this many of them")
    running.add_argument("--folder", help="a directory for the copies of the tree")
    arguments = parser.parse_args()
    arguments.action(arguments)


if __name__ == "__main__":
    main()
