"""What stores and token files hold, as short digests, whatever their files look like.

tests/goldens.json has them for a small corpus in every format. They are taken through the public
interface alone, so they outlive changes of the store's files. Such a digest never changes.
"""

import hashlib
import json
from pathlib import Path

import numpy as np

import penstock as ps

GOLDENS = json.loads((Path(__file__).parent.parent / "goldens.json").read_text(encoding="utf-8"))
LENGTH = 16


def contents(store):
    """Return what `store` holds: its documents, its rows in order, and its first shuffled batches.

    Targets that are not trained on are -100 in a batch, so digests of batches cover loss masks.
    """
    windows = ps.Windows(store, LENGTH, tail="pad")
    in_order = ps.Loader(windows, len(windows), shuffle="none", prefetch=0)
    found = {"tokens": store.num_tokens, "rows": digest_batch(in_order[0])}
    found["windows"] = digest_batch(ps.Loader(windows, 4, seed=17, prefetch=0)[0])
    if store.has_documents:
        documents = [store.document(number) for number in range(len(store))]
        ends = np.cumsum([0, *map(len, documents)])
        ids = np.concatenate(documents).tolist()
        found["documents"] = f"{len(documents)} {digest([ids, ends.tolist()])}"
        packs = ps.Packs(store, LENGTH)
        found["packs"] = digest_batch(ps.Loader(packs, 4, seed=17, prefetch=0)[0])
    return found


def digest_batch(batch):
    return digest([batch["inputs"].tolist(), batch["targets"].tolist()])


def digest(value):
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
