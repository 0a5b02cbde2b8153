"""What a document is where nobody says: one rule that keeps the text.

The oracle is `tokenizers`, given the whole text at once. Slices and blocks are made small, so that
texts of a few kilobytes are cut as often as files of gigabytes.
"""

import bz2
import gzip
import json
import logging
import random
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

import penstock as ps
from penstock.errors import SourceError, StoreError
from penstock.options import ReadSettings
from penstock.sources import text as text_module
from penstock.sources.listing import list_files
from penstock.sources.slices import cut
from penstock.store.cuts import cut_safety
from penstock.tokenize.definition import find_definition

# fmt: off
WORDS = [
    "the", "cat", "I'm", "can't", "we'll", "they've", "X's", "1234567890", "3.14",
    "a.b,c", "x", "naïve", "Straße", "你好世界", "こんにちは", "שלום", "نص", "😀👩‍👩‍👧",
    "—", "…", "¿", "<|end", "oftext|>", "</s>", "#!/", "//", "{};",
    "A", "aaaa", "__init__", "don'T",
    "e\u0301", "\u00a0", "\u3000",
]
# fmt: on
SPACES = [*" " * 5, *"\n" * 4, "  ", "\n\n", "\n\n\n", "\t", "\r\n", " \n", "\n ", "", "    "]
SPACES += ["\r\n\r\n", "\n\t", "\u2028", "\x0b", "\x85"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def random_text(rng, size):
    """Words and white space of all kinds, in any order; sometimes a long run of one of them."""
    parts = []
    length = 0
    while length < size:
        word, space = rng.choice(WORDS), rng.choice(SPACES)
        if rng.random() < 0.02:
            word = rng.choice(["a", "ab", "7", "=", word]) * rng.randint(2, 200)
        if rng.random() < 0.02:
            space *= rng.randint(2, 40)
        parts += [word, space]
        length += len(word) + len(space)
    return "".join(parts).replace("<|endoftext|>", "")


def trained(model, trainer, *, normalizer=None, pre_tokenizer=None):
    """A small tokenizer of some kind, learned from random texts."""
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    rng = random.Random(1)
    tokenizer.train_from_iterator([random_text(rng, 3_000) for _ in range(20)], trainer)
    return tokenizer


def bpe(pre_tokenizer, normalizer=None, vocab_size=600):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    return trained(models.BPE(), trainer, pre_tokenizer=pre_tokenizer, normalizer=normalizer)


def byte_level(**options):
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})


def llama3():
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    return bpe(pre_tokenizers.Sequence([split, byte_level(use_regex=False)]))


def word_piece():
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    return trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    )


def unigram(scheme):
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return trained(models.Unigram(), trainer, pre_tokenizer=metaspace)


TOKENIZERS = {
    "gpt2": lambda: Tokenizer.from_str(find_definition("gpt2").text),
    "byte-level": lambda: bpe(byte_level()),
    "llama3": llama3,
    "no pattern": lambda: bpe(byte_level(use_regex=False), vocab_size=1_500),
    "nfc": lambda: bpe(byte_level(), normalizers.NFC()),
    "nfkc lowercase": lambda: bpe(
        byte_level(), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "word piece": word_piece,
    "unigram": lambda: unigram("never"),
    "prefix space": lambda: bpe(byte_level(add_prefix_space=True)),
    "unigram with a prefix": lambda: unigram("always"),
    "unigram with a first prefix": lambda: unigram("first"),
    "stripped": lambda: bpe(byte_level(), normalizers.Strip()),
    "prepended": lambda: bpe(byte_level(), normalizers.Prepend("_")),
}
# What two of these do at the ends of a text, they do at every cut; the third never splits a text.
WITHOUT_A_PLACE = ("stripped", "prepended", "no pattern")


@pytest.fixture(scope="module")
def tokenizer_of():
    """Tokenizers by name, each trained once."""
    made = {}

    def tokenizer_of(name):
        if name not in made:
            made[name] = TOKENIZERS[name]()
        return made[name]

    return tokenizer_of


def ids_of(tokenizer, text):
    """The oracle: all of the text at once."""
    tokenizer.encode_special_tokens = True
    return tokenizer.encode(text, add_special_tokens=False).ids


def cut_up(path, tokenizer, slice_bytes):
    """The texts between the places where a file is cut."""
    reading = ReadSettings()
    files = list_files(path, reading)
    safe = cut_safety(tokenizer.reference or tokenizer.engine)
    data = path.read_bytes()
    slices = list(cut(files, reading, slice_bytes=slice_bytes, is_cut_safe=safe))
    spans = [span for piece in slices for span in piece.spans]
    inner = [False] * (len(spans) - 1)
    assert [span.begins for span in spans] == [True, *inner]
    assert [span.ends for span in spans] == [*inner, True]
    return [data[span.start : span.stop].decode() for span in spans]


@pytest.mark.parametrize(
    "num_texts", [2, pytest.param(500, marks=[pytest.mark.torture, pytest.mark.timeout(7_200)])]
)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_cut_changes_an_id(name, num_texts, tokenizer_of, tmp_path, figure):
    tokenizer = tokenizer_of(name)
    rng = random.Random(f"{name} {num_texts}")
    loaded = ps.load_tokenizer(tokenizer)
    num_cuts = 0
    for _ in range(num_texts):
        text = random_text(rng, rng.randint(200, 3_000))
        (tmp_path / "a.txt").write_bytes(text.encode())
        pieces = cut_up(tmp_path / "a.txt", loaded, rng.randint(50, 500))
        assert "".join(pieces) == text
        num_cuts += len(pieces) - 1
        found = [token for piece in pieces for token in ids_of(tokenizer, piece)]
        assert found == ids_of(tokenizer, text)
    figure(f"{name}: {num_texts:,} texts, {num_cuts:,} cuts, no id changed")
    # No text is refused here: it ends before 1 MiB were searched. White space at the end of a text
    # may be cut off by a tokenizer that strips it anyhow.
    most = num_texts // 50 if name in WITHOUT_A_PLACE else 10**9
    assert 2 * num_texts * (name not in WITHOUT_A_PLACE) <= num_cuts <= most


@pytest.mark.parametrize("run", [b"a" * 5_001, b"a" * 5_000, b"ab" * 2_501, b"1" * 4_999])
def test_a_model_that_sees_all_of_a_text_is_not_cut(run, tmp_path):
    """Without a pattern it pairs up a run from its beginning, which no window shows."""
    tokenizer = Tokenizer(
        models.BPE(
            vocab={"a": 0, "b": 1, "1": 2, "\n": 3, "aa": 4, "a\n": 5, "\nb": 6, "11": 7, "ab": 8},
            merges=[("a", "a"), ("1", "1"), ("a", "\n"), ("\n", "b"), ("a", "b")],
        )
    )
    text = b"\n".join([run, b"b", b"b1", b"1b", run, b"ba"] * 3)
    (tmp_path / "a.txt").write_bytes(text)
    assert len(cut_up(tmp_path / "a.txt", ps.load_tokenizer(tokenizer), 2_000)) == 1


@pytest.mark.parametrize("name", ["gpt2", "llama3", "unigram", "unigram with a prefix"])
def test_runs_longer_than_any_window_do_not_mislead_either(name, tokenizer_of, tmp_path):
    tokenizer = tokenizer_of(name)
    loaded = ps.load_tokenizer(tokenizer)
    num_cuts = 0
    for seed in range(4):
        rng = random.Random(seed)
        runs = [rng.choice(["a", "7", "we'll", "ab", "=", "."]) * rng.randint(900, 1_100)]
        runs += [rng.choice([*WORDS, "x", "."]) for _ in range(3)]
        text = "".join(rng.choice(runs) + rng.choice(["\n", " ", "\n", "\r\n"]) for _ in range(60))
        (tmp_path / "a.txt").write_bytes(text.encode())
        pieces = cut_up(tmp_path / "a.txt", loaded, 1_000)
        num_cuts += len(pieces) - 1
        found = [token for piece in pieces for token in ids_of(tokenizer, piece)]
        assert found == ids_of(tokenizer, text)
    assert num_cuts > 10


def test_where_gpt2_may_be_cut(gpt2):
    safe = cut_safety(gpt2.reference)

    assert safe("one\n", "two")
    assert safe("one", "\ntwo")
    assert safe("one", " two")
    for left, right in (("one\n\n", "two"), ("one ", "two"), ("on", "e")):
        assert not safe(left, right), (left, right)


def test_a_special_token_that_is_read_as_text_does_not_split_the_text():
    vocabulary = [(token, -1.0) for token in ("<unk>", "</s>", *"a<>/s\n", "▁")]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.add_special_tokens(["</s>"])
    as_text = ps.load_tokenizer(tokenizer).engine
    parsed = ps.load_tokenizer(tokenizer, special_tokens="parse").engine

    # A pre-token of Metaspace ends at a space only.
    assert not cut_safety(as_text)("a\n</s>", "\na")
    assert cut_safety(as_text)("a\n</s>", " a")
    assert cut_safety(parsed)("a\n</s>", "\na")


@pytest.mark.parametrize("name", WITHOUT_A_PLACE)
@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
def test_a_tokenizer_without_a_place_is_refused_above_one_slice(
    name, suffix, tokenizer_of, tmp_path, monkeypatch
):
    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", 4_000)
    for module in ("text", "slices"):
        monkeypatch.setattr(f"penstock.sources.{module}.RANGE_BYTES", 500)
    text = "".join(f"line {number} of a text\n" for number in range(600)).encode()
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    options = {"tokenizer": tokenizer_of(name), "eos": False}

    with pytest.raises(SourceError, match=r'after byte .*documents="lines", "paragraphs"'):
        ps.build(path, tmp_path / "refused", **options)
    small = tmp_path / "small.txt"
    small.write_bytes(text[:5_000])
    assert ps.build(small, tmp_path / "small", **options).num_tokens
    assert len(ps.build(path, tmp_path / "lines", documents="lines", **options)) == 600


@pytest.fixture(scope="module")
def engines(gpt2):
    """GPT-2's tokenizer with each engine, loaded once."""
    return {"gigatoken": gpt2, "tokenizers": ps.load_tokenizer("gpt2", engine="tokenizers")}


@pytest.fixture
def text():
    """A text of 60 kB with lines of all kinds."""
    return random_text(random.Random(5), 40_000).encode()


@pytest.fixture
def sliced(monkeypatch):
    """Slices of 4,000 bytes, and blocks of a few hundred for the tokenizer."""
    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", 4_000)
    monkeypatch.setattr(text_module, "BLOCK_BYTES", 500)


@pytest.mark.usefixtures("sliced")
@pytest.mark.parametrize(
    ("suffix", "engine", "edges"),
    [
        ("txt", "gigatoken", {}),
        ("txt", "tokenizers", {"bos": True}),
        ("txt", "gigatoken", {"bos": True, "eos": False}),
        ("txt.gz", "gigatoken", {"bos": True}),
        ("txt.gz", "tokenizers", {"eos": False}),
        ("txt.bz2", "gigatoken", {}),
    ],
)
def test_a_document_in_pieces_is_the_document(
    suffix, engine, edges, text, tmp_path, tokenizer_of, engines
):
    path = tmp_path / f"a.{suffix}"
    compress = {"gz": gzip.compress, "bz2": bz2.compress}.get(suffix.rpartition(".")[2], bytes)
    path.write_bytes(compress(text))
    store = ps.build(path, tmp_path / "store", tokenizer=engines[engine], **edges)
    expected = ids_of(tokenizer_of("gpt2"), text.decode())
    expected = [50_256] * ("bos" in edges) + expected + [50_256] * edges.get("eos", True)

    assert store.tokens(0, store.num_tokens).tolist() == expected
    assert len(store) > 5
    counts = store.manifest.contents["counts"]
    assert counts == {"documents": 1, "tokens": len(expected), "pieces": len(store)}
    build = store.manifest.contents["builds"][0]
    assert (build["counts"]["documents"], build["counts"]["pieces"]) == (1, len(store))
    assert build["documents"] == {"file": 1}
    assert store.manifest.contents["version"] == 4
    offsets = [store.origin(number).offset for number in range(len(store))]
    assert offsets[0] == 0
    for number, (start, stop) in enumerate(pairwise([*offsets, len(text)])):
        assert store.decode_bytes(number) == text[start:stop]
    assert [store.edges(number) for number in range(len(store))] == [
        (number == 0, number == len(store) - 1) for number in range(len(store))
    ]
    ps.verify(store.path)


@pytest.mark.usefixtures("sliced")
def test_bytes_do_not_depend_on_threads_or_engine(text, tmp_path, sums, engines):
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "b.txt").write_bytes(text[:9_000])
    builds = [(1, "gigatoken"), (2, "gigatoken"), (5, "gigatoken"), (2, "tokenizers")]
    for threads, engine in builds:
        place = tmp_path / f"{threads} {engine}"
        inputs = [tmp_path / "a.txt", tmp_path / "b.txt"]
        store = ps.build(inputs, place, workers=threads, tokenizer=engines[engine])
        assert sums(place) == sums(tmp_path / "1 gigatoken")
    assert store.manifest.contents["counts"]["documents"] == 2


@pytest.mark.usefixtures("sliced")
def test_a_stream_of_such_a_file_is_its_store(text, tmp_path, sums, gpt2):
    (tmp_path / "a.txt").write_bytes(text)
    built = ps.build(tmp_path / "a.txt", tmp_path / "built", tokenizer=gpt2)
    with ps.stream(tmp_path / "a.txt", tmp_path / "streamed", tokenizer=gpt2) as growing:
        found = [tokens.tolist() for tokens in growing]
        loader = ps.Loader(ps.Windows(growing, 64), 4, epochs=1)
        rows = [row for batch in loader for row in batch["inputs"].tolist()]
    expected = ps.Loader(ps.Windows(built, 64), 4, epochs=1, shuffle="part")

    assert found == [tokens.tolist() for tokens in built]
    assert rows == [row for batch in expected for row in batch["inputs"].tolist()]
    assert sums(tmp_path / "streamed") == sums(tmp_path / "built")


@pytest.mark.usefixtures("sliced")
def test_rows_take_a_piece_for_a_document(text, tmp_path, gpt2):
    (tmp_path / "a.txt").write_bytes(text)
    store = ps.build(tmp_path / "a.txt", tmp_path / "store", tokenizer=gpt2)
    documents = ps.Documents(store, 100_000)
    packs = ps.Packs(store, 8_000)
    fields = packs.read(np.arange(len(packs)))

    assert len(documents) == len(store)
    assert fields["num_targets"].sum() == store.num_tokens - len(store)


@pytest.mark.usefixtures("sliced")
def test_windows_mark_borders_of_documents_and_none_between_pieces(text, tmp_path, gpt2):
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "b.txt").write_bytes(text[:9_000])
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    store = ps.build(paths, tmp_path / "store", tokenizer=gpt2)
    lengths = [len(store.document(number)) for number in range(len(store))]
    begin = sum(lengths[: next(n for n in range(1, len(store)) if store.edges(n)[0])])
    masked = ps.Windows(store, length=100, borders="mask")
    numbered = ps.Windows(store, length=100, borders=True)
    same = masked.read(np.arange(len(masked)))["same_document"].reshape(-1)
    positions = numbered.read(np.arange(len(numbered)))["position_ids"].reshape(-1)

    assert len(store) > 7
    assert np.flatnonzero(~same).tolist() == [begin - 1]  # where the target is b's first token
    assert [at for at in np.flatnonzero(positions == 0).tolist() if at % 100] == [begin]


def test_a_file_below_a_slice_is_one_document_without_pieces(tmp_path, text, tokenizer_of, gpt2):
    (tmp_path / "a.txt").write_bytes(text)
    store = ps.build(tmp_path / "a.txt", tmp_path / "store", tokenizer=gpt2)
    contents = store.manifest.contents

    assert len(store) == 1
    assert set(contents["counts"]) == {"documents", "tokens"}
    assert store.document(0).tolist() == [*ids_of(tokenizer_of("gpt2"), text.decode()), 50_256]


@pytest.mark.parametrize("block", [64, 1_000])
def test_blocks_change_nothing(block, tmp_path, text, monkeypatch, sums, gpt2):
    (tmp_path / "a.txt").write_bytes(text)
    ps.build(tmp_path / "a.txt", tmp_path / "one", tokenizer=gpt2)
    monkeypatch.setattr(text_module, "BLOCK_BYTES", block)
    ps.build(tmp_path / "a.txt", tmp_path / "many", tokenizer=gpt2)

    assert sums(tmp_path / "one") == sums(tmp_path / "many")


@pytest.mark.parametrize(
    "data",
    [
        b"one\r\ntwo\r\n",
        b"one\n\n\ntwo\n\n",
        b"  indented\n\ttab \n ",
        b"no line end",
        b"\n\n leading",
        "\u2028é\u0085\x0c".encode(),
        b"a</s>b</s>\n",
    ],
)
def test_every_byte_is_kept(data, tmp_path, gpt2):
    (tmp_path / "a.txt").write_bytes(data)
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbf" + data)
    for name, lead in (("a", 0), ("mark", 3)):
        store = ps.build(tmp_path / f"{name}.txt", tmp_path / name, tokenizer=gpt2)
        assert [store.decode_bytes(number) for number in range(len(store))] == [data]
        assert store.origin(0).offset == lead
        counts = store.manifest.contents["builds"][0]["counts"]
        assert (counts["document_bytes"], counts["separator_bytes"]) == (len(data), lead)


def test_blank_and_empty_files_are_skipped_and_counted(tmp_path):
    for number, data in enumerate((b"", b"\n \r\n\t", b"text")):
        (tmp_path / f"{number}.txt").write_bytes(data)
    store = ps.build(f"{tmp_path}/*.txt", tmp_path / "store", tokenizer="bytes")

    assert len(store) == 1
    assert store.manifest.contents["builds"][0]["counts"]["skipped"] == 2


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(
    ("eos", "text", "expected"),
    [
        ("<eos>", "one\n<|endoftext|>two", ["one\n", "two"]),
        ("<eos>", "one\n<eos>two<eos>", ["one\n", "two"]),
        ("<eos>", "one<eos>two<|endoftext|>three", ["one<eos>two", "three"]),
        ("</s>", "<s>one</s>\ntwo</s>", ["<s>one</s>\ntwo</s>"]),
        ("<eos>", "one <e os> two\n\nthree", ["one <e os> two\n\nthree"]),
    ],
)
def test_what_separates_documents(
    suffix, small, eos, text, expected, tmp_path, monkeypatch, tokenizer_of
):
    if small:
        monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", 4)
    tokenizer = Tokenizer.from_str(tokenizer_of("byte-level").to_str())
    tokenizer.add_special_tokens([eos])
    config = {"eos_token": eos}
    (tmp_path / "own").mkdir()
    tokenizer.save(str(tmp_path / "own" / "tokenizer.json"))
    (tmp_path / "own" / "tokenizer_config.json").write_text(json.dumps(config))
    data = text.encode()
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    store = ps.build(path, tmp_path / "store", tokenizer=str(tmp_path / "own"))
    found = [store.decode(number) for number in range(len(store))]

    assert found == expected or "".join(found) == "".join(expected)
    assert store.manifest.num_documents == len(expected)
    rules = store.manifest.contents["builds"][0]["documents"]
    expected_rule = "file" if len(expected) == 1 else "<|endoftext|>" if "<|" in text else eos
    assert rules == {expected_rule: 1}


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
@pytest.mark.parametrize(("place", "separated"), [(980, True), (987, True), (988, False)])
def test_only_the_first_64_megabytes_decide(suffix, place, separated, tmp_path, monkeypatch):
    for module in ("text", "slices"):
        monkeypatch.setattr(f"penstock.sources.{module}.RULE_BYTES", 1_000)
    monkeypatch.setattr("penstock.sources.read.BLOCK_BYTES", 64)
    data = b"x" * place + b"<|endoftext|>" + b"y" * 2_000
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    store = ps.build(path, tmp_path / "store", tokenizer="bytes")

    assert len(store) == (2 if separated else 1)


def test_each_file_follows_its_own_rule_and_records_are_records(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("three<|endoftext|>four")
    (tmp_path / "c.jsonl").write_text('{"text": "five"}\n{"text": "six <|endoftext|> 7"}\n')
    with caplog.at_level(logging.INFO, "penstock"):
        store = ps.build(f"{tmp_path}/*.*", tmp_path / "store", tokenizer="bytes")

    found = [store.decode(number) for number in range(len(store))]
    assert found == ["one\ntwo\n", "three", "four", "five", "six <|endoftext|> 7"]
    rules = store.manifest.contents["builds"][0]["documents"]
    assert rules == {"<|endoftext|>": 1, "file": 1}
    # Sorted: the two files are read by two threads.
    assert sorted(line.partition(": ")[2] for line in caplog.messages) == [
        "a document is a whole file; the first 64 MB contain no '<|endoftext|>'",
        "a document is the text between '<|endoftext|>'; the first 64 MB contain '<|endoftext|>'",
    ]


def test_a_separator_may_be_named_in_two_ways(tmp_path, sums):
    (tmp_path / "a.txt").write_text("one lines two lines three")
    for name, documents in (("plain", "lines "), ("named", "sep:lines ")):
        ps.build(tmp_path / "a.txt", tmp_path / name, tokenizer="bytes", documents=documents)
    assert sums(tmp_path / "plain") == sums(tmp_path / "named")
    store = ps.build(
        tmp_path / "a.txt", tmp_path / "word", tokenizer="bytes", documents="sep:lines"
    )
    assert [store.decode(number) for number in range(len(store))] == ["one ", " two ", " three"]
    with pytest.raises(SourceError, match="separates nothing"):
        ps.build(tmp_path / "a.txt", tmp_path / "none", tokenizer="bytes", documents="sep:")


@pytest.mark.usefixtures("sliced")
def test_a_piece_that_is_not_utf8_is_refused_and_may_be_replaced(text, tmp_path):
    middle = text.index(b"\n", 30_000)
    data = text[:middle] + b"\n\xff\n" + text[middle:]
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(SourceError, match=r"stored in pieces.*invalid_utf8.*errors=.replace"):
        ps.build(tmp_path / "a.txt", tmp_path / "store", tokenizer="bytes")
    store = ps.build(tmp_path / "a.txt", tmp_path / "mended", tokenizer="bytes", errors="replace")
    found = b"".join(store.decode_bytes(number) for number in range(len(store)))
    assert found == data.replace(b"\xff", "\ufffd".encode())


def test_a_file_that_is_rejected_whole_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(SourceError, match=r"its only record was rejected.*invalid_utf8"):
        ps.build(tmp_path / "a.txt", tmp_path / "store", tokenizer="bytes")


@pytest.mark.usefixtures("sliced")
@pytest.mark.parametrize(
    ("suffix", "mark", "share"),
    [
        ("txt", b"", "0.1"),
        ("txt", b"\xef\xbb\xbf", "0.37"),
        ("txt.gz", b"\xef\xbb\xbf", "0.1"),
        ("txt.gz", b"", "0.999"),
    ],
)
def test_one_document_is_split_at_a_character(
    suffix, mark, share, text, tmp_path, tokenizer_of, gpt2
):
    path = tmp_path / f"a.{suffix}"
    data = mark + text
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    ps.build(path, tmp_path / "store", tokenizer=gpt2, split=f"tail:{share}")
    characters = text.decode()
    border = len(characters) * (1_000 - round(float(share) * 1_000)) // 1_000

    for side, part in (("train", characters[:border]), ("val", characters[border:])):
        store = ps.verify(tmp_path / "store" / side)
        expected = [*ids_of(tokenizer_of("gpt2"), part), 50_256]
        assert store.tokens(0, store.num_tokens).tolist() == expected
        assert b"".join(map(store.decode_bytes, range(len(store)))) == part.encode()
        assert store.manifest.num_documents == 1
        assert store.manifest.contents["side"] == side


@pytest.mark.parametrize("documents", ["auto", "file"])
def test_several_documents_are_split_between_documents(documents, tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(f"{number}" * 100)
    ps.build(
        f"{tmp_path}/*.txt",
        tmp_path / "s",
        tokenizer="bytes",
        split="tail:0.25",
        documents=documents,
    )
    train, val = (ps.TokenStore(tmp_path / "s" / side) for side in ("train", "val"))

    # The border is in the middle of 7.txt, which began before it.
    assert [train.decode(number)[0] for number in range(len(train))] == list("01234567")
    assert [val.decode(number)[0] for number in range(len(val))] == list("89")


@pytest.mark.usefixtures("sliced")
def test_all_pieces_of_a_document_are_on_one_side(text, tmp_path, gpt2):
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "b.txt").write_bytes(text[:20_000].decode(errors="ignore").encode())
    (tmp_path / "c.txt").write_text("the last one")
    ps.build(f"{tmp_path}/*.txt", tmp_path / "s", tokenizer=gpt2, split="tail:0.2")
    train, val = (ps.TokenStore(tmp_path / "s" / side) for side in ("train", "val"))

    assert b"".join(map(train.decode_bytes, range(len(train)))) == (
        text + (tmp_path / "b.txt").read_bytes()
    )
    assert [val.decode(number) for number in range(len(val))] == ["the last one"]


@pytest.mark.usefixtures("sliced")
@pytest.mark.parametrize("eos", [True, False])
def test_a_piece_without_a_token_has_no_bound(eos, tmp_path):
    """A vocabulary of letters drops digits: the middle and end of this text are nothing to it."""
    vocab = {"a": 0, "b": 1, "<|endoftext|>": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    letters, digits = "ab ba\n" * 2_000, "12 34\n" * 2_000
    (tmp_path / "a.txt").write_text(letters + digits + letters + digits)
    store = ps.build(tmp_path / "a.txt", tmp_path / "store", tokenizer=tokenizer, eos=eos)

    ps.verify(store.path)
    assert store.tokens(0, store.num_tokens).tolist() == [0, 1, 1, 0] * 4_000 + [2] * eos
    assert len(store) < 10


@pytest.mark.parametrize("split", ["tail:0.1", "hash:0.5"])
def test_a_split_that_leaves_a_side_empty_is_an_error(split, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the same text")
    with pytest.raises(StoreError, match=r"The split leaves .* empty: .* 2 documents"):
        ps.build(f"{tmp_path}/*.txt", tmp_path / "s", tokenizer="bytes", split=split)
    assert not list((tmp_path / "s").rglob("penstock.json"))


@pytest.mark.usefixtures("sliced")
def test_a_split_by_digest_needs_whole_documents(text, tmp_path):
    (tmp_path / "a.txt").write_bytes(text)
    with pytest.raises(StoreError, match=r"stored in pieces.*split=.tail"):
        ps.build(tmp_path / "a.txt", tmp_path / "s", tokenizer="bytes", split="hash:0.5")


def test_tinyshakespeare_has_the_ids_of_nanogpt(data, tmp_path, tokenizer_of, gpt2):
    path = data / "tinyshakespeare" / "input.txt"
    store = ps.build(path, tmp_path / "store", tokenizer=gpt2)
    bare = ps.build(path, tmp_path / "bare", tokenizer=gpt2, eos=False)
    ps.build(path, tmp_path / "split", tokenizer=gpt2, eos=False, split="tail:0.1")
    sides = [ps.TokenStore(tmp_path / "split" / side).num_tokens for side in ("train", "val")]
    expected = ids_of(tokenizer_of("gpt2"), path.read_text())

    assert len(expected) == 338_025
    assert np.array_equal(bare.document(0), expected)
    assert np.array_equal(store.document(0), [*expected, 50_256])
    assert sides == [301_966, 36_059]
