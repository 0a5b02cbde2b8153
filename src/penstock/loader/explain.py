"""What the rows of a step are: their positions, documents, input files and text.

    step 12, 2 rows
    position 24: row 1,234 of data, epoch 0
      document 17 of stores/web, tokens 100 to 165 (web.jsonl, offset 90,210)
      'the text of the row …'

Rows are computed from their positions, so any step can be explained at any time, before or after
it was trained on.
"""

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from penstock.formats.token_files import LocalTokens
from penstock.loader.run import AnyPlan
from penstock.order.steps import PADDING
from penstock.rows.origins import RowOrigin
from penstock.rows.protocol import Array, Integers, Rows, token_spans
from penstock.store.decoder import decoder_of
from penstock.store.reader import TokenStore
from penstock.streaming.plan import StreamedPlan

if TYPE_CHECKING:
    from penstock.tokenize.definition import Decoder

_SHOWN_CHARACTERS = 200
_SHOWN_DOCUMENTS = 5
_SHOWN_IDS = 30


class ExplainedRow(NamedTuple):
    """One row of a step."""

    position: int
    source: str
    epoch: int
    sample: int
    """The number of the row in its source."""
    tokens: Array
    """The ids of the row after transforms, without padding."""
    text: str | None
    """The text of the ids; None for rows without a known tokenizer."""
    origins: list[RowOrigin]
    """The documents in the row; empty if they are not recorded."""

    def __str__(self) -> str:
        origins = [f"  {each}" for each in self.origins[:_SHOWN_DOCUMENTS]]
        if len(self.origins) > _SHOWN_DOCUMENTS:
            origins.append(f"  … and {len(self.origins) - _SHOWN_DOCUMENTS:,} more documents")
        text = "no tokenizer is known: ids " + " ".join(map(str, self.tokens[:_SHOWN_IDS]))
        if self.text is not None:
            # As Python writes it, so that control characters of a text cannot reach a terminal.
            text = repr(self.text[:_SHOWN_CHARACTERS])
            text += " …" if len(self.text) > _SHOWN_CHARACTERS else ""
        row = f"position {self.position:,}: row {self.sample:,} of {self.source}"
        return "\n".join([f"{row}, epoch {self.epoch:,}", *origins, f"  {text}"])


@dataclass(frozen=True, repr=False)
class ExplainedStep:
    """The rows of a step on one rank; as text, a paragraph for each row."""

    step: int
    rows: tuple[ExplainedRow, ...]

    def __str__(self) -> str:
        rows = f"{len(self.rows):,} row{'s' * (len(self.rows) != 1)}"
        return "\n".join([f"step {self.step:,}, {rows}", *map(str, self.rows)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return a table of the rows, for notebooks; all text is escaped."""
        heads = "".join(f"<th>{name}</th>" for name in ("position", "source", "epoch", "row"))
        lines = []
        for row in self.rows:
            cells = f"{row.position:,}", row.source, f"{row.epoch:,}", f"{row.sample:,}"
            origins = "<br>".join(escape(str(each)) for each in row.origins)
            text = escape(" ".join(map(str, row.tokens)) if row.text is None else row.text)
            place = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            style = "white-space: pre-wrap; text-align: left"
            lines.append(f'<tr>{place}<td>{origins}</td><td style="{style}">{text}</td></tr>')
        heads += "<th>documents</th><th>text</th>"
        caption = f"step {self.step:,}, {len(self.rows):,} rows"
        return f"<table><caption>{caption}</caption><tr>{heads}</tr>{''.join(lines)}</table>"


def explain_step(
    plan: AnyPlan, step: int, positions: Integers, tokenizer: object = None
) -> ExplainedStep:
    """Return the rows at some positions, which are those of a step.

    Args:
        plan: The order of the rows.
        step: The number of the step.
        positions: Its positions; `PADDING` is left out.
        tokenizer: The tokenizer of the rows, if you did not load it on this machine before.
    """
    real = positions[positions != PADDING]
    sources, epochs, samples = plan.locate(real)
    rows = []
    tokenizers = RowTokenizers(plan, tokenizer)
    for each in range(len(real)):
        name = plan.names[int(sources[each])]
        chosen = slice(each, each + 1)
        source = plan.sources[name]
        if isinstance(plan, StreamedPlan):
            source = plan.readable(samples[chosen])
        fields = source.read_epochs(samples[chosen], epochs[chosen])
        (start,), (stop,) = token_spans(fields)
        tokens = fields["tokens"][0, start:stop]
        known = tokenizers.of(name)
        text = None if known is None else known.decode(tokens)
        place = int(real[each]), name, int(epochs[each]), int(samples[each])
        rows.append(ExplainedRow(*place, tokens, text, source.origins(place[3])))
    return ExplainedStep(step, tuple(rows))


class RowTokenizers:
    """The tokenizers of a plan's sources, each loaded when it is first needed.

    Args:
        plan: The plan.
        given: The tokenizer of the sources; None if it is found by the digest in their stores.
    """

    def __init__(self, plan: AnyPlan, given: object = None) -> None:
        self._plan, self._given = plan, given
        self._found: dict[str, Decoder | None] = {}

    def of(self, name: str) -> "Decoder | None":
        """Return the tokenizer of a source; None if it is not known, of token files."""
        if name not in self._found:  # to load one may take a second
            self._found[name] = self._load(self._plan.sources[name])
        return self._found[name]

    def _load(self, rows: Rows) -> "Decoder | None":
        for member in rows.stream.members if rows.stream is not None else ():
            if isinstance(member, TokenStore):
                return decoder_of(member.manifest, self._given)
            if isinstance(member, LocalTokens) and member.tokenizer is not None:
                return member.tokenizer
        if self._given is None:
            return None
        from penstock.tokenize.tokenizer import load_tokenizer  # it imports Arrow and the engines

        return load_tokenizer(self._given)
