"""Sets of questions and answers as examples that can be trained on.

    {"question": "Which gas do plants take in?",
     "choices":  ["oxygen", "carbon dioxide", "neon"],     # [] where there is nothing to choose
     "answer":   "B",                                      # a letter, or what is asked for
     "messages": [{"role": "user", "content": …}, {"role": "assistant", "content": "B"}]}

Every set gives these four keys, so that examples of all of them mix in one batch. Files are read
where they lie: in the directory that is named, else in `data/NAME`, where `penstock fetch NAME`
puts them, else in `~/.cache/penstock/NAME` (or `$PENSTOCK_CACHE/NAME`). Nothing is downloaded.
"""

import csv
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import SourceError
from penstock.places import cache_directory

__all__ = ["Row", "choice_example", "find_files", "known", "rows_of"]

_LETTERS = "ABCDEFGHIJ"

PathLike = str | os.PathLike[str]


class Row(NamedTuple):
    """A row of a file, and where it stands, for messages."""

    values: Any
    where: str


def known(what: str, name: str, names: Sequence[str]) -> str:
    """`name`, if it is one of `names`.

    Raises:
        SourceError: it is not; the message lists them.
    """
    if name not in names:
        raise SourceError(f"There is no {what} {name!r}; there are {', '.join(names)}.")
    return name


def find_files(
    entry: str, patterns: Sequence[str], directory: PathLike | None, wanted: str
) -> list[Path]:
    """The files of the first of `patterns` that has some, in the first place that has them.

    Raises:
        SourceError: no place has any; the message names the command that gets them.
    """
    places = [Path(directory)] if directory is not None else _places(entry)
    for place in places:
        for pattern in patterns:
            if found := sorted(path for path in place.glob(pattern) if path.is_file()):
                return found
    looked = " and in ".join(str(place) for place in places)
    names = ", ".join(dict.fromkeys(patterns))
    raise SourceError(
        f"{wanted} is not in {looked} (working directory: {Path.cwd()}); looked for {names}. Get "
        f"it with: penstock fetch {entry}; or say where it is with directory=."
    )


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of a JSON Lines, Parquet or CSV file, CSV as lists of strings.

    Raises:
        SourceError: the file is damaged; the message says where.
    """
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
    """An example with choices, lettered from A on, whatever they were called upstream.

    Raises:
        SourceError: there is no such choice.
    """
    if not 0 <= right < len(choices) <= len(_LETTERS):
        raise SourceError(
            f"{where} has {len(choices)} choices, and number {right + 1} is said to be right."
        )
    listed = "\n".join(f"{_LETTERS[n]}. {choice}" for n, choice in enumerate(choices))
    asked = f"{question}\n\n{listed}\n\nAnswer with the letter of the right choice."
    answer = _LETTERS[right]
    return {
        "question": question,
        "choices": list(choices),
        "answer": answer,
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answer},
        ],
    }


def _places(entry: str) -> list[Path]:
    return [Path("data") / entry, cache_directory() / entry]


def _json_rows(path: Path) -> Iterator[Row]:
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
                    f"{where} holds a {type(values).__name__}; a row is an object with fields."
                )
            yield Row(values, where)


def _parquet_rows(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as opened:
            for batch in opened.iter_batches():
                for values in batch.to_pylist():
                    number += 1
                    yield Row(values, f"{path}, row {number:,}")
    except (ArrowException, OSError) as error:
        raise SourceError(f"{path} cannot be read as Parquet: {error}") from error


def _csv_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            for values in reader:
                if values:
                    yield Row(values, f"{path}, line {reader.line_num:,}")
        except csv.Error as error:
            raise SourceError(f"{path}, line {reader.line_num:,} is not CSV: {error}.") from None
