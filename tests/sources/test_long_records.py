"""A record that is longer than a block is tokenized in blocks, and has the same ids."""

import json

import numpy as np
import pytest

import penstock

# More than two blocks of 4 MiB, so the record is divided; the last word tells an early end.
LONG = "It was the best of times, it was the worst of times. " * 200_000 + "The end."
TEXTS = ["first", LONG, "between", LONG[::-1], "last"]


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
@pytest.mark.parametrize("format", ["txt", "jsonl", "json"])
def test_a_long_record_has_the_ids_of_its_text(tmp_path, tokenizer, format):
    records = [json.dumps({"text": text}) for text in TEXTS]
    contents = {
        "txt": "\n".join(TEXTS),
        "jsonl": "\n".join(records),
        "json": f"[{', '.join(records)}]",
    }
    path = tmp_path / f"a.{format}"
    path.write_text(contents[format])
    store = penstock.build(path, tmp_path / "store", tokenizer=tokenizer, documents="lines")
    encode = penstock.load_tokenizer(tokenizer).encode

    assert len(store) == store.manifest.num_documents == len(TEXTS)
    for number, text in enumerate(TEXTS):
        assert np.array_equal(store[number][:-1], encode(text.encode())), number
