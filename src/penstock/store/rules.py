"""What the documents of a build are, in words."""

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from penstock.sources.reading import separator_in

if TYPE_CHECKING:
    from penstock.store.job import Job

__all__ = ["count_rules", "describe_rules", "log_rules", "rule_text"]

_log = logging.getLogger("penstock")
_WORDS = {
    "lines": "a line",
    "paragraphs": "a paragraph",
    "file": "a whole file",
}


def count_rules(records: "list[Any]") -> dict[str, dict[str, int]]:
    """The member of a build in the manifest that counts files by rule; nothing without "auto"."""
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.rules)
    return {"documents": dict(sorted(total.items()))} if total else {}


def describe_rules(builds: list[dict[str, Any]]) -> str:
    """What a document is in the inputs of all `builds` of a manifest.

    >>> reading = {"documents": "auto"}
    >>> text, table = {"format": "text"}, {"format": "parquet"}
    >>> describe_rules([{"reading": reading, "inputs": [text], "documents": {"file": 1}}])
    'a whole file'
    >>> describe_rules([{"reading": {"documents": "lines"}, "inputs": [text, table]}])
    'a line (1 file), a record (1 file)'
    """
    total: Counter[str] = Counter()
    for done in builds:
        texts = [each for each in done["inputs"] if each.get("format") == "text"]
        records = len(done["inputs"]) - len(texts)
        rules = done.get("documents") or {done["reading"].get("documents", "lines"): len(texts)}
        for rule, number in rules.items():
            total[rule_text(rule)] += number
        total["a record"] += records
    found = {words: number for words, number in total.items() if number}
    if len(found) < 2:
        return "".join(found)
    return ", ".join(
        f"{words} ({number:,} file{'s' * (number != 1)})" for words, number in found.items()
    )


def rule_text(rule: str | None) -> str:
    """What a document is by one rule; None is for files of records.

    >>> rule_text("lines"), rule_text("<|endoftext|>"), rule_text(None)
    ('a line', "the text between '<|endoftext|>'", 'a record')
    """
    if rule is None:
        return "a record"
    separator = separator_in(rule)
    return _WORDS.get(rule, rule) if separator is None else f"the text between {separator!r}"


def log_rules(job: "Job", rules: list[tuple[int, str]]) -> None:
    """Log the rule of a file, the first time that the build meets this rule."""
    for number, rule in rules:
        if rule in job.rules_seen:
            continue
        job.rules_seen.add(rule)
        separators = " or ".join(map(repr, job.reading.separators))
        why = f"no {separators}" if rule == "file" else repr(rule)
        name = job.files[number].name
        _log.info("%s: a document is %s; the first 64 MB contain %s", name, rule_text(rule), why)
