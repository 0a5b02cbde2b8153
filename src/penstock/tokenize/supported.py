r"""The tokenizer definitions for which gigatoken is known to give the right ids.

gigatoken loads more definitions than it implements: it ignores `single_word`, `use_regex=False` and
`end_of_word_suffix`, for example, and then gives ids that `tokenizers` does not give. So this
module lists the settings for which both libraries were compared and gave the same ids. A definition
with any other setting is encoded by `tokenizers`.

Two kinds of models are listed:

    byte-level BPE      GPT-2, GPT-4, Llama 3, Qwen, DeepSeek, o200k: a known split pattern
    BPE with byte       Llama 2, Mistral, Gemma: spaces become "▁", and no pattern splits
    fallback

The tests compare every entry with `tokenizers`. A new release of gigatoken must pass them before it
is added to `VERSIONS`. `code_points` has the characters that both libraries treat differently even
for the definitions listed here.
"""

from functools import cache

from penstock.tokenize.definition import Config, Definition
from penstock.tokenize.gpt2 import byte_alphabet
from penstock.tokenize.special_tokens import merge_pair

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

# gigatoken has no regular expressions: it compares a definition's patterns with these as text, and
# has code for each. An entry has the patterns of one or more `Split` steps, which come before a
# `ByteLevel` step without a pattern. Two variants of GPT-4's pattern that gigatoken knows are not
# listed, because gigatoken implements them as tiktoken does, and not as `tokenizers` does:
# `\p{N}{1,3}+` matches all digits in `tokenizers`, but only three in gigatoken; and with
# `\s*[\r\n]|\s+(?!\S)|\s+` gigatoken keeps the blanks at the end of a text together.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_EDGE = r"[^\r\n\p{L}\p{N}]?"
_SIGNS, _OTHER_SIGNS = r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{M}\p{N}]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SMALL, _LARGE = f"{_EDGE}{_UPPER}*{_LOWER}+", f"{_EDGE}{_UPPER}+{_LOWER}*"
# The alternatives of each pattern, in order.
_ALTERNATIVES = (
    # GPT-2, written out
    (r"'(?:[sdmt]|ll|ve|re)", r" ?\p{L}+", r" ?\p{N}+", _SIGNS, r"\s+(?!\S)", r"\s+"),
    # Llama 3, OLMo 2, GPT-4 as converters write it
    (_ENDINGS, rf"{_EDGE}\p{{L}}+", r"\p{N}{1,3}", rf"{_SIGNS}[\r\n]*", _BLANKS),
    # Qwen 2 and 3
    (_ENDINGS, rf"{_EDGE}\p{{L}}+", r"\p{N}", rf"{_SIGNS}[\r\n]*", _BLANKS),
    # Qwen 3.5
    (_ENDINGS, rf"{_EDGE}[\p{{L}}\p{{M}}]+", r"\p{N}", rf"{_OTHER_SIGNS}[\r\n]*", _BLANKS),
    # o200k, gpt-oss
    (f"{_SMALL}{_ENDINGS}?", f"{_LARGE}{_ENDINGS}?", r"\p{N}{1,3}", rf"{_SIGNS}[\r\n/]*", _BLANKS),
    # Mistral's tekken, Nemotron
    (_SMALL, _LARGE, r"\p{N}", rf"{_SIGNS}[\r\n/]*", _BLANKS),
)
# DeepSeek V3: numbers, Chinese and Japanese, and the rest
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
    "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
PATTERNS = frozenset([*(("|".join(each),) for each in _ALTERNATIVES), _DEEPSEEK])


def refusal(config: Config, *, parse: bool) -> str | None:
    """The reason why gigatoken's ids may differ from those of `tokenizers`; None if they do not.

    Args:
        config: The tokenizer.json.
        parse: Whether a special token in a text is parsed as that token.
    """
    # The order matters: the checks of added tokens assume one of the listed models.
    return (
        _version_reason()
        or _model_reason(config["model"])
        or _split_reason(config)
        or _token_reason(config, parse=parse)
    )


def is_byte_level(definition: Definition) -> bool:
    """Whether the model's symbols are bytes; otherwise it is BPE with byte fallback."""
    return not definition.config["model"].get("byte_fallback")


def knows_symbols(definition: Definition) -> bool:
    """Whether the definition's split pattern has a class for symbols and punctuation."""
    steps = _steps(definition.config.get("pre_tokenizer"), "pretokenizers")
    return any(r"\p{S}" in str(step.get("pattern", {}).get("Regex")) for step in steps)


def may_cut(definition: Definition, *, parse: bool) -> bool:
    """Whether a listed definition gives the same ids for a text and for the text cut in two.

    The cuts are those of `penstock.tokenize.code_points.cut`. Every listed pattern splits the text
    there, whatever else is in the text. But an added token that contains a blank, or that strips
    the blanks beside it, could match across the cut, and `add_prefix_space` would put a space
    before each piece.
    """
    active = _active(definition.added_tokens, parse=parse)
    strips = any(map(_strips, active))
    has_blank = any(char.isspace() for token in active for char in token["content"])
    return is_byte_level(definition) and not (
        strips or has_blank or _is_prefixed(definition.config)
    )


@cache
def _version_reason() -> str | None:
    # Imported here, because it takes 20 ms: rows without a known tokenizer are shown as ids.
    from importlib.metadata import version

    found = version("gigatoken")
    if found.startswith(VERSIONS):
        return None
    return f"gigatoken {found} was not compared with tokenizers; {VERSIONS[-1]}x was"


def _model_reason(model: Config) -> str | None:
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


def _byte_level_reason(model: Config) -> str | None:
    vocab = model["vocab"]
    alphabet = byte_alphabet()
    if not alphabet.keys() <= vocab.keys():
        return "its vocabulary lacks some bytes"
    if set().union(*vocab) <= alphabet.keys():
        return None
    # A token with other characters is not written in the byte alphabet (DeepSeek's special tokens).
    # `tokenizers` never finds it in a text, but gigatoken reads it as its bytes in UTF-8.
    plain = [token for token in vocab if not alphabet.keys() >= set(token)]
    if model.get("ignore_merges"):
        return f"its vocabulary has {plain[0]!r}, which is not byte-level, with ignore_merges"
    letters = {byte: letter for letter, byte in alphabet.items()}
    for token in plain:
        if "".join(letters[byte] for byte in token.encode()) in vocab:
            return f"its vocabulary has {token!r} twice, once in bytes"
    return None


def _fallback_reason(model: Config) -> str | None:
    if not model["vocab"].keys() >= _BYTE_TOKENS:
        return "its vocabulary lacks some of the tokens <0x00> to <0xFF>"
    if model.get("ignore_merges"):
        return "its model has byte_fallback with ignore_merges"
    parts = {part for merge in model["merges"] for part in merge_pair(merge)}
    return None if parts.isdisjoint(_BYTE_TOKENS) else "its merges join byte tokens"


def _split_reason(config: Config) -> str | None:
    """The reason if the normalizer or the pre-tokenizer is not one of those that were compared."""
    normalizers = _steps(config.get("normalizer"), "normalizers")
    steps = _steps(config.get("pre_tokenizer"), "pretokenizers")
    if config["model"].get("byte_fallback"):
        kind, shown = "steps", [*normalizers, *steps]
        is_known = _is_sentencepiece(normalizers, steps)
    elif any(step != {"type": "NFC"} for step in normalizers):
        kind, shown, is_known = "normalizer", normalizers, False
    else:
        kind, shown, is_known = "pre-tokenizer", steps, _is_known_split(steps)
    if is_known:
        return None
    # Each step is cut to 200 characters: a precompiled character map would fill the screen.
    text = ", ".join(str(step)[:200] for step in shown) or "none"
    return f"its {kind} is not among those that were compared: {text}"


def _steps(step: Config | None, key: str) -> list[Config]:
    """The steps of a sequence, or the only step."""
    if step is None:
        return []
    return step.get(key, []) if step.get("type") == "Sequence" else [step]


def _is_known_split(steps: list[Config]) -> bool:
    """Whether the steps are ByteLevel with GPT-2's pattern, or known patterns and ByteLevel."""
    *splits, last = steps or [{}]
    if last.get("type") != "ByteLevel":
        return False
    if not splits:
        return bool(last.get("use_regex", True))
    if last.get("use_regex", True) or last.get("add_prefix_space", True):
        return False
    # "Isolated" keeps text that the pattern does not match, and "Removed" with invert drops it. A
    # single listed pattern matches all text, so both give the same result. Each of DeepSeek's three
    # patterns leaves some text unmatched, so for them only "Isolated" is right.
    kept = [("Isolated", False), ("Removed", True)] if len(splits) == 1 else [("Isolated", False)]
    is_kept = all(
        step.get("type") == "Split" and (step.get("behavior"), bool(step.get("invert"))) in kept
        for step in splits
    )
    return is_kept and tuple(step["pattern"].get("Regex") for step in splits) in PATTERNS


def _is_sentencepiece(normalizers: list[Config], steps: list[Config]) -> bool:
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


def _is_prefixed(config: Config) -> bool:
    """Whether a space is put before each text that does not begin with one."""
    steps = _steps(config.get("pre_tokenizer"), "pretokenizers")
    return any(step.get("add_prefix_space", step["type"] == "ByteLevel") for step in steps)


def _strips(token: Config) -> bool:
    return bool(token.get("lstrip") or token.get("rstrip"))


def _active(tokens: list[Config], *, parse: bool) -> list[Config]:
    """The added tokens that a text can contain."""
    return [token for token in tokens if parse or not token["special"]]


def _token_reason(config: Config, *, parse: bool) -> str | None:
    """The reason if the added tokens are not like those that were compared."""
    tokens = config.get("added_tokens") or []
    active = _active(tokens, parse=parse)
    if not active:
        return None
    if not _has_usual_ids(tokens, config["model"]["vocab"]):
        return "the ids of its added tokens are not those that tokenizers would give them"
    for token in active:
        if reason := _flag_reason(token, has_normalizer=bool(config.get("normalizer"))):
            return f"its added token {token['content']!r} {reason}"
    if config["model"].get("byte_fallback") or _is_prefixed(config) or any(map(_strips, active)):
        for content in (token["content"] for token in tokens):
            if content != content.strip():
                return f"its added token {content!r} begins or ends with a blank"
    return _overlap_reason(tokens, active)


def _flag_reason(token: Config, *, has_normalizer: bool) -> str | None:
    if token.get("single_word"):
        return "has single_word=True"
    if token.get("normalized") and has_normalizer:
        return "has normalized=True, and the tokenizer has a normalizer"
    if unknown := sorted(token.keys() - _TOKEN_KEYS):
        return f"has the unknown setting {unknown[0]!r}"
    return None if token["content"] else "is empty"


def _has_usual_ids(tokens: list[Config], vocab: dict[str, int]) -> bool:
    """Whether `tokenizers`, which numbers tokens in this order, gives them the ids in the file."""
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


def _overlap_reason(tokens: list[Config], active: list[Config]) -> str | None:
    """The reason if ids could depend on which of two added tokens is searched first.

    `tokenizers` searches tokens with normalized=False first, and skips over a special token that is
    text without searching inside it; gigatoken searches all tokens at once.
    """
    same_rules = len(active) == len(tokens) and not any(map(_strips, tokens))
    if same_rules and len({bool(token.get("normalized")) for token in tokens}) == 1:
        return None
    by_first: dict[str, list[str]] = {}
    for token in tokens:
        by_first.setdefault(token["content"][:1], []).append(token["content"])
    for token in tokens:
        content = token["content"]
        for start in range(len(content)):
            rest = content[start:]
            for other in by_first.get(content[start], ()):
                # Both begin at `start`. At 0, every token begins with itself, which is no overlap.
                overlaps = other.startswith(rest) or (start > 0 and rest.startswith(other))
                if overlaps and (start > 0 or other != content):
                    return f"its added tokens {content!r} and {other!r} overlap"
    return None
