"""Dynamic masking for masked language models.

    tokens    the cat sat on the mat          rate=0.15: "sat" and "mat" were selected
    inputs    the cat [M] on the mat          80 % are masked, 10 % replaced at random, 10 % stay
    labels    -   -   sat -  -   mat          predicted; all others are ignored (-100)

Each token is selected independently with probability `rate` (Bernoulli), like Hugging Face's
`DataCollatorForLanguageModeling`; BERT's own script selected exactly 15 % of a row. Random
replacements come from the whole vocabulary including special tokens, as in both. Tokens are
selected when a row is read, in a few nanoseconds per token (docs/transforms.md), so every
epoch has different masks and nothing is stored.

For whole-word masking, `begins_word` finds the ids that begin a word, by the convention of
the tokenizer:

    "##"    un ##believ ##able            BERT marks tokens that continue a word
    "Ġ"     un believ able Ġstory !       GPT-2, RoBERTa: a space is part of the next word
    "▁"     ▁un believ able ▁story !      SentencePiece: likewise
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from penstock.digest import Unsigned, digest_bytes
from penstock.errors import PlanError
from penstock.rows.protocol import token_spans
from penstock.transforms import draws
from penstock.transforms.draws import Integers, subkeys
from penstock.transforms.transform import (
    Fields,
    align_to_first_token,
    copy_for_ids,
    exclude_padding,
    refuse_fields,
)

IGNORED = -100
"""The label that loss functions ignore."""

WordMark = Literal["##", "Ġ", "▁"]
Booleans = NDArray[np.bool_]

_SELECT, _KIND, _RANDOM = range(3)  # numbers of the subkeys: one for each random choice
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # SentencePiece's token for a single byte
_BLANKS = "ĠĊĉč"  # GPT-2's characters for space, line feed, tab and carriage return


@final
class MaskTokens:
    """Masks tokens as BERT does: 80 % mask, 10 % random, 10 % unchanged; all are predicted."""

    gives_labels = True
    """Each position predicts its own token. So nothing is shifted, and a row's first token can be
    a target."""

    def __init__(
        self,
        mask_id: int,
        vocab_size: int,
        *,
        special_ids: Iterable[int] = (),
        rate: float = 0.15,
        masked: float = 0.8,
        random: float = 0.1,
        begins_word: NDArray[np.bool_] | None = None,
    ) -> None:
        """Create a masking transform; the defaults are BERT's rates.

        Args:
            mask_id: The id of the mask token.
            vocab_size: Random tokens are drawn from the ids below it.
            special_ids: Tokens that are never selected, such as padding and separators.
            rate: The probability of selecting a token, or a word.
            masked: The share of selected tokens that `mask_id` replaces.
            random: The share that a random token replaces. The remaining tokens stay unchanged.
            begins_word: For each id, whether it begins a word (see the function `begins_word`).
                If given, whole words are selected. Each token of a selected word is then masked,
                replaced or kept independently.
        """
        _check_id("mask_id", mask_id, vocab_size)
        draws.check_probability("rate", rate)
        if masked < 0 or random < 0 or masked + random > 1:
            raise PlanError(
                "masked and random are shares of the selected tokens: each must be at least 0, and "
                f"their sum at most 1; got masked={masked} and random={random}."
            )
        self.mask_id = mask_id
        self.vocab_size = vocab_size
        self.rate = rate
        self.masked = masked
        self.random = random
        self._is_special = np.zeros(vocab_size, np.bool_)
        for each in special_ids:
            _check_id("special_ids", each, vocab_size)
            self._is_special[each] = True
        self._begins = None if begins_word is None else np.array(begins_word, np.bool_)
        if self._begins is not None and self._begins.shape != (vocab_size,):
            raise PlanError(
                f"begins_word must have one boolean for each of the {vocab_size:,} ids; its shape "
                f"is {self._begins.shape}."
            )

    def __repr__(self) -> str:
        words = "" if self._begins is None else ", whole words"
        return f"MaskTokens({self.rate:g} of the tokens, {self.masked:g} masked{words})"

    def describe(self) -> dict[str, Any]:
        """Return every setting that affects the result, in a dict that JSON can represent."""
        described: dict[str, Any] = {
            "kind": "masked-tokens",
            "mask_id": self.mask_id,
            "vocab_size": self.vocab_size,
            "special_ids": np.flatnonzero(self._is_special).tolist(),
            "rate": float(self.rate),
            "masked": float(self.masked),
            "random": float(self.random),
        }
        if self._begins is not None:
            # Described by a digest: nobody can read 50,257 booleans, and only a difference matters.
            described["begins_word"] = digest_bytes(np.packbits(self._begins).tobytes())
        return described

    def apply(self, fields: Fields, keys: Unsigned, length: int | None = None) -> Fields:
        """Return masked `tokens`, original tokens as `labels`, and the selection as `target_mask`.

        Padding is never selected. With whole words, special tokens end a word. So an end token
        in `special_ids` keeps documents apart.
        """
        refuse_fields(fields, "MaskTokens", "labels", "targets", "target_mask")
        tokens = fields["tokens"]
        length = tokens.shape[1] if length is None else length
        # C order: below, rows are addressed as one flat array through views.
        labels = tokens[:, :length].copy(order="C")
        if labels.size and (int(labels.max()) >= self.vocab_size or int(labels.min()) < 0):
            raise PlanError(
                f"These rows hold ids from {int(labels.min()):,} to {int(labels.max()):,}, but "
                f"vocab_size is {self.vocab_size:,}. Pass the vocab_size of their tokenizer."
            )
        first, _ = token_spans(fields)
        drawn = draws.bernoulli_table(subkeys(keys, _SELECT), length, self.rate)
        selected = align_to_first_token(drawn, first)
        if self._begins is not None:
            selected = self._select_words(selected, labels, self._begins, first)
        selected = exclude_padding(selected, fields)
        # Look up only the selected tokens: 15 % of them, so 6 times fewer than all.
        flat = np.flatnonzero(selected)
        special = self._is_special[labels.reshape(-1)[flat]]
        selected.reshape(-1)[flat[special]] = False
        changed = copy_for_ids(tokens, self.vocab_size - 1)
        rows, columns = np.divmod(flat[~special], max(1, length))
        bits = draws.random_bits(subkeys(keys, _KIND)[rows], columns - first[rows])
        # 53 bits as a fraction from 0 to 1: a double holds 53 bits exactly.
        kinds = (bits >> np.uint64(11)) * 2.0**-53
        hidden = kinds < self.masked
        changed[rows[hidden], columns[hidden]] = self.mask_id
        other = ~hidden & (kinds < self.masked + self.random)
        rows, columns = rows[other], columns[other]
        random_keys = subkeys(keys, _RANDOM)[rows]
        changed[rows, columns] = draws.integers_below(
            random_keys, columns - first[rows], self.vocab_size
        )
        result = {**fields, "tokens": changed, "labels": labels, "target_mask": selected}
        # num_targets excludes the last token, as nothing follows it; here it predicts itself.
        result.pop("num_targets", None)
        return result

    def _select_words(
        self, selected: Booleans, labels: NDArray[Any], begins: Booleans, first_token: Integers
    ) -> Booleans:
        """Return a selection in which every token shares the choice of its word's first token."""
        # A word begins at a token that `begins_word` marks, at a special token, after a special
        # token, and at each row's first column and first token (they differ in rows padded on the
        # left).
        special = self._is_special[labels]
        starts = begins[labels] | special
        starts[:, 1:] |= special[:, :-1]
        starts[:, :1] = True
        if starts.size:
            starts[np.arange(len(starts)), first_token] = True
        # The rows are treated as one long array. Every row begins a word, so no word spans two
        # rows.
        first = np.flatnonzero(starts)
        sizes = np.diff(first, append=starts.size)
        return np.repeat(selected.reshape(-1)[first], sizes).reshape(selected.shape)


def collate_masked(fields: Fields) -> dict[str, NDArray[np.int64]]:
    """Return masked rows as int64 `input_ids` and `labels`, -100 where nothing is predicted.

    The same arrays as Hugging Face's collator returns. Only needed without a loader.
    """
    labels, mask = fields["labels"], fields["target_mask"]
    inputs = fields["tokens"][:, : labels.shape[1]].astype(np.int64)
    return {"input_ids": inputs, "labels": np.where(mask, labels.astype(np.int64), IGNORED)}


def begins_word(
    vocabulary: Mapping[str, int], mark: WordMark, *, vocab_size: int | None = None
) -> Booleans:
    """Return, for each id, whether its token begins a word; True for ids not in `vocabulary`.

    With "Ġ" and "▁", a token that starts with something other than a letter, a digit or a part
    of a character begins a word too: "!", "'t", a newline. A vocabulary does not say more:
    in "(foo", the token "foo" counts as part of the word that "(" begins.

    >>> begins_word({"[CLS]": 0, "un": 1, "##able": 2}, "##")
    array([ True,  True, False])
    >>> begins_word({"un": 0, "Ġstory": 1, "!": 2, "Ċ": 3, "é": 4}, "Ġ").tolist()
    [False, True, True, True, False]
    """
    if mark not in ("##", "Ġ", "▁"):
        raise PlanError(f'mark must be "##", "Ġ" or "▁"; got {mark!r}.')
    size = max(vocabulary.values(), default=-1) + 1
    vocab_size = size if vocab_size is None else vocab_size
    if vocab_size < size:
        raise PlanError(
            f"vocab_size={vocab_size:,} is too small: the vocabulary has an id {size - 1:,}."
        )
    found = np.ones(vocab_size, np.bool_)
    for token, number in vocabulary.items():
        found[number] = _token_begins_word(token, mark)
    return found


def _token_begins_word(token: str, mark: WordMark) -> bool:
    if mark == "##":
        return not token.startswith("##")
    if not token or token[0] == mark:
        return True
    if mark == "▁":
        return not token[0].isalnum() and not _BYTE_TOKEN.fullmatch(token)
    # GPT-2 writes each byte as one character. A character outside ASCII is a byte of a larger
    # character (or a blank), so it continues a word.
    return token[0] in _BLANKS or (token[0].isascii() and not token[0].isalnum())


def _check_id(name: str, value: int, vocab_size: int) -> None:
    if not 0 <= value < vocab_size:
        raise PlanError(
            f"{name} must be from 0 to vocab_size - 1 = {vocab_size - 1:,}; got {value:,}."
        )
