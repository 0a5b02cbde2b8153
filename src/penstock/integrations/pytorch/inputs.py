r"""The inputs of a hand-written Dataset: the samples of a file, and a tokenizer by its `encode`.

    "jsonl"        the field `text` of every line
    "paragraphs"   t.strip() for t in text.split("\n\n"), where not empty
    "file"         the whole text

`penstock.build` adds nothing to a text and takes special tokens in it as text. A hand-written
Dataset stores what `tokenizer.encode(text)` returns, with everything that the object adds. So an
object is called as it is, unless penstock's engine is known to return the same ids.

A digest is given only to tokenizers whose settings are all known. Any other object may return
other ids tomorrow, so its store is never reused by another process.
"""

import codecs
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from penstock.digest import digest_json
from penstock.errors import SourceError, TokenizerError
from penstock.tokenize.definition import Definition, from_object
from penstock.tokenize.objects import read_attribute
from penstock.tokenize.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "UNKNOWN_VOCABULARY",
    "AnyTokenizer",
    "GivenTokenizer",
    "Layout",
    "as_given",
    "read_bytes",
    "read_samples",
    "suffix_layout",
]

UNKNOWN_VOCABULARY = 2**32
"""The vocabulary size of an object that may return any id; ids have 32 bits."""

PathLike = str | os.PathLike[str]
AnyTokenizer: TypeAlias = Any
"""A name, a path, or a tokenizer object of any package."""
Layout = Literal["jsonl", "paragraphs", "file"]

_JSONL = (".jsonl", ".ndjson", ".json")
_TEXT = (".txt", ".text", ".md", ".raw")


def suffix_layout(path: PathLike) -> Layout:
    """What a file contains, by its suffix.

    >>> suffix_layout("data/train.jsonl"), suffix_layout("input.txt")
    ('jsonl', 'paragraphs')
    """
    suffix = Path(path).suffix.lower()
    if suffix in _JSONL:
        return "jsonl"
    if suffix in _TEXT:
        return "paragraphs"
    raise SourceError(
        f"{os.fspath(path)} ends in {suffix!r}, which does not say what it contains; "
        f"{', '.join(_JSONL)} are JSON lines and {', '.join(_TEXT)} are text. "
        "Set is_jsonl=True or is_jsonl=False."
    )


def read_bytes(path: str) -> bytes:
    """The contents of a file."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise SourceError(f"{path} does not exist (working directory: {Path.cwd()}).") from None
    except IsADirectoryError:
        raise SourceError(f"{path} is a directory; give one file.") from None


def read_samples(data: bytes, layout: Layout, path: str) -> list[str]:
    """The samples in the contents of a file.

    Args:
        data: The contents.
        layout: What the file contains.
        path: Its path, for messages.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path} is not UTF-8 at byte {error.start:,} ({error.reason}). Convert it, or "
            "decompress it if it is compressed; penstock.build() reads compressed files."
        ) from None
    # As `open()` does it. A file without carriage returns, the usual one, is not copied.
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if layout == "file":
        return [text]
    if layout == "paragraphs":
        return [stripped for part in text.split("\n\n") if (stripped := part.strip())]
    # Not splitlines(), which also splits at U+2028 and others that JSON strings may contain.
    lines = enumerate(text.split("\n"), start=1)
    return [_json_text(line, path, number) for number, line in lines if line.strip()]


def _json_text(line: str, path: str, number: int) -> str:
    """The field `text` of a JSON line."""
    if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8.decode())  # json refuses a byte order mark
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise SourceError(
            f"{path}, line {number:,} is not JSON: {error.msg} at character {error.pos:,}. Set "
            "is_jsonl=False if the file is plain text."
        ) from None
    if not isinstance(item, dict) or "text" not in item:
        names = list(item)[:5] if isinstance(item, dict) else []
        known = ", ".join(f'"{name}"' for name in names) or "none"
        raise SourceError(f'{path}, line {number:,} has no field "text"; its fields: {known}.')
    text = item["text"]
    if not isinstance(text, str):
        raise SourceError(
            f'{path}, line {number:,}: "text" holds {json.dumps(text)[:60]}, not a string.'
        )
    # JSON allows an escape for half of a pair. The engines encode UTF-8, which does not.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.start + 20]
        raise SourceError(
            f"{path}, line {number:,} holds half of a surrogate pair ({text[error.start]!r} in "
            f"{near!r}), which is not a character and has no ids."
        ) from None
    return text


@dataclass(frozen=True)
class GivenTokenizer:
    """A tokenizer as the user gave it, and as `penstock.build` uses it."""

    given: AnyTokenizer
    """The user's object, or the tokenizer that a name was loaded as."""
    tokenizer: Tokenizer
    """Encodes as `given.encode` does."""

    def ending(self, eos: bool | int | str) -> tuple[Tokenizer, bool]:
        """The tokenizer with the end token that `eos` names, and whether there is one.

        Args:
            eos: False, True for the tokenizer's end token, the id of a token, or its text.
        """
        if eos is False:
            return self.tokenizer, False
        found: int | None
        if isinstance(eos, str):
            found = _token_id(self.given, eos)
        else:
            found = self.tokenizer.eos_id if eos is True else int(eos)
        if found is None:
            raise TokenizerError(
                f"{self.tokenizer.name} does not say which of its tokens ends a document. Give its "
                "id: eos=ID, or leave eos out."
            )
        # `penstock.build` takes True or a token's text, so a chosen id becomes the end token.
        return replace(self.tokenizer, eos_id=found), True


def as_given(tokenizer: AnyTokenizer) -> GivenTokenizer:
    """The tokenizer that a name, a path or an object with `encode` means."""
    if isinstance(tokenizer, GivenTokenizer):
        return tokenizer
    if isinstance(tokenizer, str | os.PathLike | Tokenizer):
        loaded = load_tokenizer(tokenizer)
        return GivenTokenizer(loaded, loaded)
    if not callable(getattr(tokenizer, "encode", None)):
        raise TokenizerError(
            f"{tokenizer!r:.80} is not a tokenizer: it is neither a name nor a path, and it has no "
            "method encode."
        )
    package = type(tokenizer).__module__.partition(".")[0]
    if "encode" in getattr(tokenizer, "__dict__", {}):
        package = ""  # replaced on this object: nothing is known about it
    # tiktoken's `encode` raises an error for special tokens in a text; the engine takes them as
    # text, and is otherwise the same.
    if package == "tiktoken":
        return GivenTokenizer(tokenizer, load_tokenizer(tokenizer))
    definition = from_object(tokenizer) if package in ("tokenizers", "transformers") else None
    if definition is None:
        return GivenTokenizer(tokenizer, _wrapped(tokenizer))
    theirs = package == "transformers"
    backend = tokenizer.backend_tokenizer if theirs else tokenizer
    as_text = bool(backend.encode_special_tokens)
    # Then `encode` is what the engine does with special_tokens="parse", a hundred times as fast.
    if not theirs and not as_text and _adds_nothing(definition):
        return GivenTokenizer(tokenizer, load_tokenizer(tokenizer, special_tokens="parse"))
    wrapped = _wrapped(tokenizer, definition)
    if not _dropout(definition):
        # Of a `transformers` tokenizer, `split_special_tokens` is not in the JSON.
        split = theirs and bool(tokenizer.split_special_tokens)
        kind = [package, type(tokenizer).__qualname__, as_text, split]
        wrapped = replace(wrapped, digest=digest_json([*kind, definition.text]))
    return GivenTokenizer(tokenizer, wrapped)


class _ObjectTokenizer(Tokenizer):
    """A tokenizer that calls a user's object, without the digest of a fixed text.

    The fixed text has characters of many scripts. An object with a small vocabulary, such as one
    id per letter of its training text, raises an error for it.
    """

    @property
    def canary(self) -> str:
        """Empty: nothing is known of the object."""
        return ""


def _wrapped(given: AnyTokenizer, definition: Definition | None = None) -> Tokenizer:
    loaded = load_tokenizer(_Encoder(given, definition))
    return _ObjectTokenizer(**vars(loaded))


class _Encoder:
    """An object with `encode`, with the attributes that `load_tokenizer` asks of a tokenizer."""

    def __init__(self, given: AnyTokenizer, definition: Definition | None = None) -> None:
        self._given = given
        self.name = str(read_attribute(given, "name") or type(given).__name__)
        # What an object says of its vocabulary may not count added tokens, so it is not asked.
        self.vocab_size = definition.vocab_size if definition else UNKNOWN_VOCABULARY
        self.eos_token_id = read_attribute(given, "eos_token_id", "eot_token")
        if definition is not None:
            self.name = definition.name
            if definition.eos_token:
                self.eos_token_id = definition.token_id(definition.eos_token)

    def encode(self, text: str) -> list[int]:
        """The ids that the object returns: a list, an array, a tensor or an Encoding."""
        # NumPy would turn -1, 0.5 or "a" into some id without an error; so ids are checked.
        encoded = self._given.encode(text)
        encoded = getattr(encoded, "ids", encoded)  # an Encoding of `tokenizers`
        ids = np.asarray(
            encoded if isinstance(encoded, np.ndarray | torch.Tensor) else list(encoded)
        )
        if not ids.size:
            return []
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TokenizerError(
                f"encode() returned {ids.dtype} of shape {ids.shape}: {encoded!r:.60}. It must "
                "return one row of integers."
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= UNKNOWN_VOCABULARY:
            raise TokenizerError(
                f"encode() returned ids from {low:,} to {high:,}; ids are stored in 32 bits."
            )
        found: list[int] = ids.tolist()
        return found

    def decode(self, ids: list[int]) -> str:
        """The text of some ids."""
        return str(self._given.decode(ids))


def _adds_nothing(definition: Definition) -> bool:
    """Whether `encode` returns all ids of the text, the same at every call, and no others."""
    config = definition.config
    # GPT-2's ByteLevel post-processor only trims offsets.
    after = config.get("post_processor")
    adds = after is not None and after.get("type") != "ByteLevel"
    return not (adds or config.get("truncation") or config.get("padding") or _dropout(definition))


def _dropout(definition: Definition) -> bool:
    return bool(definition.config["model"].get("dropout"))


def _token_id(tokenizer: AnyTokenizer, token: str) -> int:
    """The id of a token, by whichever method the object has for it."""
    # penstock, tokenizers, transformers and tiktoken, in this order.
    for name in ("token_id", "token_to_id", "convert_tokens_to_ids", "encode_single_token"):
        find = getattr(tokenizer, name, None)
        if find is not None and (found := find(token)) is not None:
            return int(found)
    raise TokenizerError(
        f"{type(tokenizer).__name__} cannot be asked for the id of {token!r}. Give it: eos=ID."
    )
