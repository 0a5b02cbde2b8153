r"""What gigatoken is known to do right.

gigatoken loads more definitions than it follows: it ignores `single_word`, `use_regex=False`
and `end_of_word_suffix`, for example, and then gives ids that `tokenizers` does not give. So
this module lists the settings for which both were compared and gave the same ids. A definition
with any other setting is tokenized by `tokenizers`.

Two kinds of models are listed:

    byte-level BPE      GPT-2, GPT-4, Llama 3, Qwen, DeepSeek, o200k: a known split pattern
    BPE with byte       Llama 2, Mistral, Gemma: spaces become "▁", and no pattern splits
    fallback

The tests compare every entry with `tokenizers`, and so does a new version of gigatoken have to
be compared before it is listed in `VERSIONS`. `code_points` has the characters that both
programs treat differently although the definition is listed here.
"""

from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from typing import Any

from penstock.tokenize.definition import Definition

__all__ = ["PATTERNS", "VERSIONS", "is_byte_level", "knows_symbols", "may_cut", "refusal"]

VERSIONS = ("0.10.",)
"""The releases of gigatoken that were compared, as the beginnings of their version numbers."""

# Above this, gigatoken packs ids into fewer bits than they need: an id of 20,000,000 was wrong.
_MAX_VOCAB_SIZE = 1 << 20
_MODEL_KEYS = frozenset(
    (
        *("type", "vocab", "merges", "dropout", "unk_token", "fuse_unk", "byte_fallback"),
        *("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"),
    )
)
_TOKEN_KEYS = frozenset(
    ("id", "content", "special", "single_word", "lstrip", "rstrip", "normalized")
)
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_FIRST_SPACE = {"type": "Prepend", "prepend": "▁"}
_GEMMA = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_EDGE = r"[^\r\n\p{L}\p{N}]?"
PATTERNS = frozenset(
    (
        # GPT-2, spelled out
        (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",),
        # Llama 3, OLMo 2, GPT-4 as converters write it
        (
            _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
            rf"{_BLANKS}",
        ),
        # Qwen 2 and 3
        (
            _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
            rf"{_BLANKS}",
        ),
        # Qwen 3.5
        (
            _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+"
            rf"[\r\n]*|{_BLANKS}",
        ),
        # o200k, gpt-oss
        (
            rf"{_EDGE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_EDGE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _BLANKS,
        ),
        # Mistral's tekken, Nemotron
        (
            rf"{_EDGE}{_UPPER}*{_LOWER}+|{_EDGE}{_UPPER}+{_LOWER}*"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _BLANKS,
        ),
        # DeepSeek V3: numbers, Chinese and Japanese, and the rest
        (
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
            "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
        ),
    )
)


def refusal(config: dict[str, Any], *, parse: bool) -> str | None:
    """Why gigatoken is not known to give the ids of `tokenizers`, or None where it is.

    Args:
        config: The tokenizer.json.
        parse: Whether the text of a special token becomes that token.
    """
    # In this order: what is said of tokens holds for models that are listed.
    return (
        _version_reason()
        or _model_reason(config)
        or _split_reason(config)
        or _token_reason(config, parse=parse)
    )


def is_byte_level(definition: Definition) -> bool:
    """Whether the model's symbols are bytes; otherwise it is BPE with byte fallback."""
    return not definition.config["model"].get("byte_fallback")


def knows_symbols(definition: Definition) -> bool:
    """Whether its pattern tells symbols and punctuation from other characters."""
    steps = _flat(definition.config.get("pre_tokenizer"), "pretokenizers")
    return any(r"\p{S}" in str(step.get("pattern", {}).get("Regex")) for step in steps)


def may_cut(definition: Definition, *, parse: bool) -> bool:
    """Whether a listed definition gives the same ids for a text and for the text cut in two.

    The cuts are those of `penstock.tokenize.code_points.cut`. Every listed pattern ends a piece
    there, whatever is further away. An added token that holds a blank, or takes the blanks beside
    it, could reach across, and `add_prefix_space` would put a space before each piece.
    """
    active = _active(definition.config.get("added_tokens") or [], parse=parse)
    reaches = any(_strips(token) for token in active)
    blank = any(char.isspace() for token in active for char in token["content"])
    return is_byte_level(definition) and not (reaches or blank or _is_prefixed(definition.config))


@cache
def _version_reason() -> str | None:
    found = version("gigatoken")
    if found.startswith(VERSIONS):
        return None
    return f"gigatoken {found} was not compared with tokenizers; {VERSIONS[-1]}x was"


def _model_reason(config: dict[str, Any]) -> str | None:
    model = config["model"]
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        return f"its model is {kind}, and gigatoken has BPE"
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            return f"its model has {key}={model[key]!r}"
    if unknown := sorted(model.keys() - _MODEL_KEYS):
        return f"its model has the unknown setting {unknown[0]!r}"
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or len(set(vocab.values())) != len(vocab):
        return "its vocabulary gives one id to two tokens"
    if max(vocab.values(), default=0) >= _MAX_VOCAB_SIZE:
        return f"its vocabulary has ids above {_MAX_VOCAB_SIZE:,}"
    return (_fallback_reason if model.get("byte_fallback") else _byte_level_reason)(model)


def _byte_level_reason(model: dict[str, Any]) -> str | None:
    vocab = model["vocab"]
    alphabet = _alphabet()
    if not alphabet.keys() <= vocab.keys():
        return "its vocabulary lacks some bytes"
    if set().union(*vocab) <= alphabet.keys():
        return None
    # A token with other characters is not spelled in bytes (DeepSeek's special tokens). No text
    # gives it, but gigatoken takes it for its bytes in UTF-8.
    plain = [token for token in vocab if not alphabet.keys() >= set(token)]
    if model.get("ignore_merges"):
        return f"its vocabulary has {plain[0]!r}, which is not byte-level, with ignore_merges"
    letters = {byte: letter for letter, byte in alphabet.items()}
    for token in plain:
        if "".join(letters[byte] for byte in token.encode()) in vocab:
            return f"its vocabulary has {token!r} twice, once in bytes"
    return None


def _fallback_reason(model: dict[str, Any]) -> str | None:
    if not model["vocab"].keys() >= _BYTE_TOKENS:
        return "its vocabulary lacks some of the tokens <0x00> to <0xFF>"
    if model.get("ignore_merges"):
        return "its model has byte_fallback with ignore_merges"
    parts = {part for merge in model["merges"] for part in _pair(merge)}
    if not parts.isdisjoint(_BYTE_TOKENS):
        return "its merges join byte tokens"
    return None


def _pair(merge: str | list[str]) -> Iterable[str]:
    return merge.split(" ", 1) if isinstance(merge, str) else merge


def _split_reason(config: dict[str, Any]) -> str | None:
    """Why normalizer and pre-tokenizer are not among those that were compared."""
    normalizer, split = config.get("normalizer"), config.get("pre_tokenizer")
    normalizers = _flat(normalizer, "normalizers")
    steps = _flat(split, "pretokenizers")
    if config["model"].get("byte_fallback"):
        known = _is_sentencepiece(normalizers, steps)
        return None if known else _described("steps", [*normalizers, *steps])
    if any(step != {"type": "NFC"} for step in normalizers):
        return _described("normalizer", normalizers)
    return None if _is_known_split(steps) else _described("pre-tokenizer", steps)


def _described(what: str, steps: list[Any]) -> str:
    # A precompiled character map would fill the screen.
    told = ", ".join(str(step)[:200] for step in steps) or "none"
    return f"its {what} is not among those that were compared: {told}"


def _flat(step: dict[str, Any] | None, key: str) -> list[Any]:
    """The steps of a sequence, or the only step."""
    if step is None:
        return []
    return step.get(key, []) if step.get("type") == "Sequence" else [step]


def _is_known_split(steps: list[Any]) -> bool:
    """Whether the steps are ByteLevel with GPT-2's pattern, or known patterns and ByteLevel."""
    *splits, last = steps or [{}]
    if last.get("type") != "ByteLevel":
        return False
    if not splits:
        return bool(last.get("use_regex", True))
    if last.get("use_regex", True) or last.get("add_prefix_space", True):
        return False
    patterns = []
    for step in splits:
        # What a pattern does not match is kept (Isolated) or dropped (Removed, inverted); the
        # listed patterns match everything, but the three of DeepSeek only together.
        how = (step.get("behavior"), bool(step.get("invert")))
        if step.get("type") != "Split" or how not in _KEPT[len(splits) == 1]:
            return False
        patterns.append(step["pattern"].get("Regex"))
    return tuple(patterns) in PATTERNS


_KEPT = {True: (("Isolated", False), ("Removed", True)), False: (("Isolated", False),)}


def _is_sentencepiece(normalizers: list[Any], steps: list[Any]) -> bool:
    if normalizers in ([_SPACES], [_FIRST_SPACE, _SPACES]):
        return not steps or (steps == [_GEMMA] and normalizers == [_SPACES])
    if normalizers or len(steps) != 1:
        return False
    (step,) = steps
    return (
        step.keys() <= {"type", "replacement", "prepend_scheme", "split"}
        and step.get("type") == "Metaspace"
        and step.get("replacement") == "▁"
        and step.get("prepend_scheme") in ("first", "always", "never")
        and isinstance(step.get("split"), bool)
    )


def _is_prefixed(config: dict[str, Any]) -> bool:
    """Whether a space is put before each text that does not begin with one."""
    steps = _flat(config.get("pre_tokenizer"), "pretokenizers")
    return any(step.get("add_prefix_space", step["type"] == "ByteLevel") for step in steps)


def _strips(token: dict[str, Any]) -> bool:
    return bool(token.get("lstrip") or token.get("rstrip"))


def _active(tokens: list[Any], *, parse: bool) -> list[Any]:
    """The added tokens that a text can give."""
    return [token for token in tokens if parse or not token["special"]]


def _token_reason(config: dict[str, Any], *, parse: bool) -> str | None:
    """Why the added tokens are not among those that were compared."""
    tokens = config.get("added_tokens") or []
    active = _active(tokens, parse=parse)
    if not active:
        return None
    if not _numbered_alike(tokens, config["model"]["vocab"]):
        return "the ids of its added tokens are not those that tokenizers would give them"
    prefixed = bool(config["model"].get("byte_fallback")) or _is_prefixed(config)
    strips = any(_strips(token) for token in active)
    for token in active:
        if reason := _flag_reason(token, normalized=bool(config.get("normalizer"))):
            return f"its added token {token['content']!r} {reason}"
    for token in tokens:
        content = token["content"]
        if (strips or prefixed) and content != content.strip():
            return f"its added token {content!r} begins or ends with a blank"
    return _overlap_reason(tokens, active)


def _flag_reason(token: dict[str, Any], *, normalized: bool) -> str | None:
    if token.get("single_word"):
        return "has single_word=True"
    if token.get("normalized") and normalized:
        return "has normalized=True, and the tokenizer has a normalizer"
    if unknown := sorted(token.keys() - _TOKEN_KEYS):
        return f"has the unknown setting {unknown[0]!r}"
    return None if token["content"] else "is empty"


def _numbered_alike(tokens: list[Any], vocab: dict[str, int]) -> bool:
    """Whether the ids in the file are those that `tokenizers` gives the tokens in this order."""
    largest = -1
    seen = set()
    for token in tokens:
        content = token["content"]
        expected = vocab.get(content, max(len(vocab), largest + 1))
        if token["id"] != expected or content in seen:
            return False
        seen.add(content)
        largest = max(largest, expected)
    return True


def _overlap_reason(tokens: list[Any], active: list[Any]) -> str | None:
    """Why it could matter which of two added tokens is looked for first.

    `tokenizers` looks for tokens with normalized=False first, and skips over a special token
    that is text without looking for others inside; gigatoken looks for all at once.
    """
    first: dict[str, list[Any]] = {}
    for token in tokens:
        first.setdefault(token["content"][:1], []).append(token)
    alike = len(active) == len(tokens) and not any(map(_strips, tokens))
    if alike and len({bool(token.get("normalized")) for token in tokens}) == 1:
        return None
    for token in tokens:
        content = token["content"]
        for start in range(1, len(content)):
            for other in first.get(content[start], ()):
                rest = content[start:]
                if rest.startswith(other["content"]) or other["content"].startswith(rest):
                    return f"its added tokens {content!r} and {other['content']!r} overlap"
        for other in first[content[:1]]:
            if other is not token and other["content"].startswith(content):
                return f"its added tokens {content!r} and {other['content']!r} overlap"
    return None


@cache
def _alphabet() -> dict[str, int]:
    """The letters of a byte-level vocabulary, and the byte that each stands for."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + number): byte for number, byte in enumerate(hidden)}
