"""Tokens left out by chance.

    tokens               the cat sat on the mat
    replace_with=UNK     the UNK sat on UNK mat     inputs are changed, targets are not
    loss only            the cat  -  on the  -      inputs stay, some targets are ignored (-100)

The first makes a model lean less on the words before (word dropout); the second trains on
a part of the targets. Both keep the length of rows.
"""

from collections.abc import Iterable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.transform.chain import Fields, from_first, holding, token_spans, without_padding
from penstock.transform.draw import Unsigned, chosen

__all__ = ["TokenDropout"]


@final
class TokenDropout:
    """Each token replaced, or its loss left out, with probability `rate`.

    Args:
        rate: How likely each token is dropped, by itself.
        replace_with: The id that inputs get in its place; without it, inputs stay and the
            dropped tokens are no targets.
        special_ids: Tokens that are never dropped.
    """

    def __init__(
        self, rate: float, *, replace_with: int | None = None, special_ids: Iterable[int] = ()
    ) -> None:
        self.rate = rate
        self.replace_with = replace_with
        self.special_ids = tuple(sorted(set(special_ids)))
        if not 0 <= rate <= 1:
            raise PlanError(f"rate={rate} is not a probability, from 0 to 1.")
        if replace_with is not None and replace_with < 0:
            raise PlanError(f"replace_with={replace_with} is not an id; they begin at 0.")

    def __repr__(self) -> str:
        how = "loss only" if self.replace_with is None else f"replaced with {self.replace_with}"
        return f"TokenDropout({self.rate:g} of the tokens, {how})"

    def describe(self) -> dict[str, Any]:
        """All that decides what it does, as JSON."""
        return {
            "kind": "token-dropout",
            "rate": float(self.rate),
            "replace_with": self.replace_with,
            "special_ids": list(self.special_ids),
        }

    def apply(self, fields: Fields, keys: Unsigned, length: int | None = None) -> Fields:
        """`tokens` with some replaced and the `targets` they had; or a `target_mask`.

        Labels of a transform before it stay what they are, and so does padding. Rows without
        a token after the last input, (rows, length), have no target at the last place.
        """
        tokens = fields["tokens"]
        length = tokens.shape[1] if length is None else length
        dropped = from_first(chosen(keys, length, self.rate), token_spans(fields)[0])
        told = fields if "labels" in fields else _told_targets(fields, length)
        if self.replace_with is not None:
            changed = holding(tokens, self.replace_with)
            dropped = without_padding(dropped, fields) & ~self._special(tokens[:, :length])
            changed[:, :length][dropped] = self.replace_with
            return {**told, "tokens": changed}
        predicted = told["labels"] if "labels" in told else told["targets"]
        kept = ~dropped | self._special(predicted)
        if "target_mask" in told:
            kept &= told["target_mask"].astype(np.bool_)
        return {**fields, "target_mask": kept}

    def _special(self, ids: NDArray[Any]) -> NDArray[np.bool_]:
        return np.isin(ids, self.special_ids)


def _told_targets(fields: Fields, length: int) -> Fields:
    """The fields with `targets`, cut from the tokens where nothing has changed those yet."""
    tokens = fields["tokens"]
    if "targets" in fields:
        return fields
    if tokens.shape[1] > length:
        return {**fields, "targets": tokens[:, 1 : length + 1].copy()}
    targets = np.concatenate((tokens[:, 1:], tokens[:, -1:]), axis=1)
    mask = fields.get("target_mask", np.ones(tokens.shape, np.bool_)).astype(np.bool_)
    mask[:, -1:] = False
    return {**fields, "targets": targets, "target_mask": mask}
