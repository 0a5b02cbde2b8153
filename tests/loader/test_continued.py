"""Loaders of continued plans: what they read, and which states they resume."""

import json

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PlanError, ResumeError
from penstock.loader import BatchFormat

FORMAT = BatchFormat(ids=True, fingerprint="tokens")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    base = tmp_path_factory.mktemp("stores")
    texts = [
        [f"{name} {number} " + "more " * (number % 7) for number in range(150)] for name in "abc"
    ]
    return [
        ps.build(ps.Texts(each), base / str(number), tokenizer="bytes")
        for number, each in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def plan(stores):
    rows = {name: ps.Windows(store, 24) for name, store in zip("ab", stores, strict=False)}
    return ps.Plan(rows, weights={"a": 3, "b": 1}, seed=17)


@pytest.fixture(scope="module")
def new(stores):
    """The rows of a third source."""
    return ps.Windows(stores[2], 24)


def loader_of(plan, rows, rank=0, world_size=1):
    return ps.Loader(
        plan, global_batch_size=rows, rank=rank, world_size=world_size, format=FORMAT, prefetch=0
    )


def read_steps(loaders, num_steps):
    """The batches of all ranks, and the sum of their fingerprints, step by step."""
    iterators = [iter(each) for each in loaders]
    for _ in range(num_steps):
        batches = [next(each) for each in iterators]
        rows = {
            name: np.concatenate([batch[name].numpy() for batch in batches])
            for name in ("inputs", "targets", "source", "epoch", "sample", "position")
        }
        yield rows, sum(each.fingerprint for each in loaders) % 2**64


@pytest.mark.parametrize("seed", range(4))
def test_each_part_of_a_run_resumes_on_another_number_of_ranks(plan, new, seed):
    random = np.random.default_rng(seed)
    second = plan.continued(60, weights={"a": 1, "b": 2})
    third = second.continued(
        120, weights={"b": 1, "c": 1}, sources={"b": plan.sources["b"], "c": new}
    )
    expected = list(read_steps([loader_of(third, 12)], 30))
    state, done, found = None, 0, []
    # Before each change, the run has the plan of that time; its state then resumes the next plan.
    for each, stop in ((plan, 5), (second, 10), (third, 17), (third, 30)):
        world_size = int(random.choice([1, 2, 3, 4, 6]))
        loaders = [loader_of(each, 12, rank, world_size) for rank in range(world_size)]
        for loader in loaders if state is not None else ():
            loader.load_state_dict(json.loads(json.dumps(state)))
        found += read_steps(loaders, stop - done)
        states = [loader.state_dict() for loader in loaders]
        assert all(one == states[0] for one in states)
        state, done = states[0], stop

    for (rows, fingerprint), (others, other) in zip(found, expected, strict=True):
        assert fingerprint == other
        assert all(np.array_equal(rows[name], others[name]) for name in rows)


def test_a_state_before_the_change_resumes_and_one_after_it_is_refused(plan):
    loader = loader_of(plan, 8)
    states = [loader.state_dict() for _, _ in zip(range(6), loader, strict=False)]
    continued = loader_of(plan.continued(24, weights={"a": 1, "b": 1}), 8)

    for state in states[:3]:
        continued.load_state_dict(state)
        assert continued.position == state["position"]
    with pytest.raises(
        ResumeError,
        match=r"change at position 24, but this checkpoint was saved without that change at "
        r"position 32.*at or before position 24",
    ):
        continued.load_state_dict(states[3])
    continued.load_state_dict(states[3], on_change="restart")
    assert continued.position == 0


def test_states_of_any_earlier_plan_resume_up_to_the_first_change(plan):
    chain = plan.continued(24, weights={"a": 1, "b": 1}).continued(80, weights={"b": 1})
    loader = loader_of(plan, 8)
    loader.seek(24)
    loader_of(chain, 8).load_state_dict(loader.state_dict())
    loader.seek(32)
    with pytest.raises(ResumeError, match="change at position 24"):
        loader_of(chain, 8).load_state_dict(loader.state_dict())


def test_a_state_of_a_continued_plan_is_refused_by_other_plans(plan):
    continued = plan.continued(24, weights={"a": 1, "b": 1})
    state = loader_of(continued, 8).state_dict()

    loader_of(continued.continued(80, weights={"a": 1}), 8).load_state_dict(state)
    with pytest.raises(
        ResumeError, match=r"another order.*Changed after it was written: continued"
    ):
        loader_of(plan, 8).load_state_dict(state)
    other = plan.continued(24, weights={"a": 1, "b": 2})
    with pytest.raises(ResumeError, match=r'weight of "b" from position 24 on 1 -> 2'):
        loader_of(other, 8).load_state_dict(state)


def test_a_state_of_one_source_part_by_part_resumes_too(stores, new):
    plan = ps.Plan({"a": ps.Windows(stores[0], 24)}, seed=3, shuffle="part")
    continued = plan.continued(16, weights={"a": 1, "c": 1}, sources={**plan.sources, "c": new})
    loader = loader_of(plan, 8)
    loader.seek(16)
    again = loader_of(continued, 8)
    again.load_state_dict(loader.state_dict())

    assert again.position == 16
    again.load_state_dict(again.state_dict())


def test_rows_with_other_fields_are_not_added(stores, plan):
    packs = ps.Packs(stores[2], 24)
    with pytest.raises(PlanError, match=r'Source "c" is a Packs, whose batches have other fields'):
        plan.continued(8, weights={"c": 1}, sources={"c": packs})
