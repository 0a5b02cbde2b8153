"""Code points that gigatoken and `tokenizers` treat differently: found, and replaced exactly."""

import importlib.util
import itertools
import pickle
import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from penstock.sources.batch import Batch, SeparatedTexts
from penstock.tokenize.engines import TokenizersEngine
from penstock.tokenize.supported import PATTERNS, cut, find, listed_ranges
from penstock.tokenize.tokenizer import load_tokenizer

HERE = Path(__file__)
ROOT = HERE.parent.parent.parent


def module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


ids = module(HERE.with_name("same_ids.py"))
CODE_POINTS = [*range(0xD800), *range(0xE000, 0x110000)]
LISTED = [point for low, high in listed_ranges(symbols=True) for point in range(low, high + 1)]
CONTEXTS = ("{}", "{}'s", "a\u0345{}")
"""Alone, before a contraction, after the combining mark that is sorted last."""


def test_marks_that_only_one_version_of_nfc_knows(tmp_path):
    config = ids.definition(normalizer={"type": "NFC"}, pre_tokenizer=ids.byte_level())
    these = [f"a\u0345{chr(point)}" for point in LISTED if point < 0x20000]

    assert ids.same(config, these, tmp_path) == "gigatoken"


def test_letters_that_only_one_version_of_a_pattern_knows(gpt2):
    assert gpt2.engine.name == "gigatoken"
    these = ["\U000323b0's", "\U000323b0", "a\U000323b0", "\u088f's", "\ua7ce"]
    assert ids.given(gpt2, these) == ids.expected(gpt2.definition.config, these)


def test_listed_code_points_are_found_and_no_others():
    text = "".join(map(chr, CODE_POINTS))
    data = np.frombuffer(text.encode(), np.uint8)
    starts = np.cumsum([0, *(len(chr(point).encode()) for point in CODE_POINTS)])

    for symbols in (False, True):
        found = np.searchsorted(starts, find(data, symbols=symbols))
        listed = {
            point for low, high in listed_ranges(symbols=symbols) for point in range(low, high + 1)
        }
        assert {CODE_POINTS[place] for place in found.tolist()} == listed


@pytest.mark.parametrize("size", [0, 1, 4_094, 4_095, 4_096, (1 << 22) - 2, 1 << 22])
def test_a_code_point_is_found_wherever_blocks_end(size):
    for text in ("x" * size, "\u0915" * (size // 3) + "x" * (size % 3)):
        data = np.frombuffer((text + "\U000323b0" + "y" * 5_000).encode(), np.uint8)

        assert find(data, symbols=False).tolist() == [size]


def test_documents_with_such_letters_are_replaced_in_their_batch(gpt2):
    source = random.Random(3)
    these = [
        "".join(
            source.choices(["word ", "\U000323b0", "'s", "é", "\n"], weights=[9, 1, 2, 1, 1], k=20)
        )
        for _ in range(300)
    ]
    right = ids.expected(gpt2.definition.config, these)

    assert ids.given(gpt2, these) == right
    assert ids.given(pickle.loads(pickle.dumps(gpt2)), these) == right
    data = "\0".join(these).encode()
    edges = np.cumsum([0, *(len(text.encode()) + 1 for text in these)])
    block = SeparatedTexts(data, b"\0", edges[:-1], edges[1:] - 1)
    found, offsets = gpt2.encode_batch(Batch(block, np.zeros(300, "u8"), np.zeros(300, "u8")))
    assert [each.tolist() for each in np.split(found, offsets[1:-1])] == right


class Counting(TokenizersEngine):
    """The reference, which counts what it is given."""

    num_bytes = 0

    def encode(self, texts):
        self.num_bytes += sum(map(len, texts.to_pylist()))
        return super().encode(texts)


def test_one_letter_does_not_send_a_long_document_to_the_reference():
    tokenizer = load_tokenizer("gpt2")
    tokenizer.engine.reference = Counting(tokenizer.definition, parse=False)
    source = random.Random(4)
    words = source.choices(
        ["the word", "3 o'clock", "'s", "it\u2019s", "\n\n", "  x", "中文"], k=120_000
    )
    text = " ".join([*words[:70_000], "\U000323b0's", *words[70_000:]])

    assert len(text) > 600_000
    assert ids.given(tokenizer, [text]) == ids.expected(tokenizer.definition.config, [text])
    assert 500 < tokenizer.engine.reference.num_bytes < 600


def test_one_letter_does_not_send_a_long_chinese_document_to_the_reference():
    tokenizer = load_tokenizer("gpt2")
    tokenizer.engine.reference = Counting(tokenizer.definition, parse=False)
    text = "中文字。\n\u3000\u3000中文字\n文字" * 8_000
    text += "\U000323b0's" + text

    assert ids.given(tokenizer, [text]) == ids.expected(tokenizer.definition.config, [text])
    assert 500 < tokenizer.engine.reference.num_bytes < 600


def test_a_table_full_of_unusual_letters_is_cut_between_its_entries():
    tokenizer = load_tokenizer("gpt2")
    tokenizer.engine.reference = Counting(tokenizer.definition, parse=False)
    rows = [f'    (0x{point:X}, "M", "{point % 97}"),\n' for point in range(0x1000, 0x3000)]
    text = "".join([*rows[:4_000], f'    "{chr(LISTED[3])}\'s",\n', *rows[4_000:]])

    assert ids.given(tokenizer, [text]) == ids.expected(tokenizer.definition.config, [text])
    assert 500 < tokenizer.engine.reference.num_bytes < 600


def test_a_document_without_a_place_to_cut_goes_to_the_reference_whole(gpt2):
    text = "中文" * 20_000 + "\U000323b0's" + "中文" * 20_000

    assert cut(text.encode(), 1 << 13) == [text.encode()]
    assert ids.given(gpt2, [text]) == ids.expected(gpt2.definition.config, [text])


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}], ids=["plain", "NFC"])
@pytest.mark.parametrize("pattern", sorted(PATTERNS), ids=str)
@pytest.mark.parametrize("number", [15, pytest.param(150, marks=pytest.mark.torture)])
def test_texts_have_the_same_ids_in_pieces(pattern, normalizer, number):
    config = ids.definition(pre_tokenizer=ids.patterned(pattern), normalizer=normalizer)
    source = random.Random(6)
    words = [*ids.ATOMS, "a b", "1 x", "B c", "5 o'clock", "word \u0301"]
    words += ["中\n中", "。\n文", "\uff01\n汉", "中\n/", "中\n\u3000"]
    # Blanks and newlines of all kinds after letters, digits and punctuation.
    words += [
        "a\n",
        "7\n\n",
        "b \n",
        ");\n",
        "), (",
        "x  ",
        "'s ",
        "' s",
        "/ /",
        "\t ",
        "\r\n",
        " 1",
    ]
    these = ["".join(source.choices(words, k=60)) for _ in range(number)]

    for text, whole in zip(these, ids.expected(config, these), strict=True):
        pieces = [piece.decode() for piece in cut(text.encode(), 5)]
        assert list(itertools.chain(*ids.expected(config, pieces))) == whole


def test_a_sample_of_code_points_for_gpt2_and_for_nfc(gpt2, tmp_path):
    source = random.Random(2)
    points = [*source.sample(LISTED, 600), *source.sample(CODE_POINTS, 1_200)]
    these = [context.format(chr(point)) for point in points for context in CONTEXTS]

    assert ids.given(gpt2, these) == ids.expected(gpt2.definition.config, these)
    config = ids.definition(pre_tokenizer=ids.byte_level(), normalizer={"type": "NFC"})
    assert ids.same(config, these, tmp_path) == "gigatoken"


def marked(count, seed):
    """Runs of marks, Hangul and letters that NFC sorts, composes or takes apart."""
    source = random.Random(seed)
    pool = [
        chr(point)
        for point in CODE_POINTS
        if unicodedata.combining(chr(point))
        or unicodedata.decomposition(chr(point))[:1] not in ("", "<")
    ]
    pool = [*source.sample(pool, min(len(pool), 1_200)), *map(chr, range(0x300, 0x370))]
    pool += [
        *map(chr, range(0x1100, 0x1113)),
        *map(chr, range(0x1161, 0x1176)),
        *"aeiouAEIOU \uac00",
    ]
    pool += [chr(point) for point in source.sample(LISTED, 20)]
    return ["".join(source.choices(pool, k=source.randint(2, 24))) for _ in range(count)]


def test_runs_of_marks_are_normalized_as_the_reference_does(tmp_path):
    config = ids.definition(pre_tokenizer=ids.byte_level(), normalizer={"type": "NFC"})

    assert ids.same(config, marked(1_500, seed=1), tmp_path) == "gigatoken"


@pytest.mark.torture
@pytest.mark.timeout(7_200)
def test_many_runs_of_marks_are_normalized_as_the_reference_does(tmp_path, figure):
    config = ids.definition(pre_tokenizer=ids.byte_level(), normalizer={"type": "NFC"})
    for seed in range(100):
        ids.same(config, marked(3_000, seed=seed), tmp_path)

    figure("300,000 runs of marks under NFC: 0 differences")


@pytest.mark.torture
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize(
    "kind", ["gpt2", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel"]
)
def test_all_code_points(kind, gpt2, tmp_path, figure):
    config = ids.definition(pre_tokenizer=ids.byte_level(), normalizer={"type": kind})
    config = gpt2.definition.config if kind == "gpt2" else config
    loaded = ids.load(config, tmp_path)
    # Where tokenizers encodes in any case, many of them share a document.
    at_once = 1 if loaded.engine.name == "gigatoken" else 64
    wrong = 0
    for start in range(0, len(CODE_POINTS), 1 << 16):
        some = [chr(point) for point in CODE_POINTS[start : start + (1 << 16)]]
        for context in CONTEXTS:
            each = [context.format(char) for char in some]
            these = [" ".join(each[low : low + at_once]) for low in range(0, len(each), at_once)]
            right = ids.expected(config, these)
            wrong += sum(a != b for a, b in zip(ids.given(loaded, these), right, strict=True))

    assert loaded.engine.name == ("gigatoken" if kind in ("gpt2", "NFC") else "tokenizers")
    assert wrong == 0
    figure(f"1,112,064 code points in 3 contexts, {kind}, by {loaded.engine.name}: 0 differences")


@pytest.mark.torture
@pytest.mark.timeout(7_200)
def test_the_list_of_code_points_is_complete(figure):
    """What `benchmarks/code_points.py` finds, is in the list."""
    found = module(ROOT / "benchmarks" / "code_points.py")
    letters, symbols = found.of_patterns()
    letters |= found.of_nfc()
    ranges = listed_ranges(symbols=False)

    assert letters <= {point for low, high in ranges for point in range(low, high + 1)}
    assert symbols <= set(LISTED)
    figure(f"{len(letters):,} code points differ in patterns or NFC, {len(LISTED):,} are listed")
