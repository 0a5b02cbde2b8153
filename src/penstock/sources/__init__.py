"""Reading of inputs: from raw files to batches of documents.

An input is a path, a glob, a directory, a URL or a list of texts. Each document is read with the
file and offset it came from. Every byte of the decompressed input is part of a document, a
separator, a skipped blank record or a logged reject. How the input is cut into slices depends on
the input and the tokenizer alone.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.sources.files import InputFile as InputFile
    from penstock.sources.listing import list_files as list_files
    from penstock.sources.settings import Format as Format
    from penstock.sources.settings import ReadSettings as ReadSettings
    from penstock.sources.settings import Texts as Texts
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "files": "InputFile",
            "listing": "list_files",
            "settings": "Format ReadSettings Texts",
        },
    )
