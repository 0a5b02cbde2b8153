"""Stopping anywhere and going on anywhere else: the same rows, in the same order.

A sample of what `tests/torture/test_loader_resume.py` does in full.
"""

import json
from itertools import product

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.loader import BatchFormat
from penstock.loader.loader import Loader
from penstock.order.plan import Plan
from penstock.rows.windows import Windows
from penstock.testing import assert_resumable, global_rows

GLOBAL = 24


@pytest.fixture(scope="module")
def windows(store):
    return Windows(store, 64)


def ranks(rows, world_size, prefetch=0, **settings):
    return [
        Loader(
            rows,
            global_batch_size=GLOBAL,
            rank=rank,
            world_size=world_size,
            prefetch=prefetch,
            **settings,
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize(
    "common",
    [
        {"epochs": 2, "seed": 17},
        {
            "epochs": 2,
            "shuffle": "block",
            "drop_last": False,
            "format": BatchFormat(fingerprint="tokens"),
        },
        {"steps": 12, "shuffle": "part", "format": BatchFormat(ids=True)},
        {"format": "hf"},
        {"format": "tuple"},
        {"format": "narrow"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:format=.hf. leaves out")
def test_a_run_is_resumable(windows, common):
    def make(rank, world_size, prefetch):
        return Loader(
            windows,
            global_batch_size=GLOBAL,
            rank=rank,
            world_size=world_size,
            prefetch=prefetch,
            **common,
        )

    assert_resumable(make, world_sizes=(1, 2, 3), prefetch=(0, 2), steps=12)


def test_a_mixture_with_a_ramp_is_resumable(windows, other_store):
    plan = Plan(
        {"one": windows, "two": Windows(other_store, 64)},
        weights={"one": 0.7, "two": 0.3},
        schedule={100: {"one": 0.1, "two": 0.9}},
        seed=3,
    )

    def make(rank, world_size):
        sizes = {0: 6, 30: 12, 90: 24}
        return Loader(
            plan,
            global_batch_size=sizes,
            rank=rank,
            world_size=world_size,
            format=BatchFormat(ids=True),
        )

    # Step 5 is the first of 12 rows, and step 10 the first of 24.
    stops = (0, 1, 4, 5, 6, 9, 10, 11, 15)
    assert_resumable(make, world_sizes=(1, 2, 3), steps=16, stops=stops)


def test_every_step_of_two_epochs_into_every_topology(windows):
    """Rows and fingerprints, from each of six topologies into each."""
    common = {"epochs": 2, "seed": 5, "format": BatchFormat(ids=True)}
    expected = global_rows(ranks(windows, 1, **common), 100)
    topologies = list(product((1, 2, 3), (0, 1)))
    states = {}
    for world_size, prefetch in topologies:
        loader = ranks(windows, world_size, prefetch, **common)[-1]
        taken = [loader.state_dict()]
        for _ in loader:
            taken.append(loader.state_dict())  # noqa: PERF401  (the state changes as it goes)
        states[world_size, prefetch] = [json.dumps(state) for state in taken]
    for before, after in product(topologies, topologies):
        for stop in range(0, len(expected) + 1, 3):
            loaders = ranks(windows, *after, **common)
            for loader in loaders:
                loader.load_state_dict(json.loads(states[before][stop]))
            found = global_rows(loaders, 100)

            assert len(found) == len(expected) - stop
            for one, two in zip(found, expected[stop:], strict=True):
                assert all(np.array_equal(one[name], two[name]) for name in two)


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_of_fifty_resumes_reads_what_one_run_does(numbered, seed):
    """Each link on other ranks, with other batch sizes and threads, in fresh objects."""
    random = np.random.default_rng(seed)
    rows = numbered(97)
    found, state = [], None
    for _ in range(50):
        world_size = int(random.integers(1, 5))
        size = world_size * int(random.integers(1, 9))
        loaders = [
            Loader(
                rows,
                global_batch_size=size,
                rank=rank,
                world_size=world_size,
                seed=seed,
                prefetch=int(random.choice([0, 1, 4])),
            )
            for rank in range(world_size)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(state))
        for step in global_rows(loaders, int(random.integers(0, 4))):
            found += step["inputs"][:, 0].tolist()
        states = {json.dumps(loader.state_dict()) for loader in loaders}
        assert len(states) == 1
        state = states.pop()

    plain = Loader(rows, 1, seed=seed, steps=len(found), prefetch=0)
    assert found == [batch["inputs"][0, 0].item() for batch in plain]
    assert json.loads(state) == plain.state_dict()


def test_a_resume_with_another_batch_size_goes_on_with_the_same_rows(windows):
    plain = Loader(windows, 1, seed=2, epochs=1)
    expected = [batch["inputs"][0].tolist() for batch in plain]
    for before, after in ((8, 5), (5, 8), (7, 7), (1, 30)):
        first = Loader(windows, before, seed=2, epochs=1)
        found = [row for _, batch in zip(range(3), first, strict=False) for row in batch["inputs"]]
        second = Loader(
            windows, after, seed=2, epochs=1, drop_last=False, format=BatchFormat(ids=True)
        )
        second.load_state_dict(first.state_dict())
        assert second.run.steps.start in (0, 3 * before)
        for batch in second:
            found += [
                row for row, at in zip(batch["inputs"], batch["position"], strict=True) if at >= 0
            ]

        assert [row.tolist() for row in found] == expected


def test_a_resume_locates_and_reads_as_few_rows_from_any_position(numbered, monkeypatch):
    work = {"located": 0, "read": 0}
    locate, read = Plan.locate, numbered.read

    def counted_locate(plan, positions):
        work["located"] += len(positions)
        return locate(plan, positions)

    def counted_read(rows, samples):
        work["read"] += len(samples)
        return read(rows, samples)

    monkeypatch.setattr(Plan, "locate", counted_locate)
    monkeypatch.setattr(numbered, "read", counted_read)
    loader = Loader(numbered(10**12), 32)
    for position in (0, 32 * 10**6, 32 * 10**15):
        loader.seek(position)
        state = json.dumps(loader.state_dict())
        fresh = Loader(numbered(10**12), 32, prefetch=0)
        work.update(located=0, read=0)
        fresh.load_state_dict(json.loads(state))
        next(iter(fresh))
        assert work == {"located": 32, "read": 32}


class Numbers:
    """As many rows as these tests need; see `conftest.Numbered`."""

    length = 1
    digest = "numbers"

    def __len__(self):
        return 23

    def read(self, samples):
        return {"tokens": np.repeat(samples[:, None], 2, axis=1)}


ORDER = Plan(Numbers(), seed=9)
EPOCHS = 3
END = EPOCHS * 23


class Machine(RuleBasedStateMachine):
    """Any sequence of what a user can do to a loader; the model is a position in a list."""

    @initialize()
    def begin(self):
        self.rows = ORDER.locate(np.arange(100 * END))[2].tolist()
        self.position = 0
        self.saved = []
        self.world_size, self.size = 1, 4
        self.fresh(prefetch=0)

    def fresh(self, prefetch):
        self.loaders = [
            Loader(
                ORDER,
                global_batch_size=self.size,
                rank=rank,
                world_size=self.world_size,
                epochs=EPOCHS,
                drop_last=False,
                prefetch=prefetch,
                format=BatchFormat(ids=True),
            )
            for rank in range(self.world_size)
        ]
        self.iterators = None

    @rule(steps=st.integers(1, 5))
    def take(self, steps):
        if self.iterators is None:
            self.iterators = [iter(loader) for loader in self.loaders]
            self.end = (self.position // END + 1) * END  # of this loop
        for _ in range(steps):
            batches = [next(iterator, None) for iterator in self.iterators]
            expected = self.rows[self.position : min(self.position + self.size, self.end)]
            if not expected:
                assert batches == [None] * self.world_size
                self.iterators = None  # the next loop begins where this one ended
                return
            found = [
                sample
                for batch in batches
                for sample, at in zip(batch["sample"].tolist(), batch["position"], strict=True)
                if at >= 0
            ]
            assert found == expected
            self.position += len(expected)

    @rule()
    def leave_the_loop(self):
        self.iterators = None

    @rule(rank=st.integers(0, 10))
    def save(self, rank):
        loader = self.loaders[rank % self.world_size]
        self.saved.append((json.dumps(loader.state_dict()), self.position))

    @rule(which=st.integers(0, 10), here=st.booleans())
    def load(self, which, here):
        if self.saved:
            text, position = self.saved[which % len(self.saved)]
            if not here:
                self.fresh(prefetch=2)
            for loader in self.loaders:
                loader.load_state_dict(json.loads(text))
            self.position, self.iterators = position, None

    @rule(world_size=st.integers(1, 4), rows=st.integers(1, 9), prefetch=st.sampled_from([0, 1]))
    def move_to_another_topology(self, world_size, rows, prefetch):
        state = self.loaders[0].state_dict()
        self.world_size, self.size = world_size, world_size * rows
        self.fresh(prefetch)
        for loader in self.loaders:
            loader.load_state_dict(state)

    @rule(position=st.integers(0, 2 * END))
    def seek(self, position):
        for loader in self.loaders:
            loader.seek(position)
        self.position, self.iterators = position, None

    @invariant()
    def all_ranks_are_where_the_model_is(self):
        assert {loader.position for loader in self.loaders} == {self.position}
        assert len({(len(loader), loader.step) for loader in self.loaders}) == 1

    def teardown(self):
        self.loaders, self.iterators = [], None


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
