"""The law that users hold their set-up to, and twins of a loader that must break it."""

import numpy as np
import pytest

from penstock.loader import BatchFormat
from penstock.loader.loader import Loader
from penstock.rows.windows import Windows
from penstock.testing import assert_resumable, global_rows


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    path = tmp_path_factory.mktemp("law") / "tokens.npy"
    np.save(path, np.arange(1, 302, dtype="uint16"))
    return Windows(path, 4)  # 75 rows


def holds(kind, windows, steps=32, **settings):
    """Hold a kind of loader to the law."""

    def make(rank, world_size, prefetch):
        return kind(
            windows,
            global_batch_size=12,
            rank=rank,
            world_size=world_size,
            prefetch=prefetch,
            **{"epochs": 2, **settings},
        )

    assert_resumable(make, world_sizes=(1, 2, 3), prefetch=(0, 2), steps=steps)


def test_a_loader_holds(windows):
    holds(Loader, windows)


@pytest.mark.parametrize("steps", [10, pytest.param(32, marks=pytest.mark.torture)])
def test_a_loader_without_an_end_holds(windows, steps):
    """Ten steps reach the second epoch, which begins after row 75."""
    holds(Loader, windows, steps, epochs=None, format=BatchFormat(ids=True))


class OffByOne(Loader):
    """Its state is one batch behind."""

    def state_dict(self):
        behind = Loader(self.plan, 1)
        behind.seek(max(0, self.position - 12))
        return behind.state_dict()


class CountsPrefetched(Loader):
    """Its state is what was made, not what was handed out."""

    def state_dict(self):
        ahead = Loader(self.plan, 1)
        ahead.seek(min(150, self.position + 24) if self.position else 0)
        return ahead.state_dict()


class ForgetsEpochs(Loader):
    """Resumes in the second epoch with the order of the first."""

    def load_state_dict(self, state, **options):
        super().load_state_dict(state, **options)
        self.seek(self.position % 75)


class SkipsARow(Loader):
    """Drops a row when it resumes, as a buffer that is not saved does."""

    def load_state_dict(self, state, **options):
        super().load_state_dict(state, **options)
        self.seek(min(150, self.position + 1))


class NeverMoves(Loader):
    """The second resume goes back to the first: its state is frozen."""

    def load_state_dict(self, state, **options):
        super().load_state_dict(state, **options)
        self.frozen = dict(state)

    def state_dict(self):
        return getattr(self, "frozen", None) or super().state_dict()


class ShortensTheRest(Loader):
    """Ends a batch early after a resume."""

    def load_state_dict(self, state, **options):
        super().load_state_dict(state, **options)
        if self.run.num_steps > self.step:
            self.run.num_steps -= 1


class ForgetsTheEnd(Loader):
    """Goes on for ever after a resume."""

    def load_state_dict(self, state, **options):
        super().load_state_dict(state, **options)
        self.run.end = self.run.num_steps = None


class OneOfItsOwn(Loader):
    """Every rank has a state of its own."""

    def state_dict(self):
        return {**super().state_dict(), "rank": self.rank}


class Uneven(Loader):
    """Rank 1 has a step more than the others."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.run.num_steps -= self.rank != 1


class SameOnEveryRank(Loader):
    """Every rank reads what rank 0 reads."""

    def __init__(self, *args, rank, **options):
        super().__init__(*args, rank=0, **options)


class DependsOnThreads(Loader):
    """Another order with a thread than without."""

    def __init__(self, *args, prefetch, **options):
        super().__init__(*args, prefetch=prefetch, seed=prefetch, **options)


class StartsOver(Loader):
    """Between two loops it is resumed at the beginning, with the order of the first epoch."""

    def load_state_dict(self, state, **options):
        super().load_state_dict(state, **options)
        self.seek(0 if self.position == 150 else self.position)


class EmptyRest(Loader):
    """Resumed after the last step of a loop, it first yields the rest of that loop: nothing."""

    def load_state_dict(self, state, **options):
        super().load_state_dict(state, **options)
        self.empty = self.position in (144, 150)

    def __iter__(self):
        if getattr(self, "empty", False):
            self.empty = False
            return iter(())
        return super().__iter__()


class LosesAKey(Loader):
    """Resumed batches lack what they had."""

    def load_state_dict(self, state, **options):
        super().load_state_dict(state, **options)
        self.names = ["inputs"]

    def __iter__(self):
        for batch in super().__iter__():
            yield {name: batch[name] for name in getattr(self, "names", batch)}


class Reorders(Loader):
    """The same rows a step, in another order: enough for a test that compares sets."""

    def load_state_dict(self, state, **options):
        super().load_state_dict(state, **options)
        self.turned = True

    def __iter__(self):
        for batch in super().__iter__():
            turned = getattr(self, "turned", False)
            yield {name: values.flip(0) if turned else values for name, values in batch.items()}


@pytest.mark.parametrize(
    ("twin", "message"),
    [
        (OffByOne, "stopped after 1 steps and resumed on world_size=1, prefetch=0: 'inputs' diff"),
        (CountsPrefetched, "stopped after 1 steps and resumed on world_size=1, prefetch=0: 'inp"),
        (ForgetsEpochs, "'inputs' differs at step"),
        (SkipsARow, "stopped after 0 steps and resumed on world_size=1, prefetch=0: 'inputs' diff"),
        (NeverMoves, "the state after 1 steps differs"),
        (ShortensTheRest, "the run ends too early, after 11 steps"),
        (ForgetsTheEnd, "the run does not end after 12 steps"),
        (
            StartsOver,
            "stopped after 12 steps and resumed on world_size=1, prefetch=0: 'inputs' dif",
        ),
        (EmptyRest, "prefetch=0: the state after 12 steps differs"),
        (OneOfItsOwn, "after 0 steps, the states of ranks 1 and 0 differ"),
        (Uneven, "world_size=2, prefetch=0: rank 0 ends after 11 steps and others do not"),
        (SameOnEveryRank, "world_size=2, prefetch=0: 'inputs' differs at step 0"),
        (DependsOnThreads, "world_size=1, prefetch=2: 'inputs' differs at step 0"),
        (
            LosesAKey,
            "has ['fingerprint', 'inputs'] instead of ['fingerprint', 'inputs', 'targets']",
        ),
        (Reorders, "stopped after 0 steps and resumed on world_size=1, prefetch=0: 'inputs' diff"),
    ],
)
def test_a_broken_twin_is_found(windows, twin, message):
    with pytest.raises(AssertionError) as caught:
        holds(twin, windows)

    assert message in str(caught.value)


def test_a_maker_without_choices_is_resumed_as_it_is(windows):
    calls = []

    def make():
        calls.append(1)
        return Loader(windows, 10, epochs=1)

    assert_resumable(make)
    assert len(calls) == 16  # twice through, from after each of 14 steps, and between the loops

    with pytest.raises(AssertionError, match="stopped after 1 steps and resumed on one loader"):
        assert_resumable(lambda: OffByOne(windows, 12, epochs=1))


def test_a_maker_may_take_anything(windows):
    seen = set()

    def make(**topology):
        seen.add((topology["world_size"], topology["prefetch"]))
        return Loader(windows, global_batch_size=8, **topology)

    assert_resumable(make, world_sizes=(1, 2), prefetch=(0, 1), steps=4)
    assert seen == {(1, 0), (1, 1), (2, 0), (2, 1)}


def test_stops_may_be_chosen(windows):
    assert_resumable(lambda: Loader(windows, 5), steps=30, stops=[0, 17, 30])
    with pytest.raises(AssertionError, match="stopped after 17 steps"):
        assert_resumable(lambda: OffByOne(windows, 12), steps=30, stops=[17])


def test_global_rows_joins_the_ranks(windows):
    ranks = [Loader(windows, 3, rank=rank, world_size=2, seed=1) for rank in range(2)]
    whole = Loader(windows, 6, seed=1)

    for joined, batch in zip(global_rows(ranks, 5), whole, strict=False):
        assert joined["inputs"].tolist() == batch["inputs"].tolist()
        assert joined["fingerprint"] == whole.fingerprint
