r"""The split patterns that gigatoken has written out in code, as tokenizer.json files spell them.

gigatoken compares a definition's pattern with these as text; it has no regular expressions. Each
entry is the patterns of one or more `Split` in a row, before a `ByteLevel` without a pattern.

Two spellings of GPT-4's pattern that gigatoken knows are not listed, because it follows tiktoken
and not `tokenizers`. Of `\p{N}{1,3}+`, which takes all digits in `tokenizers`, it takes three; and
with `\s*[\r\n]|\s+(?!\S)|\s+` it keeps the blanks at the end of a text together.
"""

__all__ = ["PATTERNS"]

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
