"""Loops over a run that ends: what the second and the third read, and how a state resumes them.

The oracle is a list of positions, cut into batches one by one. A sample of what is done in full
under the marker `torture`.
"""

import json
import warnings
from itertools import islice
from random import Random

import numpy as np
import pytest
import torch

from penstock.errors import PlanError
from penstock.loader import BatchFormat
from penstock.loader.dataloader import log_fingerprints
from penstock.loader.loader import Loader
from penstock.order.plan import Plan
from penstock.rows.windows import Windows
from penstock.testing import assert_resumable
from penstock.transforms import MaskTokens, Transformed


def samples(loader):
    """The rows that one loop over a loader reads, without those that fill up its last batch."""
    return [
        sample
        for batch in loader
        for sample, at in zip(batch["sample"].tolist(), batch["position"].tolist(), strict=True)
        if at >= 0
    ]


def quiet(loader):
    """The same, of a run that may be over."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This run is over")
        return samples(loader)


WAYS = [
    None,
    {"num_workers": 0},
    {"num_workers": 2, "multiprocessing_context": "fork"},
    {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
]


def way(loader, options):
    return loader if options is None else loader.as_dataloader(**options)


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_three_validations_read_the_same(store, options):
    """Every token once in each; 0 batches in the second and third before this was written."""
    windows = Windows(store, 16, tail="pad")
    loader = Loader(windows, 8, shuffle="none", epochs=1, drop_last=False)
    loops = [[batch["targets"] for batch in way(loader, options)] for _ in range(3)]

    assert [len(loop) for loop in loops] == [-(-len(windows) // 8)] * 3
    for loop in loops[1:]:
        assert all(torch.equal(one, two) for one, two in zip(loops[0], loop, strict=True))
    assert loader.position == 3 * len(windows)
    assert len(way(loader, options)) == len(loops[0])


@pytest.mark.parametrize(
    ("options", "shuffle"),
    [
        *((WAYS[0], shuffle) for shuffle in ("full", "block", "part")),
        # Processes get positions, whatever their order.
        *((options, "full") for options in WAYS[1:3]),
        *(
            pytest.param(options, shuffle, marks=pytest.mark.torture)
            for options in WAYS[1:3]
            for shuffle in ("block", "part")
        ),
    ],
    ids=str,
)
def test_a_shuffled_epoch_follows_in_a_new_order(store, shuffle, options):
    windows = Windows(store, 16)
    loader = Loader(
        windows, 7, shuffle=shuffle, seed=3, epochs=1, drop_last=False, format=BatchFormat(ids=True)
    )
    loops = [samples(way(loader, options)) for _ in range(3)]
    endless = Loader(windows, 30, shuffle=shuffle, seed=3, format=BatchFormat(ids=True))
    expected = samples(islice(endless, len(windows) // 10 + 1))[: 3 * len(windows)]

    assert [row for loop in loops for row in loop] == expected
    assert all(sorted(loop) == list(range(len(windows))) for loop in loops)
    assert loops[0] != loops[1] != loops[2]


def test_a_loop_may_be_several_epochs(numbered):
    loader = Loader(numbered(10), 4, epochs=3, drop_last=False, format=BatchFormat(ids=True))
    epochs = [
        [epoch for batch in loader for epoch in batch["epoch"][batch["position"] >= 0].tolist()]
        for _ in range(2)
    ]

    assert epochs == [[0] * 10 + [1] * 10 + [2] * 10, [3] * 10 + [4] * 10 + [5] * 10]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4, 7, 10])
def test_a_state_between_two_loops_resumes_with_the_next_in_any_batch_size(
    numbered, drop_last, size
):
    """The rows that filled no batch belong to the loop that has ended."""
    loader = Loader(numbered(10), 4, epochs=1, drop_last=drop_last)
    list(loader)
    assert loader.position == loader.state_dict()["position"] == 10
    resumed = Loader(
        numbered(10), size, epochs=1, drop_last=drop_last, format=BatchFormat(ids=True)
    )
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    positions = [at for batch in resumed for at in batch["position"].tolist() if at >= 0]

    assert positions == list(range(10, 10 + (10 // size * size if drop_last else 10)))
    assert resumed.position == 20


def test_a_state_in_the_middle_of_a_loop_resumes_its_rest_and_then_the_next(numbered):
    loader = Loader(numbered(10), 3, epochs=1, drop_last=False, format=BatchFormat(ids=True))
    for _ in loader:
        pass
    next(iter(loader))  # position 13, in the second loop
    resumed = Loader(numbered(10), 2, epochs=1, drop_last=False, format=BatchFormat(ids=True))
    resumed.load_state_dict(loader.state_dict())
    loops = [
        [at for batch in resumed for at in batch["position"].tolist() if at >= 0] for _ in range(2)
    ]

    assert loops == [list(range(13, 20)), list(range(20, 30))]
    assert len(resumed) == 5


def test_a_loop_that_is_left_continues_and_its_last_batch_is_not_lost(numbered):
    loader = Loader(numbered(10), 4, epochs=1, format=BatchFormat(ids=True), seed=5)
    first = [next(iter(loader))["position"].tolist() for _ in range(5)]

    # Two full batches each; the rows that fill no batch are left out when the next loop begins.
    assert first == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [10, 11, 12, 13],
        [14, 15, 16, 17],
        [20, 21, 22, 23],
    ]


def test_some_steps_without_shuffling_start_over(numbered):
    loader = Loader(numbered(50), 4, steps=3, shuffle="none", format=BatchFormat(ids=True))
    loops = [samples(loader) for _ in range(3)]

    assert loops == [list(range(12))] * 3
    assert len(loader) == 3
    state = loader.state_dict()
    longer = Loader(numbered(50), 4, steps=5, shuffle="none", format=BatchFormat(ids=True))
    longer.load_state_dict(state)  # a run that is given more steps continues
    assert samples(longer) == list(range(12, 20))
    again = Loader(numbered(50), 4, steps=3, shuffle="none", format=BatchFormat(ids=True))
    again.load_state_dict(state)
    assert samples(again) == list(range(12))


@pytest.mark.parametrize("options", WAYS[:3], ids=str)
def test_a_shuffled_run_of_some_steps_is_over_with_one_warning(windows, options):
    loader = Loader(windows, 4, steps=3)
    assert len(list(way(loader, options))) == 3
    with pytest.warns(
        UserWarning, match=r"over: its steps=3 were read.*loader\.seek\(0\)"
    ) as warned:
        assert [list(way(loader, options)) for _ in range(3)] == [[], [], []]

    # From 3.12 on, Python also warns of each fork.
    (ours,) = (each for each in warned if each.category is UserWarning)
    assert ours.filename == __file__
    assert loader.position == 12
    resumed = Loader(windows, 4, steps=3)
    resumed.load_state_dict(loader.state_dict())
    with pytest.warns(UserWarning, match="This run is over"):
        assert list(resumed) == []
    longer = Loader(windows, 4, steps=5)
    longer.load_state_dict(loader.state_dict())
    assert len(list(longer)) == 2


def test_a_mixture_that_reaches_its_epochs_is_over_or_starts_over(numbered):
    for shuffle, expected in (("full", [24, 0]), ("none", [24, 24])):
        rows = {"a": numbered(12, name="a"), "b": numbered(12, name="b")}
        plan = Plan(rows, weights={"a": 1, "b": 1}, max_epochs=1, shuffle=shuffle)
        loader = Loader(plan, 4, format=BatchFormat(ids=True))
        assert [len(quiet(loader)) for _ in range(2)] == expected


@pytest.fixture(scope="module")
def windows(store):
    return Windows(store, 16)


def test_several_unshuffled_sources_repeat_their_order(numbered):
    plan = Plan({"a": numbered(7, name="a"), "b": numbered(5, name="b")}, shuffle="none")
    loader = Loader(plan, 4, epochs=1, drop_last=False, format=BatchFormat(ids=True))
    loops = [
        [tuple(row) for b in loader for row in torch.stack([b["source"], b["sample"]], 1).tolist()]
        for _ in range(3)
    ]

    assert loops[0] == loops[1] == loops[2]


def test_a_transform_changes_with_the_epoch_and_seek_repeats_it(windows):
    """The rows of an unshuffled second loop are the same; what a transform draws is not."""
    rows = Transformed(windows, MaskTokens(mask_id=300, vocab_size=301, rate=0.5), seed=2)
    loader = Loader(
        rows, 8, shuffle="none", epochs=1, drop_last=False, format=BatchFormat(ids=True)
    )
    one, two = list(loader), list(loader)
    loader.seek(0)

    assert all(torch.equal(a["sample"], b["sample"]) for a, b in zip(one, two, strict=True))
    assert not all(torch.equal(a["inputs"], b["inputs"]) for a, b in zip(one, two, strict=True))
    assert all(torch.equal(a["inputs"], b["inputs"]) for a, b in zip(one, loader, strict=True))


def test_batch_sizes_by_position_hold_in_later_loops(numbered):
    """The sizes are of positions of the whole run; a loop that cannot fill one batch is refused."""
    loader = Loader(
        numbered(20),
        global_batch_size={0: 2, 24: 8, 40: 32},
        epochs=1,
        format=BatchFormat(ids=True),
    )
    shapes = [[len(batch["position"]) for batch in loader] for _ in range(2)]

    assert shapes == [[2] * 10, [2, 2, 8, 8]]
    with pytest.raises(PlanError, match=r"has 20 rows, and its first batch .* takes 32"):
        next(iter(loader))


def test_a_longer_run_has_states_of_later_loops(numbered):
    """Positions are those of the whole run, whatever `epochs=` says."""
    loader = Loader(numbered(10), 5, epochs=1, format=BatchFormat(ids=True))
    for _ in range(3):
        list(loader)
    longer = Loader(numbered(10), 5, epochs=2, format=BatchFormat(ids=True))
    longer.load_state_dict(loader.state_dict())
    first, second = ([b["position"].tolist() for b in longer] for _ in range(2))

    assert first == [list(range(30, 35)), list(range(35, 40))]  # the rest of epochs 2 and 3
    assert len(second) == 4


def test_the_log_of_fingerprints_counts_steps_of_a_loop_and_positions_of_the_run(
    numbered, tmp_path
):
    loader = Loader(numbered(10), 4, epochs=1)
    list(log_fingerprints(loader, tmp_path / "log"))
    list(log_fingerprints(loader, tmp_path / "log"))
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]

    assert [(each["step"], each["position"]) for each in lines] == [
        (0, 4),
        (1, 8),
        (0, 14),
        (1, 18),
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 1},
        {"epochs": 1, "drop_last": False},
        {"epochs": 2, "shuffle": "block", "drop_last": False},
        {"epochs": 1, "shuffle": "none"},
        {"steps": 4, "shuffle": "none"},
        {"steps": 4},
    ],
    ids=str,
)
def test_two_loops_are_resumable_at_every_step(numbered, settings):
    def make(rank, world_size, prefetch):
        topology = {"rank": rank, "world_size": world_size, "prefetch": prefetch}
        return Loader(
            numbered(19),
            global_batch_size=6,
            seed=2,
            format=BatchFormat(ids=True),
            **topology,
            **settings,
        )

    assert_resumable(make, world_sizes=(1, 2, 3))


class Naive:
    """A run as a list of positions: what each loop reads, and where the run is after it."""

    def __init__(self, num_rows, size, *, epochs, steps, shuffled, drop_last):
        self.pass_rows = num_rows * epochs if epochs else None
        self.end = None if epochs else steps * size
        self.size, self.shuffled, self.drop_last = size, shuffled, drop_last
        self.position = 0

    def loop(self):
        """The batches of a loop from the position on."""
        found = self.batches(self.position)
        if found:
            return found
        if self.pass_rows:
            self.position = (self.position // self.pass_rows + 1) * self.pass_rows
        elif not self.shuffled:
            self.position = 0
        return self.batches(self.position)

    def batches(self, position):
        end = self.end
        if self.pass_rows:
            end = position - position % self.pass_rows + self.pass_rows
        positions = list(range(position, end))
        cut = [positions[at : at + self.size] for at in range(0, len(positions), self.size)]
        if self.drop_last and cut and len(cut[-1]) < self.size:
            cut.pop()
        return cut

    def finish(self):
        if self.pass_rows:
            self.position = -(-self.position // self.pass_rows) * self.pass_rows


def drawn(random):
    """A run of some kind."""
    num_rows = random.randint(1, 40)
    epochs = random.choice([None, 1, 1, 2, 3])
    shuffle = random.choice(["full", "none", "none", "block"])
    return {
        "num_rows": num_rows,
        "epochs": epochs,
        "steps": None if epochs else random.randint(1, 9),
        "shuffle": shuffle,
        "drop_last": random.random() < 0.5,
        "seed": random.randrange(1_000),
    }


def topology(random, run):
    """Ranks and rows a step that leave the run at least one step."""
    while True:
        world_size = random.choice([1, 1, 2, 3])
        size = world_size * random.randint(1, 9)
        if not (run["epochs"] and run["drop_last"] and size > run["num_rows"] * run["epochs"]):
            return world_size, size


def made(numbered, run, world_size, size, prefetch):
    chosen = {name: run[name] for name in ("epochs", "steps", "shuffle", "drop_last", "seed")}
    return [
        Loader(
            numbered(run["num_rows"]),
            global_batch_size=size,
            rank=rank,
            world_size=world_size,
            prefetch=prefetch,
            format=BatchFormat(ids=True),
            **chosen,
        )
        for rank in range(world_size)
    ]


def check_run(numbered, seed):
    """One run: loops that are ended, left, stopped and resumed elsewhere, against the list."""
    random = Random(seed)
    run = drawn(random)
    world_size, size = topology(random, run)
    ranks = made(numbered, run, world_size, size, random.choice([0, 0, 0, 1]))
    naive = Naive(
        *(run["num_rows"], size),
        epochs=run["epochs"],
        steps=run["steps"],
        shuffled=run["shuffle"] != "none",
        drop_last=run["drop_last"],
    )
    plan = Plan(numbered(run["num_rows"]), seed=run["seed"], shuffle=run["shuffle"])
    for _ in range(random.randint(2, 6)):
        before, expected = naive.position, naive.loop()
        taken = random.choice([len(expected), len(expected), random.randint(0, len(expected))])
        to_the_end = random.random() < 0.7 or taken < len(expected)
        found = loops(ranks, taken if taken < len(expected) else None if to_the_end else taken)
        assert len(found) == taken, (seed, run)
        for batch, right in zip(found, expected, strict=False):
            filled = [*right, *[-1] * (size - len(right))]
            assert batch["position"].tolist() == filled, (seed, run)
            _, epochs, rows = plan.locate(np.array(right))
            assert batch["sample"][: len(right)].tolist() == rows.tolist()
            assert batch["epoch"][: len(right)].tolist() == epochs.tolist()
            assert (batch["targets"][len(right) :] == -100).all()
            naive.position = right[-1] + 1
        if not taken and expected:
            naive.position = before  # nothing was asked for, so no loop has begun
        if taken == len(expected) and to_the_end:
            naive.finish()
        states = {json.dumps(loader.state_dict()) for loader in ranks}
        assert [json.loads(state)["position"] for state in states] == [naive.position], (seed, run)
        if random.random() < 0.5:
            # With steps= the batch size says how long the run is, so it stays.
            other = topology(random, run)
            if run["steps"]:
                fitting = [ranks for ranks in (1, 2, 3) if size % ranks == 0]
                other = (random.choice(fitting), size)
            world_size, size = other
            naive.size = size
            ranks = made(numbered, run, world_size, size, random.choice([0, 1]))
            for loader in ranks:
                loader.load_state_dict(json.loads(next(iter(states))))


def loops(ranks, steps):
    """One loop on all ranks, to its end or so many steps; rows of all ranks joined."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This run is over")
        taken = [list(loader if steps is None else islice(loader, steps)) for loader in ranks]
    return [
        {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        for batches in zip(*taken, strict=True)
    ]


def test_random_runs_read_what_a_list_of_positions_says(numbered):
    for seed in range(50):
        check_run(numbered, seed)


@pytest.mark.torture
@pytest.mark.timeout(3_600)
def test_very_many_random_runs_read_what_a_list_of_positions_says(numbered):
    for seed in range(1_000, 21_000):
        check_run(numbered, seed)
