"""Turns raw text into training batches for language models in PyTorch.

    raw files ── sources ── tokenize ── store ── rows ── order ── loader ──► GPU

The row at any position of a training run is a pure function of (stores, plan,
position). So training starts at once, a run resumes at any step and on any number of GPUs,
and the documents of any step can be listed.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

__version__ = "0.1.0"

# Type checkers and editors see ordinary imports. At run time, each name is imported on first use.
if TYPE_CHECKING:
    from penstock.chat.chat import Chat as Chat
    from penstock.chat.chat import render as render
    from penstock.formats.export import export_tokens as export_tokens
    from penstock.formats.imports import import_tokens as import_tokens
    from penstock.formats.open import open_tokens as open_tokens
    from penstock.formats.token_files import TokenFiles as TokenFiles
    from penstock.loader.loader import Loader as Loader
    from penstock.order.plan import Plan as Plan
    from penstock.rows.documents import Documents as Documents
    from penstock.rows.packs import Packs as Packs
    from penstock.rows.tokens import ArrayFile as ArrayFile
    from penstock.rows.windows import Windows as Windows
    from penstock.sources.settings import Texts as Texts
    from penstock.store.build import build as build
    from penstock.store.copy import copy as copy
    from penstock.store.reader import TokenStore as TokenStore
    from penstock.streaming.stream import stream as stream
    from penstock.tokenize.tokenizer import load_tokenizer as load_tokenizer
    from penstock.verification import verify as verify
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "chat.chat": "Chat render",
            "errors": "",
            "formats.export": "export_tokens",
            "formats.imports": "import_tokens",
            "formats.open": "open_tokens",
            "formats.token_files": "TokenFiles",
            "loader.loader": "Loader",
            "order.plan": "Plan",
            "rows.documents": "Documents",
            "rows.packs": "Packs",
            "rows.tokens": "ArrayFile",
            "rows.windows": "Windows",
            "sources.settings": "Texts",
            "store.build": "build",
            "store.copy": "copy",
            "store.reader": "TokenStore",
            "streaming.stream": "stream",
            "tokenize.tokenizer": "load_tokenizer",
            "verification": "verify",
        },
    )
