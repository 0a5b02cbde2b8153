"""82 normalizers, pre-tokenizers and models that are compared with `tokenizers`."""

import importlib.util
import itertools
import random
from pathlib import Path

from penstock.tokenize.supported import PATTERNS

SPEC = importlib.util.spec_from_file_location("same_ids", Path(__file__).with_name("same_ids.py"))
ids = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ids)
bpe, byte_level, byte_model, definition = ids.bpe, ids.byte_level, ids.byte_model, ids.definition
normalizers, patterned, split, steps = ids.normalizers, ids.patterned, ids.split, ids.steps
token, BOTH, LETTERS, SINGLE = ids.token, ids.BOTH, ids.LETTERS, ids.SINGLE


def variants():
    """82 normalizers, pre-tokenizers and models, by a name each."""
    yield from _normalizer_variants()
    yield from _split_variants()
    yield from _byte_variants()
    yield from _fallback_variants()
    yield from _other_models()


def _normalizer_variants():
    nfc, lower = {"type": "NFC"}, {"type": "Lowercase"}
    bert = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
    known = [
        None,
        *({"type": kind} for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents")),
        *({"type": kind} for kind in ("Nmt", "ByteLevel")),
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Replace", "pattern": {"String": "the"}, "content": "x"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "_"},
        {"type": "Prepend", "prepend": "_"},
        {"type": "BertNormalizer", "lowercase": True, **bert},
        *(normalizers(), normalizers(nfc), normalizers(nfc, nfc), normalizers(nfc, lower)),
        normalizers({"type": "NFD"}, {"type": "StripAccents"}),
    ]
    for number, normalizer in enumerate(known):
        yield f"normalizer {number}", definition(normalizer=normalizer, pre_tokenizer=byte_level())


def _split_variants():
    plain = byte_level(use_regex=False)
    (llama,) = ids.LLAMA_3
    known = [
        *(byte_level(add_prefix_space=p, use_regex=r) for p, r in itertools.product(BOTH, BOTH)),
        *(patterned(each) for each in (*sorted(PATTERNS), ids.CL100K, ids.GPT_4)),
        *(patterned(each, behavior="Removed", invert=True) for each in SINGLE[:5]),
        *(
            patterned((llama,), behavior=each)
            for each in ("MergedWithPrevious", "MergedWithNext", "Contiguous")
        ),
        steps(split((" ",)), plain),
        steps(split(llama), byte_level()),
        steps(split(llama), byte_level(use_regex=False, add_prefix_space=True)),
        *(steps({"type": "Digits", "individual_digits": each}, plain) for each in (False, True)),
        *(
            steps({"type": kind}, plain)
            for kind in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "UnicodeScripts")
        ),
        steps({"type": "Punctuation", "behavior": "Isolated"}, plain),
        steps({"type": "CharDelimiterSplit", "delimiter": "a"}, plain),
        steps(steps(split(llama)), plain),
        None,
    ]
    for number, each in enumerate(known):
        yield f"split {number}", definition(pre_tokenizer=each)


def _byte_variants():
    usual = byte_model()
    vocab, merges = usual["vocab"], usual["merges"]
    shuffled = list(vocab)
    random.Random(5).shuffle(shuffled)
    words = ["theword", "wordword", LETTERS[32] + "hello", "aaa"]
    more = {**vocab, **{word: len(vocab) + number for number, word in enumerate(words)}}
    raw = {**vocab, "▁": len(vocab), "<\uff5ca\uff5c>": len(vocab) + 1}
    suffixed = {**vocab, **{f"{a}</w>": len(vocab) + n for n, a in enumerate(LETTERS.values())}}
    prefixed = {**vocab, **{f"##{a}": len(vocab) + n for n, a in enumerate(LETTERS.values())}}
    yield from (
        (f"bytes {number}", definition(model, pre_tokenizer=byte_level()))
        for number, model in enumerate(
            [
                {**usual, "ignore_merges": True},
                {**usual, "unk_token": "a"},
                {**usual, "unk_token": "a", "fuse_unk": True},
                bpe(suffixed, [["o", "w</w>"]], end_of_word_suffix="</w>")
                | {"vocab": {**suffixed, "ow</w>": len(suffixed)}},
                bpe(prefixed, [], continuing_subword_prefix="##"),
                bpe({name: number for number, name in enumerate(shuffled)}, merges),
                bpe(more, merges),
                bpe(more, merges, ignore_merges=True),
                bpe(raw, merges),
                bpe(raw, merges, ignore_merges=True),
                bpe({**vocab, "wo": 70_000}, merges),
                bpe({**vocab, "wo": 20_000_000}, merges),
                bpe(vocab, [" ".join(merge) for merge in merges]),
                {key: value for key, value in usual.items() if key != "type"},
            ]
        )
    )


def fallback_model(**settings):
    """BPE with byte fallback over some common pieces."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    merges = []
    for char in "▁abcdefghijklmnopqrstuvwxyzTHE.,'é":
        vocab.setdefault(char, len(vocab))
    for pair in ("▁ t", "h e", "▁t he", "▁ a", "i n", "e r", "▁ ▁", "o n", "▁ </s>"):
        left, right = pair.split()
        vocab.setdefault(left, len(vocab))
        vocab.setdefault(right, len(vocab))
        vocab.setdefault(left + right, len(vocab))
        merges.append([left, right])
    return bpe(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True, **settings)


def _fallback_variants():
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    first = {"type": "Prepend", "prepend": "▁"}
    special = [
        token(text, number, special=True) for number, text in enumerate(("<unk>", "<s>", "</s>"))
    ]
    few = fallback_model()
    few["vocab"] = {key: value for key, value in few["vocab"].items() if key != "<0x41>"}
    metaspaces = [
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": is_split}
        for scheme in ("first", "always", "never")
        for is_split in (False, True)
    ]
    known = [
        (fallback_model(), normalizers(first, spaces), None),
        (fallback_model(), spaces, split((" ",), "MergedWithPrevious")),
        (fallback_model(), spaces, None),
        *((fallback_model(), None, each) for each in metaspaces),
        (fallback_model(), None, None),
        (fallback_model(ignore_merges=True), normalizers(first, spaces), None),
        (few, normalizers(first, spaces), None),
    ]
    for number, (model, normalizer, each) in enumerate(known):
        made = definition(model, normalizer=normalizer, pre_tokenizer=each, added=special)
        yield f"fallback {number}", made


def _other_models():
    words = {"[UNK]": 0, "the": 1, "##s": 2, "a": 3, "word": 4}
    pieces = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    yield (
        "WordPiece",
        definition(
            {**pieces, "max_input_chars_per_word": 100, "vocab": words},
            pre_tokenizer={"type": "BertPreTokenizer"},
        ),
    )
    yield (
        "WordLevel",
        definition(
            {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
            pre_tokenizer={"type": "Whitespace"},
        ),
    )
    scores = [["<unk>", 0.0], ["▁", -2.0], ["the", -3.0], ["a", -4.0], ["▁the", -3.5]]
    yield (
        "Unigram",
        definition(
            {"type": "Unigram", "unk_id": 0, "vocab": scores, "byte_fallback": False},
            pre_tokenizer={
                "type": "Metaspace",
                "replacement": "▁",
                "prepend_scheme": "always",
                "split": True,
            },
        ),
    )
