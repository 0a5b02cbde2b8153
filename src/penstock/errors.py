"""Every error penstock raises on purpose.

    PenstockError
    ├── SourceError       (ValueError)     an input that cannot be read as asked
    │   ├── FetchError    (OSError)        a file that cannot be had, or is not the right one
    │   └── ChatError     (ValueError)     a conversation that cannot be rendered as asked
    │       └── TemplateError (ValueError) a chat template that cannot be used at all
    ├── TokenizerError    (ValueError)     a tokenizer that cannot be loaded or trusted
    │   └── TokenMismatchError (ValueError) two programs gave different ids for one document
    ├── StoreError        (ValueError)     a store that is unfinished, damaged or foreign
    │   └── StoreBusyError (RuntimeError)  another process is writing it
    ├── DiskFullError     (OSError)        no room to write; what was sealed is kept
    ├── PlanError         (ValueError)     an order of the data that cannot exist
    │   └── UnknownLengthError (TypeError) a length that is not known yet
    ├── ResumeError       (ValueError)     a state that belongs to other data
    ├── RecipeError       (ValueError)     a recipe that cannot be understood
    ├── TrainError        (RuntimeError)   a training run that cannot go on
    └── MissingExtraError (ImportError)    an optional package that is not installed

Each message says what happened with its values, why it cannot go on, and what to
do. Each class also is the builtin that a caller would expect.
"""

__all__ = [
    "ChatError",
    "DiskFullError",
    "FetchError",
    "MissingExtraError",
    "PenstockError",
    "PlanError",
    "RecipeError",
    "ResumeError",
    "SourceError",
    "StoreBusyError",
    "StoreError",
    "TemplateError",
    "TokenMismatchError",
    "TokenizerError",
    "TrainError",
    "UnknownLengthError",
]


class PenstockError(Exception):
    """The root of every error raised on purpose."""


class SourceError(PenstockError, ValueError):
    """An input that cannot be read as asked."""


class FetchError(SourceError, OSError):
    """A file that could not be had, or that is not the one that is meant."""


class ChatError(SourceError):
    """A conversation that cannot be rendered as asked.

    `reason` is one of a few fixed words, by which a build counts what it rejects.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason

    def __reduce__(self) -> tuple[type["ChatError"], tuple[str, str]]:
        return type(self), (self.reason, str(self))


class TemplateError(ChatError):
    """A template that cannot be used at all."""

    def __init__(self, detail: str) -> None:
        super().__init__("bad_template", detail)

    def __reduce__(self) -> tuple[type["TemplateError"], tuple[str]]:  # type: ignore[override]
        return type(self), (str(self),)


class TokenizerError(PenstockError, ValueError):
    """A tokenizer that cannot be loaded, or whose tokens cannot be trusted."""


class TokenMismatchError(TokenizerError):
    """Two programs gave different ids for one document, so the fast one cannot be trusted."""


class StoreError(PenstockError, ValueError):
    """A store that is unfinished, damaged, or not the one that was meant."""


class StoreBusyError(StoreError, RuntimeError):
    """A store that another process is writing."""


class DiskFullError(PenstockError, OSError):
    """No room to write; everything sealed before it is kept."""


class PlanError(PenstockError, ValueError):
    """An order of the data that cannot exist."""


class UnknownLengthError(PlanError, TypeError):
    """A length that is not known yet; a TypeError, so that `list()` and others do without it."""


class ResumeError(PenstockError, ValueError):
    """A saved state that belongs to other data or another order."""


class RecipeError(PenstockError, ValueError):
    """A recipe that cannot be understood."""


class TrainError(PenstockError, RuntimeError):
    """A training run that cannot go on."""


class MissingExtraError(PenstockError, ImportError):
    """An optional package that is not installed."""
