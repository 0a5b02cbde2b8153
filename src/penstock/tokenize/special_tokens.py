r"""Tokenizers to which special tokens are text.

`tokenizers` can be told not to look for special tokens in a text, but the model behind it may
still have one among its pieces. A Unigram model lists `</s>` like any other piece, a WordPiece
model whose words end at spaces finds `[SEP]`, merges of BPE may build `<|endoftext|>`. Such a
text would write the id that ends a document.

So text is encoded by a copy of the model in which each special piece has a name that no text can
have. Ids stay as they are, and so do the ids of all text that holds no special token:

    Unigram, WordPiece, WordLevel    the piece is renamed, so it never matches
    BPE                              the merges that build it are left out; it is renamed too,
                                     for the two ways around merges: `ignore_merges`, and
                                     pieces of a single character

The name is a private-use character n + 1 times and a number, where n is the most that any of the
texts has of it: a text with n of them cannot hold n + 1. In byte-level models the name holds a
space, which the byte alphabet does not have.

The unknown token (`<unk>`) is hidden in the same way, but its id stays allowed: it is what a
model gives for characters that it does not know.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import TokenizerError
from penstock.tokenize.definition import Definition

__all__ = ["PlainText", "load_reference"]

_MARK = "\U0010fffd"
_BYTE_MARK = " "


class PlainText:
    """The copies of one tokenizer to which special tokens are text; safe to use from threads.

    Args:
        definition: The tokenizer.
        words: Tokens that the copies find in a text besides, such as an anchor.
    """

    def __init__(self, definition: Definition, words: Sequence[str] = ()) -> None:
        self._definition = definition
        self._words = words
        self._loaded: dict[int, Any] = {}

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether text reaches the model as characters of the byte alphabet."""
        return _has_byte_level(self._definition.config.get("pre_tokenizer"))

    @cached_property
    def forbidden(self) -> dict[int, str]:
        """Ids that no text may give, and their tokens: all special ones but the unknown token.

        If that also begins or ends documents, it may not be given either.
        """
        unknown = {self._definition.unk_token} - {
            self._definition.eos_token,
            self._definition.bos_token,
        }
        tokens = [each for each in self._definition.special_tokens if each not in unknown]
        numbers = ((self._definition.token_id(each), each) for each in tokens)
        return {number: token for number, token in numbers if number is not None}

    @cached_property
    def hidden(self) -> tuple[str, ...]:
        """The special pieces that the model could find in a text."""
        special = {self._definition.token_id(each) for each in self._definition.special_tokens}
        pieces = {piece for piece, number in self._definition.pieces.items() if number in special}
        model = self._definition.config["model"]
        if not pieces or not _is_bpe(model) or model.get("ignore_merges"):
            return tuple(sorted(pieces))
        lengths = {len(each) for each in pieces}
        # Most merges build something of another length; to join only the others takes a fifth.
        built = {_built(merge, model) for merge in _merges(model) if _length(merge) in lengths}
        affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        return tuple(sorted(each for each in pieces if each in built or len(each) < 2 or affixes))

    def config(self, num_marks: int = 0) -> dict[str, Any]:
        """The tokenizer.json of the copy for texts with at most `num_marks` marks.

        Raises:
            TokenizerError: a text would lose a character.
        """
        self._refuse_lost_character()
        mark = _BYTE_MARK if self.is_byte_level else _MARK * (num_marks + 1)
        while self.hidden and any(each.startswith(mark) for each in self._definition.pieces):
            mark += mark[0]  # a piece has such a name already
        names = {piece: f"{mark}{number}" for number, piece in enumerate(self.hidden)}
        special = set(self._definition.special_tokens)
        added = [
            {
                **token,
                "content": names.get(token["content"], token["content"]),
                "special": token["special"] or token["content"] in special,
            }
            for token in self._definition.config.get("added_tokens") or []
        ]
        model = _renamed(self._definition.config["model"], names)
        return {**self._definition.config, "model": model, "added_tokens": added}

    def gigatoken_config(self) -> dict[str, Any]:
        """The same for gigatoken, which always parses the special tokens that it knows.

        Raises:
            TokenizerError: some text could have the name of a hidden piece.
        """
        ignores = self._definition.config["model"].get("ignore_merges")
        if self.hidden and ignores and not self.is_byte_level:
            raise TokenizerError("its special tokens are also words of the vocabulary")
        config = self.config()
        kept = [token for token in config["added_tokens"] if not token["special"]]
        return {**config, "added_tokens": kept}

    def tokenizer(self, texts: Iterable[str]) -> Any:
        """The `tokenizers.Tokenizer` that takes special tokens in these texts as text."""
        num_marks = 0
        if self.hidden and not self.is_byte_level:
            most = max((text.count(_MARK) for text in texts), default=0)
            num_marks = 1 << most.bit_length() if most else 0  # few copies, whatever the texts
        if num_marks not in self._loaded:
            loaded = load_reference(json.dumps(self.config(num_marks)), self._definition.name)
            loaded.encode_special_tokens = True
            loaded.add_tokens([_word(each) for each in self._words])
            self._loaded[num_marks] = loaded
        return self._loaded[num_marks]

    def check(self, ids: NDArray[np.uint32]) -> None:
        """Refuse ids of special tokens, should a tokenizer give one for text all the same.

        A normalizer could write the name of a hidden piece.
        """
        if len(ids) and self.forbidden:
            found = ids[np.isin(ids, np.fromiter(self.forbidden, np.uint32))]
            if len(found):
                raise TokenizerError(
                    f"{self._definition.name} gave {self.forbidden[int(found[0])]!r}, the id "
                    f"{int(found[0]):,}, for a text. Special tokens in a text cannot be kept "
                    'as text with this tokenizer; special_tokens="parse" takes them as tokens.'
                )

    def _refuse_lost_character(self) -> None:
        """Raise where a hidden piece is the only way to write a character."""
        model = self._definition.config["model"]
        lost = [piece for piece in self.hidden if len(piece) == 1]
        if (
            lost
            and _is_bpe(model)
            and not model.get("unk_token")
            and not model.get("byte_fallback")
        ):
            raise TokenizerError(
                f"The special token {lost[0]!r} of {self._definition.name} is also the only token "
                "for that character, so a text that has it cannot be encoded with special tokens "
                'as text. Use special_tokens="parse", or give the model an unk_token.'
            )


def load_reference(text: str, name: str) -> Any:
    """A `tokenizers.Tokenizer` that neither cuts nor pads.

    Raises:
        TokenizerError: `text` defines nothing that `tokenizers` knows.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text)
    except BaseException as error:
        # A panic inside `tokenizers` is no Exception: merges that lack the model's prefix.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{name} is no usable tokenizer.json: {error}.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _word(text: str) -> Any:
    from tokenizers import AddedToken

    return AddedToken(text, normalized=False, special=False)


def _has_byte_level(step: Any) -> bool:
    """Whether a pre-tokenizer, or one of a sequence, maps text to the byte alphabet."""
    if not isinstance(step, dict):
        return False
    steps = step.get("pretokenizers") or []
    return step.get("type") == "ByteLevel" or any(map(_has_byte_level, steps))


def _is_bpe(model: dict[str, Any]) -> bool:
    # Files of early versions do not say the type; BPE is the model that has merges.
    return model.get("type", "BPE" if "merges" in model else None) == "BPE"


def _merges(model: dict[str, Any]) -> list[Any]:
    merges = model.get("merges")
    return merges if isinstance(merges, list) else []


def _pair(merge: Any) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else list(merge)


def _length(merge: Any) -> int:
    """How long the piece is that a merge builds, prefixes aside."""
    return len(merge) - 1 if isinstance(merge, str) else sum(map(len, merge))


def _built(merge: Any, model: dict[str, Any]) -> str:
    """The piece that a merge builds; "" for a line that is no pair."""
    pair = _pair(merge)
    if len(pair) != 2:
        return ""
    prefix = model.get("continuing_subword_prefix") or ""
    return pair[0] + pair[1].removeprefix(prefix)


def _renamed(model: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A model whose pieces in `names` are called so, with no merge that builds or uses them."""
    if not names:
        return model
    vocab = model.get("vocab") or {}
    if isinstance(vocab, dict):
        vocab = {names.get(piece, piece): number for piece, number in vocab.items()}
    else:
        vocab = [[names.get(piece, piece), score] for piece, score in vocab]
    changed = {**model, "vocab": vocab}
    if model.get("unk_token") in names:
        changed["unk_token"] = names[model["unk_token"]]
    if _merges(model):
        changed["merges"] = [
            merge
            for merge in _merges(model)
            if not names.keys() & {_built(merge, model), *_pair(merge)}
        ]
    return changed
