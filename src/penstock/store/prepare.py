"""What a build is asked to do: its inputs listed, its tokenizer loaded, its settings spelled.

Everything that the bytes of a store depend on is in `settings`; two builds with equal ones
give the same store, and one that was killed is gone on with only if they are.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from penstock.errors import StoreError, TokenizerError
from penstock.sources.listing import InputFile, list_files
from penstock.sources.settings import Format, ReadSettings
from penstock.sources.texts import Texts
from penstock.store.holdout import parse_split
from penstock.tokenize.tokenizer import SpecialTokens, Tokenizer, load_tokenizer

__all__ = ["Prepared", "prepare", "separators_of"]

_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A build whose arguments were looked at and whose inputs were listed."""

    directory: Path
    files: list[InputFile]
    reading: ReadSettings
    tokenizer: Tokenizer
    settings: dict[str, Any]
    """Everything that the bytes of the store depend on."""
    split: str | None
    append: bool
    max_bad: float
    chat: Any
    threads: int

    @property
    def stamped(self) -> dict[str, Any]:
        """The settings, and when each input was changed last."""
        return {**self.settings, "stamps": [file.stamp for file in self.files]}


def prepare(  # noqa: PLR0913  (the arguments of `build`)
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Texts,
    store: str | os.PathLike[str],
    *,
    tokenizer: Any,
    format: Format,
    documents: str,
    field: str,
    errors: Literal["strict", "replace"],
    eos: bool | str,
    bos: bool | str,
    special_tokens: SpecialTokens,
    max_bad: float,
    max_document_bytes: int,
    max_expansion: int,
    engine: Literal["auto", "gigatoken", "tokenizers"],
    threads: int | None,
    add_tokens: Literal["auto"] | Sequence[str] | None = None,
    chat: Any = None,
    split: str | None = None,
    append: bool = False,
) -> Prepared:
    """List the inputs and load the tokenizer of a build; nothing but the directory is written."""
    if threads is not None and threads < 1:
        raise StoreError(f"threads={threads} leaves nobody to do the work; use at least 1.")
    if not (max_bad >= 0):
        raise StoreError(f"max_bad={max_bad} is not a share or a number of records.")
    reading = ReadSettings(
        format=format,
        documents=documents if chat is None else "lines",
        field=field,
        errors=errors,
        max_document_bytes=max_document_bytes,
        max_expansion=max_expansion,
    )
    parse_split(split, (), reading)  # whether it is a rule, before anything is looked at
    files = list_files(inputs, reading)
    stage = None
    if chat is not None:
        from penstock.store.chats import chat_files, chat_stage

        stage = chat_stage(
            chat, tokenizer, engine, special_tokens, eos=eos, bos=bos, add_tokens=add_tokens
        )
        tokenizer, special_tokens, files = stage.chat.tokenizer, "text", chat_files(files)
        eos, bos, add_tokens = stage.eos, stage.bos, None
    elif add_tokens == "auto":
        raise StoreError(
            'add_tokens="auto" (--add-tokens auto) adds the markers of a chat template, and there '
            "is none. Name the tokens."
        )
    loaded = load_tokenizer(
        tokenizer, special_tokens=special_tokens, engine=engine, add_tokens=add_tokens
    )
    _say_what_begins(loaded, bos, stage)
    reading = replace(reading, separators=separators_of(loaded))
    directory = Path(store)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        taken = next(each for each in (directory, *directory.parents) if each.exists())
        raise StoreError(
            f"{taken} is a file, and a store is a directory. Choose a name that is not taken."
        ) from None
    settings: dict[str, Any] = {
        "tokenizer": loaded.describe(),
        "eos_id": _edge_id(loaded, eos, "eos"),
        "bos_id": _edge_id(loaded, bos, "bos"),
        "split": split,
        "reading": reading.describe(),
        "inputs": [_describe_input(file) for file in files],
        "append": append,
        **({} if stage is None else {"chat": stage.chat.describe()}),
    }
    return Prepared(
        directory=directory,
        files=files,
        reading=reading,
        tokenizer=loaded,
        settings=settings,
        split=split,
        append=append,
        max_bad=max_bad,
        chat=stage,
        threads=threads or _default_threads(),
    )


def separators_of(tokenizer: Tokenizer) -> tuple[str, ...]:
    """What separates documents under "auto": `<|endoftext|>`, and the tokenizer's own end token.

    `</s>` never does: it is a tag of HTML.
    """
    tokens = ["<|endoftext|>", tokenizer.eos_token]
    return tuple(dict.fromkeys(token for token in tokens if token and token != "</s>"))


def _say_what_begins(tokenizer: Tokenizer, bos: bool | str, stage: Any) -> None:
    """Log that the tokenizer would begin each text with a token, and the store does not."""
    definition = tokenizer.definition
    if definition is None or definition.begins_with is None or bos is not False:
        return
    token = definition.begins_with
    if stage is not None and stage.chat.begins_with(token):
        return
    known = tokenizer.bos_id is not None and definition.token_id(token) == tokenizer.bos_id
    how = "bos=True (--bos)" if known else f'bos="{token}" (--bos-token "{token}")'
    _log.warning(
        "%s begins each text with %s when it is called by itself. This build does not; %s does.",
        tokenizer.name,
        token,
        how,
    )


def _default_threads() -> int:
    """One a core that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _edge_id(tokenizer: Tokenizer, wanted: bool | str, which: str) -> int | None:
    """The id to put at one end of each document, or None."""
    if wanted is False:
        return None
    if isinstance(wanted, str):
        return tokenizer.token_id(wanted)
    found = tokenizer.eos_id if which == "eos" else tokenizer.bos_id
    if found is None:
        raise TokenizerError(
            f"{tokenizer.name} does not say which of its tokens "
            f'{"ends" if which == "eos" else "begins"} a document. Name it with {which}="TOKEN", '
            f"or leave it out with {which}=False."
        )
    return found


def _describe_input(file: InputFile) -> dict[str, Any]:
    return {
        "name": file.name,
        "bytes": file.size,
        "format": file.format,
        "compression": file.compression,
    }
