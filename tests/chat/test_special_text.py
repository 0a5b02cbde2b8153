"""No text writes a special token, in documents and in chats, whatever the tokenizer.

Eleven tokenizers of all kinds, each of which could give special ids for text: Unigram has
`</s>` among its pieces, WordPiece and WordLevel find whole words, merges of BPE build
`<|endoftext|>`. Texts are made of special tokens, their parts, the big list of naughty strings
and the names that penstock hides tokens under.
"""

import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from penstock.chat.chat import Chat
from penstock.chat.template import Template
from penstock.sources.batch import binary_array
from penstock.tokenize.tokenizer import load_tokenizer

WORDS = ["the", "user", "said", "hello", "to", "assistant", "model"]
WORDS += ["end", "of", "text", "and", "turn"]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789<>|/[]_-.,:;!?'\"{}()\n "


def byte_level(special, **options):
    """Byte-level BPE with merges that build each special token, piece by piece."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    merges = []
    for word in [*WORDS, *(each for each in special if each.isascii())]:
        built = word[0]
        for letter in word[1:]:
            if (built, letter) not in merges:
                merges.append((built, letter))
            built += letter
            vocab.setdefault(built, len(vocab))
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, **options))
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"\s+|\S+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [made.pre_tokenizer, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    return made


def llama2():
    """SentencePiece BPE with bytes for the unknown, and merges that build `</s>`."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    vocab = {name: number for number, name in enumerate([*names, *sorted(set(LETTERS) - {" "})])}
    merges = [
        ("<", "/"),
        ("</", "s"),
        ("</s", ">"),
        ("<", "s"),
        ("<s", ">"),
        ("▁", "t"),
        ("h", "e"),
    ]
    for pair in merges:
        vocab.setdefault("".join(pair), len(vocab))
    made = tokenizers.Tokenizer(
        models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def unigram(special, unknown, *, normalizer=None, scheme="always", lstrip=()):
    """A Unigram model in which special tokens are pieces like all others."""
    pieces = [(each, 0.0) for each in special] + [("▁", -2.0)]
    pieces += [(f"▁{word}", -4.0) for word in WORDS] + [(word, -5.0) for word in WORDS]
    pieces += [(letter, -8.0) for letter in sorted(set(LETTERS) - {" "})]
    made = tokenizers.Tokenizer(models.Unigram(pieces, special.index(unknown), False))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    made.add_special_tokens(
        [AddedToken(each, lstrip=each in lstrip, normalized=False) for each in special]
    )
    return made


def word_piece(splitter, normalizer=None):
    """BERT's model; words end at spaces or at punctuation."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted(set(LETTERS) - {" ", "\n"})
    pieces = [*special, *letters, *(f"##{letter}" for letter in letters), *WORDS]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    made = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = splitter
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(special)
    return made


def word_level():
    """Words alone; the token that ends a text is named, and flagged nowhere."""
    vocab = {each: number for number, each in enumerate(["[UNK]", "<eos>", "<pad>", *WORDS, "x"])}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()

    class Named:
        backend_tokenizer = made
        eos_token = "<eos>"
        pad_token = "<pad>"

    return Named()


def open_encoding():
    """A tiktoken encoding whose merges build the words inside of its special tokens."""
    import tiktoken

    ranks = {bytes([byte]): byte for byte in range(256)}
    for word in (b"<|", b"|>", b"<|e", b"<|en", b"<|end", b"<|end|", b"en", b"end"):
        ranks[word] = len(ranks)
    special = {"<|end|>": 300, "<|endoftext|>": 301}
    return tiktoken.Encoding(
        "kinds", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=special
    )


CONTROL = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "</s>")
KINDS = {
    "gpt2": lambda: "gpt2",
    "byte-level BPE": lambda: byte_level(CONTROL),
    "byte-level BPE, whole words first": lambda: byte_level(CONTROL, ignore_merges=True),
    "SentencePiece BPE": llama2,
    "Unigram, as T5": lambda: unigram(["<pad>", "</s>", "<unk>", "<extra_id_0>"], "<unk>"),
    "Unigram, as XLM-R": lambda: unigram(
        ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        "<unk>",
        normalizer=normalizers.NFKC(),
        scheme="first",
        lstrip=("<mask>",),
    ),
    "WordPiece": lambda: word_piece(
        pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer(lowercase=False)
    ),
    "WordPiece, words end at spaces": lambda: word_piece(pre_tokenizers.WhitespaceSplit()),
    "WordLevel": word_level,
    "tiktoken": open_encoding,
    "bytes": lambda: "bytes",
}


def special_of(source):
    """Special tokens and their ids but the unknown token's, read from the source by hand."""
    if source == "bytes":
        return {"": 256}
    if source == "gpt2":
        return {"<|endoftext|>": 50_256}
    if hasattr(source, "_special_tokens"):
        return dict(source._special_tokens)
    backend = getattr(source, "backend_tokenizer", source)
    config = json.loads(backend.to_str())
    found = {each["content"]: each["id"] for each in config["added_tokens"] if each["special"]}
    for name in ("eos_token", "pad_token"):
        if token := getattr(source, name, None):
            found[token] = backend.token_to_id(token)
    return {each: number for each, number in found.items() if each not in ("<unk>", "[UNK]")}


@cache
def loaded(kind, engine="auto"):
    return load_tokenizer(KINDS[kind](), engine=engine)


@pytest.fixture(scope="module")
def naughty(data):
    """The big list of naughty strings."""
    return json.loads((data / "unicode" / "blns.json").read_bytes())


MARK = "\U0010fffd"  # in the names under which penstock hides special tokens
NAMES = ["", "▁", "##", " 0", " 1", "0", MARK, f"{MARK}0", f"{MARK}{MARK}1", MARK * 9, "\ue0a5"]


def hostile(tokens, naughty, seed, number):
    """Texts of special tokens, their parts, naughty strings and the names of hidden tokens."""
    rng = random.Random(seed)
    for _ in range(number):
        pieces = []
        for _ in range(rng.randint(1, 7)):
            token = rng.choice(tokens)
            at = rng.randint(0, len(token))
            wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in token)
            parts = [token, token, token[:at], token[at:], token.lower(), wide]
            pieces.append(rng.choice(rng.choice([parts, parts, naughty, WORDS, NAMES])))
        yield rng.choice(["", "", " ", "\n"]).join(pieces)


def no_document_writes_a_special_token(kind, engine, texts):
    tokenizer = loaded(kind, engine)
    source = KINDS[kind]()
    special = special_of(source)
    array = binary_array([text.encode() for text in texts])
    ids, offsets = tokenizer.encode_documents(array)
    found = np.flatnonzero(np.isin(ids, list(special.values())))

    assert len(offsets) == len(texts) + 1
    assert not len(found), repr(texts[int(np.searchsorted(offsets, found[0], side="right")) - 1])
    backend = getattr(source, "backend_tokenizer", source)
    if not isinstance(backend, tokenizers.Tokenizer):
        return
    # Where a text holds no special token, all ids are those of the unchanged tokenizer.
    backend.encode_special_tokens = True
    for number, text in enumerate(texts):
        theirs = backend.encode(text, add_special_tokens=False).ids
        if not set(theirs) & {*special.values(), unknown_of(backend, text)}:
            assert ids[offsets[number] : offsets[number + 1]].tolist() == theirs, repr(text)


def unknown_of(backend, text):
    """The id of the unknown token where the text spells it, which then is text too."""
    unknown = next((each for each in ("<unk>", "[UNK]") if each in text), "")
    return backend.token_to_id(unknown)


ENGINES = [(kind, "auto") for kind in KINDS]
ENGINES += [(kind, "tokenizers") for kind in KINDS if "BPE" in kind]


@pytest.mark.parametrize(("kind", "engine"), ENGINES)
@pytest.mark.parametrize("number", [150, pytest.param(20_000, marks=pytest.mark.torture)])
def test_no_document_writes_a_special_token(kind, engine, naughty, number, figure):
    tokens = [each for each in special_of(KINDS[kind]()) if each] or ["<|end|>"]
    texts = [*tokens, *naughty[::7], *hostile(tokens, naughty, 17, number)]
    if number > 150:
        texts += [f"{a}{text}{b}" for text in naughty for a in ("", *tokens) for b in ("", *tokens)]
    for first in range(0, len(texts), 1_000):
        no_document_writes_a_special_token(kind, engine, texts[first : first + 1_000])
    figure(f"special tokens as text: {kind}, {engine}: {len(texts):,} documents, no special id")


TEMPLATES = Path(__file__).parent / "templates"
FAMILIES = json.loads((TEMPLATES / "families.json").read_text(encoding="utf-8"))
SEVEN = ("chatml", "llama2", "llama3", "mistral", "gemma", "phi3", "qwen3")


@cache
def chat_of(kind, name):
    """A tokenizer of this kind with the tokens of a family of templates added."""
    family = FAMILIES[name]
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    named = {"bos_token": family.get("bos", ""), "eos_token": family["eos"]}
    template = "chatml" if name == "chatml" else Template(name, source, named)
    return Chat(template, loaded(kind), add_tokens=family["special"])


@cache
def special_in(kind, name):
    """The ids of all special tokens but the unknown one, as `tokenizers` lists them."""
    tokenizer = chat_of(kind, name).tokenizer
    added = set(tokenizer.added_tokens.values())
    if tokenizer.definition is None:
        return added | ({256} if kind == "bytes" else {300, 301})
    backend = tokenizers.Tokenizer.from_str(tokenizer.definition.text)
    special = added | {int(number) for number in backend.get_added_tokens_decoder()}
    special |= {backend.token_to_id(each) for each in ("<eos>", "<pad>")} - {None}
    return special - {backend.token_to_id(each) for each in ("<unk>", "[UNK]")}


def messages(one, two):
    return [
        {"role": "user", "content": one},
        {"role": "assistant", "content": two},
        {"role": "user", "content": two},
        {"role": "assistant", "content": one},
    ]


def no_message_writes_a_special_token(kind, name, texts):
    """The special tokens of a conversation are those of one that says "x" all the time."""
    chat = chat_of(kind, name)
    special = list(special_in(kind, name))

    def written(tokens):
        return tokens[np.isin(tokens, special)].tolist()

    honest = written(chat.render(messages("x", "x")).tokens)
    texts = [text if text.strip() else "x" for text in texts]
    pairs = [messages(a, b) for a, b in zip(texts[::2], texts[1::2], strict=False)]
    assert honest
    for pair, (tokens, loss) in zip(pairs, chat.render_many(pairs), strict=True):
        assert written(tokens) == honest, repr(pair[:2])
        assert loss.any() or name == "qwen3"  # which may drop what it takes for a thought


def texts_for(kind, name, naughty, seed, number):
    tokens = [each for each in special_of(KINDS[kind]()) if each] + FAMILIES[name]["special"]
    return list(hostile(tokens, naughty, seed, number))


# Two templates for each tokenizer; the test of many messages has all of both.
PAIRS = [
    (kind, SEVEN[(number + step) % len(SEVEN)])
    for number, kind in enumerate(KINDS)
    for step in (0, 3)
]


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_no_message_writes_a_special_token(kind, name, naughty):
    no_message_writes_a_special_token(kind, name, texts_for(kind, name, naughty, 5, 12))


@pytest.mark.torture
@pytest.mark.parametrize("name", SEVEN)
@pytest.mark.parametrize("kind", KINDS)
def test_no_message_of_many_writes_a_special_token(kind, name, naughty, figure):
    texts = [*naughty, *texts_for(kind, name, naughty, 2_026, 2_000)]
    for first in range(0, len(texts), 200):
        no_message_writes_a_special_token(kind, name, texts[first : first + 200])
    figure(f"special tokens as text: {kind}, {name}: {len(texts):,} messages, no special id")
