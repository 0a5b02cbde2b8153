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
from collections.abc import Iterable, Sequence
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
        return _has_byte_level(self._definition.config.get("pre_tokenizer"))

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
        if not found or not _is_bpe(model) or any(model.get(key) for key in settings):
            return tuple(sorted(found))
        # `merge_pair` of all merges took longer than to load a tokenizer.
        merges = model.get("merges") or ()
        built = {
            each.replace(" ", "") if isinstance(each, str) else "".join(each) for each in merges
        }
        return tuple(sorted(each for each in found if each in built or len(each) < 2))

    def config(self, num_prefixes: int = 0) -> Config:
        """The tokenizer.json of a copy, for texts with up to `num_prefixes` private-use characters.

        Raises:
            TokenizerError: a character could no longer be encoded.
        """
        model = self._definition.config["model"]
        lost = [token for token in self.hidden if len(token) == 1]
        has_other = model.get("unk_token") or model.get("byte_fallback")
        if lost and _is_bpe(model) and not has_other:
            raise TokenizerError(
                f"The special token {lost[0]!r} of {self._definition.name} is also the only token "
                "for that character, so a text with it cannot be encoded while special tokens are "
                'text. Use special_tokens="parse" of penstock.load_tokenizer or penstock.build '
                "(--special-tokens parse), or give the model an unk_token."
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
        renamed = _renamed(model, names)
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
            loaded.add_tokens(
                [
                    tokenizers.AddedToken(word, normalized=False, special=False)
                    for word in self._words
                ]
            )
            self._loaded[num_prefixes] = loaded
        return self._loaded[num_prefixes]

    def check(self, ids: NDArray[np.uint32]) -> None:
        """Raise if `ids` contains the id of a special token.

        A copy could still return one, if a normalizer writes the name of a renamed token.
        """
        if len(ids) and self.forbidden:
            found = ids[np.isin(ids, np.fromiter(self.forbidden, np.uint32))]
            if len(found):
                raise TokenizerError(
                    f"{self._definition.name} gave {self.forbidden[int(found[0])]!r}, the id "
                    f"{int(found[0]):,}, for a text. This tokenizer cannot treat special tokens in "
                    'a text as text; special_tokens="parse" of penstock.load_tokenizer or '
                    "penstock.build (--special-tokens parse) takes them as tokens."
                )


def load_reference(text: str, name: str) -> tokenizers.Tokenizer:
    """A `tokenizers.Tokenizer` that neither truncates nor pads.

    Raises:
        TokenizerError: `tokenizers` cannot load `text`.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        # A Rust panic is not an Exception; merges that lack the model's prefix cause one.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{name} is not a usable tokenizer.json: {error}.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _has_byte_level(step: object) -> bool:
    """Whether a pre-tokenizer, or one step of a sequence, converts text to the byte alphabet."""
    if not isinstance(step, dict):
        return False
    steps = step.get("pretokenizers") or []
    return step.get("type") == "ByteLevel" or any(map(_has_byte_level, steps))


def _is_bpe(model: Config) -> bool:
    # Files of early versions have no type; only BPE models have merges.
    return model.get("type", "BPE" if "merges" in model else None) == "BPE"


def merge_pair(merge: str | list[str]) -> list[str]:
    """The two tokens of a merge, which files write as "a b" or as ["a", "b"]."""
    return merge.split(" ") if isinstance(merge, str) else list(merge)


def _built(merge: str | list[str], model: Config) -> str:
    """The token that a merge builds."""
    first, *second = merge_pair(merge)
    prefix = model.get("continuing_subword_prefix") or ""
    return first + "".join(second).removeprefix(prefix)


def _renamed(model: Config, names: dict[str, str]) -> Config:
    """`model` with its tokens renamed, without the merges that build or use them."""
    if not names:
        return model
    vocab = model.get("vocab") or {}
    if isinstance(vocab, dict):
        vocab = {names.get(token, token): number for token, number in vocab.items()}
    else:
        vocab = [[names.get(token, token), score] for token, score in vocab]
    changed = {**model, "vocab": vocab}
    if model.get("unk_token") in names:
        changed["unk_token"] = names[model["unk_token"]]
    if merges := model.get("merges"):
        changed["merges"] = [
            merge
            for merge in merges
            if not names.keys() & {_built(merge, model), *merge_pair(merge)}
        ]
    return changed


def checked_tokens(tokens: Iterable[str]) -> list[str]:
    """The tokens to add, without repetitions.

    Raises:
        TokenizerError: `tokens` is not a list of strings.
    """
    if isinstance(tokens, str):
        raise TokenizerError(f"add_tokens={tokens!r} is one string; give a list: [{tokens!r}].")
    found = list(dict.fromkeys(tokens))
    for each in found:
        if not isinstance(each, str) or not each.strip():
            raise TokenizerError(f"add_tokens has {each!r}, which is not a token; give strings.")
    return found


def extended_definition(definition: Definition, tokens: Sequence[str]) -> Definition:
    """`definition` with special tokens added; the same object if it has all of them.

    A token that the vocabulary has as an ordinary one keeps its id and becomes special.

    Raises:
        TokenizerError: `tokenizers` would give the new tokens other ids than those after the
            largest id.
    """
    flagged = {token["content"] for token in definition.added_tokens if token["special"]}
    wanted = [token for token in tokens if token not in flagged]
    if not wanted:
        return definition
    found = {token: definition.token_id(token) for token in wanted}
    known = {token: number for token, number in found.items() if number is not None}
    missing = [token for token in wanted if token not in known]
    new = {token: definition.vocab_size + each for each, token in enumerate(missing)}
    ids = {**known, **new}
    # The tokens are sorted by id, because `tokenizers` numbers them in the order of the file.
    kept = [token for token in definition.added_tokens if token["content"] not in ids]
    listed = [*kept, *(special_token(token, number) for token, number in ids.items())]
    listed.sort(key=lambda token: token["id"])
    made = replace(
        definition,
        config={**definition.config, "added_tokens": listed},
        extra_tokens={**definition.extra_tokens, **ids},
    )
    if new and _has_gaps(definition):
        # `tokenizers` numbers new tokens by counting tokens instead of looking for the largest id.
        # With gaps in the vocabulary, the id that it gives may already belong to another token.
        reference = load_reference(made.text, made.name)
        for token, number in new.items():
            if (other := reference.token_to_id(token)) != number:
                raise TokenizerError(
                    f"The vocabulary of {made.name} has gaps: {token!r} would be {number:,}, after "
                    f"its largest id, but tokenizers makes it {other:,}. Add the tokens to its "
                    "tokenizer.json with the library that trained it."
                )
    return made


def _has_gaps(definition: Definition) -> bool:
    """Whether an id from 0 to the largest one is unused.

    This is checked for the model's own vocabulary, and again together with the added tokens.
    """
    model = set(definition.vocab.values())
    added = {token["id"] for token in definition.added_tokens}
    return len(model) != max(model, default=-1) + 1 or len(model | added) != definition.vocab_size


@cache  # the same tokens are logged once
def log_added(name: str, added: tuple[tuple[str, int], ...], vocab_size: int) -> None:
    """Log which tokens were added, because the model's embedding needs a row for each."""
    # Worker processes load the same tokenizer again; only the parent logs it.
    if multiprocessing.parent_process() is not None:
        return
    pairs = [f"{token} ({number:,})" for token, number in added]
    more = [f"and {len(pairs) - 10:,} more"] if len(pairs) > 10 else []
    _log.warning(
        f"{name} has these added tokens: {', '.join(pairs[:10] + more)}. Its vocabulary "
        f"now has {vocab_size:,} tokens, and the model's embedding needs as many rows; the "
        f"next multiple of 64 is {padded_vocab_size(vocab_size):,}."
    )
