"""Row groups of Parquet files: their sizes, and their text in batches.

Page checksums are verified if the file has them. Only the text column is read.

A row group may have a dictionary of texts, and a few bytes stand for a million references to one
of them. Arrow expands a batch at once, so a batch must have few rows if the dictionary may hold a
long text. Its longest text is known only after the dictionary was decompressed, and then Arrow
decompresses it once more with the rows. pyarrow writes dictionaries of half the text of a row
group, so that took a tenth of the time of a build. The header of the page says how long the whole
dictionary is. So rows are read a few at a time, as if each were as long as the dictionary, and
are joined to blocks. Only if that would take too many batches, the dictionary is read first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.errors import SourceError
from penstock.sources.decompress import expansion_limit, too_expanded
from penstock.sources.document import ArrowArray, compute
from penstock.sources.files import InputFile, open_file, read_fully
from penstock.sources.pages import ColumnPages, column_pages, page_claims
from penstock.sources.settings import BLOCK_BYTES, ReadSettings

# Rows of a batch are so few that they fit into this memory even if each of them is the longest
# text of the dictionary.
_BATCH_MEMORY = 64 << 20
# The length of a page has 31 bits.
_LONGEST_PAGE = 1 << 31
# Batches for a block of text. A batch takes about 10 microseconds, a block 20 milliseconds.
_MOST_BATCHES = 128
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
    sizes = [
        max(0, metadata.row_group(group).total_byte_size)
        for group in range(metadata.num_row_groups)
    ]
    # The file says this itself, so nothing was decompressed yet.
    limit, claimed = expansion_limit(file, reading.max_expansion), sum(sizes)
    # The footer may be forged, and pages say how long they are, too. To a larger file the limit
    # allows a page of any length, and Arrow holds one page at a time.
    if claimed <= limit < _LONGEST_PAGE:
        with our_errors(file, "Parquet"), open_file(file) as stream:
            claimed = page_claims(read_fully(stream, file.size))
    if claimed > limit:
        raise too_expanded(file, reading.max_expansion)
    return sizes


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
                batch_size=_batch_rows(parquet, file, field, number),
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


def _batch_rows(parquet: Any, file: InputFile, field: str, number: int) -> int:
    """How many rows of a row group are read at a time."""
    group = parquet.metadata.row_group(number)
    # As many rows as make about one block of text, by the average size of a row.
    num_rows, num_bytes = int(group.num_rows), int(group.total_byte_size)
    wanted = min(65_536, BLOCK_BYTES * num_rows // max(1, num_bytes))
    if wanted < 2:
        return 1
    # Arrays of other types are not joined, so they are read in batches that are as large as blocks.
    if _text_type(parquet.schema_arrow, field) in _PLAIN and not file.remote:
        dictionary = _dictionary_bytes(parquet, file, field, number)
        fitting = _BATCH_MEMORY // max(1, dictionary)
        if fitting * _MOST_BATCHES >= wanted:
            return min(wanted, fitting)
    return max(1, min(wanted, _BATCH_MEMORY // max(1, _longest_entry(file, field, number))))


def _dictionary_bytes(parquet: Any, file: InputFile, field: str, number: int) -> int:
    """The length of the dictionary of a row group, which is at least that of each text in it.

    A dictionary whose length is not known counts as too long for `_BATCH_MEMORY`.
    """
    try:
        with open_file(file) as stream:
            names = tuple(_path(parquet.schema_arrow, field))
            pages = _known_pages(file.path, file.size, file.stamp, names)
            return pages[number].longest_dictionary(stream)
    except (pa.ArrowInvalid, IndexError):
        return _BATCH_MEMORY + 1


@lru_cache(maxsize=8)
def _known_pages(
    path: str, size: int, stamp: str, names: tuple[str, ...]
) -> tuple[ColumnPages, ...]:
    """The pages of a column in each row group; the footer is parsed once for all slices."""
    with Path(path).open("rb") as stream:
        return column_pages(stream, size, names)


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


def _longest_entry(file: InputFile, field: str, group: int) -> int:
    """The length of the longest text in the dictionary of a row group; 0 if it has none.

    Read as a dictionary, the first row comes with all entries. The other rows are not read so,
    because Arrow would make a dictionary of texts that have none, in ten times the time.
    """
    parquet = open_parquet(file, field, read_dictionary=[field], pre_buffer=False)
    with our_errors(file, "Parquet"):
        batches = parquet.iter_batches(
            batch_size=1, row_groups=[group], columns=[field], use_threads=False
        )
        # A damaged group may have no row; the caller reports that.
        columns = [text_column(batch, field, is_decoded=False) for batch in islice(batches, 1)]
    entries = [each.dictionary for each in columns if isinstance(each.type, pa.DictionaryType)]
    # A copy of the entries, as `_text_lengths` makes it, took as long as reading them.
    lengths = [compute().max(compute().binary_length(each)).as_py() for each in entries]
    return max((length or 0 for length in lengths), default=0)


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


def text_column(batch: Any, field: str, *, is_decoded: bool = True) -> ArrowArray:
    """The column `field` of a batch of rows; the indices of a dictionary are checked."""
    names = _path(batch.schema, field)
    column = batch.column(names[0])
    for name in names[1:]:
        column = compute().struct_field(column, name)
    # Decoding an index outside the dictionary would crash the process.
    if is_decoded and isinstance(column.type, pa.DictionaryType):
        column.validate(full=True)
    return column
