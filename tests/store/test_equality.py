"""Stores against Hugging Face `tokenizers`, document by document, on all shared text."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import penstock
from penstock.sources.settings import Texts
from penstock.tokenize.tokenizer import load_tokenizer

BETWEEN = "\x00\x01\x00"  # occurs in none of the texts


def strings(value):
    """Every string in a JSON value."""
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value:
        if not isinstance(value, str) and isinstance(each, str | list | dict):
            yield from strings(each)


def texts_of(path):
    text = path.read_bytes().decode()
    if path.suffix == ".json":
        return strings(json.loads(text))
    if path.suffix == ".jsonl":
        return (each for line in text.split("\n") if line for each in strings(json.loads(line)))
    return text.split("\n")


@pytest.fixture(scope="module", params=[40, pytest.param(1, marks=pytest.mark.torture)])
def corpus(data, request):
    """Each distinct line or string of the shared data (24 MB), and the start of the web sample.

    `make test` takes every fortieth of them, `make torture` all.
    """
    files = [path for path in sorted(data.rglob("*")) if path.is_file()]
    kept = [path for path in files if path.parent.name != "gpt2" and path.suffix != ".zst"]
    texts = dict.fromkeys(text for path in kept for text in texts_of(path))
    with zstandard.open(data / "web" / "sample.jsonl.zst", "rt", encoding="utf-8") as lines:
        texts |= dict.fromkeys(json.loads(next(lines))["text"] for _ in range(500))
    full = [text for text in texts if text.strip(" \t\r\n")]
    assert len(full) > 100_000
    return full[:: request.param]


@pytest.fixture(scope="module")
def expected(data, corpus):
    """The ids that the published tokenizer gives, with the end token, and where documents end."""
    reference = Tokenizer.from_file(str(data / "gpt2" / "tokenizer.json"))
    reference.encode_special_tokens = True
    encodings = reference.encode_batch_fast(corpus, add_special_tokens=False)
    rows = [[*encoding.ids, 50_256] for encoding in encodings]
    tokens = np.fromiter((each for row in rows for each in row), np.uint16)
    return tokens, np.cumsum([len(row) for row in rows])


def write(corpus, folder, kind):
    joined = BETWEEN.join(corpus).encode()
    lines = b"".join(
        json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0).encode() + b"\n"
        for i, text in enumerate(corpus)
    )
    if kind == "parquet":
        pq.write_table(pa.table({"text": corpus}), folder / "a.parquet", row_group_size=500)
    else:
        name, data = {
            "text": ("a.txt", joined),
            "jsonl": ("a.jsonl", lines),
            "gz": ("a.txt.gz", gzip.compress(joined, 1)),
            "zst": ("a.jsonl.zst", zstandard.compress(lines, 1)),
        }[kind]
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "gz", "zst"])
def test_a_store_of_all_shared_text_equals_the_reference(
    kind, corpus, expected, gpt2, tmp_path, monkeypatch
):
    from penstock.sources.slices import cut

    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", 100_000)
    (tmp_path / "in").mkdir()
    inputs = write(corpus, tmp_path / "in", kind)
    store = penstock.build(
        inputs, tmp_path / "store", tokenizer=gpt2, documents=BETWEEN, max_bad=10
    )
    ends = np.cumsum([len(document) for document in store])

    assert len(store.manifest.parts) > 3
    assert np.array_equal(ends, expected[1])
    assert np.array_equal(store.tokens(0, store.num_tokens), expected[0])


@pytest.mark.slow
def test_decoding_all_shared_text_gives_it_back_byte_for_byte(corpus, expected, gpt2):
    tokens, ends = expected
    starts = [0, *ends[:-1]]

    for text, start, end in zip(corpus, starts, ends, strict=True):
        assert gpt2.decode(tokens[start : end - 1]) == text


@pytest.mark.parametrize(
    ("name", "documents"),
    [
        ("tinyshakespeare/input.txt", "paragraphs"),
        ("cs336_fixtures/tinystories_sample.txt", "<|endoftext|>"),
        ("unicode/blns.txt", "file"),
        ("unicode/blns.txt", "lines"),
        ("unicode/udhr2", "file"),
        ("unicode/udhr2", "paragraphs"),
        ("mmlu/hendrycks_layout", "lines"),
    ],
)
def test_files_as_they_lie_come_back_from_their_store(name, documents, data, read, gpt2, tmp_path):
    store = penstock.build(
        data / name, tmp_path / "store", tokenizer=gpt2, documents=documents, format="text"
    )
    found = read(data / name, documents=documents, format="text")
    contents = {
        path.name: path.read_bytes()
        for path in [data / name, *(data / name).glob("*")][:40]
        if path.is_file()
    }

    assert [store.decode_bytes(number) for number in range(len(store))] == found.texts
    for number, text in enumerate(found.texts):
        origin = store.origin(number)
        raw = contents[origin.file]
        assert raw[origin.offset : origin.offset + len(text)] == text


def test_json_fields_as_they_lie_come_back_from_their_store(data, gpt2, tmp_path):
    for name, field in [
        ("gsm8k/test.jsonl", "answer"),
        ("arc/ARC-Challenge-Dev.jsonl", "question.stem"),
    ]:
        store = penstock.build(
            data / name, tmp_path / field, tokenizer=gpt2, field=field, documents="lines"
        )
        rows = [
            json.loads(line) for line in (data / name).read_bytes().decode().split("\n") if line
        ]
        wanted = [row["answer"] if field == "answer" else row["question"]["stem"] for row in rows]

        assert [store.decode(number) for number in range(len(store))] == wanted


@pytest.mark.parametrize(
    "documents", ["lines", "paragraphs", "<|endoftext|>", "\n\n", "sep:aa", " "]
)
@given(
    pieces=st.lists(
        st.sampled_from(["a", "aa", "\n", "\n\n", "<|endoftext|>", " ", "é", "\r", "\x00", "word"])
        | st.text(max_size=5),
        max_size=40,
    )
)
def test_however_text_is_split_the_ids_are_those_of_each_document(
    documents, pieces, read, gpt2, scratch
):
    """gigatoken splits blocks by itself where it may; it must find the same documents."""
    (scratch / "split.txt").write_bytes("".join(pieces).encode().removeprefix(b"\xef\xbb\xbf"))
    from penstock.options import ReadSettings
    from penstock.sources.listing import list_files
    from penstock.sources.read import read_slice
    from penstock.sources.slices import cut

    reading = ReadSettings(documents=documents)
    files = list_files(scratch / "split.txt", reading)
    for piece in cut(files, reading):
        for batch in read_slice(files, piece, reading):
            ids, offsets = gpt2.encode_batch(batch)
            expected, places = gpt2.encode_documents(batch.texts)

            assert ids.tolist() == expected.tolist()
            assert offsets.tolist() == places.tolist()


@given(texts=st.lists(st.text(min_size=1).filter(lambda text: text.strip(" \t\r\n")), min_size=1))
@pytest.mark.parametrize("tokenizer", ["gpt2", "bytes"])
def test_any_texts_come_back_byte_for_byte(tokenizer, texts, tmp_path_factory, gpt2):
    tokenizer = gpt2 if tokenizer == "gpt2" else load_tokenizer("bytes")
    folder = tmp_path_factory.mktemp("round")
    store = penstock.build(Texts(texts), folder, tokenizer=tokenizer, bos=tokenizer is gpt2)

    assert [store.decode_bytes(number, tokenizer) for number in range(len(store))] == [
        text.encode() for text in texts
    ]
