"""Fill in the middle: rearranges documents so that a model learns to insert text.

    document    a b c d e f g h i <eos>         cut into prefix, middle and suffix
    PSM         <P> a b <S> e f <M> c d <eos>   prefix, suffix, middle
    SPM         <P> <S> e f <M> a b c d <eos>   suffix, then prefix and middle as one part

The three sentinel tokens replace three tokens of the document: the last three before the end
token (g, h, i above). All other tokens are kept, once each. So documents keep their position
and length in the row, and document borders and position ids stay correct. Both cuts are
drawn uniformly from all gaps between the kept tokens, so prefix, middle or suffix can be
empty.

A piece is the range of columns that is rearranged: the tokens of one document in a row, or a
whole row with within="row". Pieces of three tokens or fewer, not counting the end token, have
no room for sentinels and are not changed.

PSM and SPM are defined by Bavarian et al. (2022). SPM is the variant that begins like PSM,
which StarCoder and Code Llama were trained with.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from penstock.digest import Unsigned
from penstock.errors import PlanError
from penstock.rows.protocol import token_spans
from penstock.transforms.draws import bernoulli, check_probability, integers_below, subkeys
from penstock.transforms.transform import Fields, copy_for_ids, refuse_fields, spanned

_SENTINELS = 3
_CHANGE, _ORDER, _CUT, _OTHER_CUT = range(4)  # columns of a piece's random numbers


class _PieceColumns(NamedTuple):
    """Pieces: the row of each piece, its first column, and the column after its last one."""

    rows: NDArray[np.intp]
    starts: NDArray[np.intp]
    stops: NDArray[np.intp]

    def take(self, which: NDArray[Any]) -> "_PieceColumns":
        return _PieceColumns(self.rows[which], self.starts[which], self.stops[which])


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class FillInTheMiddle:
    """Rearranges some documents as prefix, suffix, middle; their length stays the same."""

    prefix_id: int
    """The sentinel token before the prefix."""
    middle_id: int
    """The sentinel token before the middle."""
    suffix_id: int
    """The sentinel token before the suffix."""
    rate: float = 0.5
    """The probability that a piece is rearranged."""
    spm_rate: float = 0.5
    """The probability that a rearranged piece has the order SPM, not PSM."""
    within: Literal["documents", "row"] = "documents"
    """"documents" rearranges each document, and needs rows that know where documents begin
    (`borders=True`); "row" rearranges whole rows."""
    eos_id: int | None = None
    """If a piece ends with this token, the token stays at the end."""

    def __post_init__(self) -> None:
        check_probability("rate", self.rate)
        check_probability("spm_rate", self.spm_rate)
        ids = (self.prefix_id, self.middle_id, self.suffix_id)
        if min(ids) < 0 or len(set(ids)) < len(ids):
            raise PlanError(f"The sentinels must be three different ids, 0 or more; got {ids}.")
        if self.within not in ("documents", "row"):
            raise PlanError(f'within must be "documents" or "row"; got {self.within!r}.')

    @property
    def needs_borders(self) -> bool:
        """Whether rows must say where documents begin."""
        return self.within == "documents"

    def __repr__(self) -> str:
        what = "rows" if self.within == "row" else "documents"
        return f"FillInTheMiddle({self.rate:g} of the {what}, {self.spm_rate:g} of them SPM)"

    def describe(self) -> dict[str, Any]:
        """Return every setting that affects the result, in a dict that JSON can represent."""
        # As floats: 1 and 1.0 are the same rate, so they must give the same digest.
        rates = {"rate": float(self.rate), "spm_rate": float(self.spm_rate)}
        return {"kind": "fill-in-the-middle", **asdict(self), **rates}

    def apply(self, fields: Fields, keys: Unsigned, length: int | None = None) -> Fields:
        """Return rearranged `tokens`; with within="documents", also a `target_mask`.

        The token after the last input of a row stays where it is, because document borders are
        known for inputs only. If the last piece was rearranged, that token is no longer its
        continuation, so it is excluded from the targets.
        """
        refuse_fields(fields, "FillInTheMiddle", "labels", "targets", "target_mask")
        largest_id = max(self.prefix_id, self.middle_id, self.suffix_id)
        tokens = copy_for_ids(fields["tokens"], largest_id)
        length = tokens.shape[1] if length is None else length
        pieces = self._pieces(fields, length)
        # With within="row", a row is a single piece. Its key must not depend on the padding before
        # its first token.
        numbers = 0 if self.within == "row" else pieces.starts
        piece_keys = subkeys(keys[pieces.rows], numbers)
        full_stops = pieces.stops
        pieces = pieces._replace(stops=full_stops - self._ends_with_eos(tokens, pieces))
        has_room = pieces.stops - pieces.starts > _SENTINELS
        changed = np.flatnonzero(has_room & bernoulli(piece_keys, _CHANGE, self.rate))
        self._rearrange(tokens, pieces.take(changed), piece_keys[changed])
        result = {**fields, "tokens": tokens}
        if self.within == "documents":
            mask = np.ones((len(tokens), length), np.bool_)
            if tokens.shape[1] > length:
                mask[pieces.rows[changed[full_stops[changed] == length]], -1] = False
            result["target_mask"] = mask
        return result

    def _pieces(self, fields: Fields, length: int) -> _PieceColumns:
        num_rows = len(fields["tokens"])
        row_starts, row_stops = token_spans(fields)
        if self.within == "row":
            _refuse_several_documents(fields, row_starts, row_stops)
            return _PieceColumns(np.arange(num_rows), row_starts, row_stops)
        if "document_ids" not in fields:
            raise PlanError(
                "FillInTheMiddle rearranges documents, but these rows do not know where documents "
                'begin. Use Packs or Windows with borders=True, or within="row" to rearrange whole '
                "rows."
            )
        begins = np.ones((num_rows, length), np.bool_)
        begins[:, 1:] = np.diff(fields["document_ids"], axis=1) != 0
        rows, starts = np.nonzero(begins)
        # A piece stops where the next one starts. If that is column 0, the next piece is in the
        # next row (the first row, for the last piece), so this one stops at the end of its row.
        stops = np.roll(starts, -1)
        stops[stops == 0] = length
        return _PieceColumns(rows, starts, np.minimum(stops, row_stops[rows]))

    def _ends_with_eos(self, tokens: NDArray[Any], pieces: _PieceColumns) -> NDArray[np.bool_]:
        if self.eos_id is None:
            return np.zeros(len(pieces.rows), np.bool_)
        ended: NDArray[np.bool_] = tokens[pieces.rows, pieces.stops - 1] == self.eos_id
        return ended & (pieces.stops > pieces.starts)

    def _rearrange(self, tokens: NDArray[Any], pieces: _PieceColumns, keys: Unsigned) -> None:
        """Rearrange all tokens of these pieces, in place."""
        sizes = pieces.stops - pieces.starts
        kept = sizes - _SENTINELS
        cuts = [integers_below(keys, column, kept + 1) for column in (_CUT, _OTHER_CUT)]
        prefix, until = np.minimum(*cuts), np.maximum(*cuts)
        suffix = kept - until
        spm = bernoulli(keys, _ORDER, self.spm_rate)
        # A new piece is three runs, each a sentinel and the tokens after it. `second` and
        # `third` are where the runs of <S> and <M> begin; the run of <P> begins at 0.
        #   PSM: <P> prefix, <S> suffix, <M> middle          second = prefix + 1
        #   SPM: <P>,        <S> suffix, <M> prefix middle   second = 1
        second = np.where(spm, 1, prefix + 1)
        third = second + suffix + 1
        runs = np.stack((second, third - second, sizes - third), axis=1)
        # New column c of a run takes old column c + shift. The run of <S>, for example, has the
        # first suffix token at second + 1, from old column `until`. The values that reach the
        # sentinels' columns do not matter: they are overwritten below.
        shifts = np.stack(
            (np.full_like(sizes, -1), until - second - 1, np.where(spm, 0, prefix) - third - 1),
            axis=1,
        )
        flat = tokens.reshape(-1)
        begins = pieces.rows * tokens.shape[1] + pieces.starts
        # The flat columns of all pieces, concatenated: pieces at 5 of size 2 and at 20 of size 3
        # give 5 6 20 21 22.
        columns = np.arange(sizes.sum()) + np.repeat(begins - np.cumsum(sizes) + sizes, sizes)
        flat[columns] = flat[columns + np.repeat(shifts.reshape(-1), runs.reshape(-1))]
        flat[begins] = self.prefix_id
        flat[begins + second] = self.suffix_id
        flat[begins + third] = self.middle_id


def _refuse_several_documents(fields: Fields, starts: NDArray[Any], stops: NDArray[Any]) -> None:
    """Raise PlanError if a row may hold several documents: rearranging it would mix them."""
    name = 'FillInTheMiddle with within="row"'
    refuse_fields(fields, name, "document_ids")
    if "same_document" not in fields:
        return
    same = fields["same_document"].astype(np.bool_)
    inside = spanned(starts, stops - 1, same.shape[1])
    # Rows with one document each (Documents) have an attention mask. Rows without one pack
    # several documents, even if these particular rows happen to hold one.
    if "attention_mask" not in fields or (inside & ~same).any():
        raise PlanError(
            f"{name} would move tokens from one document into another: these rows pack several "
            'documents. Use Documents, or Windows with borders=True and within="documents".'
        )
