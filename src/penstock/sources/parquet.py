"""Row groups of Parquet files: their sizes, and their text in batches.

Page checksums are verified if the file has them. Only the text column is read.

A row group may have a dictionary of texts, and a few bytes stand for a reference to one of them.
Arrow expands a batch at once, so a batch has at most 1,024 rows. Batches of a few rows are joined
to blocks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from penstock.errors import SourceError
from penstock.options import ReadSettings
from penstock.sources.document import ArrowArray, compute
from penstock.sources.files import InputFile, open_file
from penstock.sources.settings import BLOCK_BYTES

_MOST_ROWS = 1_024
_PLAIN = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


@contextmanager
def our_errors(file: InputFile, kind: str) -> Iterator[None]:
    """Turn the errors that Arrow raises for damaged files into a SourceError."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{file.name} cannot be read as {kind}: {error}") from error


def open_parquet(file: InputFile, field: str | None = None, **options: Any) -> Any:
    """A Parquet file as a `pyarrow.parquet.ParquetFile`; raises if `field` is no text column."""
    import pyarrow.parquet as pq

    with our_errors(file, "Parquet"):
        source = open_file(file) if file.remote else file.path
        parquet = pq.ParquetFile(source, page_checksum_verification=True, **options)
        if field is not None:
            refuse_no_text(parquet.schema_arrow, file, field)
        return parquet


def parquet_sizes(file: InputFile, reading: ReadSettings) -> list[int]:
    """The size of each row group, including columns other than the text.

    The size of the text column would be more exact. But Arrow 26 ends the process when it reads
    damaged metadata of a column.
    """
    metadata = open_parquet(file, reading.field).metadata
    return [
        max(0, metadata.row_group(group).total_byte_size)
        for group in range(metadata.num_row_groups)
    ]


def parquet_rows(
    file: InputFile, start: int, stop: int, field: str
) -> Iterator[tuple[int, ArrowArray]]:
    """The text column of the row groups `[start, stop)`, in pieces of about a block.

    Each piece comes with the number of its first row.

    Raises:
        SourceError: the file is damaged.
    """
    parquet = open_parquet(file, field)
    # Offsets of documents are row numbers of the whole file, so earlier groups are counted.
    groups = [parquet.metadata.row_group(group) for group in range(stop)]
    row = sum(group.num_rows for group in groups[:start])
    # To join dictionaries, Arrow follows their indices, which `text_column` has to check first.
    joined = _blocks if _text_type(parquet.schema_arrow, field) in _PLAIN else iter
    for number in range(start, stop):
        end = row + groups[number].num_rows
        with our_errors(file, "Parquet"):
            batches = parquet.iter_batches(
                batch_size=_batch_rows(groups[number]),
                row_groups=[number],
                columns=[field],
                # The workers of the build use all cores already.
                use_threads=False,
            )
            for batch in joined(batches):
                yield row, text_column(batch, field)
                row += len(batch)
        # Arrow stops too early in some damaged files, without an error.
        if row != end:
            raise SourceError(
                f"{file.name} is damaged: row group {number} ends at row {row:,} and not at "
                f"{end:,}. Download or write it again."
            )


def _batch_rows(group: Any) -> int:
    """How many rows of a row group are read at a time: at most about one block of text."""
    average = max(1, group.total_byte_size // max(1, group.num_rows))
    return int(max(1, min(_MOST_ROWS, BLOCK_BYTES // average)))


def _blocks(batches: Iterator[Any]) -> Iterator[Any]:
    """Batches of a few rows, joined to batches of about a block of text.

    A batch may have six rows, so nothing else is done with each of them: to find its column, and
    the size of that, took a third of the time of reading.
    """
    held: list[Any] = []
    size = 0
    for batch in batches:
        if held and size + batch.nbytes > BLOCK_BYTES:
            yield held[0] if len(held) == 1 else pa.concat_batches(held)
            held, size = [], 0
        held.append(batch)
        size += batch.nbytes
    if held:
        yield held[0] if len(held) == 1 else pa.concat_batches(held)


def refuse_no_text(schema: Any, file: InputFile, field: str) -> None:
    """Raise if the schema has no column `field`, or if that column does not hold text."""
    kind: Any = pa.struct(list(schema))
    for name in _path(schema, field):
        known = [each.name for each in kind] if isinstance(kind, pa.StructType) else []
        if name not in known:
            shown = ", ".join(f'"{each}"' for each in known[:5]) or "no columns at that level"
            raise SourceError(
                f'{file.name} has no column "{field}"; it has {shown}. '
                "Name a column of strings with field= (--field) of penstock.build, or column= of "
                "LLMDataModule."
            )
        found = kind.field(name)
        kind = found.type
    if isinstance(kind, pa.DictionaryType):
        kind = kind.value_type
    texts = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary())
    extension = (found.metadata or {}).get(b"ARROW:extension:name")
    if kind not in texts or extension:
        shown = f"the extension type {extension.decode(errors='replace')}" if extension else kind
        raise SourceError(
            f'{file.name}: column "{field}" holds {shown}, not text. Name a column of strings '
            "with field= (--field) of penstock.build, or column= of LLMDataModule."
        )


def _text_type(schema: Any, field: str) -> Any:
    """The type of the column `field`, which exists."""
    first, *others = _path(schema, field)
    kind = schema.field(first).type
    for name in others:
        kind = kind.field(name).type
    return kind


def _path(schema: Any, field: str) -> list[str]:
    """The names that lead to `field`: the column `a.b` if it exists, else `b` inside of `a`."""
    return [field] if field in schema.names else field.split(".")


def text_column(batch: Any, field: str) -> ArrowArray:
    """The column `field` of a batch of rows; the indices of a dictionary are checked."""
    names = _path(batch.schema, field)
    column = batch.column(names[0])
    for name in names[1:]:
        column = compute().struct_field(column, name)
    # Decoding an index outside the dictionary would crash the process.
    if isinstance(column.type, pa.DictionaryType):
        column.validate(full=True)
    return column
