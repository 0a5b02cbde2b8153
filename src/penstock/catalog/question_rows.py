"""Reads the rows of question files: JSON Lines, Parquet, and CSV without or with a header."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.errors import SourceError

Row = dict[str, Any]

# Column names that CSV headers of MMLU use.
_MMLU_QUESTION, _MMLU_ANSWER = ("question", "input"), ("answer", "target")


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a JSON Lines, Parquet or CSV file, each with its location for messages.

    Raises:
        SourceError: the file is damaged; the message says where.
    """
    # Everything else is taken as JSON Lines: the patterns name .jsonl, .parquet and .csv only.
    readers = {".parquet": _parquet_rows, ".csv": _csv_rows}
    try:
        yield from readers.get(path.suffix, _json_rows)(path)
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path} is not UTF-8 ({error.reason}). Convert it, or decompress it."
        ) from None


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    # newline="\n": other line separators, such as U+2028, may be inside a JSON string.
    with path.open(encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number:,}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise SourceError(f"{where} is not JSON: {error}.") from None
            if not isinstance(row, dict):
                raise SourceError(
                    f"{where} holds a {type(row).__name__}, but a row must be a JSON object."
                )
            yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as opened:
            rows = (row for batch in opened.iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{path}, row {number:,}", row
    except (ArrowException, OSError) as error:
        raise SourceError(f"{path} cannot be read as Parquet: {error}") from error


def _csv_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield rows of a question, any number of choices and an answer, without the header."""
    width = 0
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            for cells in filter(None, reader):  # csv yields [] for a blank line
                where = f"{path}, line {reader.line_num:,}"
                is_first, width = not width, width or len(cells)
                # The authors' files have no header. A header is recognised by its first and its
                # last cell, because the text of a question could be just "question".
                first, last = (cells[number].strip().lower() for number in (0, -1))
                if is_first and first in _MMLU_QUESTION and last in _MMLU_ANSWER:
                    continue
                if len(cells) != width or width < 4:
                    raise SourceError(
                        f"{where} has {len(cells)} cells. A row needs a question, two or more "
                        f"choices and an answer, in as many cells as the first row ({width})."
                    )
                question, *choices, answer = cells
                yield where, {"question": question, "choices": choices, "answer": answer}
        except csv.Error as error:
            raise SourceError(f"{path}, line {reader.line_num:,} is not CSV: {error}.") from None
