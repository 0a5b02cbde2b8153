"""The loaders of a run, and the micro-batches of a step.

    a step on all processes    ├───────── global_batch_size ─────────┤
    this process               ├── its share ──┤
    computed at once           ├─────┼─────┼───┤        micro-batches of batch_size rows

The loader returns one batch per step and process. So the rows of a step depend neither on how
many fit on a device nor on the number of devices.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import PlanError
from penstock.loader.fingerprints import RowReader
from penstock.loader.loader import Loader
from penstock.order.plan import Plan
from penstock.order.steps import PADDING
from penstock.rows.protocol import Array
from penstock.rows.windows import Windows
from penstock.store.reader import TokenStore
from penstock.train.config import TrainingConfig, TrainingJob
from penstock.train.distributed import World
from penstock.train.vocabulary import check_tokens, stores_of

_FIELDS = ("inputs", "targets", "position_ids", "document_ids")


def step_rows(config: TrainingConfig, rows: int, world: World) -> int:
    """The number of rows of a step on all processes; each computes micro-batches of `rows` rows."""
    total = config.global_batch_size or rows * world.size
    if total % (rows * world.size):
        raise PlanError(
            f"global_batch_size={total} is not a multiple of batch_size={rows} x {world.size} "
            f"processes. Use a multiple of {rows * world.size}."
        )
    return total


def row_reader(job: TrainingJob) -> RowReader:
    """A reader of the rows of any step, which checks that the model has all their token ids."""

    def check(tokens: Array) -> None:
        if tokens.size:
            check_tokens(int(tokens.min()), int(tokens.max()), job.model.vocab_size, job.plan)

    return RowReader(job.plan, check)


def training_loader(job: TrainingJob, world: World, total: int) -> Loader[Any]:
    """The loader of this process, for steps of `total` rows on all processes."""
    return Loader(
        job.plan,
        global_batch_size=total,
        prefetch=job.training.prefetch,
        rank=world.rank,
        world_size=world.size,
        device=world.device,
    )


def validation_loader(job: TrainingJob, world: World, rows: int) -> Loader[Any] | None:
    """A loader of the same `val_rows` rows at every validation; None without validation data."""
    if job.val is None:
        return None
    num_rows = min(job.training.val_rows, len(job.val))
    # The first rows of a shuffled epoch, the same ones every time. Half a row is added, so that
    # rounding cannot take one away.
    epochs = (num_rows + 0.5) / len(job.val)
    plan = Plan({"val": job.val}, weights={"val": 1}, max_epochs=epochs)
    return _evaluation_loader(plan, num_rows, job, world, rows)


def final_loader(job: TrainingJob, world: World, rows: int) -> Loader[Any] | None:
    """A loader of all validation data, in order: every token but the first is a target once."""
    val = job.val
    if val is None:
        return None
    if isinstance(val, Windows):
        # The last tokens of the data do not fill a row.
        val = Windows(val.stream, val.length, tail="pad", borders=val.borders)
    plan = Plan({"val": val}, weights={"val": 1}, shuffle="none", max_epochs=1)
    return _evaluation_loader(plan, len(val), job, world, rows)


def _evaluation_loader(
    plan: Plan, num_rows: int, job: TrainingJob, world: World, rows: int
) -> Loader[Any]:
    loader: Loader[Any] = Loader(
        plan,
        # At most `rows` rows for each process, and no more than there are: 10 rows on 4
        # processes are batches of 3 each. drop_last=False pads the last batch with rows whose
        # targets are all ignored, so that every process takes the same number of steps.
        global_batch_size=min(rows, -(-num_rows // world.size)) * world.size,
        prefetch=min(1, job.training.prefetch),
        rank=world.rank,
        world_size=world.size,
        device=world.device,
        drop_last=False,
    )
    loader.rank_positions.never()  # each evaluation begins at 0, on every process
    return loader


def step_fingerprints(loader: Loader[Any], reader: RowReader) -> list[int]:
    """The fingerprints of this rank's rows in the step that the loader has just yielded.

    That of the rows is the loader's own. For that of the tokens, the rows are read again. Both are
    signed, because torch has no sums of uint64; sums of int64 wrap around to the same bits.
    """
    step, run = loader.step - 1, loader.run
    positions = run.shard.positions(step, step + 1, end=run.end)
    _, tokens = reader.sums(positions[positions != PADDING])
    found = np.array([loader.fingerprint or 0, tokens], np.uint64).view(np.int64)
    return [int(each) for each in found]


def evaluation_microbatches(
    loader: Loader[Any], rows: int, vocab_size: int
) -> Iterator[list[Tensor | None]]:
    """The micro-batches of all batches, after a check of the token ids of token files."""
    # The ids of stores are compared with checksums instead: reading a number from the GPU waits
    # for all work that is queued there.
    members = [each for found in loader.plan.sources.values() for each in stores_of(found)]
    is_checked = not members or not all(isinstance(each, TokenStore) for each in members)
    for batch in loader:
        if is_checked:
            inputs, targets = batch["inputs"], batch["targets"]
            ids = torch.cat([inputs.flatten(), targets[targets != -100]])
            lowest, highest = torch.stack(ids.aminmax()).tolist()
            check_tokens(lowest, highest, vocab_size, loader.plan)
        yield from microbatches(batch, rows)


def microbatches(batch: dict[str, Tensor], rows: int) -> Iterator[list[Tensor | None]]:
    """The micro-batches of a batch, of up to `rows` rows each, as arguments of `GPT.forward`."""
    fields = [batch.get(name) for name in _FIELDS]
    for start in range(0, len(batch["inputs"]), rows):
        # A slice is a view whose strides can differ from those of a whole tensor. torch would
        # compile the model again for other strides, so the slice is made contiguous.
        piece = slice(start, start + rows)
        yield [None if each is None else each[piece].contiguous() for each in fields]
