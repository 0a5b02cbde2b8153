"""A DataLoader over several datasets that knows where it is.

    loader = create_multiplex_dataloader([("arc", arc), ("gsm8k", gsm8k)], batch_size=32)
    for batch in loader:                          # one epoch; the next one has another order
        checkpoint["data"] = loader.state_dict()  # after any batch, on any rank

Its position counts batches that were handed out, not those that workers made ahead. Without
workers, batches are made by a loop of our own: PyTorch's costs 20 µs a batch, which is more
than reading a batch of 32 examples from memory takes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from penstock.errors import ResumeError
from penstock.integrations.blend import Blend, digest_examples
from penstock.integrations.collate import default_collate_fn
from penstock.integrations.epochs import EpochSteps, Share, Span
from penstock.integrations.mixed import MultiplexDataset
from penstock.integrations.shares import Weights
from penstock.integrations.workers import Workers
from penstock.loader.fingerprint import combine, of_samples, source_keys
from penstock.loader.state import sealed, shortened, unsealed
from penstock.order.integers import Integers
from penstock.order.schedule import StartingPoint

__all__ = ["MultiplexDataLoader"]

_VERSION = 2
_FIELDS = {"epoch": int, "start": int, "position": int, "changed": dict, "order": dict}
_FIELDS_OF_1 = {"epoch": int, "start": int, "position": int, "stages": list, "order": dict}


class MultiplexDataLoader(DataLoader[Any]):
    """A `torch.utils.data.DataLoader` of mixed batches; see `create_multiplex_dataloader`.

    Each `iter()` is the next epoch; right after `load_state_dict` it is the rest of the one in
    which the state was taken. `len()` is the steps of a whole epoch.
    """

    dataset: MultiplexDataset

    def __init__(
        self,
        dataset: MultiplexDataset,
        share: Share,
        workers: Workers,
        *,
        shuffle: bool,
        pin_memory: bool,
        collate_fn: Callable[[list[dict[str, Any]]], Any],
    ) -> None:
        self._steps = EpochSteps(dataset, share, shuffle=shuffle)
        self._changes = 0  # of the weights
        self._identity: dict[str, Any] | None = None
        self._asked = dataset.blend
        super().__init__(
            dataset,
            batch_sampler=self._steps,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            # Seeds workers. Without it, PyTorch would draw from its global generator at every
            # epoch, and loading data would change what dropout does.
            generator=torch.Generator().manual_seed(dataset.blend.seed % 2**63),
            **workers._asdict(),
        )
        # With a batch sampler PyTorch leaves these unset, and people ask for them.
        self.__dict__.update(
            batch_size=share.batch_size, drop_last=share.drop_last, sampler=self._steps
        )

    def __iter__(self) -> Any:
        turn = self._steps.begin()
        return self._follow(turn, self._batches())

    @property
    def position(self) -> int:
        """How many examples of the order were handed out before, over all ranks and epochs."""
        return self.dataset.place.position

    @property
    def epoch(self) -> int:
        """The epoch under way, or the next one where none is."""
        return self.dataset.place.epoch

    @property
    def fingerprint(self) -> int | None:
        """A number for the last batch: over ranks they add up to that of one process.

        None before the first batch.
        """
        if self._steps.last is None:
            return None
        blend, positions = self.dataset.blend, np.arange(*self._steps.last[:2])
        sources, epochs, samples = blend.order.locate(positions)
        keys = source_keys(blend.names)[sources]
        return combine(of_samples(keys, epochs, samples, positions), [0])[0]

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one, from its beginning; nothing changes where it is already."""
        self._steps.set_epoch(epoch)

    def set_weights(self, weights: Weights) -> None:
        """Draw by other weights from the next batch on; call it on every rank at the same step.

        Each dataset continues with the example after its last one, and what it is owed by
        rounding is carried over; a dataset of weight 0 passes that on to the others. What a
        schedule still had ahead is given up. Inside an epoch, batches that workers have made
        ahead are thrown away and made anew; `persistent_workers=True` spares starting the
        workers again. Costs some 10 µs a dataset, however often weights changed before.

        Raises:
            PlanError: these are no weights, or the loader is proportional.
        """
        self._use(self.dataset.blend.changed(self.position, weights))

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, as JSON: the same on every rank, for any number of workers.

        At most 4 KiB and 100 bytes a dataset, however often weights were set: the weights in
        force, with the examples of each dataset and what it is owed where they were set, and a
        digest of all weights before.
        """
        place, blend = self.dataset.place, self.dataset.blend
        told = {
            "epoch": place.epoch,
            "start": place.start,
            "position": place.position,
            "changed": {} if blend.stages == self._asked.stages else blend.to_resume(),
            "order": self._order(),
        }
        return sealed(told, _VERSION)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the weights that were in force there.

        Batch size, ranks and workers may differ. Seed, datasets, and the weights that the
        loader was made with may not. Where weights had been set, positions before that have no
        answer any more: earlier epochs and items raise a PlanError.

        Raises:
            ResumeError: it was changed after it was written, or belongs to another order.
        """
        told = _read(state_dict)
        differences = [
            f"{name} {_short(told['order'].get(name))} -> {_short(now)}"
            for name, now in self._order().items()
            if shortened(told["order"].get(name)) != now
        ]
        if differences:
            raise ResumeError(
                "This checkpoint belongs to another order of the examples, so its position "
                f"{told['position']:,} would not be the example it was. Changed since: "
                f"{', '.join(differences)}. Restore that to resume exactly; to go on with other "
                "weights, load the state first and call set_weights after it."
            )
        end = told["start"] + self.dataset.blend.total
        self._steps.share.num_steps(end - told["position"])  # refuses what would hang
        blend = self._asked.resumed(told["changed"]) if told["changed"] else self._asked
        if blend.stages != self.dataset.blend.stages:
            self._use(blend)
        self._steps.go_to(told["epoch"], told["start"], told["position"])

    def _use(self, blend: Blend) -> None:
        self.dataset.blend = blend
        self._changes += 1

    def _order(self) -> dict[str, Any]:
        """What a position is a position in, in the words of the user; computed once."""
        if self._identity is None:
            blend = self._asked
            identity = {
                "shuffle_seed": blend.seed,
                "shuffle": self._steps.shuffle,
                "weights": [stage.to_json() for stage in blend.stages] or "each example once",
                "tokens": None if blend.num_tokens is None else list(blend.num_tokens),
                "datasets": [
                    [name, len(rows), digest_examples(rows)] for name, rows in self.dataset.datasets
                ],
            }
            # Long lists as a digest: a state has a bound, and schedules have none.
            self._identity = {name: shortened(value) for name, value in identity.items()}
        return self._identity

    def _batches(self) -> Iterator[tuple[Any, Span]]:
        """The batches from the run's position on, as PyTorch makes them or by our own loop."""
        if self.num_workers or self.pin_memory:
            # The batches come first: at their end PyTorch stops its workers.
            return zip(super().__iter__(), self._steps.spans(self.position), strict=False)
        return self._made_here(self._steps.steps(self.position))

    def _made_here(
        self, steps: Iterator[tuple[Integers, Integers, Span]]
    ) -> Iterator[tuple[Any, Span]]:
        if self.collate_fn is default_collate_fn:
            columns = self.dataset.columns
            for sources, samples, span in steps:
                yield columns(sources.tolist(), samples.tolist()), span
            return
        read, collate = self.dataset.read, self.collate_fn
        for sources, samples, span in steps:
            yield collate(read(sources.tolist(), samples.tolist())), span

    def _follow(self, turn: int, batches: Iterator[tuple[Any, Span]]) -> Iterator[Any]:
        """Hand out batches, and move the run on with each."""
        run, place, changes = self._steps, self.dataset.place, self._changes
        while True:
            if turn != run.turn:
                raise ResumeError(
                    "This iterator was overtaken: the DataLoader was moved by load_state_dict(), "
                    "set_epoch() or another iter(). Use the newest iterator."
                )
            if changes != self._changes:
                changes, batches = self._changes, self._batches()
            try:
                batch, span = next(batches)
            except StopIteration:
                run.finish(turn)
                return
            place.position, run.last = span[2], span
            yield batch


def _read(state: Any) -> dict[str, Any]:
    """What a state says, if it can be resumed; one of version 1 in the words of this one.

    Raises:
        ResumeError: it is damaged, edited, or no state; or weights changed in version 1.
    """
    of = "a multiplex DataLoader"
    if not isinstance(state, Mapping) or state.get("version") != 1:
        return unsealed(state, _VERSION, _FIELDS, of=of)
    told = unsealed(state, 1, _FIELDS_OF_1, of=of)
    stages = told.pop("stages")
    changed = {}
    if len(stages) > 1:
        raise ResumeError(
            f"This state is of a run whose weights changed {len(stages) - 1:,} times, written by "
            "an older penstock: the order after a change of weights is another one now. Resume "
            "with the penstock that wrote it, or start a new run with the weights now in force."
        )
    if stages and told["order"].get("weights") != stages:  # weights that were set at the start
        position, weights = stages[0]
        nothing = [0] * len(weights)
        changed = StartingPoint(position, nothing, nothing)._asdict() | {
            "weights": weights,
            "history": "",
        }
    return {**told, "changed": changed}


def _short(value: Any) -> str:
    return f"{value!r:.200}"
