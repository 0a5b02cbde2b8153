"""Public names of a package, imported when they are first used.

`import penstock` takes milliseconds and imports neither torch nor Arrow, and a script that only
reads a store never imports the tokenizers.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from sys import modules as loaded
from types import ModuleType


class _Package(ModuleType):
    """A package in which a public name takes precedence over a module of the same name."""

    def __setattr__(self, name: str, value: object) -> None:
        # After importing `store/build.py`, Python sets the attribute `build` of `penstock.store`
        # to the module. Users of the package want the function.
        if isinstance(value, ModuleType) and name in self.__all__:
            value = vars(value)[name]
        super().__setattr__(name, value)


def lazy_exports(
    package: str, modules: Mapping[str, str]
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` for a package that imports names on first use.

    Args:
        package: The name of the package: its `__name__`.
        modules: For each module, relative to the package, its public names, separated by spaces.
    """
    homes = {name: f"{package}.{module}" for module in modules for name in modules[module].split()}
    this = loaded[package]
    this.__class__ = _Package

    def get(name: str) -> object:
        value: object
        if name in homes:
            value = vars(import_module(homes[name]))[name]
        elif not name.startswith("_") and find_spec(f"{package}.{name}"):
            value = import_module(f"{package}.{name}")  # such as `penstock.errors`
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(this, name, value)
        return value

    def public() -> list[str]:
        # Only what is promised: modules that were imported, and this function, are not.
        # A module without names here is promised as a whole.
        whole = (module for module in modules if not modules[module])
        return sorted({*homes, *whole, *(name for name in vars(this) if name.startswith("__"))})

    return sorted(homes), get, public
