r"""Keeps text from becoming special tokens, and adds special tokens to a tokenizer.json.

`tokenizers` has an option not to parse special tokens in a text, but the model itself may still
contain one as an ordinary token. A Unigram model lists `</s>` like any other token, a WordPiece
model whose words end at spaces finds `[SEP]`, and merges of BPE may build `<|endoftext|>`. A text
with these characters would then produce the id that ends a document.

So `PlainText` encodes with a copy of the model in which each such token has a name that no text
contains. No id changes, except of a text that contains a special token:

    Unigram, WordPiece, WordLevel    the renamed token never matches
    BPE                              the merges that build the token are removed; it is also
                                     renamed, because `ignore_merges` and tokens of a single
                                     character do not need merges

The new name is n + 1 copies of a private-use character, followed by a number. No text has more than
n of these characters, so no text can contain the name. In byte-level models the name begins with a
space, which the byte alphabet does not have.

The unknown token (`<unk>`) is renamed too, but its id stays allowed: it is the id of characters
that the model does not know.

`extended_definition` adds tokens, such as the markers of a chat template. New ids follow the
vocabulary, so all other ids keep their meaning, and a model needs new rows only at the end of its
embedding: GPT-2 has the ids 0 to 50,256, and <|im_start|> becomes 50,257.
"""

import json
import logging
import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property

import numpy as np
import tokenizers
from numpy.typing import NDArray

from penstock.errors import TokenizerError
from penstock.tokenize.definition import Config, Definition, padded_vocab_size, special_token

_log = logging.getLogger("penstock")
_PREFIX = "\U0010fffd"
_BYTE_PREFIX = " "
_PARSE_INSTEAD = (
    'This tokenizer cannot treat special tokens in a text as text; special_tokens="parse" of '
    "penstock.load_tokenizer or penstock.build (--special-tokens parse) takes them as tokens."
)


class PlainText:
    """Copies of one tokenizer that treat special tokens as text; safe to use from threads.

    Args:
        definition: The tokenizer.
        words: More tokens for the copies to find in a text; callers remove them from the result.
    """

    def __init__(self, definition: Definition, words: Sequence[str] = ()) -> None:
        self._definition = definition
        self._words = words
        self._loaded: dict[int, tokenizers.Tokenizer] = {}

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether the pre-tokenizer converts text to the byte alphabet."""
        return '"ByteLevel"' in json.dumps(self._definition.config.get("pre_tokenizer"))

    @cached_property
    def forbidden(self) -> dict[int, str]:
        """The ids that no text may have, and their tokens: all special ones but the unknown token.

        An unknown token that also begins or ends documents is forbidden too.
        """
        edges = {self._definition.eos_token, self._definition.bos_token}
        allowed = {self._definition.unk_token} - edges
        tokens = [each for each in self._definition.special_tokens if each not in allowed]
        numbers = ((self._definition.token_id(each), each) for each in tokens)
        return {number: token for number, token in numbers if number is not None}

    @cached_property
    def hidden(self) -> tuple[str, ...]:
        """The special tokens that the model could find in a text; the copies rename them."""
        special = {self._definition.token_id(each) for each in self._definition.special_tokens}
        found = {token for token, number in self._definition.vocab.items() if number in special}
        model = self._definition.config["model"]
        # With these settings, BPE may find a token without the merges that build it.
        settings = ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
        if found and is_bpe(model) and not any(map(model.get, settings)):
            # `merge_pair` of all merges took longer than to load a tokenizer.
            merges = model.get("merges") or ()
            built = {
                each.replace(" ", "") if isinstance(each, str) else "".join(each) for each in merges
            }
            found = {each for each in found if each in built or len(each) < 2}
        return tuple(sorted(found))

    def config(self, num_prefixes: int = 0) -> Config:
        """The tokenizer.json of a copy, for texts with up to `num_prefixes` private-use characters.

        Raises:
            TokenizerError: a character could no longer be encoded.
        """
        model = self._definition.config["model"]
        lost = [token for token in self.hidden if len(token) == 1]
        has_other = model.get("unk_token") or model.get("byte_fallback")
        if lost and is_bpe(model) and not has_other:
            raise TokenizerError(
                f"The special token {lost[0]!r} of {self._definition.name} is also the only token "
                f"for that character, so a text with it cannot be encoded. {_PARSE_INSTEAD}"
            )
        prefix = _BYTE_PREFIX if self.is_byte_level else _PREFIX * (num_prefixes + 1)
        while self.hidden and any(each.startswith(prefix) for each in self._definition.vocab):
            prefix += prefix[0]  # a token has such a name already
        names = {token: f"{prefix}{number}" for number, token in enumerate(self.hidden)}
        special = set(self._definition.special_tokens)
        added = [
            {
                **token,
                "content": names.get(token["content"], token["content"]),
                "special": token["special"] or token["content"] in special,
            }
            for token in self._definition.added_tokens
        ]
        renamed = _renamed(model, names) if names else model
        return {**self._definition.config, "model": renamed, "added_tokens": added}

    def gigatoken_config(self) -> Config:
        """`config()` without special tokens, because gigatoken would find them in any text.

        Raises:
            TokenizerError: gigatoken could still find a special token, by the new name that
                `config()` gave it.
        """
        # gigatoken gets one copy for all texts, so a text could contain the new name. Without
        # `ignore_merges` that does not matter, because no merge builds the renamed token.
        ignores = self._definition.config["model"].get("ignore_merges")
        if self.hidden and ignores and not self.is_byte_level:
            raise TokenizerError("its special tokens are also words of the vocabulary")
        config = self.config()
        kept = [token for token in config["added_tokens"] if not token["special"]]
        return {**config, "added_tokens": kept}

    def tokenizer(self, texts: Iterable[str]) -> tokenizers.Tokenizer:
        """The copy that treats special tokens in these texts as text."""
        num_prefixes = 0
        if self.hidden and not self.is_byte_level:
            most = max((text.count(_PREFIX) for text in texts), default=0)
            # A power of two, so that few copies serve all texts.
            num_prefixes = 1 << most.bit_length() if most else 0
        if num_prefixes not in self._loaded:
            loaded = load_reference(json.dumps(self.config(num_prefixes)), self._definition.name)
            loaded.encode_special_tokens = True
            words = [tokenizers.AddedToken(each, normalized=False) for each in self._words]
            loaded.add_tokens(words)
            self._loaded[num_prefixes] = loaded
        return self._loaded[num_prefixes]

    def check(self, ids: NDArray[np.uint32]) -> None:
        """Raise if `ids` contains the id of a special token.

        A copy could still return one, if a normalizer writes the name of a renamed token.
        """
        found = ids[np.isin(ids, np.fromiter(self.forbidden, np.uint32))]
        if len(found):
            raise TokenizerError(
                f"{self._definition.name} gave {self.forbidden[int(found[0])]!r}, the id "
                f"{int(found[0]):,}, for a text. {_PARSE_INSTEAD}"
            )


def load_reference(text: str, name: str) -> tokenizers.Tokenizer:
    """A `tokenizers.Tokenizer` that neither truncates nor pads.

    Raises:
        TokenizerError: `tokenizers` cannot load `text`.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        raise TokenizerError(f"{name} is not a usable tokenizer.json: {error}.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def is_bpe(model: Config) -> bool:
    """Whether a model is BPE."""
    # Files of early versions have no type; only BPE models have merges.
    return model.get("type", "BPE" if "merges" in model else None) == "BPE"


def merge_pair(merge: str | list[str]) -> list[str]:
    """The two tokens of a merge, which files write as "a b" or as ["a", "b"]."""
    return merge.split(" ") if isinstance(merge, str) else merge


def _renamed(model: Config, names: dict[str, str]) -> Config:
    """`model` with its tokens renamed, without the merges that build or use them."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        vocab = {names.get(token, token): number for token, number in vocab.items()}
    else:
        vocab = [[names.get(token, token), score] for token, score in vocab]
    changed = {**model, "vocab": vocab}
    if model.get("unk_token") in names:
        changed["unk_token"] = names[model["unk_token"]]
    prefix = model.get("continuing_subword_prefix") or ""

    def is_kept(merge: str | list[str]) -> bool:
        first, second = merge_pair(merge)
        return names.keys().isdisjoint((first, second, first + second.removeprefix(prefix)))

    if model.get("merges"):
        changed["merges"] = list(filter(is_kept, model["merges"]))
    return changed


def extended_definition(definition: Definition, tokens: Sequence[str]) -> Definition:
    """`definition` with special tokens added; the same object if it has all of them.

    A token that the vocabulary has as an ordinary one keeps its id and becomes special.

    Raises:
        TokenizerError: `tokenizers` would give the new tokens other ids than those after the
            largest id.
    """
    flagged = {token["content"] for token in definition.added_tokens if token["special"]}
    known = {token: definition.token_id(token) for token in tokens if token not in flagged}
    if not known:
        return definition
    missing = [token for token, number in known.items() if number is None]
    new = {token: definition.vocab_size + each for each, token in enumerate(missing)}
    ids = {token: number for token, number in known.items() if number is not None} | new
    # The tokens are sorted by id, because `tokenizers` numbers them in the order of the file.
    kept = [token for token in definition.added_tokens if token["content"] not in ids]
    listed = [*kept, *(special_token(token, number) for token, number in ids.items())]
    listed.sort(key=lambda token: token["id"])
    given = numbered([token["content"] for token in listed], definition.vocab)
    for token, number in new.items():
        if given[token] != number:
            raise TokenizerError(
                f"The vocabulary of {definition.name} has gaps: {token!r} would be {number:,}, "
                f"after its largest id, but tokenizers makes it {given[token]:,}. Add the tokens "
                "to its tokenizer.json with the library that trained it."
            )
    return replace(
        definition,
        config={**definition.config, "added_tokens": listed},
        extra_tokens={**definition.extra_tokens, **ids},
    )


def numbered(contents: Iterable[str], vocab: Mapping[str, int]) -> dict[str, int]:
    """The ids that `tokenizers` gives to added tokens, which it numbers in the order of the file.

    It counts the tokens of the vocabulary, so with gaps in the vocabulary, the id of a new token
    may belong to another token already.
    """
    ids: dict[str, int] = {}
    following = len(vocab)
    for content in contents:
        ids[content] = vocab.get(content, following)
        following = max(following, ids[content] + 1)
    return ids


@cache  # the same tokens are logged once
def log_added(name: str, added: tuple[tuple[str, int], ...], vocab_size: int) -> None:
    """Log which tokens were added, because the model's embedding needs a row for each."""
    # Worker processes load the same tokenizer again; only the parent logs it.
    if multiprocessing.parent_process() is None:
        shown = ", ".join(f"{token} ({number:,})" for token, number in added[:10])
        more = f", and {len(added) - 10:,} more" if len(added) > 10 else ""
        _log.warning(
            f"{name} has these added tokens: {shown}{more}. Its vocabulary now has "
            f"{vocab_size:,} tokens, and the model's embedding needs as many rows; the next "
            f"multiple of 64 is {padded_vocab_size(vocab_size):,}."
        )
