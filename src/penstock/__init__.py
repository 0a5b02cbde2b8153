"""Text in, training batches out.

    raw files ── sources ── tokenize ── store ── rows ── order ── loader ──► GPU

The row at any position of a training run is a pure function of (stores, plan,
position). Everything else follows from that: start at once, resume anywhere, change the
number of GPUs, explain any step.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.chat.chat import Chat as Chat
    from penstock.chat.chat import render as render
    from penstock.loader.loader import Loader as Loader
    from penstock.order.budget import Budget as Budget
    from penstock.order.plan import Plan as Plan
    from penstock.rows.documents import Documents as Documents
    from penstock.rows.packs import Packs as Packs
    from penstock.rows.tokens import ArrayFile as ArrayFile
    from penstock.rows.windows import Windows as Windows
    from penstock.sources.texts import Texts as Texts
    from penstock.store.build import build as build
    from penstock.store.reader import TokenStore as TokenStore
    from penstock.store.verify import verify as verify
    from penstock.streaming.stream import stream as stream
    from penstock.tokenize.tokenizer import load_tokenizer as load_tokenizer

__version__ = "0.1.0"

# Loaded on first use: `import penstock` costs milliseconds and brings in neither torch
# nor Arrow.
_HOMES = {
    "ArrayFile": "penstock.rows.tokens",
    "Budget": "penstock.order.budget",
    "Chat": "penstock.chat.chat",
    "Documents": "penstock.rows.documents",
    "Loader": "penstock.loader.loader",
    "Packs": "penstock.rows.packs",
    "Plan": "penstock.order.plan",
    "Texts": "penstock.sources.texts",
    "TokenStore": "penstock.store.reader",
    "build": "penstock.store.build",
    "Windows": "penstock.rows.windows",
    "load_tokenizer": "penstock.tokenize.tokenizer",
    "render": "penstock.chat.chat",
    "stream": "penstock.streaming.stream",
    "verify": "penstock.store.verify",
}

__all__ = [
    "ArrayFile",
    "Budget",
    "Chat",
    "Documents",
    "Loader",
    "Packs",
    "Plan",
    "Texts",
    "TokenStore",
    "Windows",
    "build",
    "load_tokenizer",
    "render",
    "stream",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
