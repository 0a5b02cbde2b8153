"""The rows of a step with their documents and text; what objects say about themselves."""

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.loader import BatchFormat
from penstock.transforms import TokenDropout, Transformed


@pytest.fixture(params=["windows", "packs", "documents", "left", "transformed"])
def loader(request, store):
    rows = {
        "windows": lambda: ps.Windows(store, 16),
        "packs": lambda: ps.Packs(store, 32),
        "documents": lambda: ps.Documents(store, 32),
        "left": lambda: ps.Documents(store, 32, side="left"),
        "transformed": lambda: Transformed(ps.Windows(store, 16), TokenDropout(0.5)),
    }[request.param]()
    return ps.Loader(rows, 4, seed=3, epochs=2, drop_last=False, format=BatchFormat(ids=True))


def test_loader_explain_gives_the_rows_of_a_step_with_their_text(loader):
    for step in (0, 5, len(loader) - 1):
        batch, explained = loader[step], loader.explain(step)

        assert explained.step == step
        # The last batch of a run is padded with rows that are none.
        assert len(explained.rows) == int((batch["targets"] != -100).any(dim=1).sum())
        for number, row in enumerate(explained.rows):
            assert row.sample == int(batch["sample"][number])
            inputs = batch["inputs"][number].tolist()
            size = min(len(row.tokens), len(inputs))
            assert any(
                inputs[at : at + size] == row.tokens[:size].tolist()
                for at in (0, len(inputs) - size)
            )
            assert row.text == ps.load_tokenizer("bytes").decode(row.tokens)
            assert row.origins == loader.plan.origins(row.position)
    assert loader.position == 0


def test_an_explanation_as_text_names_positions_documents_files_and_the_text(store):
    loader = ps.Loader(ps.Windows(store, 16), 2, shuffle="none", steps=10)
    row = loader.explain(1).rows[0]

    assert (row.position, row.source, row.epoch, row.sample) == (2, "data", 0, 2)
    lines = str(loader.explain(1)).splitlines()
    assert lines[:2] == ["step 1, 2 rows", "position 2: row 2 of data, epoch 0"]
    assert lines[2] == f"  {row.origins[0]}"
    assert lines[1 + 1 + len(row.origins)] == f"  {row.text!r}"
    assert repr(loader.explain(1)) == str(loader.explain(1))
    assert loader.explain(-1).step == 9
    with pytest.raises(IndexError, match="step 10 does not exist: this run has 10 steps"):
        loader.explain(10)


def test_long_rows_are_shortened_as_text_only(store):
    loader = ps.Loader(ps.Windows(store, 1_000), 1, shuffle="none")
    explained = loader.explain(0)

    assert len(explained.rows[0].text.encode()) > 1_000 - 100
    assert str(explained).endswith(" …")
    assert f"  … and {len(explained.rows[0].origins) - 5:,} more documents" in str(explained)


def test_each_rank_explains_its_rows(store):
    one = ps.Loader(ps.Windows(store, 16), 4, steps=3)
    found = [ps.Loader(one.plan, 2, rank=r, world_size=2, steps=3).explain(1) for r in (0, 1)]
    positions = [row.position for each in found for row in each.rows]

    assert sorted(positions) == [row.position for row in one.explain(1).rows]


def test_rows_without_a_tokenizer_are_explained_by_their_ids(tmp_path, numbered):
    np.save(tmp_path / "ids.npy", np.arange(97, 97 + 20, dtype=np.uint16))
    loader = ps.Loader(ps.Windows(tmp_path / "ids.npy", 4), 1, shuffle="none")

    (row,) = loader.explain(0).rows
    assert (row.tokens.tolist(), row.text, row.origins) == ([97, 98, 99, 100, 101], None, [])
    assert str(loader.explain(0)).endswith("\n  no tokenizer is known: ids 97 98 99 100 101")
    assert loader.explain(0, tokenizer="bytes").rows[0].text == "abcde"
    (own,) = ps.Loader(numbered(8), 1, shuffle="none").explain(3).rows
    assert (own.tokens.tolist(), own.text, own.origins) == ([3, 3, 3], None, [])


def test_a_streamed_run_is_explained_too(tmp_path):
    with ps.stream(ps.Texts(["abc " * 50] * 20), tmp_path / "s", tokenizer="bytes") as streamed:
        loader = ps.Loader(ps.Windows(streamed, 16), 2, epochs=1)
        found = loader.explain(3)
        with pytest.raises(IndexError, match="step 1,000,000 does not exist: this run has"):
            loader.explain(1_000_000)

    whole = ps.Loader(ps.Windows(tmp_path / "s", 16), 2, epochs=1, shuffle="part")
    assert str(found) == str(whole.explain(3))


def test_repr_is_one_line_that_says_what_an_object_holds_and_where_it_is(store):
    windows = ps.Windows(store, 16)
    place = repr(str(store.path))
    plan = ps.Plan({"web": windows, "code": ps.Packs(store, 32)}, weights={"web": 1, "code": 2})
    rows = f"web: {len(windows):,} rows, code: {plan.sizes[1]:,} rows"

    assert repr(store).startswith(f"TokenStore({place}: 120 documents, ")
    assert repr(windows).startswith(f"Windows({place}: {len(windows):,} rows of 16 tokens")
    assert repr(ps.Windows([store, store], 16)).startswith(f"Windows({place} and 1 more: ")
    assert repr(plan) == f"Plan({rows}; weighted, seed 0, shuffle full)"
    assert repr(ps.Plan(windows, seed=3, shuffle="block")) == (
        f"Plan(data: {len(windows):,} rows; each once per epoch, seed 3, shuffle block)"
    )
    many = ps.Plan({str(number): windows for number in range(9)})
    assert "5: " not in repr(many)
    assert " and 4 more; " in repr(many)
    assert repr(ps.load_tokenizer("bytes")).startswith("Tokenizer('bytes': 257 ids, digest ")


def test_repr_of_a_loader_says_where_it_is(store, numbered):
    plan = ps.Plan(ps.Windows(store, 16))
    loader = ps.Loader(plan, 2, rank=1, world_size=2, steps=9)
    for _ in zip(range(3), loader, strict=False):
        pass

    assert repr(loader) == (
        f"Loader({plan!r}; global batches of 4 rows, rank 1 of 2, cpu; at step 3 of 9, position 12)"
    )
    assert repr(ps.Loader(numbered(10), 2)).endswith("; at step 0, position 0)")
    growing = ps.Loader(numbered(100), global_batch_size={0: 2, 8: 4})
    assert "; global batches of a varying number of rows, " in repr(growing)


def test_notebooks_show_a_tree_of_a_plan_and_a_table_of_a_store(store, tmp_path):
    plan = ps.Plan({"<b>web</b>": ps.Windows(store, 16)})
    odd = ps.build(ps.Texts(["a b"]), tmp_path / "<i>", tokenizer="bytes")

    assert plan._repr_html_().startswith(f"<pre>plan {plan.digest[:8]}, seed 0, shuffle full")
    assert "&lt;b&gt;web&lt;/b&gt;" in plan._repr_html_()
    assert "<b>" not in plan._repr_html_()
    html = odd._repr_html_()
    assert html.startswith("<table><tr><th>store</th><td>")
    assert "&lt;i&gt;" in html
    assert "<tr><th>documents</th><td>1</td></tr>" in html
    assert "<i>" not in html


def test_a_loader_reads_as_before_after_it_was_explained(store):
    torch.testing.assert_close(
        *(_first(ps.Loader(ps.Windows(store, 16), 2), explain=each) for each in (True, False))
    )


def _first(loader, *, explain):
    if explain:
        loader.explain(2)
    return next(iter(loader))["inputs"]
