"""Find the code points that gigatoken and tokenizers treat differently.

    python benchmarks/code_points.py

compares all 1.1 million code points under every supported split pattern and under NFC, and
writes src/penstock/tokenize/code_points.txt. It takes about ten minutes.

Programs with different versions of the Unicode tables disagree about code points that were added
between these versions. gigatoken 0.10 has Unicode 17; tokenizers 0.23 has Unicode 16 in its
patterns and Unicode 9 in its NFC. penstock also allows older releases of tokenizers, with Unicode
14 in their patterns, so letters, numbers and marks that were added later are listed too. These
are found with the tables of Python 3.11, which has Unicode 14; so run this with Python 3.11.
"""

import json
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import tokenizers

from penstock.tokenize.definition import Definition, byte_alphabet
from penstock.tokenize.gigatoken import GigatokenEngine
from penstock.tokenize.supported import PATTERNS

OUTPUT = Path(__file__).parents[1] / "src" / "penstock" / "tokenize" / "code_points.txt"
HEADER = """\
# Code points that gigatoken and tokenizers treat differently, written by benchmarks/code_points.py:
# the first and the last one of each range, and whether only one of the libraries knows them as
# letters, numbers or marks ("letter"), or as symbols or punctuation ("symbol").
"""

CODE_POINTS = [*range(0xD800), *range(0xE000, 0x110000)]
# Letters, digits, punctuation and blanks beside a character show whether a pattern ends there.
CONTEXT = "{0} a{0}a A{0}a 1{0}1 !{0}!\n{0}\n {0} \n\n{0}'s '{0} a{0}A"
CONTEXTS = ("{}", "{}'s", "a\u0345{}")
"""Alone, before a contraction, after a combining mark."""
_BATCH = 200_000
LETTERS = {byte: letter for letter, byte in byte_alphabet().items()}


def byte_level(**settings):
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
        **settings,
    }


def pre_tokenizers():
    """Each supported split, in the format of tokenizer.json."""
    yield byte_level(use_regex=True)
    for patterns in sorted(PATTERNS):
        splits = [
            {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
            for each in patterns
        ]
        yield {"type": "Sequence", "pretokenizers": [*splits, byte_level()]}


def revealing(pre_tokenizer, normalizer=None):
    """A tokenizer whose ids show where the pattern splits.

    Each ASCII byte of the context merges with every byte of a longer character, so two
    neighbours become one token where the pattern keeps them together.
    """
    beside = b"aA1! \n's"
    pairs = [(x, y) for x in beside for y in range(128, 256)]
    pairs += [(y, x) for x, y in pairs] + [(x, y) for x in beside for y in beside]
    merges = [[LETTERS[x], LETTERS[y]] for x, y in pairs]
    vocab = {LETTERS[byte]: byte for byte in range(256)}
    for merge in merges:
        vocab.setdefault("".join(merge), len(vocab))
    config = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": byte_level(),
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    return Definition("revealing", config)


def raw_gigatoken(definition, texts):
    """The ids of gigatoken, without the corrections that penstock makes."""
    engine = GigatokenEngine(definition, parse=False)
    for start in range(0, len(texts), _BATCH):
        array = pa.array([text.encode() for text in texts[start : start + _BATCH]])
        ids, offsets = engine.encode_raw(array.cast(pa.large_binary()))
        yield from np.split(ids, offsets[1:-1])


def reference(definition, texts):
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(definition.config))
    for start in range(0, len(texts), _BATCH):
        encoded = tokenizer.encode_batch_fast(texts[start : start + _BATCH])
        yield from (each.ids for each in encoded)


def differing(definition, texts):
    """The numbers of the texts for which gigatoken and tokenizers return different ids."""
    both = zip(raw_gigatoken(definition, texts), reference(definition, texts), strict=True)
    return [number for number, (ours, theirs) in enumerate(both) if ours.tolist() != theirs]


def of_patterns():
    """Code points that gigatoken and tokenizers split differently, and those for DeepSeek only.

    Only DeepSeek's pattern distinguishes symbols and punctuation.
    """
    texts = [CONTEXT.format(chr(point)) for point in CODE_POINTS]
    found, symbols = set(), set()
    for split in pre_tokenizers():
        here = {CODE_POINTS[number] for number in differing(revealing(split), texts)}
        print(f"{len(here):6,} under {str(split)[:80]}", file=sys.stderr, flush=True)
        is_deepseek = len(split.get("pretokenizers", ())) > 2
        (symbols if is_deepseek else found).update(here)
    return found, symbols


def of_nfc():
    """Code points that gigatoken and tokenizers order or compose differently in NFC."""
    nfc = revealing(byte_level(use_regex=True), {"type": "NFC"})
    found = set()
    # NFC sorts U+0345 after every other mark and U+0334 before. So if only one program knows that
    # a code point is a mark, only that program swaps it with one of these two.
    for context in ("{}", "a\u0345{}", "a{}\u0334", "{0}{0}"):
        texts = [context.format(chr(point)) for point in CODE_POINTS]
        found |= {CODE_POINTS[number] for number in differing(nfc, texts)}
    # Pairs that only one program composes. One of the two was added after Unicode 3.2. Both belong
    # to the same script, or the second is a mark that composes with other characters too.
    old = unicodedata.ucd_3_2_0.category
    new = [p for p in range(0x180, 0x20000) if old(chr(p)) == "Cn" and not _is_ideograph(p)]
    pieces = (unicodedata.decomposition(chr(point)).split() for point in CODE_POINTS)
    marks = {int(each[1], 16) for each in pieces if len(each) == 2 and not each[0].startswith("<")}
    composed = set()
    for start in range(0, len(new), 4_000):
        some = new[start : start + 4_000]
        pairs = [(p, p + step) for p in some for step in range(-96, 97)]
        pairs += [(p, mark) for p in some for mark in sorted(marks)]
        pairs = [pair for pair in pairs if not any(0xD800 <= each < 0xE000 for each in pair)]
        # Skip pairs with a code point that was found already: they differ because of it.
        pairs = [pair for pair in pairs if found.isdisjoint(pair)]
        numbers = differing(nfc, ["".join(map(chr, pair)) for pair in pairs])
        composed |= {p for number in numbers for p in pairs[number] if old(chr(p)) == "Cn"}
    print(f"{len(found | composed):6,} under NFC", file=sys.stderr)
    return found | composed


def _is_ideograph(point):
    """Whether a code point is in one of the large blocks in which nothing composes."""
    return 0x3400 <= point < 0xA000 or 0x13000 <= point < 0x14680 or 0x17000 <= point < 0x1B300


def newer_than_unicode_14():
    """Letters, numbers and marks that are not in the tables of Python 3.11."""
    if unicodedata.unidata_version != "14.0.0":
        raise SystemExit("Run this with Python 3.11, whose unicodedata is that of Unicode 14.")
    pattern = tokenizers.Regex(r"[\p{L}\p{N}\p{M}]")
    split = tokenizers.pre_tokenizers.Split(pattern, "removed")
    unknown = [p for p in CODE_POINTS if unicodedata.category(chr(p)) == "Cn"]
    return {point for point in unknown if not split.pre_tokenize_str(chr(point))}


def ranges(points):
    found = []
    for point in sorted(points):
        if found and found[-1][1] == point - 1:
            found[-1][1] = point
        else:
            found.append([point, point])
    return found


def table(letters, symbols):
    """The text of code_points.txt."""
    kinds = (("letter", letters), ("symbol", symbols - letters))
    rows = [f"{low:04X} {high:04X} {kind}\n" for kind, each in kinds for low, high in ranges(each)]
    return HEADER + "".join(rows)


if __name__ == "__main__":
    letters, symbols = of_patterns()
    letters |= of_nfc() | newer_than_unicode_14()
    OUTPUT.write_text(table(letters, symbols), encoding="ascii")
    print(f"{len(letters | symbols):,} code points are in {OUTPUT}", file=sys.stderr)
