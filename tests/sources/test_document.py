"""Arrow arrays by their buffers: the same as pyarrow's own, and without pandas."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sources.batch import binary_array, bool_array, byte_lengths, null_rows

TEXTS = st.lists(st.one_of(st.none(), st.binary(max_size=9)), max_size=30)
KINDS = [pa.large_binary(), pa.large_string()]


@given(TEXTS)
def test_texts_are_what_pyarrow_makes_of_them(texts):
    array = binary_array(texts)
    array.validate(full=True)
    assert array.equals(pa.array(texts, pa.large_binary()))


@given(st.lists(st.booleans(), max_size=30))
def test_truth_values_are_what_pyarrow_makes_of_them(flags):
    array = bool_array(np.array(flags, bool))
    array.validate(full=True)
    assert array.equals(pa.array(flags, pa.bool_()))


@given(
    st.lists(st.one_of(st.none(), st.text("aé四", max_size=5)), max_size=30),
    st.sampled_from(KINDS),
    st.integers(0, 9),
)
def test_lengths_and_gaps_of_any_slice_are_those_of_its_values(texts, kind, start):
    data = [None if text is None else text.encode() for text in texts]
    array = pa.array(data, pa.binary()).cast(kind).slice(start)
    assert byte_lengths(array).tolist() == [len(text or b"") for text in data[start:]]
    assert null_rows(array).tolist() == [
        row for row, text in enumerate(data[start:]) if text is None
    ]


@pytest.mark.skipif(not importlib.util.find_spec("pandas"), reason="pandas is not installed")
def test_no_reader_imports_pandas(tmp_path):
    """A fifth of a second each time, and Ctrl-C in the midst of it was lost once in 170 times."""
    texts = ["one", "", "zwei drei", "four\nfive"]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    lines = [json.dumps({"text": text}) for text in [*texts, None]]
    (tmp_path / "good.jsonl").write_text("\n".join(lines))
    (tmp_path / "bad.jsonl").write_text("\n".join([*lines, '{"text": 5}', '{"text": "x', "[]"]))
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}\n' + "\n".join(lines).encode())
    pq.write_table(pa.table({"text": [*texts, None]}), tmp_path / "table.parquet")
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "O"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    code = """
import logging, sys, penstock
from pathlib import Path
logging.disable(logging.WARNING)  # of the tokens that are added
def build(number, source, **options):
    penstock.build(source, f"store{number}", max_bad=9, **options)
    assert "pandas" not in sys.modules, (source, options)
build(1, "a.txt", tokenizer="gpt2")
build(2, "a.txt", tokenizer=penstock.load_tokenizer("gpt2", engine="tokenizers"))
build(3, "good.jsonl", tokenizer="bytes")
build(4, "bad.jsonl", tokenizer="bytes")
build(5, "latin.jsonl", tokenizer="bytes", errors="replace")
build(6, "table.parquet", tokenizer="bytes", split="hash:0.5")
build(7, "chats.jsonl", chat=penstock.Chat("chatml", "gpt2", add_tokens="auto"))
build(8, penstock.Texts(["one", "two"]), tokenizer="bytes")
print(len(list(Path().glob("store*"))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout == "8\n"
