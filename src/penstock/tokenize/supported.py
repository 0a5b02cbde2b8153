r"""The tokenizer definitions and characters for which gigatoken is known to give the right ids.

gigatoken loads more definitions than it implements: it ignores `single_word`, `use_regex=False` and
`end_of_word_suffix`, for example, and then gives ids that `tokenizers` does not give. So this
module lists the settings for which both libraries were compared and gave the same ids. A definition
with any other setting is encoded by `tokenizers`.

Two kinds of models are listed:

    byte-level BPE      GPT-2, GPT-4, Llama 3, Qwen, DeepSeek, o200k: a known split pattern
    BPE with byte       Llama 2, Mistral, Gemma: spaces become "▁", and no pattern splits
    fallback

The tests compare every entry with `tokenizers`. A new release of gigatoken must pass them before it
is added to `VERSIONS`.

Even for these definitions, both libraries treat some characters differently. Both split text by
Unicode's classes (letter, number, mark), and one definition in five also normalizes the text. But
each library has its own version of the Unicode tables. A code point that was assigned between the
two versions is a letter to one library and unassigned to the other: "\\U000323b0's" is two tokens
or three. code_points.txt has these code points, from a comparison of all 1.1 million:

    python benchmarks/code_points.py

They belong to rare scripts and recent additions, so ordinary text has none of them, and the search
for them must be fast: `find` reads English at about 15 GB/s, gigatoken at 0.2 GB/s.
"""

import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.tokenize.definition import Config, Definition, byte_alphabet
from penstock.tokenize.special_tokens import is_bpe, merge_pair, numbered

VERSIONS = ("0.10.",)
"""The releases of gigatoken that were compared, as the beginnings of their version numbers."""

# Above this, gigatoken packs ids into fewer bits than they need: an id of 20,000,000 was wrong.
_MAX_VOCAB_SIZE = 1 << 20
_MODEL_KEYS = {
    *("type", "vocab", "merges", "dropout", "unk_token", "fuse_unk", "byte_fallback"),
    *("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"),
}
_TOKEN_KEYS = {"id", "content", "special", "single_word", "lstrip", "rstrip", "normalized"}
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}
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

# In no listed pattern does a token contain a space after a character that is not blank, or a
# newline after a letter or digit (some have newlines after punctuation). The patterns look ahead
# only after blanks, and never back. So a piece is split as in the whole text, whatever follows.
# Wide characters in UTF-8: 0xE4 to 0xE9 begin the ideographs, E3 80 82 is the full stop, and EF BC
# begins wide punctuation.
_CUT = re.compile(
    rb"[!-~](?= )|[0-9A-Za-z](?=\n)"
    rb"|(?:[\xe4-\xe9][\x80-\xbf]{2}|\xe3\x80\x82|\xef\xbc[\x80-\xbf])\n(?=[\xe4-\xe9])"
)
# `find` reads this much at once, so that its temporary arrays stay in the cache.
_CHUNK = 1 << 17


def refusal(config: Config, *, parse: bool) -> str | None:
    """The part of a tokenizer.json that was not compared; None if gigatoken's ids are right.

    Args:
        config: The tokenizer.json.
        parse: Whether a special token in a text is parsed as that token.
    """
    # The order matters: the checks of added tokens assume one of the listed models.
    from importlib.metadata import version  # slow to import, and only builds ask for it

    if not (release := version("gigatoken")).startswith(VERSIONS):
        return f"gigatoken {release}"
    if not _is_known_model(config["model"]):
        return f"its model ({config['model'].get('type', 'BPE')})"
    if not _is_known_split(config):
        return "its normalizer or pre-tokenizer"
    return None if _has_known_tokens(config, parse=parse) else "one of its added tokens"


def knows_symbols(definition: Definition) -> bool:
    """Whether the definition's split pattern has a class for symbols and punctuation."""
    steps = _steps(definition.config.get("pre_tokenizer"), "pretokenizers")
    return any(r"\p{S}" in str(step.get("pattern", {}).get("Regex")) for step in steps)


def may_cut(definition: Definition, *, parse: bool) -> bool:
    """Whether a listed definition gives the same ids for a text and for the text cut in two.

    The cuts are those of `cut`. Every listed pattern splits the text there, whatever else is in the
    text. But an added token that contains a blank, or that strips the blanks beside it, could match
    across the cut, and `add_prefix_space` would put a space before each piece. A model with byte
    fallback has no pattern.
    """
    active = _active(definition.added_tokens, parse=parse)
    has_blank = any(char.isspace() for token in active for char in token["content"])
    is_byte_level = not definition.config["model"].get("byte_fallback")
    has_blank = has_blank or any(map(_strips, active)) or _is_prefixed(definition.config)
    return is_byte_level and not has_blank


def _is_known_model(model: Config) -> bool:
    unlike = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if not is_bpe(model) or model.keys() - _MODEL_KEYS or any(map(model.get, unlike)):
        return False
    vocab = model["vocab"]
    if len(set(vocab.values())) != len(vocab):  # one id for two tokens
        return False
    if max(vocab.values(), default=0) >= _MAX_VOCAB_SIZE:
        return False
    return _is_known_fallback(model) if model.get("byte_fallback") else _is_known_byte_level(model)


def _is_known_byte_level(model: Config) -> bool:
    vocab = model["vocab"]
    alphabet = byte_alphabet()
    if not alphabet.keys() <= vocab.keys():
        return False
    # A token with other characters is not written in the byte alphabet (DeepSeek's special tokens).
    # `tokenizers` never finds it in a text, but gigatoken reads it as its bytes in UTF-8.
    plain = [token for token in vocab if not alphabet.keys() >= set(token)]
    if not plain or model.get("ignore_merges"):
        return not plain
    letters = {byte: letter for letter, byte in alphabet.items()}
    return not any("".join(letters[byte] for byte in token.encode()) in vocab for token in plain)


def _is_known_fallback(model: Config) -> bool:
    if not model["vocab"].keys() >= _BYTE_TOKENS or model.get("ignore_merges"):
        return False
    return _BYTE_TOKENS.isdisjoint(part for merge in model["merges"] for part in merge_pair(merge))


def _is_known_split(config: Config) -> bool:
    """Whether the normalizer and the pre-tokenizer were compared."""
    normalizers = _steps(config.get("normalizer"), "normalizers")
    steps = _steps(config.get("pre_tokenizer"), "pretokenizers")
    if config["model"].get("byte_fallback"):
        return _is_sentencepiece(normalizers, steps)
    return all(step == {"type": "NFC"} for step in normalizers) and _is_known_pattern(steps)


def _steps(step: Config | None, key: str) -> list[Config]:
    """The steps of a sequence, or the only step."""
    if step is None:
        return []
    return step.get(key, []) if step.get("type") == "Sequence" else [step]


def _is_known_pattern(steps: list[Config]) -> bool:
    """Whether the steps are ByteLevel with GPT-2's pattern, or known patterns and ByteLevel."""
    *splits, last = steps or [{}]
    has_pattern = bool(last.get("use_regex", True))
    if last.get("type") != "ByteLevel" or not splits:
        return last.get("type") == "ByteLevel" and has_pattern
    if has_pattern or last.get("add_prefix_space", True):
        return False
    # "Isolated" keeps text that the pattern does not match, and "Removed" with invert drops it. A
    # single listed pattern matches all text, so both give the same result. Each of DeepSeek's three
    # patterns leaves some text unmatched, so for them only "Isolated" is right.
    kept = [("Isolated", False), ("Removed", True)][: 2 if len(splits) == 1 else 1]
    is_kept = all(
        step.get("type") == "Split" and (step.get("behavior"), bool(step.get("invert"))) in kept
        for step in splits
    )
    return is_kept and tuple(step["pattern"].get("Regex") for step in splits) in PATTERNS


def _is_sentencepiece(normalizers: list[Config], steps: list[Config]) -> bool:
    if normalizers:
        is_gemma = normalizers == [_SPACES] and steps == [_GEMMA]
        return is_gemma or (not steps and normalizers in ([_SPACES], [_FIRST_SPACE, _SPACES]))
    step = steps[0] if len(steps) == 1 else {}
    return (
        step.keys() == {"type", "replacement", "prepend_scheme", "split"}
        and (step["type"], step["replacement"]) == ("Metaspace", "▁")
        and step["prepend_scheme"] in ("first", "always", "never")
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


def _has_known_tokens(config: Config, *, parse: bool) -> bool:
    """Whether the added tokens are like those that were compared."""
    tokens = config.get("added_tokens") or []
    active = _active(tokens, parse=parse)
    if not active:
        return True
    for token in active:
        is_normalized = token.get("normalized") and config.get("normalizer")
        if token.get("single_word") or is_normalized or token.keys() - _TOKEN_KEYS:
            return False
    ids = {token["content"]: token["id"] for token in tokens}
    # `tokenizers` may give the tokens other ids than those in the file.
    if "" in ids or len(ids) != len(tokens) or ids != numbered(ids, config["model"]["vocab"]):
        return False
    strips = any(map(_strips, active))
    takes_blanks = strips or config["model"].get("byte_fallback") or _is_prefixed(config)
    if takes_blanks and any(content != content.strip() for content in ids):
        return False
    # `tokenizers` searches tokens with normalized=False first, and skips over a special token that
    # is text without searching inside it; gigatoken searches all tokens at once. So if the tokens
    # differ in this, the ids could depend on which of two tokens is searched first.
    is_searched_at_once = len(active) == len(tokens) and not strips
    num_rules = len({bool(token.get("normalized")) for token in tokens})
    return (is_searched_at_once and num_rules == 1) or not _may_overlap([*ids])


def _may_overlap(contents: list[str]) -> bool:
    """Whether an added token is the beginning of another, or another could begin inside it."""
    firsts = {content[0] for content in contents}
    is_beginning = any(two.startswith(one) for one, two in pairwise(sorted(contents)))
    return is_beginning or not all(firsts.isdisjoint(content[1:]) for content in contents)


def find(data: NDArray[np.uint8], *, symbols: bool) -> NDArray[np.int64]:
    """The positions of code points that gigatoken and `tokenizers` treat differently.

    Args:
        data: Texts in UTF-8, concatenated.
        symbols: Whether to include code points that only one library knows as symbol or
            punctuation (`symbol` in code_points.txt), such as the one at byte 2 in the example.

    >>> find(np.frombuffer("a ﷎ \U000323b0's".encode(), np.uint8), symbols=False)
    array([6])
    """
    leads, starts_listed, bounds = _tables(symbols)
    found = [np.zeros(0, np.int64)]
    here, after = data[:-1], data[1:]
    for low in range(0, len(here), _CHUNK):
        chunk = here[low : low + _CHUNK]
        if chunk.max() < leads[0]:  # the usual case
            continue
        is_lead = chunk == leads[0]
        for lead in leads[1:]:
            is_lead |= chunk == lead
        starts = np.flatnonzero(is_lead)
        pairs = chunk[starts].astype(np.uint16) << 8 | after[low + starts]
        found.append(low + starts[starts_listed[pairs]])
    positions: NDArray[np.int64] = np.concatenate(found)
    # `bounds` alternates the first code point of a range and the one after its last. So a code
    # point is inside a range if an odd number of bounds are at or below it.
    inside = np.searchsorted(bounds, _decoded(data, positions), side="right") % 2
    listed: NDArray[np.int64] = positions[inside == 1]
    return listed


def cut(text: bytes, size: int) -> list[bytes]:
    """`text` in pieces of about `size` bytes whose ids, concatenated, are the ids of the text.

    A cut is before a space that follows an ASCII character other than a blank, before a newline
    that follows an ASCII letter or digit, or after a newline between an ideograph (or a full stop,
    or other wide punctuation) and an ideograph. The ids stay the same only for tokenizers for which
    `may_cut` is true. A text without such positions is one piece.

    >>> cut(b"It is 5 o'clock now, no more.", 3)
    [b'It is', b" 5 o'clock", b' now,', b' no more.']
    """
    pieces = []
    start = 0
    while start < len(text):
        found = _CUT.search(text, start + size)
        stop = found.end() if found else len(text)
        pieces.append(text[start:stop])
        start = stop
    return pieces


def _decoded(data: NDArray[np.uint8], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The code points that begin at `positions`."""
    # Four bytes are read from each position on. At the end of the data, the last byte is repeated.
    ends = np.minimum(positions[:, None] + np.arange(4), len(data) - 1)
    lead, *tail = data[ends].astype(np.int64).T
    tail = [byte & 0x3F for byte in tail]
    two = (lead & 0x1F) << 6 | tail[0]
    three = (lead & 0x0F) << 12 | tail[0] << 6 | tail[1]
    four = (lead & 0x07) << 18 | tail[0] << 12 | tail[1] << 6 | tail[2]
    decoded: NDArray[np.int64] = np.where(lead < 0xE0, two, np.where(lead < 0xF0, three, four))
    return decoded


@cache
def listed_ranges(*, symbols: bool) -> list[tuple[int, int]]:
    """The ranges of code_points.txt, as (first, last), in ascending order."""
    text = Path(__file__).with_name("code_points.txt").read_text(encoding="ascii")
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    kinds = ("letter", "symbol") if symbols else ("letter",)
    return sorted((int(low, 16), int(high, 16)) for low, high, kind in rows if kind in kinds)


@cache
def _tables(symbols: bool) -> tuple[list[int], NDArray[np.bool_], NDArray[np.int64]]:
    """Three tables to search for listed code points.

    Their first bytes in UTF-8; whether two bytes are the first ones of a listed code point; and the
    bounds of all ranges.
    """
    ranges = listed_ranges(symbols=symbols)
    starts_listed = np.zeros((256, 256), bool)
    for low, high in ranges:
        # The last byte of a code point has its lowest 6 bits, so the first two bytes change only at
        # multiples of 64.
        for point in (*range(low, high, 0x40), high):
            starts_listed[tuple(chr(point).encode()[:2])] = True
    leads = np.flatnonzero(starts_listed.any(axis=1)).tolist()
    return leads, starts_listed.ravel(), np.array([(a, b + 1) for a, b in ranges]).ravel()
