"""Texts are found under decoders that add, remove and merge what neighbouring tokens stand for."""

import re
import string

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

import penstock as ps
from penstock.inspect import find_text

WORDS = ["fox", "jumps", "café", "over", "naïve", "don't", "stop", ".", ",", "!", "€5", "日本語"]


def word_piece():
    """Words are joined by spaces, and a decoder removes the space before a full stop."""
    letters = [*string.ascii_letters, *string.digits, *"éï€日本語'.,!"]
    pieces = dict.fromkeys(["[UNK]", *letters, *(f"##{each}" for each in letters), "fox", "##ps"])
    made = tokenizers.Tokenizer(
        models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


def byte_fallback():
    """A character that is not in the vocabulary becomes one token for each of its bytes."""
    pieces = ["<unk>", *(f"<0x{each:02X}>" for each in range(256)), "▁", *string.ascii_letters]
    vocab = {piece: number for number, piece in enumerate([*pieces, *string.digits, *"'.,!"])}
    made = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


@pytest.fixture(scope="module", params=[word_piece, byte_fallback], ids=lambda each: each.__name__)
def tokenizer(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    request.param().save(str(path))
    return ps.load_tokenizer(path, engine="tokenizers")


def words(num_words):
    random = np.random.default_rng(17)
    return " ".join(WORDS[each] for each in random.integers(0, len(WORDS), num_words))


@pytest.fixture(scope="module")
def store(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    made = ps.build(ps.Texts([words(120)]), folder / "s", tokenizer=tokenizer, eos=False)
    assert len(made.document(0)) > 256 + 32  # more than one piece
    return made


@pytest.fixture(scope="module")
def settled(store, tokenizer):
    """How many bytes of the text each number of tokens determines."""
    ids = store.document(0)
    data = tokenizer.decode_bytes(ids)
    prefixes = [tokenizer.decode_bytes(ids[:stop]) for stop in range(len(ids) + 1)]
    whole = np.frombuffer(data, np.uint8)
    return [_num_equal(np.frombuffer(each, np.uint8), whole) for each in prefixes]


def _num_equal(one, two):
    size = min(len(one), len(two))
    unlike = np.flatnonzero(one[:size] != two[:size])
    return int(unlike[0]) if len(unlike) else size


def expected_spans(data, text, settled):
    """The tokens of each match, from the text of every prefix of the document."""
    for match in re.finditer(rb"(?=" + re.escape(text.encode()) + rb")", data):
        stop = match.start() + len(text.encode())
        after = next(n for n, known in enumerate(settled) if known > match.start())
        low = settled.index(max(settled[:after]))
        high = next(n for n, known in enumerate(settled) if known >= stop)
        yield low, high


@pytest.mark.parametrize("text", ["fox", "é ", "日本", "op", "s jump", "don"])
def test_the_tokens_of_a_match_are_those_that_the_decoder_makes_it_of(
    store, tokenizer, settled, text
):
    data = tokenizer.decode_bytes(store.document(0))

    found = [each.span for each in find_text(store, text, tokenizer)]

    assert found == list(expected_spans(data, text, settled)) != []


def test_the_work_grows_with_the_length_of_a_document_and_not_with_its_square(
    tokenizer, tmp_path, monkeypatch
):
    decoded = []
    engine = type(tokenizer.engine)
    decode = engine.decode
    monkeypatch.setattr(
        engine, "decode", lambda self, ids: decoded.append(len(ids)) or decode(self, ids)
    )
    work = []
    for size in (500, 2000):
        text = f"{words(size)} needle {words(size)}"
        store = ps.build(ps.Texts([text]), tmp_path / str(size), tokenizer=tokenizer, eos=False)
        decoded.clear()
        assert len(list(find_text(store, "needle", tokenizer))) == 1
        work.append(sum(decoded))

    assert work[1] < 6 * work[0]
