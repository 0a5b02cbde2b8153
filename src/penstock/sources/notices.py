"""Warnings about input files whose first bytes lead to documents that users do not expect."""

import logging
from collections.abc import Sequence
from contextlib import closing

from penstock.errors import SourceError
from penstock.options import ReadSettings
from penstock.sources.decompress import Expanded
from penstock.sources.files import BOM, InputFile

_log = logging.getLogger("penstock")
_FILES = 8
_BYTES = 1 << 16


def log_surprises(files: Sequence[InputFile], reading: ReadSettings) -> None:
    """Warn of byte order marks and of Windows line ends; only the first eight files are read."""
    # A remote file costs a request.
    seen = [each for each in files if each.path and not each.remote][:_FILES]
    for file in seen:
        if file.format in ("parquet", "arrow") or not file.size:
            continue
        try:
            with closing(Expanded(file)) as stream:
                first = stream.read(_BYTES)
        except (SourceError, OSError):  # reported when the file is read
            return
        if first.startswith(BOM):
            _log.warning(
                "%s begins with a byte order mark. It is not part of the text, and is left out.",
                file.name,
            )
        by_line = file.format == "text" and reading.documents in ("lines", "paragraphs")
        if by_line and b"\r\n" in first:
            _log.warning(
                "%s has Windows line ends (CRLF), so documents end with a carriage return. If you "
                "want line feeds, convert it first, for example with dos2unix.",
                file.name,
            )
            return
