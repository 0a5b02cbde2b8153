"""The text of a few rows or documents of a store, and what of it is trained on."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.store.manifest import Manifest
from penstock.store.reader import TokenStore
from penstock.tokenize.definition import GPT2_DIGEST, Decoder, gpt2_decoder


def decoder_of(manifest: Manifest, tokenizer: object = None) -> Decoder:
    """What decodes a few rows of the store: `tokenizer_of`, or something that loads faster.

    Raises:
        MissingTokenizerError, StoreError: see `tokenizer_of`.
    """
    recorded = manifest.contents["tokenizer"]
    if tokenizer is None and recorded["digest"] == GPT2_DIGEST:
        return gpt2_decoder()
    from penstock.tokenize.tokenizer import tokenizer_of  # imports Arrow and the engines

    return tokenizer_of(recorded, tokenizer)


def document_loss(store: TokenStore, number: int) -> NDArray[Any]:
    """The loss mask of a document: for each token of `store.document(number)`, 1 if trained on."""
    ends = np.cumsum(store.manifest.part_documents)
    # "right": the part that ends at `number` does not contain it.
    part = int(np.searchsorted(ends, number, side="right"))
    within = number - store.first_document(part)
    bounds = store.part_array(part, "bounds")
    start, stop = int(bounds[within - 1]) if within else 0, int(bounds[within])
    if store.part_loss(part) is None:
        return np.ones(stop - start, np.uint8)
    return store.files.span(part, "loss", start, stop)
