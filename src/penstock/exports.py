"""Lazy exports: the public names of a package are imported when they are first used.

So `import penstock` takes milliseconds and imports neither torch nor Arrow, and a script that only
reads a store never imports the tokenizers.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from sys import modules as loaded

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, modules: Mapping[str, str]
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` for a package.

    Args:
        package: The name of the package: its `__name__`.
        modules: For each module, relative to the package, its public names, separated by spaces.
    """
    homes = {name: f"{package}.{module}" for module in modules for name in modules[module].split()}

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(homes[name])
        # Set all names of the module, not only this one: importing `check/check.py` has set the
        # attribute `check` of the package to the module, but it must be the function.
        for each, home in homes.items():
            if home == module.__name__:
                setattr(loaded[package], each, getattr(module, each))
        return getattr(loaded[package], name)

    # `dir()` must list names that were not imported yet, so that tab completion finds them.
    return sorted(homes), get, lambda: sorted({*vars(loaded[package]), *homes})
