"""Targets of documents that an amendment excludes: they become -100, and rows stay where they are.

stream     … b b │ x x x x x x │ c c c …         x is excluded from position P on
row        b b x x x x x                         the row at a position from P on
targets    + - - - - -                           token i + 1 is the target of column i
"""

import numpy as np
from numpy.typing import NDArray

from penstock.loader.run import AnyPlan
from penstock.order.amend import Span
from penstock.order.plan import Plan
from penstock.rows.protocol import Array, Fields, Integers, Rows


class ExcludedDocuments:
    """The documents that the amendments of a plan exclude, and the rows that hold them."""

    def __init__(self, plan: AnyPlan) -> None:
        self._found: list[tuple[int, int, Rows, Integers, Span]] = []
        for amendment in plan.amendments if isinstance(plan, Plan) else ():
            for name, spans in amendment.exclude.items():
                rows, number = plan.sources[name], plan.names.index(name)
                for span in spans:
                    place = amendment.position, number, rows, rows.holding(*span), span
                    self._found.append(place)

    def apply(
        self, targets: NDArray[np.bool_] | None, located: Integers, tokens: Array, fields: Fields
    ) -> NDArray[np.bool_] | None:
        """Return which targets count, without those of excluded documents.

        Args:
            targets: Which targets count otherwise; None if all do.
            located: Source, epoch, sample and position of each row.
            tokens: The tokens of the rows.
            fields: The other fields of the rows.
        """
        for position, number, rows, samples, span in self._found:
            # Padding has the position -1, so it is before every amendment.
            later = (located[0] == number) & (located[3] >= position)
            for row in np.flatnonzero(later & np.isin(located[2], samples)).tolist():
                if targets is None:
                    targets = np.ones((len(tokens), tokens.shape[1] - 1), bool)
                # Rows of `Documents` may be padded on the left.
                mask = fields.get("attention_mask")
                first = 0 if mask is None else int(mask[row].astype(bool).argmax())
                # A label of masked language modelling belongs to its own column. Otherwise a
                # target is one column before its token.
                for start, stop in _columns(rows, int(located[2, row]), span):
                    shift = first if "labels" in fields else first - 1
                    targets[row, max(0, start + shift) : max(0, stop + shift)] = False
        return targets


def _columns(rows: Rows, sample: int, span: Span) -> list[Span]:
    """Return the columns of a row that hold tokens of `span`, from the row's first token on."""
    found, column = [], 0
    for start, size in rows.spans(sample):
        low, high = max(span[0], start), min(span[1], start + size)
        if low < high:
            found.append((column + low - start, column + high - start))
        column += size
    return found
