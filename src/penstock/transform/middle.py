"""Fill in the middle: documents rearranged, so that a model learns to insert.

    document    a b c d e f g h i <eos>         cut at two places: prefix, middle, suffix
    PSM         <P> a b <S> e f <M> c d <eos>   prefix, suffix, middle
    SPM         <P> <S> e f <M> a b c d <eos>   suffix, then prefix and middle in one piece

Three sentinels take the place of three tokens, so that a document keeps its place and
length, and borders, position ids and rows stay what they are: the last three tokens before
the end token (g, h, i) are cut. All other tokens stay, once each. The two places are drawn
uniformly among all gaps of what stays, so prefix, middle or suffix can be empty. A piece
of three tokens or fewer has no room for sentinels, and is left alone.

PSM and SPM are those of Bavarian et al. (2022), SPM in the variant that shares its
beginning with PSM, as StarCoder and Code Llama are trained.
"""

from typing import Any, Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.transform.chain import Fields, holding, refuse_after, token_spans
from penstock.transform.draw import Unsigned, below, happens, subkeys

__all__ = ["FillInTheMiddle"]

_SENTINELS = 3
_CHANGE, _ORDER, _CUT, _OTHER_CUT = range(4)  # the draws of a piece


class _Pieces(NamedTuple):
    """Stretches of rows, each of one document."""

    rows: NDArray[np.intp]
    starts: NDArray[np.intp]
    stops: NDArray[np.intp]

    def take(self, which: NDArray[Any]) -> "_Pieces":
        return _Pieces(self.rows[which], self.starts[which], self.stops[which])


@final
class FillInTheMiddle:
    """Some documents as prefix, suffix, middle, in place and of the same length."""

    def __init__(
        self,
        *,
        prefix_id: int,
        middle_id: int,
        suffix_id: int,
        rate: float = 0.5,
        spm_rate: float = 0.5,
        within: Literal["documents", "row"] = "documents",
        eos_id: int | None = None,
    ) -> None:
        """Rearrangement with these sentinels.

        Args:
            prefix_id: The sentinel before the prefix.
            middle_id: The sentinel before the middle.
            suffix_id: The sentinel before the suffix.
            rate: How likely a piece is rearranged.
            spm_rate: How likely one that is has the order SPM; otherwise it is PSM.
            within: Whether the pieces are documents, which needs rows that know their borders
                (`borders=True`), or whole rows.
            eos_id: Where a piece ends with this token, it stays the last.
        """
        for name, share in (("rate", rate), ("spm_rate", spm_rate)):
            if not 0 <= share <= 1:
                raise PlanError(f"{name}={share} is not a probability, from 0 to 1.")
        ids = (prefix_id, middle_id, suffix_id)
        if min(ids) < 0 or len(set(ids)) < len(ids):
            raise PlanError(f"The sentinels {ids} must be three different ids, from 0 on.")
        if within not in ("documents", "row"):
            raise PlanError(f'within={within!r} is not "documents" or "row".')
        self.prefix_id, self.middle_id, self.suffix_id = ids
        self.rate = rate
        self.spm_rate = spm_rate
        self.within = within
        self.eos_id = eos_id

    def __repr__(self) -> str:
        what = "rows" if self.within == "row" else "documents"
        return f"FillInTheMiddle({self.rate:g} of the {what}, {self.spm_rate:g} of them SPM)"

    def describe(self) -> dict[str, Any]:
        """All that decides what it does, as JSON."""
        return {
            "kind": "fill-in-the-middle",
            "prefix_id": self.prefix_id,
            "middle_id": self.middle_id,
            "suffix_id": self.suffix_id,
            "rate": float(self.rate),
            "spm_rate": float(self.spm_rate),
            "within": self.within,
            "eos_id": self.eos_id,
        }

    def apply(self, fields: Fields, keys: Unsigned, length: int | None = None) -> Fields:
        """Rearranged `tokens`; within documents also a `target_mask`.

        The token after the last input of a row is not rearranged with its document, because
        borders are known for the inputs only. Where the last piece was rearranged, that
        token would not follow what stands before it: it is no target.
        """
        refuse_after(fields, "FillInTheMiddle", "labels", "targets", "target_mask")
        tokens = holding(fields["tokens"], max(self.prefix_id, self.middle_id, self.suffix_id))
        length = tokens.shape[1] if length is None else length
        pieces = self._pieces(fields, length)
        # A row has one piece, which is cut alike wherever padding puts it.
        numbers = 0 if self.within == "row" else pieces.starts
        piece_keys = subkeys(keys[pieces.rows], numbers)
        whole = pieces.stops
        pieces = pieces._replace(stops=whole - self._ended(tokens, pieces))
        room = pieces.stops - pieces.starts > _SENTINELS
        changed = np.flatnonzero(room & happens(piece_keys, _CHANGE, self.rate))
        self._rearrange(tokens, pieces.take(changed), piece_keys[changed])
        made = {**fields, "tokens": tokens}
        if self.within == "documents":
            mask = np.ones((len(tokens), length), np.bool_)
            if tokens.shape[1] > length:
                mask[pieces.rows[changed[whole[changed] == length]], -1] = False
            made["target_mask"] = mask
        return made

    def _pieces(self, fields: Fields, length: int) -> _Pieces:
        num_rows = len(fields["tokens"])
        row_starts, row_stops = token_spans(fields)
        if self.within == "row":
            _refuse_several(fields, row_starts, row_stops)
            return _Pieces(np.arange(num_rows), row_starts, row_stops)
        if "document_ids" not in fields:
            raise PlanError(
                "FillInTheMiddle rearranges documents, and these rows do not say where documents "
                'begin. Use rows with borders=True, or within="row" to rearrange whole rows.'
            )
        begins = np.ones((num_rows, length), np.bool_)
        begins[:, 1:] = np.diff(fields["document_ids"], axis=1) != 0
        rows, starts = np.nonzero(begins)
        stops = np.roll(starts, -1)
        stops[stops == 0] = length  # the next piece begins another row
        return _Pieces(rows, starts, np.minimum(stops, row_stops[rows]))

    def _ended(self, tokens: NDArray[Any], pieces: _Pieces) -> NDArray[np.bool_]:
        """Whether each piece ends with the end token."""
        if self.eos_id is None:
            return np.zeros(len(pieces.rows), np.bool_)
        ended: NDArray[np.bool_] = tokens[pieces.rows, pieces.stops - 1] == self.eos_id
        return ended & (pieces.stops > pieces.starts)

    def _rearrange(self, tokens: NDArray[Any], pieces: _Pieces, keys: Unsigned) -> None:
        """Rearrange whole pieces, in place."""
        sizes = pieces.stops - pieces.starts
        kept = sizes - _SENTINELS
        cuts = [below(keys, place, kept + 1) for place in (_CUT, _OTHER_CUT)]
        prefix, until = np.minimum(*cuts), np.maximum(*cuts)
        suffix = kept - until
        spm = happens(keys, _ORDER, self.spm_rate)
        # Three runs, each of a sentinel and a part. PSM: <P> prefix, <S> suffix, <M> middle.
        second = np.where(spm, 1, prefix + 1)
        third = second + suffix + 1
        runs = np.stack((second, third - second, sizes - third), axis=1)
        # How far behind a token of the run lies the one that comes there. SPM: <P>, <S> suffix,
        # <M> prefix middle. What comes to a sentinel's place does not matter.
        shifts = np.stack(
            (np.full_like(sizes, -1), until - second - 1, np.where(spm, 0, prefix) - third - 1),
            axis=1,
        )
        flat = tokens.reshape(-1)
        begins = pieces.rows * tokens.shape[1] + pieces.starts
        places = np.arange(sizes.sum()) + np.repeat(begins - np.cumsum(sizes) + sizes, sizes)
        flat[places] = flat[places + np.repeat(shifts.reshape(-1), runs.reshape(-1))]
        flat[begins] = self.prefix_id
        flat[begins + second] = self.suffix_id
        flat[begins + third] = self.middle_id


def _refuse_several(fields: Fields, starts: NDArray[Any], stops: NDArray[Any]) -> None:
    """Raise where a row may hold more than one document: it cannot be rearranged as one."""
    name = 'FillInTheMiddle with within="row"'
    refuse_after(fields, name, "document_ids")
    if "same_document" not in fields:
        return
    same = fields["same_document"].astype(np.bool_)
    places = np.arange(same.shape[1])
    inside = (places >= starts[:, np.newaxis]) & (places < stops[:, np.newaxis] - 1)
    # Rows of one document each say where it lies; those that do not are fitted from several.
    if "attention_mask" not in fields or (inside & ~same).any():
        raise PlanError(
            f"{name} would carry tokens from one document into another: these rows are fitted "
            'together from several. Use Documents, or borders=True and within="documents".'
        )
