"""Ids, ends of documents, loss masks and batches of a small corpus in every input format."""

import bz2
import csv
import gzip
import io
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from goldens import GOLDENS, contents

import penstock as ps

WORDS = ["the", "quick", "naïve", "café", "你好", "😀", "don't\u00a0stop", "3.14", "<|endoftext|>"]
WORDS += ["\t", '"said"', "x,y", ";"]


def write_texts():
    # Arithmetic, because NumPy may change what its random generators return.
    sizes = [1, 300, *(number * 7 % 38 + 2 for number in range(30))]
    words = [[WORDS[(n * 5 + k * k + k // 3) % 13] for k in range(sizes[n])] for n in range(32)]
    return [f"{number}: {' '.join(each)}" for number, each in enumerate(words)]


TEXTS = write_texts()
"""Documents of one line."""
LONGER = [text.replace(" x", "\nx").replace(" the", "\r\n the") for text in TEXTS]
"""Documents of several lines, as JSON and tables can hold."""
LINES = "\n".join([*TEXTS[:7], "", " \t", *TEXTS[7:], ""]).encode()
RECORDS = [
    {"id": number, "text": text, "doc": {"body": text}} for number, text in enumerate(LONGER)
]


def comma_separated():
    file = io.StringIO(newline="")
    csv.writer(file).writerows([("id", "text"), *enumerate(LONGER)])
    return file.getvalue().encode()


def parquet():
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(RECORDS), file, row_group_size=10)
    return file.getvalue()


def arrow():
    file, table = io.BytesIO(), pa.Table.from_pylist(RECORDS)
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=10)
    return file.getvalue()


JSONL = "\n".join(map(json.dumps, RECORDS)).encode()
# The golden, the name of the file, its bytes, and arguments of `build`.
INPUTS = [
    ("lines", "a.txt", LINES, {"documents": "lines"}),
    ("lines", "a.txt", b"\xef\xbb\xbf" + LINES, {"documents": "lines"}),
    ("lines", "a.txt.gz", gzip.compress(LINES), {"documents": "lines"}),
    ("lines", "a.txt.zst", zstandard.compress(LINES), {"documents": "lines"}),
    ("lines", "a.txt.bz2", bz2.compress(LINES), {"documents": "lines"}),
    ("lines", "a.txt.xz", lzma.compress(LINES), {"documents": "lines"}),
    ("lines without end tokens", "a.txt", LINES, {"documents": "lines", "eos": False}),
    ("lines with begin tokens", "a.txt", LINES, {"documents": "lines", "bos": True}),
    ("windows lines", "a.txt", LINES.replace(b"\n", b"\r\n"), {"documents": "lines"}),
    ("paragraphs", "a.md", LINES.replace(b" the", b"\n\t\nthe"), {"documents": "paragraphs"}),
    ("separated", "a.txt", LINES, {"documents": "sep:said"}),
    ("separated by end tokens", "a.txt", LINES, {"documents": "auto"}),
    ("file", "a.txt", LINES, {"documents": "file"}),
    ("replaced bytes", "a.txt", LINES + b"\xff\xe2\x82 end", {"errors": "replace"}),
    ("records", "a.jsonl", JSONL, {}),
    ("records", "a.jsonl", JSONL, {"field": "doc.body"}),
    ("records", "a.jsonl", JSONL + b'\n{"id": 7}\n{\n', {"max_bad": 2}),
    ("records", "a.jsonl.zst", zstandard.compress(JSONL), {}),
    ("records", "a.json", json.dumps(RECORDS, indent=1, ensure_ascii=False).encode(), {}),
    ("records", "a.csv", comma_separated(), {}),
    ("one column", "a.tsv", ("text\n" + "\n".join(TEXTS).replace("\t", "_")).encode(), {}),
    ("records", "a.parquet", parquet(), {}),
    ("records", "a.arrow", arrow(), {}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "file", "data", "options"), INPUTS)
def test_an_input_has_the_same_tokens_and_batches_for_ever(
    name, file, data, options, tmp_path, gpt2
):
    (tmp_path / file).write_bytes(data)
    store = ps.build(tmp_path / file, tmp_path / "store", tokenizer=gpt2, **options)

    assert contents(store) == GOLDENS[name]


def test_texts_and_a_dataset_on_disk_are_records_too(tmp_path, gpt2):
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    (dataset / "data-00000-of-00001.arrow").write_bytes(arrow())
    (dataset / "state.json").write_text(
        '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}'
    )
    (dataset / "dataset_info.json").write_text("{}")

    for number, inputs in enumerate([ps.Texts(LONGER), dataset]):
        store = ps.build(inputs, tmp_path / f"store-{number}", tokenizer=gpt2)
        assert contents(store) == GOLDENS["records"]


def test_end_tokens_in_a_text_are_parsed_if_asked(tmp_path):
    (tmp_path / "a.txt").write_bytes(LINES)
    tokenizer = ps.load_tokenizer("gpt2", special_tokens="parse")
    place = tmp_path / "store"
    store = ps.build(tmp_path / "a.txt", place, tokenizer=tokenizer, documents="lines")

    assert contents(store) == GOLDENS["parsed end tokens"]


@pytest.mark.parametrize("split", ["tail:0.2", "hash:0.2"])
def test_both_sides_of_a_split_stay_the_same(split, tmp_path, gpt2):
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    ps.build(tmp_path / "a.jsonl", tmp_path / "store", tokenizer=gpt2, split=split)

    for side in ("train", "val"):
        assert contents(ps.TokenStore(tmp_path / "store" / side)) == GOLDENS[f"{split} {side}"]


def turns(role, content):
    users = [{role: "user", content: f"What is {n}? 你好"} for n in range(12)]
    answers = [{role: "assistant", content: f"It is {n}.\n" + "so " * (n % 5)} for n in range(12)]
    return list(zip(users, answers, strict=True))


PAIRS = [(each["content"], answer["content"]) for each, answer in turns("role", "content")]
SYSTEM = {"role": "system", "content": "Be brief."}
CHATS = {
    "messages": [{"messages": [SYSTEM, *pair, *pair]} for pair in turns("role", "content")],
    "untrained": [
        {"messages": [user, {**answer, "train": False}, user, answer]}
        for user, answer in turns("role", "content")
    ],
    "bare messages": [list(pair) for pair in turns("role", "content")],
    "sharegpt": [
        {"conversations": [{**user, "from": "human"}, {**answer, "from": "gpt"}], "system": "Be."}
        for user, answer in turns("from", "value")
    ],
    "alpaca": [{"instruction": user, "input": "", "output": text} for user, text in PAIRS],
    "alpaca input": [{"instruction": user, "input": "x", "output": text} for user, text in PAIRS],
    "dolly": [{"instruction": user, "context": "c", "response": text} for user, text in PAIRS],
    "prompt": [{"prompt": user, "completion": text} for user, text in PAIRS],
}


@pytest.mark.parametrize("name", CHATS)
def test_conversations_have_the_same_tokens_and_loss_masks_for_ever(name, tmp_path, gpt2_chat):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, CHATS[name])))
    store = ps.build(path, tmp_path / "store", tokenizer=gpt2_chat, chat="chatml")

    assert contents(store) == GOLDENS[f"chat {name}"]
