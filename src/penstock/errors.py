"""The errors that penstock raises on purpose.

    PenstockError
    ├── SourceError       (ValueError)     an input cannot be read
    │   ├── MissingInputError (FileNotFoundError)     an input does not exist
    │   ├── FetchError    (OSError)        a file cannot be downloaded, or is not the right one
    │   └── ChatError     (ValueError)     a conversation cannot be rendered
    │       └── TemplateError (ValueError) a chat template cannot be used at all
    │           └── MissingTemplateError (FileNotFoundError) a chat template does not exist
    ├── TokenizerError    (ValueError)     a tokenizer cannot be loaded or trusted
    │   ├── MissingTokenizerError (FileNotFoundError) a tokenizer does not exist
    │   └── TokenMismatchError (ValueError) two tokenizers gave different ids for one document
    ├── StoreError        (ValueError)     a store is unfinished, damaged or not the expected one
    │   ├── MissingStoreError (FileNotFoundError)     a store, or a file of it, does not exist
    │   ├── StoreBusyError (RuntimeError)  another process is writing the store
    │   └── RemoteError   (OSError)        a server refuses, fails, or sends other bytes
    ├── WorkerError       (RuntimeError)   a worker process of a build ended before its time
    ├── DiskFullError     (OSError)        the disk is full; finished parts are kept
    ├── PlanError         (ValueError)     arguments do not describe a valid order of the data
    │   └── UnknownLengthError (TypeError) there is no length, or it is not known yet
    ├── ResumeError       (ValueError)     a state belongs to other data or another order
    ├── RecipeError       (ValueError)     a recipe is not valid
    │   └── MissingRecipeError (FileNotFoundError)    a recipe does not exist
    ├── TrainError        (RuntimeError)   a training run cannot continue
    └── MissingExtraError (ImportError)    an optional package is not installed

Each message says what happened, with the values; why that is a problem; and what to do. Each class
is also a subclass of the builtin error in parentheses, which callers would expect. So
`except FileNotFoundError` catches every path that does not exist.
"""


class PenstockError(Exception):
    """The base class of all errors that penstock raises on purpose."""


class SourceError(PenstockError, ValueError):
    """An input cannot be read."""


class MissingInputError(SourceError, FileNotFoundError):
    """An input does not exist."""


class FetchError(SourceError, OSError):
    """A file cannot be downloaded, or is not the right one."""


class ChatError(SourceError):
    """A conversation cannot be rendered.

    `reason` is one of a few fixed words; a build counts rejected conversations by it.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason

    # Errors of worker processes are pickled. By default, pickle would call the class with `args`,
    # which do not contain the reason.
    def __reduce__(self) -> tuple[type["ChatError"], tuple[str, str]]:
        return type(self), (self.reason, str(self))


class TemplateError(ChatError):
    """A chat template cannot be used at all."""

    def __init__(self, detail: str) -> None:
        super().__init__("bad_template", detail)

    def __reduce__(self) -> tuple[type["TemplateError"], tuple[str]]:  # type: ignore[override]
        return type(self), (str(self),)


class MissingTemplateError(TemplateError, FileNotFoundError):
    """A chat template does not exist: no file, directory or built-in template has this name."""


class TokenizerError(PenstockError, ValueError):
    """A tokenizer cannot be loaded, or its tokens cannot be trusted."""


class MissingTokenizerError(TokenizerError, FileNotFoundError):
    """A tokenizer does not exist: no file, directory or known tokenizer has this name."""


class TokenMismatchError(TokenizerError):
    """Two tokenizers gave different ids for one document, so the fast one cannot be trusted."""


class StoreError(PenstockError, ValueError):
    """A store is unfinished, damaged, or not the expected one."""


class MissingStoreError(StoreError, FileNotFoundError):
    """A store, or a file of it, does not exist."""


class StoreBusyError(StoreError, RuntimeError):
    """Another process is writing the store."""


class RemoteError(StoreError, OSError):
    """A server of a remote store refuses a request, does not answer, or sends other bytes."""


class WorkerError(PenstockError, RuntimeError):
    """A worker process of a build ended before its work was done; finished parts are kept."""


class DiskFullError(PenstockError, OSError):
    """The disk is full; parts that were finished before are kept."""


class PlanError(PenstockError, ValueError):
    """The arguments do not describe a valid order of the data."""


class UnknownLengthError(PlanError, TypeError):
    """There is no length, or none yet; a TypeError, so `list()` and `tqdm` work without it."""


class ResumeError(PenstockError, ValueError):
    """A saved state belongs to other data or another order."""


class RecipeError(PenstockError, ValueError):
    """A recipe is not valid."""


class MissingRecipeError(RecipeError, FileNotFoundError):
    """A recipe does not exist."""


class TrainError(PenstockError, RuntimeError):
    """A training run cannot continue."""


class MissingExtraError(PenstockError, ImportError):
    """An optional package is not installed."""
