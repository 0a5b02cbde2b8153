"""The vocabulary of a run: its size, and whether all token ids of the data are in it."""

from penstock.errors import PlanError, TrainError
from penstock.formats.arrays import check_ids
from penstock.formats.mapped import spread_blocks
from penstock.formats.token_files import Member, TokenFiles
from penstock.loader.run import AnyPlan
from penstock.rows.protocol import Rows
from penstock.store.reader import TokenStore
from penstock.train.config import TrainingJob

_GPT2_VOCAB = 50_257
# The first ids of token files that are checked before the first step, which takes 0.1 seconds.
_CHECKED_IDS = 1 << 24
_SHOWN = 3


def stores_of(rows: Rows) -> tuple[Member, ...]:
    """The stores and token files that rows are read from; none for rows of another kind."""
    return () if rows.stream is None else rows.stream.members


def vocab_size_of(plan: AnyPlan) -> int:
    """The largest vocabulary that is recorded or given; GPT-2's if only bare files are read."""
    members = [each for rows in plan.sources.values() for each in stores_of(rows)]
    known = [each for each in members if isinstance(each, TokenStore | TokenFiles)]
    sizes = [each.vocab_size for each in known if each.vocab_size is not None]
    return max(sizes, default=_GPT2_VOCAB)


def _vocab_size(member: Member) -> int:
    """The vocabulary size that a store records; of token files, one more than the largest id.

    Token files are checked in samples: the first ids, and 17 blocks of each file.
    """
    if isinstance(member, TokenStore):
        return member.vocab_size
    num_parts = len(member.part_tokens)
    given = member.vocab_size if isinstance(member, TokenFiles) else None
    size = given or 1
    for ids in map(member.part_ids, range(num_parts)):
        for block in (ids[: _CHECKED_IDS // num_parts], *spread_blocks(ids)):
            check_ids(block, member.path, None)
            size = max(size, int(block.max(initial=0)) + 1)
    return size


def check_tokens(lowest: int, highest: int, vocab_size: int, plan: AnyPlan) -> None:
    """Raise TrainError for rows of a plan with a token id that the model does not have.

    `check_vocabulary` reads samples of token files. Without this, an id between them would end the
    run with an IndexError, or crash the CUDA context.
    """
    wrong = lowest if lowest < 0 else highest
    if not 0 <= wrong < vocab_size:
        members = [each for rows in plan.sources.values() for each in stores_of(rows)]
        paths = [str(each.path) for each in members if not isinstance(each, TokenStore)]
        files = ", ".join(paths[:_SHOWN])
        if len(paths) > _SHOWN:
            files += f" and {len(paths) - _SHOWN:,} more"
        raise TrainError(
            f"The next rows have the token id {wrong:,}, but the vocabulary of the model has "
            f"{vocab_size:,} ids. The token files are damaged, or of a tokenizer with more ids. "
            f"Check {files or 'them'} with penstock verify PATH --vocab-size {vocab_size}, or set "
            "model.vocab_size."
        )


def check_vocabulary(job: TrainingJob) -> None:
    """Refuse token ids that the model does not have, or that mean other text in validation.

    A store records its tokenizer. Token files do not, so samples of them are read. `check_tokens`
    checks all ids of each step.

    Raises:
        PlanError: names the file or the store.
    """
    vocab_size = job.model.vocab_size
    sources = job.plan.sources
    for rows in [*sources.values(), *([] if job.val is None else [job.val])]:
        for member in stores_of(rows):
            size = _vocab_size(member)
            if size > vocab_size:
                raise PlanError(
                    f"{member.path} has token ids up to {size - 1:,}, but the vocabulary of the "
                    f"model has {vocab_size:,}. Set model.vocab_size to {size} or more."
                )
    digests = {rows.tokenizer_digest for rows in sources.values()} - {None}
    val_digest = None if job.val is None else job.val.tokenizer_digest
    if digests and val_digest is not None and val_digest not in digests:
        raise PlanError(
            f"The validation data has another tokenizer (digest {val_digest[:8]}) than the "
            "training data, so the same id means other text. Build both with one tokenizer."
        )
