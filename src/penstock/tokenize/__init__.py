"""Encodes text to token ids.

Takes batches of documents and returns flat arrays of ids with an offset for each document. The ids
equal those of the reference implementation, `tokenizers`; every build compares its first documents.
A special token in a text is text unless the caller asks to parse it, and token ids are never
truncated to a narrower dtype.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.tokenize.tokenizer import Tokenizer as Tokenizer
    from penstock.tokenize.tokenizer import load_tokenizer as load_tokenizer
    from penstock.tokenize.train import TrainedTokenizer as TrainedTokenizer
    from penstock.tokenize.train import train_tokenizer as train_tokenizer
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "tokenizer": "Tokenizer load_tokenizer",
            "train": "TrainedTokenizer train_tokenizer",
        },
    )
