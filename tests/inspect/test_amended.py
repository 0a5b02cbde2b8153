"""Runs across amendments: what a loader reads before and after them, on any number of ranks."""

import json

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.errors import ResumeError
from penstock.inspect import RunSteps, find_documents, seen, when
from penstock.inspect.documents import document_span
from penstock.inspect.seen import excluded_targets
from penstock.loader import BatchFormat, FingerprintLog
from penstock.loader.fingerprints import RowReader
from penstock.order.steps import Steps
from penstock.transforms import MaskTokens, Transformed

LENGTH = 24  # of the rows of `make_rows`
FORMAT = BatchFormat(ids=True, fingerprint="tokens")


def loader_of(plan, rows, rank=0, world_size=1, **options):
    return ps.Loader(
        plan,
        global_batch_size=rows,
        rank=rank,
        world_size=world_size,
        format=FORMAT,
        prefetch=0,
        **options,
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


def is_excluded(plan, position):
    """Whether each target of a row is excluded, token by token."""
    (found,) = plan.samples(position, position + 1)
    rows = plan.sources[found.source]
    offsets = [start + i for start, size in rows.spans(found.sample) for i in range(size)]
    spans = [
        span
        for each in plan.amendments
        if each.position <= position
        for span in each.exclude.get(found.source, ())
    ]
    # Target i is token i + 1 of the row. Columns after the last token are padding.
    excluded = [any(start <= each < stop for start, stop in spans) for each in offsets[1:]]
    return np.array(excluded + [False] * (rows.length - len(excluded)))


def check_targets(plan, history, plain, num_steps):
    """Rows before each amendment stay the same, and only targets of documents are excluded.

    Returns:
        The number of targets that were excluded.
    """
    after = list(read_steps([loader_of(plan, 4)], num_steps))
    for before, position in history:
        steps = min(position // 4, num_steps)
        earlier = read_steps([loader_of(before, 4)], steps)
        for (old, print_), (new, other) in zip(earlier, after[:steps], strict=True):
            assert print_ == other
            assert all(np.array_equal(old[name], new[name]) for name in old)
    num_excluded = 0
    unmasked = read_steps([loader_of(plain, 4)], num_steps)
    for (old, _), (new, _) in zip(unmasked, after, strict=True):
        masks = np.stack([is_excluded(plan, position) for position in new["position"].tolist()])
        num_excluded += int((masks & (old["targets"] != -100)).sum())
        assert np.array_equal(new["targets"], np.where(masks, -100, old["targets"]))
        assert all(np.array_equal(old[name], new[name]) for name in old if name != "targets")
    return num_excluded


def check_resume(random, plan, history, num_steps):
    """Each part of a run is read on another number of ranks; the steps are those of one rank."""
    expected = list(read_steps([loader_of(plan, 12)], num_steps))
    state, done, found = None, 0, []
    # Before each amendment, the run has the plan of that time; a state then resumes the next plan.
    parts = [(before, min(position // 12, num_steps)) for before, position in history]
    for each, stop in [*parts, (plan, num_steps)]:
        world_size = int(random.choice([1, 2, 3, 4, 6]))
        loaders = [loader_of(each, 12, rank, world_size) for rank in range(world_size)]
        for loader in loaders if state is not None else ():
            loader.load_state_dict(json.loads(json.dumps(state)))
        found += read_steps(loaders, stop - done)
        states = [loader.state_dict() for loader in loaders]
        assert all(one == states[0] for one in states)
        state, done = states[0], stop
    for (rows, print_), (others, other) in zip(found, expected, strict=True):
        assert print_ == other
        assert all(np.array_equal(rows[name], others[name]) for name in rows)


def check_amended(run, seed):
    plan, _, _, history, plain = run
    num_steps = min(plan.end, 180) // 12
    excluded = check_targets(plan, history, plain, 3 * num_steps)
    assert sum(excluded_targets(plan, 12 * num_steps).values()) == excluded
    check_resume(np.random.default_rng(seed), plan, history, num_steps)
    return excluded


def test_runs_resume_across_amendments_on_other_ranks_and_exclude_only_documents(amended_run):
    assert sum(check_amended(amended_run(seed, 40), seed) for seed in range(500, 510)) > 100


@pytest.mark.torture
def test_many_runs_resume_across_amendments_on_other_ranks(amended_run, figure):
    excluded = sum(check_amended(amended_run(seed, 40), seed) for seed in range(7_000, 7_200))
    figure(f"200 amended runs resumed on other ranks, {excluded:,} targets excluded: all exact")


@pytest.fixture(scope="module")
def mixture(stores):
    rows = {"a": ps.Windows(stores["lines"], LENGTH), "b": ps.Windows(stores["whole"], LENGTH)}
    return ps.Plan(rows, weights={"a": 3, "b": 1}, seed=17)


def test_a_replay_of_an_amended_run_has_the_same_fingerprints(mixture, tmp_path):
    files = []
    for name in ("first", "replay"):
        plan = mixture.amend(24, weights={"a": 1, "b": 1}).amend(48, skip=8)
        log = FingerprintLog(tmp_path / name, plan)
        for step in range(12):
            log.add(step, (8 * step, 8 * step + 8))
        files.append((tmp_path / name / "fingerprints.jsonl").read_bytes())
    reader = RowReader(mixture)

    assert files[0] == files[1]
    first = [json.loads(line) for line in files[0].splitlines()][:3]
    prints = [reader.fingerprints(8 * step, 8 * step + 8) for step in range(3)]
    assert [(each["rows"], each["tokens"]) for each in first] == [
        (f"{rows:016x}", f"{tokens:016x}") for rows, tokens in prints
    ]


def test_a_state_before_an_amendment_resumes_and_one_after_it_is_refused_with_the_steps(mixture):
    loader = loader_of(mixture, 8)
    states = []
    for _, _ in zip(range(6), loader, strict=False):
        states.append(loader.state_dict())
    amended = loader_of(mixture.amend(24, weights={"a": 1, "b": 1}), 8)

    assert "ledger" not in states[0]
    for state in states[:3]:
        amended.load_state_dict(state)
        assert amended.position == state["position"]
    with pytest.raises(
        ResumeError,
        match=r"Amendment 1 begins after 3 steps \(position 24\), but this checkpoint was saved "
        r"after 4 steps \(position 32\).*at or before position 24",
    ):
        amended.load_state_dict(states[3])
    amended.load_state_dict(states[3], on_change="restart")
    assert amended.position == 0


def test_a_state_of_an_amended_run_needs_its_amendments(mixture):
    plan = mixture.amend(24, weights={"a": 1, "b": 1})
    state = loader_of(plan, 8).state_dict()
    later = plan.amend(80, drop=["b"])

    assert state["ledger"]["amendments"] == 1
    assert state["plan"] == loader_of(mixture, 8).state_dict()["plan"]
    for same in (plan, later):
        loader_of(same, 8).load_state_dict(state)
    with pytest.raises(ResumeError, match=r"with 1 amendments, but the plan has 0\. Restore the l"):
        loader_of(mixture, 8).load_state_dict(state)
    with pytest.raises(ResumeError, match=r"first 1 amendments .* not those of the checkpoint"):
        loader_of(mixture.amend(24, weights={"a": 1, "b": 2}), 8).load_state_dict(state)


def test_an_excluded_document_is_found_with_a_note_and_its_rows_stay(mixture):
    (found,) = find_documents(mixture, "lines.txt", 0)
    amended = mixture.amend(100, exclude={"a": [found.span]})
    steps = RunSteps(Steps(4), total=100)
    sightings = when(amended, steps, found)

    assert [each.position for each in sightings] == [
        each.position for each in when(mixture, steps, found)
    ]
    assert [each.excluded for each in sightings] == [each.position >= 100 for each in sightings]
    assert {each.excluded for each in sightings} == {True, False}


def test_seen_counts_skipped_rows_to_the_epoch_and_not_to_the_rows(mixture):
    steps = RunSteps(Steps(4), total=50)
    amended = mixture.amend(20, skip=12)
    before, after = seen(mixture, steps, 13).sources[0], seen(amended, steps, 10).sources[0]

    assert seen(amended, steps, 5) == seen(mixture, steps, 5)
    assert after.rows == before.rows - 9
    assert after.rows_in_last_epoch == before.rows_in_last_epoch


def excluding(rows, document, position=0):
    """A plan of one source, and the same without the targets of a document."""
    plan = ps.Plan(rows, shuffle="none")
    (store,) = rows.stream.members
    span = document_span(rows, 0, store, document)
    return plan, plan.amend(position, exclude={"data": [span]})


def test_a_document_with_padding_on_the_left_is_excluded(stores):
    rows = ps.Documents(stores["lines"], 64, side="left")
    plan, amended = excluding(rows, 2)
    before, after = (ps.Loader(each, 4)[0]["targets"] for each in (plan, amended))

    assert (after[2] == -100).all()
    assert (before[2] != -100).any()
    assert torch.equal(before[[0, 1, 3]], after[[0, 1, 3]])


def test_labels_of_masked_tokens_of_a_document_are_excluded(stores, gpt2_chat):
    masks = MaskTokens(gpt2_chat.eos_id, vocab_size=60_000, rate=0.9)
    rows = Transformed(ps.Documents(stores["lines"], 64), masks)
    plan, amended = excluding(rows, 2)
    before, after = (ps.Loader(each, 4, format="hf")[0]["labels"] for each in (plan, amended))

    assert (after[2] == -100).all()
    assert (before[2] != -100).any()
    assert torch.equal(before[[0, 1, 3]], after[[0, 1, 3]])


@pytest.mark.parametrize("format", ["dict", "hf", "narrow"])
def test_every_format_excludes_the_document_from_the_step_on(stores, format):
    rows = ps.Packs(stores["chats"], 64)
    plan, amended = excluding(rows, 0, position=len(rows))
    loaders = [ps.Loader(each, 1, format=format) for each in (plan, amended)]
    counts = []
    for loader in loaders:
        for step in (0, len(rows)):
            batch = loader[step]
            if format == "narrow":
                counts.append(int(batch["target_mask"].sum()))
            else:
                targets = batch["labels" if format == "hf" else "targets"]
                counts.append(int((targets != -100).sum()))
    first, second, same, fewer = counts

    assert first == second == same
    # The first conversation trains on its reply; the row holds other conversations too.
    assert 0 < fewer < first


def test_a_document_in_several_rows_is_excluded_in_all_of_them(stores):
    rows = ps.Packs(stores["whole"], LENGTH)
    _, amended = excluding(rows, 0)
    loader = ps.Loader(amended, len(rows))

    # The whole store is one document in pieces.
    assert (loader[0]["targets"] == -100).all()
