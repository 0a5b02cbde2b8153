"""The cache directory: one rule, written once."""

from pathlib import Path

import pytest

import penstock
from penstock.disk import cache_directory

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
def test_the_environment_decides_where_the_cache_is(monkeypatch, environment, expected):
    for name in ("PENSTOCK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/of/someone")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert cache_directory() == Path(expected)


def test_no_other_module_reads_the_environment_variable():
    asking = [
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        if "XDG_CACHE_HOME" in path.read_text(encoding="utf-8")
    ]

    assert asking == ["disk.py"]
