"""Whether the ids of the data are ids that the model knows.

A store says which tokenizer it is of, and how many ids that has. A bare file of tokens does not,
so it is looked into: an id past the model's last would be an IndexError in the middle of a run,
or a GPU that has to be started again.
"""

from collections.abc import Mapping
from typing import Any

from penstock.errors import PlanError
from penstock.order.plan import Rows

__all__ = ["check_vocabulary", "vocab_size_of"]

_GPT2_VOCAB = 50_257
_LOOKED_AT = 1 << 24  # ids of a bare file: a tenth of a second


def vocab_size_of(rows: Any) -> int:
    """How many ids the tokenizer of some rows has; GPT-2's where a file does not say."""
    return next((size for _, size in _tokenizers(rows)), _GPT2_VOCAB)


def check_vocabulary(sources: Mapping[str, Rows], val: Rows | None, vocab_size: int) -> None:
    """Refuse ids that a model of `vocab_size` does not know, or that mean other text to it.

    Raises:
        PlanError: it says which file or store they are in.
    """
    for rows in [*sources.values(), *([] if val is None else [val])]:
        found = _looked_into(rows)
        for path, lowest, _ in found:
            if lowest < 0:
                raise PlanError(f"{path} has ids below 0 ({lowest}), which no tokenizer gives.")
        for path, size in [*_tokenizers(rows), *((path, most + 1) for path, _, most in found)]:
            if size > vocab_size:
                raise PlanError(
                    f"{path} has ids up to {size - 1:,}, and the model knows {vocab_size:,}. Set "
                    f"the model's vocab_size to {size} or more, or use data of its tokenizer."
                )
    digests = {getattr(rows, "tokenizer_digest", None) for rows in sources.values()} - {None}
    ours = getattr(val, "tokenizer_digest", None)
    if digests and ours is not None and ours not in digests:
        raise PlanError(
            f"The validation rows are of another tokenizer (digest {ours[:8]}) than those to train "
            f"on ({', '.join(sorted(str(each)[:8] for each in digests))}): the same id means other "
            "text. Build both with one tokenizer."
        )


def _tokenizers(rows: Any) -> list[tuple[Any, int]]:
    """The stores below some rows, with the sizes of their vocabularies."""
    return [
        (member.path, int(member.manifest.contents["tokenizer"]["vocab_size"]))
        for member in _members(rows)
        if hasattr(member, "manifest")
    ]


def _looked_into(rows: Any) -> list[tuple[Any, int, int]]:
    """The bare files below some rows, with the smallest and the largest id at their beginning."""
    bare = [member for member in _members(rows) if not hasattr(member, "manifest")]
    begun = [(member.path, member.array()[:_LOOKED_AT]) for member in bare]
    return [(path, int(ids.min(initial=0)), int(ids.max(initial=0))) for path, ids in begun]


def _members(rows: Any) -> tuple[Any, ...]:
    """Stores and files below some rows; rows of one's own have none that are known."""
    return getattr(getattr(rows, "stream", None), "members", ())
