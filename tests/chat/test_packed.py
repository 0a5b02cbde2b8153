"""What a chat store trains on is what its rows train on, packed, padded and one by one."""

import json

import numpy as np
import pytest

import penstock
from penstock import Documents, Loader, Packs


@pytest.fixture(scope="module")
def store(tmp_path_factory, gpt2_chat):
    place = tmp_path_factory.mktemp("chats")
    records = [
        {
            "messages": [
                {"role": "user", "content": f"Count to {number % 23}."},
                {"role": "assistant", "content": " ".join(map(str, range(number % 23)))},
                {"role": "user", "content": "Again?"},
                {"role": "assistant", "content": f"No, {number}.", "train": number % 3 == 0},
            ]
        }
        for number in range(1, 200)
    ]
    texts = penstock.Texts([json.dumps(record) for record in records])
    return penstock.build(texts, place / "store", chat="chatml", tokenizer=gpt2_chat, max_bad=20)


def trained(store):
    """All tokens that the store says are trained on, sorted."""
    found = [
        store.part_array(part, "tokens")[store.part_array(part, "loss") == 1]
        for part in range(len(store.manifest.parts))
    ]
    return np.sort(np.concatenate(found))


@pytest.mark.parametrize(
    "make", [lambda store: Packs(store, length=96), lambda store: Documents(store, max_length=512)]
)
def test_rows_train_on_every_such_token_once_and_on_no_other(store, make):
    loader = Loader(make(store), batch_size=7, seed=3, epochs=1, drop_last=False)
    targets = [batch["targets"].numpy() for batch in loader]
    told = np.concatenate([each[each != -100] for each in targets])

    assert np.array_equal(np.sort(told), trained(store))
