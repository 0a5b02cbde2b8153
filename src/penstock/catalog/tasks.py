"""Question sets as training examples.

    {"question": "Which gas do plants take in?",
     "choices":  ["oxygen", "carbon dioxide", "neon"],     # [] if there are no choices
     "answer":   "B",                                      # a letter, or the answer itself
     "messages": [{"role": "user", "content": …}, {"role": "assistant", "content": "B"}]}

Every set has these four keys, so examples of different sets can be mixed in one batch. Files
are looked for in `directory` if it is given. Otherwise they are looked for in `data/NAME`, where
`penstock fetch NAME` puts them, and then in `~/.cache/penstock/NAME` (or `$PENSTOCK_CACHE/NAME`).
Nothing is downloaded.
"""

import csv
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import SourceError
from penstock.paths import cache_directory

_LETTERS = "ABCDEFGHIJ"

PathLike = str | os.PathLike[str]


class TaskRow(NamedTuple):
    """A row of a file, and its location for messages."""

    values: Any
    where: str


def check_name(what: str, name: str, names: Sequence[str]) -> str:
    """Return `name` if it is in `names`.

    Raises:
        SourceError: it is not; the message lists `names`.
    """
    if name not in names:
        raise SourceError(f"{name!r} is not a {what}; choose from {', '.join(names)}.")
    return name


def find_files(
    entry: str, patterns: Sequence[str], directory: PathLike | None, wanted: str
) -> list[Path]:
    """Return the files for the first directory and the first pattern with a match.

    Raises:
        SourceError: no directory has any; the message names the command that fetches them.
    """
    directories = [Path("data") / entry, cache_directory() / entry]
    if directory is not None:
        directories = [Path(directory)]
    for each in directories:
        # Patterns are ordered: upstream's own files first, then copies in other formats. Only
        # one pattern is used, as two would read the same questions twice.
        for pattern in patterns:
            if found := sorted(path for path in each.glob(pattern) if path.is_file()):
                return found
    searched = " or ".join(str(each) for each in directories)
    names = ", ".join(dict.fromkeys(patterns))
    raise SourceError(
        f"{wanted} is not in {searched} (working directory: {Path.cwd()}); looked for {names}. "
        f"Fetch it with: penstock fetch {entry}; or pass its directory as directory=."
    )


def read_rows(path: Path) -> Iterator[TaskRow]:
    """Yield the rows of a JSON Lines, Parquet or CSV file; CSV rows as lists of strings.

    Raises:
        SourceError: the file is damaged; the message says where.
    """
    # Everything else is taken as JSON Lines: callers only ask for .jsonl, .parquet and .csv.
    readers = {".parquet": _parquet_rows, ".csv": _csv_rows}
    try:
        yield from readers.get(path.suffix, _json_rows)(path)
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path} is not UTF-8 ({error.reason}). Convert it, or decompress it."
        ) from None


def choice_example(
    question: str, choices: Sequence[str], right: int, *, where: str
) -> dict[str, Any]:
    """Return an example whose choices are lettered from A, whatever their labels upstream.

    Raises:
        SourceError: `right` is not the number of a choice.
    """
    if not 0 <= right < len(choices) <= len(_LETTERS):
        raise SourceError(
            f"{where} has {len(choices)} choices, but marks number {right + 1} as right."
        )
    # Upstream uses A to E, 1 to 4 or 0 to 3; one scheme lets a model learn a single format.
    listed = "\n".join(f"{_LETTERS[n]}. {choice}" for n, choice in enumerate(choices))
    asked = f"{question}\n\n{listed}\n\nAnswer with the letter of the right choice."
    return example(question, _LETTERS[right], asked, _LETTERS[right], choices)


def example(
    question: str, answer: str, asked: str, replied: str, choices: Sequence[str] = ()
) -> dict[str, Any]:
    """Return an example: `asked` is the user's message, `replied` the assistant's."""
    return {
        "question": question,
        "choices": list(choices),
        "answer": answer,
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": replied},
        ],
    }


def _json_rows(path: Path) -> Iterator[TaskRow]:
    # newline="\n": other line separators, such as U+2028, may be inside a JSON string.
    with path.open(encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number:,}"
            try:
                values = json.loads(line)
            except ValueError as error:
                raise SourceError(f"{where} is not JSON: {error}.") from None
            if not isinstance(values, dict):
                raise SourceError(
                    f"{where} holds a {type(values).__name__}, but a row must be a JSON object."
                )
            yield TaskRow(values, where)


def _parquet_rows(path: Path) -> Iterator[TaskRow]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0  # over all batches: the row that a reader of the file would count
    try:
        with ParquetFile(path) as opened:
            for batch in opened.iter_batches():
                for values in batch.to_pylist():
                    number += 1
                    yield TaskRow(values, f"{path}, row {number:,}")
    except (ArrowException, OSError) as error:
        raise SourceError(f"{path} cannot be read as Parquet: {error}") from error


def _csv_rows(path: Path) -> Iterator[TaskRow]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            for values in reader:
                if values:  # csv yields [] for a blank line
                    yield TaskRow(values, f"{path}, line {reader.line_num:,}")
        except csv.Error as error:
            raise SourceError(f"{path}, line {reader.line_num:,} is not CSV: {error}.") from None
