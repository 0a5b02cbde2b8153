"""`when` finds every row of a run that holds a document, and `find_text` every place of a text."""

import re

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PlanError, StoreError
from penstock.inspect import RunSteps, find_documents, find_text, seen, when
from penstock.inspect.documents import document_span, find_numbered
from penstock.inspect.text import find_texts
from penstock.order.steps import Steps
from penstock.sources.slices import cut

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
def test_when_equals_a_search_in_amended_runs(amended_run, seed):
    plan, _, steps, *_ = amended_run(300 + seed, 10**6)

    assert check_when(plan, steps, min(plan.end, 250)) > 30


@pytest.mark.torture
def test_when_equals_a_search_in_many_amended_runs(amended_run, figure):
    found = 0
    for seed in range(6_000, 6_200):
        plan, _, steps, *_ = amended_run(seed, 10**6)
        found += check_when(plan, steps, min(plan.end, 3 * sum(plan.sizes)))
    figure(f"200 amended runs of three epochs, {found:,} documents: all steps found")


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


def expected_matches(store, text, tokenizer):
    """Documents and byte offsets at which a text occurs; pieces of a document are joined."""
    found, number = [], 0
    while number < len(store):
        pieces = [number]
        while not store.edges(pieces[-1])[1]:
            pieces.append(pieces[-1] + 1)
        data = b"".join(store.decode_bytes(each, tokenizer) for each in pieces)
        ends = np.cumsum([len(store.decode_bytes(each, tokenizer)) for each in pieces])
        for match in re.finditer(rb"(?=" + re.escape(text.encode()) + rb")", data):
            piece = int(np.searchsorted(ends, match.start(), side="right"))
            found.append(pieces[piece])
        number = pieces[-1] + 1
    return found


@pytest.mark.parametrize("block", [3, 50, 1 << 18])
@pytest.mark.parametrize(
    "text", ["fox", " jumps. the fox", "é", "s 17", "Verse 10.\nVerse 11.", "aa"]
)
def test_a_text_is_found_wherever_it_is(stores, gpt2_chat, monkeypatch, block, text):
    monkeypatch.setattr("penstock.inspect.text._BLOCK_TOKENS", block)
    for name, store in stores.items():
        found = list(find_text(store, text, gpt2_chat, threads=2))

        assert [each.document for each in found] == expected_matches(store, text, gpt2_chat), name
        for each in found:
            start, _ = document_span(ps.Windows(store, 4), 0, store, each.document)
            ids = store.tokens(start + each.span[0], start + each.span[1])
            assert text.encode() in gpt2_chat.decode_bytes(ids)
            assert text.encode() not in gpt2_chat.decode_bytes(ids[1:])
            assert text.encode() not in gpt2_chat.decode_bytes(ids[:-1])


@pytest.mark.parametrize("engine", ["gigatoken", "tokenizers"])
def test_a_text_across_the_pieces_of_a_document_is_found_by_both_engines(
    tmp_path, monkeypatch, engine
):
    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", 90)
    tokenizer = ps.load_tokenizer("gpt2", engine=engine)
    (tmp_path / "a.txt").write_text("".join(f"word{n} " for n in range(80)))
    store = ps.build(tmp_path / "a.txt", tmp_path / "s", tokenizer="gpt2")
    assert len(store) > 3
    first = store.decode(0)
    border = f"{first[-8:]}{store.decode(1)[:8]}"

    (match,) = find_text(store, border, tokenizer)
    assert match.document == 0
    assert match.span[1] > len(store.document(0))


def test_a_text_of_two_documents_is_no_match_and_the_end_token_is_no_text(tmp_path):
    store = ps.build(ps.Texts(["one two", "three four"]), tmp_path / "s", tokenizer="gpt2")
    tokenizer = ps.load_tokenizer("gpt2")

    assert not list(find_text(store, "twothree", tokenizer))
    assert not list(find_text(store, "<|endoftext|>", tokenizer))
    assert len(list(find_text(store, "three", tokenizer))) == 1
    with pytest.raises(PlanError, match="The text to find is empty"):
        list(find_text(store, "", tokenizer))


def test_texts_of_a_plan_are_found_in_every_source_with_their_progress(stores):
    plan = ps.Plan({name: ps.Windows(store, LENGTH) for name, store in stores.items()})
    seen_tokens = []
    found = list(find_texts(plan, "Line 5:", progress=lambda *each: seen_tokens.append(each)))

    assert {each.file for each in found} == {"lines.txt"}
    assert [each.source for each in find_texts(plan, "course", "chats")] == ["chats"] * 40
    total = sum(store.num_tokens for store in stores.values())
    assert seen_tokens[-1] == (total, total)
    for each in found:
        positions = [one.position for one in when(plan, RunSteps(Steps(1)), each, len(plan))]
        assert positions
        for position in positions:
            assert any(origin.document == each.document for origin in plan.origins(position))


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
    ps.build(ps.Texts(["one two", "three"] * 20), tmp_path / "store", tokenizer="bytes")
    windows = ps.Windows(tmp_path / "store", length=8)
    rows, mute = Borrowed(windows), Borrowed(windows)
    rows.holding = windows.holding
    steps = RunSteps(Steps(4))
    (first, *_) = find_texts(ps.Plan(windows, seed=1), "three")
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
