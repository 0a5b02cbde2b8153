"""Which tokens windows train on, in each format.

    tokens    t0 t1 t2 t3 t4 t5 t6 t7 t8        length=4, stride=4
    "dict"    t0 t1 t2 t3 -> t1 t2 t3 t4        the next row trains on t5 t6 t7 t8
    "hf"      t0 t1 t2 t3 -> t1 t2 t3           the next row trains on t5 t6 t7: nothing on t4

The model of `format="hf"` shifts labels itself, so it never sees the token after the inputs of
a row, and the first token of a row is no target. Rows that overlap by one token lose nothing.
The same holds for the shorter rows that `lengths=` cuts: of a row of 8, two of 4 are tokens 0 to
3 and 3 to 6, which are 6 targets, so `stride=6` keeps all of them.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from penstock.errors import PlanError, UnknownLengthError
from penstock.loader.batch import Shape

__all__ = ["check_targets", "unread_targets"]


def unread_targets(sources: Mapping[str, Any], shape: Shape, length: int) -> int:
    """Tokens of all windows that are the target of no row, while rows are cut to `length`."""
    per_row = shape.row_targets(length)
    return sum(rows.unread(per_row) for rows in _windows(sources).values())


def check_targets(sources: Mapping[str, Any], shape: Shape) -> None:
    """Warn where `format="hf"` leaves out targets of windows; raise where nothing keeps them."""
    if shape.format != "hf":
        return
    if shape.lengths and any(hasattr(rows, "whole_documents") for rows in sources.values()):
        raise PlanError(
            f"lengths={dict(shape.lengths)} would cut packed documents in two, and with "
            'format="hf" the token after each cut is no target. Use format="dict", or leave '
            "lengths out."
        )
    # The shortest rows leave out the most.
    length = min([shape.length, *(length for _, length in shape.lengths)])
    kept = shape.row_targets(length)
    for name, rows in _windows(sources).items():
        if not kept:
            raise PlanError(
                f'Rows of {length} token have no target with format="hf": the model shifts labels '
                "itself, so it needs rows of 2 tokens or more."
            )
        if rows.stride > kept:
            cut = f" while lengths= cuts rows to {length:,}" if length < shape.length else ""
            # Here is `Loader.__init__`; its caller is who can change the stride.
            warnings.warn(
                f'format="hf" leaves out {_left_out(rows, kept)} of source "{name}"{cut}: the '
                "model shifts labels itself, so the first token of a row is no target. Rows that "
                f"overlap keep them: Windows(…, {rows.length}, stride={kept}).",
                stacklevel=3,
            )


def _windows(sources: Mapping[str, Any]) -> dict[str, Any]:
    """The windows among the sources whose tokens predict the next one."""
    return {
        name: rows
        for name, rows in sources.items()
        if hasattr(rows, "unread") and not getattr(rows, "gives_labels", False)
    }


def _left_out(rows: Any, kept: int) -> str:
    """How many targets this format leaves out, besides those that no format has."""
    try:
        count = rows.unread(kept) - rows.unread_targets
    except UnknownLengthError:  # of a store that is still being written
        return f"{rows.stride - kept:,} of every {rows.stride:,} targets"
    return f"{count:,} of {rows.stream.num_tokens - 1:,} targets"
