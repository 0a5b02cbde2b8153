"""Messages about builds: what differs, what a document is, and what was rejected.

    eos_id: 256 -> None                       a field
    reading.documents: 'lines' -> 'file'      a field of a field
    inputs: a.txt: 12 bytes -> 17             an input that both have
    inputs: b.txt is left out                 an input that only the old build has
    inputs: c.txt is new                      an input that only the new build has
    stamps: d.txt was changed or replaced     an input of the same length

At most five differences are shown, so that a directory of a thousand files stays readable.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.errors import SourceError
from penstock.sources.settings import separator_in
from penstock.store.manifest import JsonObject

if TYPE_CHECKING:
    from penstock.sources.document import Reject
    from penstock.store.job import Job
    from penstock.store.journal import SealedSlice

__all__ = [
    "describe_rules",
    "differences",
    "log_rules",
    "refuse_bad",
    "refuse_only_bad",
    "rule_text",
]

_SHOWN = 5
_log = logging.getLogger("penstock")
_WORDS = {"lines": "a line", "paragraphs": "a paragraph", "file": "a whole file"}


def differences(old: JsonObject, new: JsonObject) -> str:
    """The fields that differ between two records, as `name: old -> new`."""
    return ", ".join(_fields(old, new, "")[:_SHOWN])


def _fields(old: JsonObject, new: JsonObject, prefix: str) -> list[str]:
    found = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if key == "stamps" and isinstance(before, list) and isinstance(after, list):
            # Modification times are listed in the order of the inputs, so they can be compared
            # only if the inputs are equal. If these differ, that is reported already.
            if old.get("inputs") == new.get("inputs"):
                files = zip(old["inputs"], before, after, strict=True)
                changed = [file["name"] for file, then, now in files if then != now]
                found += [f"stamps: {name} was changed or replaced" for name in changed]
        elif isinstance(before, dict) and isinstance(after, dict):
            found += _fields(before, after, f"{prefix}{key}.")
        elif named := _inputs(before, after):
            found += [f"{prefix}{key}: {each}" for each in named]
        else:
            found.append(f"{prefix}{key}: {before!r:.60} -> {after!r:.60}")
    return found


def _inputs(before: object, after: object) -> list[str]:
    """The differences between two lists of named objects; [] if they are something else."""
    old, new = _by_name(before), _by_name(after)
    if old is None or new is None:
        return []
    found = []
    for name in sorted({*old, *new}):
        if name not in new:
            found.append(f"{name} is left out")
        elif name not in old:
            found.append(f"{name} is new")
        elif old[name].get("bytes") != new[name].get("bytes"):
            found.append(f"{name}: {_bytes(old[name])} bytes -> {_bytes(new[name])}")
        else:
            found += [f"{name}: {each}" for each in _fields(old[name], new[name], "")]
    return found


def _by_name(value: object) -> dict[str, JsonObject] | None:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return None
    named = {str(each["name"]): each for each in value if "name" in each}
    # URLs are recorded without their queries, so two inputs may have one name.
    return named if len(named) == len(value) else None


def _bytes(file: JsonObject) -> str:
    size = file.get("bytes")
    return f"{size:,}" if isinstance(size, int) else repr(size)


def describe_rules(builds: list[JsonObject]) -> str:
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
        rules = done.get("documents") or {done["reading"].get("documents", "lines"): len(texts)}
        for rule, number in rules.items():
            total[rule_text(rule)] += number
        total["a record"] += len(done["inputs"]) - len(texts)
    found = {words: number for words, number in total.items() if number}
    if len(found) < 2:
        return "".join(found)
    return ", ".join(
        f"{words} ({number:,} file{'s' * (number != 1)})" for words, number in found.items()
    )


def rule_text(rule: str | None) -> str:
    """What a document is by one rule; None means files of records.

    >>> rule_text("lines"), rule_text("<|endoftext|>"), rule_text(None)
    ('a line', "the text between '<|endoftext|>'", 'a record')
    """
    if rule is None:
        return "a record"
    separator = separator_in(rule)
    return _WORDS.get(rule, rule) if separator is None else f"the text between {separator!r}"


def log_rules(job: "Job", rules: list[tuple[int, str]], seen: set[str]) -> None:
    """Log the rules of files, and add them to `seen`, the rules that were logged already."""
    for number, rule in rules:
        if rule in seen:
            continue
        seen.add(rule)
        separators = " or ".join(map(repr, job.reading.separators))
        why = f"no {separators}" if rule == "file" else repr(rule)
        name = job.files[number].name
        _log.info("%s: a document is %s; the first 64 MB contain %s", name, rule_text(rule), why)


def refuse_bad(job: "Job", sealed: "dict[int, SealedSlice]") -> None:
    """Raise if the leading sealed slices have more rejected records than `max_bad` allows.

    Only slices before the first gap count, in order, so that the result does not depend on which
    worker was faster.
    """
    max_bad = job.settings.max_bad
    found: list[Reject] = []
    records = 0
    for number in range(len(sealed)):
        if number not in sealed:
            return
        tally = sealed[number].tally
        found += sealed[number].rejects
        records += tally.documents + tally.rejected
        # Ten rejects are always allowed: 0.1 % of a small input would be none.
        limit = max(10.0, max_bad * records) if max_bad < 1 else max_bad
        if len(found) > limit:
            shown = "\n".join(f"  {_located(job, each)}" for each in found[:_SHOWN])
            raise SourceError(
                f"{len(found):,} of {records:,} records were rejected, more than the {limit:,.0f} "
                f"that max_bad={max_bad:g} allows. The first:\n{shown}\n"
                "Repair the input, name the right field or format, or raise max_bad; the build "
                "then resumes where it stopped."
            )


def refuse_only_bad(job: "Job", done: "Sequence[SealedSlice]") -> None:
    """Raise if records were rejected and no document is left, as in one file that is not UTF-8."""
    rejects = [reject for record in done for reject in record.rejects]
    if rejects and not any(record.tally.documents for record in done):
        raise SourceError(
            f"No document is left to store: all {len(rejects):,} records were rejected. The first, "
            f"{_located(job, rejects[0])}. "
            'Repair the input, or change how it is read: errors="replace" puts U+FFFD where bytes '
            'are not UTF-8, and documents="lines" rejects single lines.'
        )


def _located(job: "Job", reject: "Reject") -> str:
    place = f"{job.files[reject.file].name}, offset {reject.offset:,}"
    return f"{place}: {reject.reason}, {reject.detail}"
