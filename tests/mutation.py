"""Mutation testing: small bugs in the code that orders data, keeps states and commits stores.

    pip install cosmic-ray                        in another environment; only `draw` needs it
    python tests/mutation.py draw mutants.json    draws 600 mutants with the seed 15
    python tests/mutation.py run mutants.json     runs tests against each; prints the survivors

A mutant is one change by an operator of cosmic-ray, such as `<` to `<=`, `+` to `-` or 1 to 2. For
each mutant, the tests of its file run until one fails; a test that hangs has found the mutant, too.
`run` needs nothing but what the tests need, so it can run on another machine than `draw`. Each of
its processes works in a copy of the tree.

Not drawn: changes of annotations, and of `==` to `is`. Type checkers find the first, and the second
changes nothing for small integers.
"""

import argparse
import difflib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parent.parent
STORE_TESTS = ["files", "lock", "append", "overwrite", "touched_inputs", "nothing_built", "build"]
STORE_TESTS += ["crash", "resume", "holdout", "damage", "golden", "drift"]
STATE_TESTS = ["state", "state_golden", "resume", "schedules"]
# The tests of a file run in this order, and its doctests before them.
TESTS = {
    "src/penstock/order": ["tests/order"],
    "src/penstock/loader/state.py": [f"tests/loader/test_{each}.py" for each in STATE_TESTS],
    **{
        f"src/penstock/store/{name}.py": [f"tests/store/test_{each}.py" for each in STORE_TESTS]
        for name in ("build", "existing", "journal", "overwrite", "files", "lock")
    },
}
# Files whose tests are not those of their directory.
OTHER_TESTS = {"src/penstock/order/budget.py": ["tests/rows/test_documents_budget.py"]}
# A mutant that needs longer counts as found. Without a mutant, the longest list takes about 50 s
# on two busy cores.
LONGEST_SECONDS = 240


def say(text):
    """Print a line at once, also into a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def targets():
    """Each file to mutate, with its tests."""
    for place, tests in TESTS.items():
        path = ROOT / place
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            name = str(file.relative_to(ROOT))
            if file.name != "__init__.py":
                yield file, [name, *OTHER_TESTS.get(name, tests)]


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
    sources = {file: file.read_text() for file, _ in targets()}
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
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:randomly"]
    command += ["-p", "no:cacheprovider", "-m", "not torture and not gpu and not slow", *tests]
    paths = [str(tree / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            return "timed out", ""
        finally:
            end(child)
        output.seek(0)
        text = output.read()[-2_000:]
    return ("survived" if code == 0 else "killed"), text


def end(child):
    """End the process of the tests, and what they have started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def run(arguments):
    """Run the tests of each mutant, and print how many were found and which were not."""
    mutants = json.loads(Path(arguments.mutants).read_text())[arguments.skip :][: arguments.first]
    tests = {str(file.relative_to(ROOT)): each for file, each in targets()}
    sources = {file: (ROOT / file).read_text() for file in tests}
    begun, done, lock = time.monotonic(), Counter(), threading.Lock()
    survivors = []
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
            result, _ = trees.test(tests[file], file, "\n".join(changed) + "\n")
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
            # Without a mutant all tests pass, or every mutant would seem to be found.
            lists = {tuple(each[1:]) for each in tests.values()}
            for each, (result, text) in zip(lists, pool.map(trees.test, lists), strict=True):
                if result != "survived":
                    raise SystemExit(f"{' '.join(each)} without a mutant: {result}\n{text}")
            say(f"without a mutant all tests pass, {time.monotonic() - begun:.0f} s")
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
    drawing, running = commands.add_parser("draw"), commands.add_parser("run")
    for each, action in ((drawing, draw), (running, run)):
        each.add_argument("mutants", help="a JSON file")
        each.set_defaults(action=action)
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
