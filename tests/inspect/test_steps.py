"""The rows of a step, and the rows of each source, are those that a run reads."""

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.errors import PlanError
from penstock.inspect import RunSteps, inspect_step, source_counts
from penstock.inspect.forecast import _intervals
from penstock.loader import BatchFormat
from penstock.order.steps import Steps
from penstock.transforms import MaskTokens, TokenDropout, Transformed

LENGTH = 24  # of the rows of `make_rows`


def check_run(plan, sizes, steps):
    """The counts and tokens of the steps of a run are those that a loader delivers."""
    loader = ps.Loader(
        plan, global_batch_size=sizes, rank=0, world_size=1, format=BatchFormat(ids=True)
    )
    total = dict.fromkeys(plan.names, 0)
    counted = source_counts(plan, steps, 1, steps.total) if steps.total else []
    for number, batch in zip(range(1, (steps.total or 0) + 1), loader, strict=False):
        delivered = np.bincount(batch["source"].numpy(), minlength=len(plan.names)).tolist()
        assert counted[number - 1] == dict(zip(plan.names, delivered, strict=True))
        total = {name: total[name] + counted[number - 1][name] for name in plan.names}
        if number % 5 == 1:
            check_step(plan, steps, number, batch)
    intervals = _intervals(plan, steps)
    assert total == {name: sum(each.rows[name] for each in intervals) for name in plan.names}
    for each in intervals:
        inside = counted[each.first_step - 1 : each.last_step]
        assert each.rows == {name: sum(one[name] for one in inside) for name in plan.names}
    return steps.total or 0


def check_step(plan, steps, number, batch):
    """`inspect_step` shows the inputs and targets of a batch, and where each row is from."""
    found = inspect_step(plan, steps, number)
    assert len(found.rows) == len(batch["inputs"])
    for row, inputs, targets, sample in zip(
        found.rows, batch["inputs"], batch["targets"], batch["sample"], strict=True
    ):
        size = min(len(row.tokens), len(inputs))
        assert inputs[:size].tolist() == row.tokens[:size]
        assert int(sample) == row.sample
        trained = [
            (each.column + offset, token)
            for each in row.segments
            for offset, token in enumerate(each.tokens)
            if each.trained
        ]
        # Target i is token i + 1 of the row.
        expected = [(i + 1, int(t)) for i, t in enumerate(targets.tolist()) if t != -100]
        assert trained == expected


def test_random_runs_read_what_was_predicted(random_run):
    assert sum(check_run(*random_run(seed, 12)) for seed in range(12)) > 120


@pytest.mark.torture
def test_many_random_runs_read_what_was_predicted(random_run, figure):
    steps = sum(check_run(*random_run(seed, 40)) for seed in range(1_000, 1_400))
    figure(f"400 random runs, {steps:,} steps: rows of each source and tokens as predicted")


def test_continued_runs_read_what_was_predicted(continued_run):
    assert sum(check_run(*continued_run(seed, 25)[:3]) for seed in range(10)) > 120


@pytest.mark.torture
def test_many_continued_runs_read_what_was_predicted(continued_run, figure):
    steps = sum(check_run(*continued_run(seed, 40)[:3]) for seed in range(2_000, 2_200))
    figure(f"200 continued runs, {steps:,} steps: rows of each source and tokens as predicted")


def test_the_text_of_a_row_has_the_borders_of_documents_and_the_loss_mask(stores, gpt2_chat):
    plan = ps.Plan(ps.Packs(stores["chats"], 64), shuffle="none")
    steps = RunSteps(Steps(2), total=3)
    row = inspect_step(plan, steps, 1).rows[0]

    assert row.documents[0].file.endswith("chats.jsonl")
    first = [each for each in row.segments if each.document == 0]
    assert [each.trained for each in first] == [False, True, False]
    assert "What is 0 + 1?" in first[0].text
    assert "It is 1, of course." in first[1].text
    assert row.num_trained == sum(len(each.tokens) for each in row.segments if each.trained)
    joined = "".join(each.text for each in row.segments)
    assert joined == gpt2_chat.decode(row.tokens)


def test_tokenizing_the_raw_record_gives_the_stored_ids(stores, texts, gpt2_chat):
    plan = ps.Plan(ps.Windows(stores["lines"], LENGTH), seed=3)
    steps = RunSteps(Steps(4), total=9)
    checked = 0
    for step in (1, 5, 9):
        for row in inspect_step(plan, steps, step).rows:
            for each in row.documents:
                raw = (texts / each.file).read_bytes()[each.record :].split(b"\n")[0]
                ids = [*gpt2_chat.encode(raw).tolist(), gpt2_chat.eos_id]
                stop = each.first_token + each.num_tokens
                stored = stores["lines"].document(each.document).tolist()
                assert stored == ids
                assert all(token in row.tokens for token in ids[each.first_token : stop])
                checked += 1
    assert checked > 20


def test_ranks_have_equal_shares_of_a_step(stores):
    plan = ps.Plan(ps.Windows(stores["lines"], LENGTH))
    steps = RunSteps(Steps(8), total=3)
    whole = inspect_step(plan, steps, 2)
    shares = [inspect_step(plan, steps, 2, rank=rank, world_size=4) for rank in range(4)]

    assert [row for each in shares for row in each.rows] == list(whole.rows)
    for rank, each in enumerate(shares):
        loader = ps.Loader(plan, 2, rank=rank, world_size=4)
        inputs = [row.tokens[:-1] for row in each.rows]
        assert torch.equal(loader[1]["inputs"], torch.tensor(inputs))
    with pytest.raises(PlanError, match=r"8 rows cannot be divided equally over 3 ranks"):
        inspect_step(plan, steps, 2, rank=0, world_size=3)
    with pytest.raises(PlanError, match="rank=4 does not exist: with world_size=4, the last is 3"):
        inspect_step(plan, steps, 2, rank=4, world_size=4)


def test_rows_of_a_transform_are_shown_as_they_are_trained_on(stores, gpt2_chat):
    windows = ps.Windows(stores["lines"], LENGTH)
    dropped = ps.Plan(Transformed(windows, TokenDropout(0.5)), seed=1)
    (row,) = inspect_step(dropped, RunSteps(Steps(1)), 3).rows
    assert row.tokens[:-1] == ps.Loader(dropped, 1)[2]["inputs"][0].tolist()
    mask = MaskTokens(mask_id=gpt2_chat.eos_id, vocab_size=gpt2_chat.vocab_size)
    masked = ps.Plan(Transformed(windows, mask), seed=1)
    (row,) = inspect_step(masked, RunSteps(Steps(1)), 3).rows
    labels = ps.Loader(masked, 1, format="hf")[2]["labels"][0]
    assert row.num_trained == int((labels != -100).sum()) > 0


def test_a_store_whose_tokenizer_is_not_known_is_shown_by_its_ids(tmp_path):
    class Own:
        vocab_size = 300
        eos_token_id = 0

        def encode(self, text):
            return [each + 1 for each in text.encode()]

    store = ps.build(ps.Texts(["some text " * 9]), tmp_path / "s", tokenizer=Own())
    (row,) = inspect_step(ps.Plan(ps.Windows(store, 8)), RunSteps(Steps(1)), 1).rows

    assert all(each.text is None for each in row.segments)
    assert len(row.tokens) == 9


def test_steps_that_a_run_does_not_have_are_refused_in_words(stores):
    plan = ps.Plan(ps.Windows(stores["lines"], LENGTH))

    with pytest.raises(PlanError, match=r"^There is no step 0: the first step of a run is 1\.$"):
        inspect_step(plan, RunSteps(Steps(8), total=3), 0)
    with pytest.raises(PlanError, match=r"Step 4 is after the end of this run: its last step is 3"):
        inspect_step(plan, RunSteps(Steps(8), total=3), 4)
    with pytest.raises(PlanError, match=r"Step 9 is after the end of the data, which has 60 rows"):
        inspect_step(plan, RunSteps(Steps(8), limit=60), 9)
    with pytest.raises(PlanError, match=r"was not recorded, and the recipe leaves the rows of a"):
        inspect_step(plan, RunSteps(None, edges=[0, 8]), 2)


def test_steps_of_a_loader_are_numbered_from_0(stores):
    plan = ps.Plan(ps.Documents(stores["lines"], LENGTH))
    loader = ps.Loader(plan, 8, format=BatchFormat(ids=True), epochs=1)
    steps = RunSteps.of(loader)
    found = inspect_step(plan, steps, 2)

    assert [row.sample for row in found.rows] == loader[2]["sample"].tolist()
    assert steps.last == len(loader) - 1
    assert [steps.at(each) for each in range(*found.positions)] == [2] * len(found.rows)


def test_notebooks_show_text_with_the_mask_and_nothing_unescaped(tmp_path):
    store = ps.build(ps.Texts(["<script>alert(1)</script>"]), tmp_path / "s", tokenizer="bytes")
    plan = ps.Plan({"<b>": ps.Windows(store, 20)})
    html = inspect_step(plan, RunSteps(Steps(1)), 1)._repr_html_()
    explained = ps.Loader(plan, 1).explain(0)._repr_html_()

    for each in (html, explained):
        assert "&lt;b&gt;" in each
        assert "<script" not in each
        assert "<b>" not in each
    assert "script&gt;alert(" in explained
    only_read = "opacity: 0.6; text-decoration: underline dotted"
    assert f'<span style="{only_read}">&lt;</span>script&gt;' in html
