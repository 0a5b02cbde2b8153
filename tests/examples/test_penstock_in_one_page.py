"""The naive version and penstock have the same tokens, rows, order, batches and resume."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import penstock as ps
from penstock.digest import derive_key
from penstock.order.permute import permute
from penstock.rows.packing import pack

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "penstock_in_one_page.py"
LENGTH = 24


@pytest.fixture(scope="module")
def page():
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def lines(seed, sizes):
    """Return a line of each size, in bytes; some are blank."""
    generator = np.random.default_rng(seed)
    return b"\n".join(
        generator.choice(list(b"aeiou \t"), size).astype("u1").tobytes() for size in sizes
    )


MANY = np.random.default_rng(5).lognormal(3, 1, 150).astype(int)
TEXTS = {
    "many sizes": lines(1, MANY),
    "short": lines(2, MANY % 9),
    "long": lines(3, [0, 700, 3, LENGTH, 2 * LENGTH - 2, 1, 1]),
    "equal": lines(4, [LENGTH - 1] * 20 + [7] * 31 + [2] * 40),
    "other bytes": "é 你好 😀\r\n\n \t\r\nlast line".encode() * 9,
}


@pytest.fixture(scope="module")
def both(page, tmp_path_factory):
    """Return a store, and the tokens and bounds of the naive one, of the text called `name`."""
    directory, found = tmp_path_factory.mktemp("both"), {}

    def both(name):
        if name not in found:
            place = directory / name
            place.mkdir()
            (place / "a.txt").write_bytes(TEXTS[name])
            page.build(page.tokenize(TEXTS[name]), place / "naive")
            store = ps.build(place / "a.txt", place / "s", tokenizer="bytes", documents="lines")
            found[name] = store, *page.read(place / "naive")
        return found[name]

    return both


@pytest.fixture
def plans(page, both):
    """Return a plan of both kinds, over rows of the texts called `names`."""

    def plans(kind, names, weights, seed):
        real, naive = {}, []
        for name in names:
            store, tokens, bounds = both(name)
            real[name] = getattr(ps, kind)(store, LENGTH)
            rows = page.windows(len(tokens), LENGTH)
            naive.append((name, tokens, rows if kind == "Windows" else page.packs(bounds, LENGTH)))
        weighted = dict(zip(names, weights, strict=True))
        plan = ps.Plan(real, weights=weighted, seed=seed)
        return plan, page.Plan(naive, weights, LENGTH, seed)

    return plans


def assert_equal(batch, arrays):
    inputs, targets = arrays
    assert batch["inputs"].tolist() == inputs.tolist()
    assert batch["targets"].tolist() == targets.tolist()


@pytest.mark.filterwarnings("ignore:.*Windows line ends")
@pytest.mark.parametrize("name", TEXTS)
def test_stores_have_the_same_tokens_and_documents(both, name):
    store, tokens, bounds = both(name)

    assert [document.tolist() for document in store] == [
        document.tolist() for document in np.split(tokens, bounds)[:-1]
    ]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kind", ["Windows", "Packs"])
def test_rows_are_the_same(plans, page, name, kind):
    plan, naive = plans(kind, [name], [1], seed=0)
    (rows,), (_, _, naive_rows) = plan.sources.values(), naive.sources[0]

    spans = [[(at, at + size) for at, size in rows.spans(row)] for row in range(len(rows))]
    assert naive_rows == spans


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("length", [2, 3, 17, 100])
def test_packs_of_random_documents_are_the_same(page, seed, length):
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, [5, 20, 60, 300][seed % 4], 120)
    bounds = np.cumsum(sizes)
    counts, starts, pieces = (index := pack(bounds, length)).spans(np.arange(index.num_rows))
    spans = [(start, start + size) for start, size in zip(starts, pieces, strict=True)]
    rows = np.split(spans, np.cumsum(counts)[:-1])

    assert page.packs(bounds.tolist(), length) == [[*map(tuple, row.tolist())] for row in rows]


@pytest.mark.parametrize("n", [1, 2, 100, 4_096, 4_097, 5_000, 10**6 + 3, 2**40])
def test_shuffles_are_the_same(page, n):
    key = page.derive_key("shuffle", 3, "é", n)
    positions = sorted({0, n - 1, n // 2, n // 3})

    assert key == derive_key("shuffle", 3, "é", n)
    assert [page.permute(each, n, key) for each in positions] == permute(positions, n, key).tolist()


MIXTURES = [([1.0, 1.0], 0), ([0.7, 0.3], 17), ([0.1, 0.2, 0.7], 2), ([5, 1, 1], -3), ([3], 4)]


@pytest.mark.parametrize(("weights", "seed"), MIXTURES)
@pytest.mark.parametrize("kind", ["Windows", "Packs"])
def test_orders_are_the_same(plans, page, kind, weights, seed):
    plan, naive = plans(kind, list(TEXTS)[: len(weights)], weights, seed)
    positions = [*range(200), 10**6 + 1, 10**15]
    located = np.stack(plan.locate(positions), axis=1)

    assert [page.locate(naive, each) for each in positions] == [*map(tuple, located.tolist())]
    assert len(set(located[:, 1])) > 2  # epochs


@pytest.mark.parametrize("kind", ["Windows", "Packs"])
def test_batches_of_every_rank_and_resumed_runs_are_the_same(plans, page, kind):
    plan, naive = plans(kind, ["many sizes", "long"], [0.7, 0.3], seed=17)

    def loader(rank, world):
        return ps.Loader(plan, global_batch_size=12, rank=rank, world_size=world, prefetch=0)

    before = loader(1, 2)
    for step, batch in zip(range(3), before, strict=False):
        assert_equal(batch, page.batch(naive, 12 * step, 12, rank=1, world=2))
    position = page.resume(naive, page.save(naive, 36))
    assert before.state_dict()["position"] == position
    for rank in range(4):
        after = loader(rank, 4)
        after.load_state_dict(before.state_dict())
        assert_equal(next(iter(after)), page.batch(naive, position, 12, rank, world=4))


def test_a_state_of_another_plan_and_a_damaged_store_are_refused(page, plans, tmp_path):
    _, naive = plans("Windows", ["short"], [1], seed=1)
    with pytest.raises(ValueError, match="another plan"):
        page.resume(naive._replace(seed=2), page.save(naive, 0))

    page.build([[1, 256]], tmp_path / "store")
    array = tmp_path / "store" / "tokens.npy"
    array.write_bytes(array.read_bytes()[:-1] + b"\0")
    with pytest.raises(ValueError, match="is damaged"):
        page.read(tmp_path / "store")


def test_it_runs_imports_no_penstock_and_fits_on_its_page(run_here):
    done = run_here(SCRIPT)

    assert done.stdout.splitlines()[-1] == "rank 1 of 2 resumes there with rows 2 and 3 of 4: True"
    assert "import penstock" not in SCRIPT.read_text(encoding="utf-8")
    size = runpy.run_path(str(SCRIPT.parent.parent / "tests" / "size.py"))
    assert size["measure_file"](SCRIPT)[0] <= 150
