"""Imports point one way, and nothing in the package can run code that came as data.

errors, digest, disk ← sources ← tokenize ← chat ← store ← rows ← loader ← everything around
errors, digest, rows.protocol ← order ← loader
store, rows, order ← streaming ← loader
"""

import ast
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import penstock

PACKAGE = Path(penstock.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
BASE = {"errors", "digest", "disk", "exports", "options", "paths", "ranges"}
# What each part may import, besides itself. Parts that are not listed stand around these.
MAY_IMPORT = {
    "errors": set(),
    "charts": {"errors"},
    "exports": set(),
    "options": {"errors"},
    "ranges": {"errors"},
    "paths": set(),
    "disk": {"errors", "paths"},
    "digest": {"errors"},
    "sources": BASE,
    "tokenize": BASE | {"sources"},
    "chat": BASE | {"sources", "tokenize"},
    # `build(progress=True)` shows the progress bar of the command line. Token files are refused. A
    # thread that waits for a download lets its process fork, as one that waits for a part does.
    "store": BASE
    | {"sources", "tokenize", "chat", "cli.progress", "formats.open", "streaming.waits"},
    # The interface of rows: it imports nothing but NumPy and errors.
    "order": BASE | {"rows.protocol"},
    "transforms": BASE | {"rows.protocol"},
    # Token files of other tools: to read them, to make stores of them, and to write them.
    "formats": BASE | {"sources", "tokenize", "store"},
    "rows": BASE | {"sources", "tokenize", "chat", "store", "formats"},
    # A streamed plan is a plan over rows of a snapshot.
    "streaming": BASE | {"sources", "tokenize", "chat", "store", "rows", "order"} | {"formats"},
    "loader": BASE
    | {"sources", "tokenize", "chat", "store", "order", "rows", "streaming"}
    | {"formats"},
    # Their datasets take a transform.
    "integrations": BASE
    | {"sources", "tokenize", "chat", "store", "order", "rows", "streaming", "loader", "catalog"}
    | {"transforms", "formats"},
    # A recipe is made of the trainer's objects, and the trainer's command reads recipes.
    # It searches for the largest batch as Lightning's data module does, and its display escapes
    # text as the command line does.
    "train": BASE
    | {"store", "order", "rows", "streaming", "loader", "recipe", "integrations", "cli"}
    | {"formats", "charts"},
    "recipe": BASE | {"train", "formats.options"},
    # It opens the data of a recipe as the trainer does, also at a URL, and has nothing to do with a
    # terminal.
    "inspect": BASE
    | {"tokenize", "store", "order", "rows", "loader", "recipe", "train"}
    | {"formats"},
    # A page shows what `inspect` finds, and escapes text as the command line does.
    "report": BASE | {"charts", "tokenize", "store", "order", "formats", "train", "inspect", "cli"},
}
WITHOUT_TORCH = [
    "errors",
    "digest",
    "disk",
    "sources",
    "tokenize",
    "chat",
    "store",
    "order",
    "transforms",
]
WITHOUT_TORCH += ["streaming", "formats"]


def name_of(path):
    """The dotted name of a module, without the package: `store.build`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


KNOWN = {f"penstock.{name_of(path)}" for path in MODULES}


@cache
def nodes(path):
    """Every node of a module's syntax tree. All tests together take half the time with a cache."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports(path, *, for_types=True):
    """The dotted names that a module imports, at any level of it."""
    return tuple(_imports(path, for_types))


def _imports(path, for_types):
    skipped = set()
    for node in nodes(path):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
            skipped.update(id(inner) for inner in ast.walk(node))
    for node in nodes(path):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}, line {node.lineno}: a relative import"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in KNOWN else node.module for name in inside)


def ours(path, **options):
    """Modules of the package that a module imports."""
    found = {name for name in imports(path, **options) if name in KNOWN}
    return {name.removeprefix("penstock.") for name in found}


# Each of these is one test for all modules: one a module took longer to collect than to run.
def test_a_module_imports_only_what_its_part_may():
    for path in MODULES:
        part = part_of(path)
        allowed = MAY_IMPORT.get(part)
        if allowed is not None:
            found = {name for name in ours(path) if name not in allowed}
            assert {name.partition(".")[0] for name in found} <= allowed | {part}, name_of(path)


def test_torch_is_imported_only_where_tensors_are():
    for path in MODULES:
        if part_of(path) in WITHOUT_TORCH:
            found = [name for name in imports(path) if name.partition(".")[0] == "torch"]
            assert not found, name_of(path)


# What is left besides `disk`: the cache of remote stores does not sync what it renames, and its
# locks are for files and not for directories.
ON_DISK = {"store.remote": {"FileLock", "replace"}}


def on_disk(path):
    """The calls of a module that publish, lock or map a file."""
    for node in nodes(path):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        # `replace` and `rename` of a path have one argument, and the others have more.
        is_path = isinstance(node.func, ast.Attribute) and len(node.args) == 1
        is_os = ast.unparse(node.func) in ("os.rename", "os.replace")
        is_move = name in ("rename", "replace") and ((is_path and not node.keywords) or is_os)
        if is_move or name in ("fsync", "flock", "mmap", "memmap", "FileLock"):
            yield name


def test_only_one_module_publishes_locks_and_maps_files():
    found = {name_of(path): set(on_disk(path)) for path in MODULES if part_of(path) != "disk"}

    assert {name: calls for name, calls in found.items() if calls} == ON_DISK


def test_nothing_runs_code_that_came_as_data():
    banned = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for path in MODULES:
        source = path.read_text(encoding="utf-8")
        calls = [
            node.func.id
            for node in nodes(path)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        ]
        name = name_of(path)

        assert not banned & {each.partition(".")[0] for each in imports(path)}, name
        assert not {"eval", "exec", "compile", "__import__"} & set(calls), name
        assert "allow_pickle=True" not in source.replace(" ", ""), name
        assert "trust_remote_code" not in source, name


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in MODULES
        # The trainer's exports its public names.
        if path.name == "__init__.py" and part_of(path) in MAY_IMPORT and part_of(path) != "train"
    ],
)
def test_the_init_of_a_stage_holds_its_docstring_and_exports_only(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))

    assert 3 <= ast.get_docstring(tree).strip().count("\n") + 1 <= 10
    assert not [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]


def test_no_two_modules_import_each_other():
    """Imports inside functions count too."""
    graph = {
        name_of(path): ours(path, for_types=False) for path in MODULES if path.parent != PACKAGE
    }

    def walk(trail):
        for name in graph.get(trail[-1], ()):
            assert name not in trail, f"a cycle: {' → '.join([*trail, name])}"
            if name not in seen:
                walk([*trail, name])
        seen.add(trail[-1])

    seen = set()
    for name in graph:
        walk([name])


def test_the_table_of_parts_is_the_pipeline():
    """Every stage may import all that the stage before it may, and that stage."""
    chain = ["sources", "tokenize", "chat", "store", "rows", "loader"]

    for one, two in pairwise(chain):
        # Only a build shows progress and refuses token files. Only the store waits for downloads.
        only = {"cli.progress", "formats.open", "streaming.waits"}
        assert (MAY_IMPORT[one] | {one}) - only <= MAY_IMPORT[two]
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir()} >= set(chain) | {"order"}
