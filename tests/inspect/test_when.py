"""`when` finds every row of a run that holds a document."""

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PlanError, StoreError
from penstock.inspect import RunSteps, find_documents, seen, when
from penstock.inspect.documents import document_span, find_numbered
from penstock.loader.fingerprints import RowReader
from penstock.order.steps import Steps

LENGTH = 24  # of the rows of `make_rows`
KINDS = ["windows", "overlapping", "gaps", "packs", "documents", "cut"]


def brute_force(plan, end):
    """The positions of each document before `end`: from looking at every position."""
    found = {}
    for position in range(end):
        for each in plan.origins(position):
            (sample,) = plan.samples(position, position + 1)
            key = sample.source, str(each.store.path), each.document
            found.setdefault(key, set()).add(position)
    return found


def check_when(plan, steps, end):
    """Every document of the plan is found where a search through all positions finds it."""
    end = end if steps.end is None else min(end, steps.end)
    expected = brute_force(plan, end)
    num_documents = 0
    for name, rows in plan.sources.items():
        for member, store in enumerate(rows.stream.members):
            for document in range(len(store)):
                if not store.edges(document)[0]:
                    continue
                origin = store.origin(document)
                records = find_documents(plan, origin.file, origin.offset, name)
                (found,) = [
                    each
                    for each in records
                    if each.document == document and each.store == str(store.path)
                ]
                assert found.span == document_span(rows, member, store, document)
                assert found in find_numbered(plan, document, name)
                sightings = when(plan, steps, found, end)
                pieces = [document]
                while not store.edges(pieces[-1])[1]:
                    pieces.append(pieces[-1] + 1)
                keys = [(name, str(store.path), piece) for piece in pieces]
                positions = set().union(*(expected.get(key, set()) for key in keys))
                assert [each.position for each in sightings] == sorted(positions)
                for each in sightings:
                    start, stop = steps.span(each.step)
                    assert start <= each.position < stop
                    assert each.row == each.position - start
                num_documents += 1
    return num_documents


@pytest.mark.parametrize("kind", KINDS)
def test_when_equals_a_search_through_three_epochs(stores, make_rows, kind):
    plan = ps.Plan({name: make_rows[kind](store) for name, store in stores.items()}, seed=5)

    assert check_when(plan, RunSteps(Steps(7)), 3 * len(plan)) > 100


@pytest.mark.parametrize("seed", range(3))
def test_when_equals_a_search_in_random_mixtures(random_run, seed):
    plan, _, steps = random_run(100 + seed, 10**6)

    assert check_when(plan, steps, min(plan.end, 300)) > 30


@pytest.mark.torture
def test_when_equals_a_search_in_many_random_mixtures(random_run, figure):
    found = 0
    for seed in range(5_000, 5_200):
        plan, _, steps = random_run(seed, 10**6)
        found += check_when(plan, steps, min(plan.end, 3 * sum(plan.sizes)))
    figure(f"200 random runs of three epochs, {found:,} documents: all steps found")


@pytest.mark.parametrize("seed", range(3))
def test_when_equals_a_search_in_continued_runs(continued_run, seed):
    plan, _, steps, *_ = continued_run(300 + seed, 10**6)

    assert check_when(plan, steps, min(plan.end, 250)) > 30


@pytest.mark.torture
def test_when_equals_a_search_in_many_continued_runs(continued_run, figure):
    found = 0
    for seed in range(6_000, 6_200):
        plan, _, steps, *_ = continued_run(seed, 10**6)
        found += check_when(plan, steps, min(plan.end, 3 * sum(plan.sizes)))
    figure(f"200 continued runs of three epochs, {found:,} documents: all steps found")


def test_a_document_is_found_by_its_number_also_by_that_of_a_later_piece(stores):
    plan = ps.Plan({name: ps.Windows(store, LENGTH) for name, store in stores.items()})
    whole = stores["whole"]
    last = len(whole) - 1

    assert not whole.edges(last)[0]
    assert [each.document for each in find_numbered(plan, last, "whole")] == [0]
    assert [each.source for each in find_numbered(plan, 0)] == ["lines", "whole", "chats"]
    with pytest.raises(StoreError, match=r"No store of this run has a document 1,000: .* has 100;"):
        find_numbered(plan, 1_000)


def test_when_counts_the_tokens_of_a_document_in_each_row(stores):
    plan = ps.Plan(ps.Windows(stores["lines"], LENGTH, tail="pad"), shuffle="none")
    steps = RunSteps(Steps(1))
    (found,) = find_documents(plan, "lines.txt", 0)
    sightings = when(plan, steps, found, len(plan))

    assert sum(each.num_tokens for each in sightings) >= found.span[1] - found.span[0]
    assert sightings[0].step == 1
    with pytest.raises(PlanError, match=r"end of this run is not known.*training.steps=1000"):
        when(plan, steps, found)


def test_a_file_of_two_sources_is_found_in_both_and_one_can_be_chosen(stores):
    rows = {"a": ps.Windows(stores["lines"], LENGTH), "b": ps.Packs(stores["lines"], LENGTH)}
    plan = ps.Plan(rows, weights={"a": 1, "b": 1})

    assert [each.source for each in find_documents(plan, "more.txt", 0)] == ["a", "b"]
    assert [each.source for each in find_documents(plan, "more.txt", 0, "b")] == ["b"]
    assert find_documents(plan, "some/where/more.txt", 0) == find_documents(plan, "more.txt", 0)
    with pytest.raises(PlanError, match=r'There is no source "c"; the sources are a, b\.'):
        find_documents(plan, "more.txt", 0, "c")
    with pytest.raises(PlanError, match=r'There is no source "c"; the sources are a, b\.'):
        find_numbered(plan, 0, "c")


def test_a_document_that_is_not_there_is_refused_with_what_is(stores):
    plan = ps.Plan({name: ps.Windows(store, LENGTH) for name, store in stores.items()})
    second = stores["lines"].origin(1).offset

    with pytest.raises(
        StoreError, match=rf"at record 3 of lines.txt; the nearest begin at 0 and {second:,}\."
    ):
        find_documents(plan, "lines.txt", 3)
    with pytest.raises(StoreError, match=r"nearest begin at [\d,]+\. A record is the number"):
        find_documents(plan, "lines.txt", 10**9)
    with pytest.raises(StoreError, match=r"was built from line.txt\. Did you mean lines\.txt"):
        find_documents(plan, "line.txt", 0)
    with pytest.raises(StoreError, match=r"Their inputs are: chats.jsonl, lines.txt, more.txt"):
        find_documents(plan, "other", 0)


def test_seen_counts_rows_and_epochs_of_each_source(stores):
    plan = ps.Plan(
        {"a": ps.Windows(stores["lines"], LENGTH), "b": ps.Packs(stores["chats"], LENGTH)},
        weights={"a": 1, "b": 3},
    )
    steps = RunSteps(Steps(8), total=100)
    for step in (1, 17, 100):
        _, epochs, _ = plan.locate(np.arange(8 * step))
        found = seen(plan, steps, step)
        for number, each in enumerate(found.sources):
            mine = plan.locate(np.arange(8 * step))[0] == number
            assert each.rows == int(mine.sum())
            assert each.epochs == each.rows // len(plan.sources[each.source])
            assert each.epochs * each.rows_in_epoch + each.rows_in_last_epoch == each.rows
            if each.rows_in_last_epoch:
                assert int(epochs[mine].max()) == each.epochs
    assert seen(plan, steps, 0).position == 0


@pytest.mark.parametrize("kind", [*KINDS, "chats"])
def test_targets_said_to_be_exact_are_those_that_were_trained_on(stores, make_rows, kind):
    if kind == "chats":
        plan = ps.Plan(ps.Packs(stores["chats"], LENGTH))
    else:
        plan = ps.Plan(make_rows[kind](stores["lines"]))
    epoch = sum(plan.sizes)
    reader = RowReader(plan)
    for rows in (1, epoch // 2, epoch, epoch + 1, 2 * epoch):
        tokens, targets, _ = reader.assembler.read(reader.locate(np.arange(rows)))
        trained = tokens[:, 1:].size if targets is None else int(targets.sum())
        (each,) = seen(plan, RunSteps(Steps(1), total=None), rows).sources
        assert each.tokens == trained or not each.tokens_exact
        if kind in ("windows", "packs") and rows in (epoch, 2 * epoch):
            assert each.tokens_exact
        if kind == "windows" and rows != 1:
            assert each.tokens_exact
        if kind in ("packs", "chats") and rows == epoch // 2:
            assert not each.tokens_exact


def test_a_document_of_a_store_is_found_behind_token_files_of_several_parts(tmp_path):
    for name in ("a", "b", "c"):
        np.save(tmp_path / f"{name}.npy", np.arange(10, dtype=np.uint16))
    files = ps.open_tokens(str(tmp_path / "*.npy"), vocab_size=257)
    assert len(files.part_tokens) == 3
    store = ps.build(ps.Texts(["one", "two", "three"]), tmp_path / "store", tokenizer="bytes")
    plan = ps.Plan(ps.Windows([files, store], length=4), shuffle="none")

    name = store.manifest.inputs[0]["name"]

    (found,) = find_documents(plan, name, store.origin(2).offset)

    assert found.span == (38, 44)
    assert bytes(plan.sources[found.source].stream.tokens(38, 43).tolist()) == b"three"


class Borrowed:
    """Rows of a user, which have the stream of other rows."""

    def __init__(self, rows):
        self.stream, self.length, self.spans = rows.stream, rows.length, rows.spans
        self.read, self.digest, self._size = rows.read, rows.digest, len(rows)

    def __len__(self):
        return self._size


def test_rows_of_a_user_are_found_by_their_own_method_and_never_said_to_be_unseen(tmp_path):
    store = ps.build(ps.Texts(["one two", "three"] * 20), tmp_path / "store", tokenizer="bytes")
    windows = ps.Windows(tmp_path / "store", length=8)
    rows, mute = Borrowed(windows), Borrowed(windows)
    rows.holding = windows.holding
    steps = RunSteps(Steps(4))
    input_name = store.manifest.inputs[0]["name"]
    (first,) = find_documents(ps.Plan(windows, seed=1), input_name, store.origin(1).offset)
    name = first.source

    expected = when(ps.Plan({name: windows}, seed=1), steps, first, 40)
    assert when(ps.Plan({name: rows}, seed=1), steps, first, 40) == expected != []
    with pytest.raises(NotImplementedError, match=r"no method holding\(start, stop\)"):
        when(ps.Plan({name: mute}, seed=1), steps, first, 40)


def test_an_imported_file_with_a_header_is_found_by_its_path(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(200, dtype="u2"))
    store = ps.import_tokens(tmp_path / "x.npy", tmp_path / "store", vocab_size=300)
    plan = ps.Plan(ps.Windows(store, LENGTH))

    assert len(find_documents(plan, str(tmp_path / "x.npy"), 0)) == 1
