"""Small stores of one tokenizer: lines in many parts, a document in pieces, conversations."""

import json

import numpy as np
import pytest

import penstock as ps
from penstock.inspect import RunSteps
from penstock.order.steps import Steps
from penstock.sources.slices import cut

LENGTH = 24


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """The folder of the inputs."""
    folder = tmp_path_factory.mktemp("texts")
    lines = [f"Line {n}: café " + "the fox jumps. " * (n * 7 % 5) for n in range(60)]
    (folder / "lines.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "more.txt").write_text("\n".join(lines[::-1][:40]), encoding="utf-8")
    (folder / "whole.txt").write_text("".join(f"Verse {n}.\n" for n in range(300)))
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n} + 1?"},
                {"role": "assistant", "content": f"It is {n + 1}, of course."},
            ]
        }
        for n in range(40)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats))
    return folder


@pytest.fixture(scope="session")
def stores(texts, tmp_path_factory, gpt2_chat):
    """Stores by name, all of one tokenizer, in parts of a few hundred bytes."""
    folder = tmp_path_factory.mktemp("stores")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cut.__kwdefaults__, "slice_bytes", 700)
        made = {
            "lines": ps.build(
                [texts / "lines.txt", texts / "more.txt"],
                folder / "lines",
                tokenizer=gpt2_chat,
                documents="lines",
            ),
            "whole": ps.build(texts / "whole.txt", folder / "whole", tokenizer=gpt2_chat),
            "chats": ps.build(
                texts / "chats.jsonl", folder / "chats", tokenizer=gpt2_chat, chat="chatml"
            ),
        }
    assert all(len(store.manifest.parts) > 2 for store in made.values())
    return made


@pytest.fixture(scope="session")
def make_rows():
    """Functions that make rows of a store, by name."""
    return {
        "windows": lambda store: ps.Windows(store, LENGTH),
        "overlapping": lambda store: ps.Windows(store, LENGTH, stride=7, tail="pad"),
        "gaps": lambda store: ps.Windows(store, LENGTH, stride=40),
        "packs": lambda store: ps.Packs(store, LENGTH),
        "documents": lambda store: ps.Documents(store, LENGTH, overflow="split"),
        "cut": lambda store: ps.Documents(store, LENGTH, side="left"),
    }


@pytest.fixture(scope="session")
def random_run(stores, make_rows):
    """A run by its seed: the plan, the rows of a step by position, and at most `most` steps."""

    def random_run(seed, most):
        random = np.random.default_rng(seed)
        plan, sizes = random_plan(random, stores, make_rows), random_sizes(random)
        steps = Steps(sizes)
        total = min(most, steps.count(min(plan.end, 2**40), drop_last=True))
        return plan, sizes, RunSteps(steps, total=total)

    return random_run


def random_plan(random, stores, make_rows):
    """A plan of one to three sources: rows of a fixed width, weights, schedules, caps, shuffles."""
    names = random.permutation(list(stores))[: random.integers(1, 4)].tolist()
    kinds = ["windows", "overlapping", "packs", "gaps"]
    sources = {f"the {name}": make_rows[random.choice(kinds)](stores[name]) for name in names}
    options = {"seed": int(random.integers(1000))}
    options["shuffle"] = str(random.choice(["full", "block", "part", "none"]))
    keys = list(sources)

    def weights():
        return {key: int(random.integers(1, 9)) for key in keys}

    if random.random() < 0.6:
        options["weights"] = weights()
        if random.random() < 0.5:
            starts = random.choice(200, size=random.integers(1, 4), replace=False) + 1
            options["schedule"] = {int(start): weights() for start in sorted(starts)}
        if random.random() < 0.3:
            options["max_epochs"] = float(random.integers(2, 6))
    return ps.Plan(sources, **options)


def random_sizes(random):
    """Rows of a step by position."""
    sizes = {0: 4 * int(random.integers(1, 5))}
    if random.random() < 0.4:
        sizes[int(random.integers(1, 60))] = 4 * int(random.integers(1, 5))
    return sizes


@pytest.fixture(scope="session")
def continued_run(stores, make_rows):
    """A run by its seed whose weights and sources change up to four times.

    Also returns the plan before each change with its position.
    """

    def continued_run(seed, most):
        random = np.random.default_rng(seed)
        plan, sizes = random_plan(random, stores, make_rows), random_sizes(random)
        history, position = [], 0
        for _ in range(random.integers(1, 5)):
            position += int(random.integers(0, 50)) * int(random.random() < 0.8)
            if position < plan.end:
                history.append((plan, position))
                plan = plan.continued(position, **random_change(random, plan, stores, make_rows))
        steps = Steps(sizes)
        total = min(most, steps.count(min(plan.end, 2**40), drop_last=True))
        return plan, sizes, RunSteps(steps, total=total), history

    return continued_run


def random_change(random, plan, stores, make_rows):
    """Arguments of `Plan.continued`: weights, and often a new source."""
    sources = {name: each for name, each in plan.sources.items() if random.random() < 0.8}
    if random.random() < 0.5 or not sources:
        kinds = ["windows", "overlapping", "gaps"]
        kinds += ["packs"] * any(rows.whole_documents for rows in plan.sources.values())
        rows = make_rows[random.choice(kinds)](stores[random.choice(list(stores))])
        sources[f"added {len(plan.names)}"] = rows
    weights = {name: int(random.integers(1, 9)) for name in sources}
    return {"weights": weights, "sources": sources}
