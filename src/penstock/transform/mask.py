"""Dynamic masking for masked-language models.

    tokens    the cat sat on the mat          rate=0.15: "sat" and "mat" were chosen
    inputs    the cat [M] on the mat          80 % become the mask, 10 % a random token, 10 % stay
    labels    -   -   sat -  -   mat          what is predicted; the others are ignored (-100)

Each token is chosen by itself with probability `rate` (Bernoulli), as Hugging Face's
`DataCollatorForLanguageModeling` does; BERT's own script took exactly 15 % of a row. Random
tokens come from the whole vocabulary, special ones included, as in both. Nothing is kept
from one epoch to the next: the choice is made when a row is read, in nanoseconds a token
(docs/transforms.md), and no two epochs are alike.
"""

from collections.abc import Iterable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from penstock.digest import digest_bytes
from penstock.errors import PlanError
from penstock.transform.chain import (
    Fields,
    from_first,
    holding,
    refuse_after,
    token_spans,
    without_padding,
)
from penstock.transform.draw import Integers, Unsigned, below, chosen, draws, subkeys

__all__ = ["IGNORED", "MaskedTokens", "collated", "table_of"]

IGNORED = -100
"""The label that losses leave out."""

_SELECT, _KIND, _RANDOM = range(3)  # the uses of a row's key


@final
class MaskedTokens:
    """Some tokens hidden, replaced or kept, and to be predicted: BERT's 80/10/10."""

    gives_labels = True
    """Places predict themselves, so nothing is shifted and a row's first token is a target too."""

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
        """Masking with BERT's rates.

        Args:
            mask_id: What hides a token.
            vocab_size: Random tokens are drawn from the ids below it.
            special_ids: Tokens that are never chosen: padding, separators.
            rate: How likely a token, or a word, is chosen.
            masked: The share of chosen tokens that `mask_id` hides.
            random: The share that a random token replaces. The rest stays as it is.
            begins_word: For each id, whether it begins a word (see `begins_word`): whole words
                are chosen then. What becomes of each token of a word is drawn token by token.
        """
        if not 0 <= mask_id < vocab_size:
            raise PlanError(f"mask_id={mask_id:,} is not an id below vocab_size={vocab_size:,}.")
        if not 0 <= rate <= 1:
            raise PlanError(f"rate={rate} is not a probability, from 0 to 1.")
        if masked < 0 or random < 0 or masked + random > 1:
            raise PlanError(
                f"masked={masked} and random={random} are shares of the chosen tokens: neither is "
                "below 0, and together they are at most 1."
            )
        self.mask_id = mask_id
        self.vocab_size = vocab_size
        self.rate = rate
        self.masked = masked
        self.random = random
        self._special = table_of(special_ids, vocab_size)
        self._begins = None if begins_word is None else np.array(begins_word, np.bool_)
        if self._begins is not None and self._begins.shape != (vocab_size,):
            raise PlanError(
                f"begins_word has the shape {self._begins.shape}; one boolean for each of "
                f"{vocab_size:,} ids is needed."
            )

    def __repr__(self) -> str:
        words = "" if self._begins is None else ", whole words"
        return f"MaskedTokens({self.rate:g} of the tokens, {self.masked:g} masked{words})"

    def describe(self) -> dict[str, Any]:
        """All that decides what it does, as JSON."""
        described: dict[str, Any] = {
            "kind": "masked-tokens",
            "mask_id": self.mask_id,
            "vocab_size": self.vocab_size,
            "special_ids": np.flatnonzero(self._special).tolist(),
            "rate": float(self.rate),
            "masked": float(self.masked),
            "random": float(self.random),
        }
        if self._begins is not None:
            described["begins_word"] = digest_bytes(np.packbits(self._begins).tobytes())
        return described

    def apply(self, fields: Fields, keys: Unsigned, length: int | None = None) -> Fields:
        """Masked `tokens`, with `labels` and a `target_mask` of the chosen places.

        Padding is never chosen. With whole words, a special token is the end of a word, so
        documents are kept apart by an end token that is special.
        """
        refuse_after(fields, "MaskedTokens", "labels", "targets", "target_mask")
        tokens = fields["tokens"]
        length = tokens.shape[1] if length is None else length
        labels = tokens[:, :length].copy(order="C")
        if labels.size and (int(labels.max()) >= self.vocab_size or int(labels.min()) < 0):
            raise PlanError(
                f"These rows hold the ids {int(labels.min()):,} to {int(labels.max()):,}; "
                f"vocab_size={self.vocab_size:,} must be more than all of them."
            )
        first, _ = token_spans(fields)
        selected = from_first(chosen(subkeys(keys, _SELECT), length, self.rate), first)
        if self._begins is not None:
            selected = self._spread(selected, labels, self._begins, first)
        selected = without_padding(selected, fields)
        flat = np.flatnonzero(selected)
        special = self._special[labels.reshape(-1)[flat]]
        selected.reshape(-1)[flat[special]] = False
        changed = holding(tokens, self.vocab_size - 1)
        self._change(changed, keys, *np.divmod(flat[~special], max(1, length)), first)
        made = {**fields, "tokens": changed, "labels": labels, "target_mask": selected}
        # The last token of a row predicts nothing of the next, and all the same itself.
        made.pop("num_targets", None)
        return made

    def _change(
        self,
        tokens: NDArray[Any],
        keys: Unsigned,
        rows: NDArray[np.intp],
        places: NDArray[np.intp],
        first: Integers,
    ) -> None:
        """Hide or replace the chosen tokens, in place; `first` is where those of a row begin."""
        # 53 bits, as a fraction: exact in a double.
        kinds = (
            draws(subkeys(keys, _KIND)[rows], places - first[rows]) >> np.uint64(11)
        ) * 2.0**-53
        hidden = kinds < self.masked
        tokens[rows[hidden], places[hidden]] = self.mask_id
        other = (kinds >= self.masked) & (kinds < self.masked + self.random)
        rows, places = rows[other], places[other]
        drawn = below(subkeys(keys, _RANDOM)[rows], places - first[rows], self.vocab_size)
        tokens[rows, places] = drawn

    def _spread(
        self,
        selected: NDArray[np.bool_],
        labels: NDArray[Any],
        begins: NDArray[np.bool_],
        first_token: Integers,
    ) -> NDArray[np.bool_]:
        """The choice of each word's first token, for all tokens of the word."""
        special = self._special[labels]
        starts = begins[labels] | special
        starts[:, 1:] |= special[:, :-1]
        starts[:, :1] = True
        if starts.size:
            starts[np.arange(len(starts)), first_token] = True
        first = np.flatnonzero(starts)
        sizes = np.diff(first, append=starts.size)
        return np.repeat(selected.reshape(-1)[first], sizes).reshape(selected.shape)


def collated(fields: Fields) -> dict[str, NDArray[np.int64]]:
    """`input_ids` and `labels`, -100 where nothing is predicted, as int64.

    For use without a loader, which does this itself: what Hugging Face's collator gives.
    """
    labels, mask = fields["labels"], fields["target_mask"]
    inputs = fields["tokens"][:, : labels.shape[1]].astype(np.int64)
    return {"input_ids": inputs, "labels": np.where(mask, labels.astype(np.int64), IGNORED)}


def table_of(ids: Iterable[int], vocab_size: int) -> NDArray[np.bool_]:
    """For each id of a vocabulary, whether it is one of `ids`.

    >>> table_of([1], 3).tolist()
    [False, True, False]
    """
    table = np.zeros(vocab_size, np.bool_)
    for each in ids:
        if not 0 <= each < vocab_size:
            raise PlanError(f"The special id {each:,} is not below vocab_size={vocab_size:,}.")
        table[each] = True
    return table
