"""Where things are kept for a user: one rule, written once."""

from pathlib import Path

import pytest

import penstock
from penstock.paths import cache_directory

PACKAGE = Path(penstock.__file__).parent


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PENSTOCK_CACHE": "/chosen", "XDG_CACHE_HOME": "/xdg"}, "/chosen"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/penstock"),
        ({"PENSTOCK_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/of/someone/.cache/penstock"),
        ({}, "/home/of/someone/.cache/penstock"),
    ],
)
def test_the_cache_lies_where_the_environment_says(monkeypatch, environment, expected):
    for name in ("PENSTOCK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/of/someone")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert cache_directory() == Path(expected)


def test_no_other_module_asks_the_environment():
    asking = [
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        if "XDG_CACHE_HOME" in path.read_text(encoding="utf-8")
    ]

    assert asking == ["paths.py"]
