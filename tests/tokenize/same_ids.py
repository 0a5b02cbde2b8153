"""Definitions that are compared with `tokenizers`, and the comparison.

The oracle is `tokenizers` itself, loaded from the same JSON and called directly.
"""

import functools
import itertools
import json
import random

import numpy as np
import pytest
import tokenizers

from penstock.errors import TokenizerError
from penstock.sources.batch import binary_array
from penstock.tokenize.supported import PATTERNS
from penstock.tokenize.tokenizer import load_tokenizer

BOTH = (False, True)
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
NOT_ASCII = ["é", "e\u0301", "中", "😀", "\u00a0", "\u2028", "\u3000", "\u0085", "\u200b", "\u0301"]
BESIDE = ["", "a", "A", "1", "_", "-", ".", "'s", " ", "  ", "\n", "\t", "\r\n", *NOT_ASCII]


# Each of them stands in for a class of characters, or was the end of some fuzzed difference.
ATOMS = [
    *"abZßéǅʰª\u017fKİ\u0131Жж\u0627中あア한12½Ⅷ٣²!?/_-$^`~#",
    *("e\u0301", "\u0301", "\u093e", "\u20e3", "ー", "4567", "...", "//", "<|", "|>", "©", "€"),
    *(" ", "  ", "\t", "\n", "\r", "\r\n", "\n\n", "\x0b", "\x0c", "\x1c", "\x1f", "\x00", "\x7f"),
    *("\u00a0", "\u0085", "\u2028", "\u2029", "\u3000", "\u200b", "\u180e", "\ufeff", "\ue000"),
    *("'", "'s", "'S", "'\u017f", "'t", "'re", "'rE", "'ve", "'m", "'ll", "'LL", "'d", "\u2019s"),
    *("😀", "👩\u200d👩", "\U0001d400", "\U00020000", "\U000e0001", "ll", "re"),
]


def letters():
    """The character that a byte-level vocabulary has for each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    names = {byte: chr(byte) for byte in shown}
    return names | {byte: chr(256 + number) for number, byte in enumerate(hidden)}


LETTERS = letters()


def byte_model(alphabet=b"abwordleti nsh!?<|>1A.\n'", **settings):
    """Byte-level BPE that joins every two of some bytes, so that ids show each split."""
    vocab, merges = joined(alphabet)
    return bpe(dict(vocab), [*merges], **settings)


@functools.cache
def joined(alphabet):
    """The vocabulary and the merges of `byte_model`."""
    merges = [[LETTERS[x], LETTERS[y]] for x in alphabet for y in alphabet]
    merges += [[LETTERS[x], LETTERS[y]] for x in b"a1! '\n" for y in range(128, 256)]
    merges += [[LETTERS[y], LETTERS[x]] for x in b"a1! '\n" for y in range(128, 256)]
    vocab = {LETTERS[byte]: byte for byte in range(256)}
    for merge in [*merges]:
        vocab.setdefault("".join(merge), len(vocab))
    for left, right in ((LETTERS[32] + "l", "ea"), ("wo", "rd")):
        if left in vocab and right in vocab:
            merges.append([left, right])
            vocab[left + right] = len(vocab)
    return vocab, merges


def bpe(vocab, merges, **settings):
    usual = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {**usual, "vocab": vocab, "merges": merges, **settings}


def byte_level(**settings):
    usual = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"type": "ByteLevel", **usual, **settings}


def split(pattern, behavior="Isolated", *, invert=False):
    kind = {"Regex": pattern} if isinstance(pattern, str) else {"String": pattern[0]}
    return {"type": "Split", "pattern": kind, "behavior": behavior, "invert": invert}


def steps(*each):
    return {"type": "Sequence", "pretokenizers": list(each)}


def normalizers(*each):
    return {"type": "Sequence", "normalizers": list(each)}


def patterned(patterns, **settings):
    plain = byte_level(use_regex=False)
    return steps(*(split(each, **settings) for each in patterns), plain)


SINGLE = sorted(each for each in PATTERNS if len(each) == 1)
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
QWEN_2 = (LLAMA_3[0].replace("{1,3}", ""),)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve"
    r"|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:"
    r"'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DEEPSEEK = next(each for each in PATTERNS if len(each) == 3)
# gigatoken knows these two, and splits 4567 and a blank last line otherwise than tokenizers.
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s+",
)
GPT_4 = (LLAMA_3[0].replace(r"[\r\n]+|\s+(", r"[\r\n]|\s+("),)


def definition(model=None, *, normalizer=None, pre_tokenizer=None, added=()):
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": None,
        "model": model or byte_model(),
    }


def token(content, number, **flags):
    return {"id": number, "content": content, **dict.fromkeys(FLAGS, False), **flags}


def added_token_grid():
    """3,456 tokenizers with an added token: 32 flags, 9 contents, 12 ways to split."""
    contents = ("<|end|>", "word", " lead", "trail ", "two words", "!?", "naïve", "1", "é\u0301")
    models = {"model": byte_model()}
    vocab = models["model"]["vocab"]
    splits = (
        byte_level(),
        byte_level(add_prefix_space=True),
        byte_level(use_regex=False),
        patterned(LLAMA_3),
    )
    ways = list(itertools.product((None, {"type": "NFC"}, {"type": "Lowercase"}), splits))
    for flags in itertools.product((False, True), repeat=5):
        for content, (normalizer, pre_tokenizer) in itertools.product(contents, ways):
            number = vocab.get(content, len(vocab))
            added = [token(content, number, **dict(zip(FLAGS, flags, strict=True)))]
            yield definition(
                **models, normalizer=normalizer, pre_tokenizer=pre_tokenizer, added=added
            )


def texts_with(content):
    """A text with an added token between all kinds of neighbours."""
    around = [
        f"{start}{left}{content}{right}{end}"
        for left, right in itertools.product(BESIDE, BESIDE)
        for start, end in (("", ""), ("x", "y"))
    ]
    return [
        *around,
        content * 2,
        f"{content} {content}",
        content[:-1],
        content[1:],
        content.upper(),
    ]


def load(config, folder, *, parse=False):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(config))
    return load_tokenizer(path, special_tokens="parse" if parse else "text")


def expected(config, texts, *, parse=False):
    """The ids that `tokenizers` gives."""
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(config))
    tokenizer.encode_special_tokens = not parse
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [each.ids for each in encoded]


def given(tokenizer, texts):
    """The ids that penstock gives."""
    ids, offsets = tokenizer.encode_documents(binary_array([text.encode() for text in texts]))
    return [each.tolist() for each in np.split(ids, offsets[1:-1])]


def differing(config, texts, folder, *, parse=False):
    """The texts of which penstock gives other ids than `tokenizers`, and the engine it used."""
    loaded = load(config, folder, parse=parse)
    both = zip(texts, given(loaded, texts), expected(config, texts, parse=parse), strict=True)
    return [text for text, ours, theirs in both if ours != theirs], loaded.engine.name


def same_but_special(config, these, folder, *, parse):
    """`same` for definitions with a special token that the model itself may find.

    `tokenizers` gives its id for a text then, with special tokens as text; penstock must not. So
    in that mode, texts that hold such a token are left out; test_plain.py is about them. A token
    that is the only one for a character is refused.
    """
    (added,) = config["added_tokens"]
    content = added["content"]
    if parse or not added["special"] or content not in config["model"]["vocab"]:
        return same(config, these, folder, parse=parse)
    if len(content) == 1:
        with pytest.raises(TokenizerError, match="the only token for that character"):
            load(config, folder)
        return "refused"
    # A normalizer can write the token: "Word", "WORD".
    others = [text for text in [*these, *fuzzed(50)] if content not in text.lower()]
    return same(config, others, folder)


def same(config, these, folder, *, parse=False):
    """Assert that no ids differ; returns the engine that was used."""
    wrong, engine = differing(config, these, folder, parse=parse)
    told = min(wrong, key=len) if wrong else ""
    assert not wrong, f"{len(wrong)} of {len(these)} texts, for example {told!r}, {engine}"
    return engine


def fuzzed(count, seed=1):
    source = random.Random(seed)
    return ["".join(source.choices(ATOMS, k=source.randint(1, 30))) for _ in range(count)]
