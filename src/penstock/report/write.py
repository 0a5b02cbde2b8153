"""Writes the page about a store, a recipe or a run into a file."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.disk import write_file
from penstock.formats.token_files import TokenFiles
from penstock.paths import expand_user
from penstock.report.page import page_html
from penstock.report.sections import render, sections_of
from penstock.report.subject import Subject, open_subject
from penstock.store.reader import TokenStore

if TYPE_CHECKING:
    from penstock.inspect.runs import OpenedRun


def write_report(
    source: "str | os.PathLike[str] | TokenStore | TokenFiles | OpenedRun | Subject",
    path: str | os.PathLike[str],
    *,
    tokenizer: object = None,
) -> Path:
    """Write a page about a store, token files, a recipe or a run; returns the path of the page.

    Needs the extra `report`.

    Args:
        source: The path or URL; or what is open already.
        path: The HTML file to write. An existing file is replaced, and directories are made.
        tokenizer: The tokenizer, if it is not known on this machine.
    """
    subject = source
    if not isinstance(subject, Subject):
        subject = open_subject(subject, tokenizer=tokenizer)
    place = expand_user(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    write_file(place, [report_html(subject).encode()])
    return place


def report_html(subject: Subject) -> str:
    """Return the page as HTML."""
    sections = [
        {"name": each.name, "title": each.title, "html": render(each, subject)}
        for each in sections_of(subject)
    ]
    return page_html(subject.name, sections)
