"""Documents to token ids.

Takes batches of documents, gives flat arrays of ids with an offset for each document.
Promises that ids equal those of the reference implementation (the first documents of
every build are compared), that text which spells a special token stays text unless
asked otherwise, and that no id is ever cut to fit.
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
