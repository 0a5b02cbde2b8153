"""The vocabulary of a run: its size, and whether all token ids of the data are in it."""

from penstock.errors import PlanError
from penstock.formats.member import Member
from penstock.formats.token_files import TokenFiles
from penstock.loader.run import AnyPlan
from penstock.rows.protocol import Rows
from penstock.store.reader import TokenStore
from penstock.train.config import TrainingJob

_GPT2_VOCAB = 50_257
# The ids of a bare token file (without a manifest) that are checked, which takes 0.1 seconds.
_CHECKED_IDS = 1 << 24


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
    """The vocabulary size that is recorded or given; else one more than the largest id."""
    if isinstance(member, TokenStore | TokenFiles) and member.vocab_size is not None:
        return member.vocab_size
    # An unsigned dtype cannot be negative, but a .npy file may be of int32 or int64.
    ids = member.part_ids(0)[:_CHECKED_IDS]
    if ids.min(initial=0) < 0:
        raise PlanError(
            f"{member.path} has the negative token id {ids.min()}, which no model can embed."
        )
    return int(ids.max(initial=0)) + 1


def check_vocabulary(job: TrainingJob) -> None:
    """Refuse token ids that the model does not have, or that mean other text in validation.

    A store records its tokenizer. A bare token file does not, so its first ids are read: an id
    past the vocabulary would end a run with an IndexError, or crash the CUDA context.

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
