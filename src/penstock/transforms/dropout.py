"""Token dropout: replaces random inputs, or ignores random targets.

    tokens               the cat sat on the mat
    replace_with=UNK     the UNK sat on UNK mat     inputs change, targets stay
    loss only            the cat  -  on the  -      inputs stay, some targets are ignored (-100)

Replacing inputs (word dropout) makes a model rely less on the preceding words. Ignoring targets
trains on only a part of the tokens. Rows keep their length in both cases.
"""

from collections.abc import Iterable
from typing import Any, final

import numpy as np

from penstock.digest import Unsigned
from penstock.errors import PlanError
from penstock.rows.protocol import token_spans
from penstock.transforms.draws import bernoulli_table, check_probability
from penstock.transforms.transform import (
    Fields,
    align_to_first_token,
    copy_for_ids,
    exclude_padding,
)


@final
class TokenDropout:
    """Replaces each token, or ignores it as a target, with probability `rate`.

    Args:
        rate: The probability of dropping a token; tokens are independent.
        replace_with: The id that replaces a dropped token in the inputs. If None, inputs stay
            as they are and dropped tokens are ignored as targets.
        special_ids: Tokens that are never dropped.
    """

    def __init__(
        self, rate: float, *, replace_with: int | None = None, special_ids: Iterable[int] = ()
    ) -> None:
        self.rate = rate
        self.replace_with = replace_with
        self.special_ids = tuple(sorted(set(special_ids)))
        check_probability("rate", rate)
        if replace_with is not None and replace_with < 0:
            raise PlanError(f"replace_with must be a token id, 0 or more; got {replace_with}.")

    def __repr__(self) -> str:
        how = "loss only" if self.replace_with is None else f"replaced with {self.replace_with}"
        return f"TokenDropout({self.rate:g} of the tokens, {how})"

    def describe(self) -> dict[str, Any]:
        """Return every setting that affects the result, in a dict that JSON can represent."""
        return {
            "kind": "token-dropout",
            "rate": float(self.rate),
            "replace_with": self.replace_with,
            "special_ids": list(self.special_ids),
        }

    def apply(self, fields: Fields, keys: Unsigned, length: int | None = None) -> Fields:
        """Return rows with replaced `tokens` and original `targets`, or with a `target_mask`.

        Labels set by an earlier transform stay unchanged, and so does padding. If `tokens` has the
        shape (rows, length), no token follows the last input, so the last column has no target.
        """
        tokens = fields["tokens"]
        length = tokens.shape[1] if length is None else length
        starts, _ = token_spans(fields)
        dropped = align_to_first_token(bernoulli_table(keys, length, self.rate), starts)
        # Targets are taken before inputs change: a dropped token must still be predicted.
        with_targets = fields if "labels" in fields else _with_targets(fields, length)
        if self.replace_with is not None:
            changed = copy_for_ids(tokens, self.replace_with)
            # Replaced padding would look like a token to a model without an attention mask.
            dropped = exclude_padding(dropped, fields) & ~np.isin(
                tokens[:, :length], self.special_ids
            )
            changed[:, :length][dropped] = self.replace_with
            return {**with_targets, "tokens": changed}
        predicted = with_targets["labels" if "labels" in fields else "targets"]
        # Here, dropping a column ignores its target. So the target, not the input, is compared
        # with `special_ids`.
        kept = ~dropped | np.isin(predicted, self.special_ids)
        if "target_mask" in with_targets:
            kept &= with_targets["target_mask"].astype(np.bool_)
        # `targets` equal `tokens[:, 1:]` here, so the loader can derive them itself.
        return {**fields, "target_mask": kept}


def _with_targets(fields: Fields, length: int) -> Fields:
    """Return the fields with `targets`; computed from `tokens` if no transform has set them."""
    tokens = fields["tokens"]
    if "targets" in fields:
        return fields
    if tokens.shape[1] > length:
        return {**fields, "targets": tokens[:, 1 : length + 1].copy()}
    # The last column has no next token: its target is a placeholder that the mask excludes.
    targets = np.concatenate((tokens[:, 1:], tokens[:, -1:]), axis=1)
    mask = fields.get("target_mask", np.ones(tokens.shape, np.bool_)).astype(np.bool_)
    mask[:, -1:] = False
    return {**fields, "targets": targets, "target_mask": mask}
