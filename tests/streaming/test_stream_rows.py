"""The rows of a store that grows are those of the finished one, in the order of its parts."""

from functools import partial

import numpy as np
import pytest

import penstock
from penstock.errors import PlanError, SourceError, StoreError, UnknownLengthError
from penstock.loader import BatchFormat
from penstock.loader.loader import Loader
from penstock.rows.documents import Documents
from penstock.rows.packs import Packs
from penstock.rows.windows import Windows
from penstock.streaming.plan import StreamedPlan
from penstock.testing import global_rows
from penstock.train import documents_at

KINDS = {
    "windows": partial(Windows, length=32),
    "padded tail": partial(Windows, length=32, tail="pad"),
    "overlapping": partial(Windows, length=32, stride=5),
    "longer than parts": partial(Windows, length=7_000),
    "borders": partial(Windows, length=32, borders=True),
    "packs": partial(Packs, length=48),
    "documents": partial(Documents, max_length=40, overflow="split"),
}


@pytest.mark.parametrize(
    ("kind", "prefetch"),
    [
        *((kind, 0) for kind in KINDS),
        *(("windows", 2), ("packs", 2)),  # the thread that reads ahead asks rows of any kind alike
        *(
            pytest.param(kind, 2, marks=pytest.mark.torture)
            for kind in KINDS
            if kind not in ("windows", "packs")
        ),
    ],
)
def test_two_epochs_are_those_of_the_finished_store(stream, finished, same, kind, prefetch):
    make, options = (
        KINDS[kind],
        {"epochs": 2, "seed": 7, "format": BatchFormat(ids=True), "drop_last": False},
    )
    loader = Loader(make(stream()), 6, prefetch=prefetch, **options)

    found = list(loader)

    alone = Loader(make(finished), 6, shuffle="part", **options)
    assert same(found, list(alone))
    assert loader.position == alone.position
    assert loader.state_dict() == alone.state_dict()


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_any_number_of_threads_gives_the_same_rows_each_once(stream, finished, threads):
    loader = Loader(Windows(stream(workers=threads), 32), 1, epochs=1, format=BatchFormat(ids=True))
    rows = [(batch["sample"].item(), batch["inputs"].tolist()) for batch in loader]

    expected = Windows(finished, 32).read(np.arange(len(rows)))["tokens"]
    assert len(rows) == len(Windows(finished, 32))
    assert sorted(rows) == [(row, [tokens[:-1].tolist()]) for row, tokens in enumerate(expected)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_any_number_of_ranks_reads_the_same_steps(stream, finished, same, world_size):
    """Ranks as processes have them: each with a stream of its own, of which one builds."""
    options = {"global_batch_size": 12, "world_size": world_size, "epochs": 1, "seed": 3}
    ranks = [
        Loader(Windows(stream(), 32), rank=rank, prefetch=1, **options)
        for rank in range(world_size)
    ]

    found = global_rows(ranks, 10_000)

    alone = Loader(Windows(finished, 32), 12, epochs=1, seed=3, shuffle="part")
    assert same(found, global_rows([alone], 10_000))


def test_any_step_can_be_asked_for_also_before_it_is_there(stream, finished, same):
    loader = Loader(Windows(stream(), 32), 8, seed=2, epochs=1)
    alone = Loader(Windows(finished, 32), 8, seed=2, epochs=1, shuffle="part")
    steps = [len(alone) - 1, 0, len(alone) // 2]

    assert same([loader[step] for step in steps], [alone[step] for step in steps])
    with pytest.raises(IndexError, match="does not exist: this run has"):
        loader[len(alone)]


def test_the_first_batch_comes_while_the_rest_is_not_even_read(stream, held, tmp_path, conftest):
    path = tmp_path / "in.txt"
    path.write_text(conftest.lines(held_at=range(600, 1_200)))
    streamed = stream(path, tokenizer=held)
    iterator = iter(Loader(Windows(streamed, 32), 8, epochs=1))

    first = [next(iterator) for _ in range(10)]

    assert len(first) == 10
    assert not streamed.sealed
    held.let_on()
    assert len(list(iterator)) > 100
    assert streamed.sealed


def test_lengths_are_not_known_before_the_end(stream, held, tmp_path, conftest):
    path = tmp_path / "in.txt"
    path.write_text(conftest.lines(held_at=[600]))
    streamed = stream(path, tokenizer=held)
    windows, packs = Windows(streamed, 32), Packs(streamed, 32)
    loader = Loader(windows, 8, epochs=1)

    for unknown in (streamed, windows, packs, loader, loader.plan):
        with pytest.raises(UnknownLengthError, match=r"not known|is not"):
            len(unknown)
    with pytest.raises(UnknownLengthError, match="its digest is not known"):
        _ = windows.digest
    assert loader.run.num_steps is None
    assert "so far" in repr(streamed)
    assert "Snapshot" in repr(windows)
    assert "Snapshot" in repr(packs)

    held.let_on()
    num_steps = sum(1 for _ in loader)
    assert len(loader) == num_steps
    assert len(loader.plan) == len(Windows(streamed, 32)) >= 8 * num_steps
    assert len(streamed) == 1_200


def test_orders_that_need_all_rows_are_refused(stream):
    windows = Windows(stream(), 32)

    with pytest.raises(PlanError, match="shuffle='full' needs all rows"):
        Loader(windows, 8, shuffle="full")
    with pytest.raises(StoreError, match="cannot be combined with other stores"):
        Windows([stream(), stream()], 32)


def test_a_plan_over_a_store_that_grows_says_what_to_do(stream, held, tmp_path, conftest):
    path = tmp_path / "in.txt"
    path.write_text(conftest.lines(held_at=[0]))
    windows = Windows(stream(path, tokenizer=held), 32)

    with pytest.raises(PlanError, match="a Loader, alone and with shuffle"):
        penstock.Plan({"a": windows}, shuffle="part")


def test_too_little_text_for_one_row_is_told_when_that_is_known(stream, tmp_path):
    (tmp_path / "in.txt").write_text("short\n")

    with pytest.raises(PlanError, match="6 tokens do not make one row"):
        list(Loader(Windows(stream(tmp_path / "in.txt"), 32), 1, epochs=1))


def test_inputs_without_a_document_end_in_an_error(stream, tmp_path):
    (tmp_path / "in.txt").write_text("\n\n\n")

    with pytest.raises(SourceError, match="The inputs hold no document"):
        list(Loader(Packs(stream(tmp_path / "in.txt"), 32), 1, epochs=1))


def test_a_stream_of_a_finished_store_reads_it(finished, text, same):
    with penstock.stream(text, finished.path, tokenizer="bytes", documents="lines") as again:
        assert again.sealed
        assert again.digest == finished.digest
        found = list(Loader(Windows(again, 32), 8, epochs=1))

    assert same(found, list(Loader(Windows(finished, 32), 8, epochs=1, shuffle="part")))


@pytest.mark.parametrize("options", [{}, {"multiprocessing_context": "fork"}])
def test_a_dataloader_without_and_with_forked_workers(stream, finished, same, options):
    loader = Loader(Windows(stream(), 32), 8, epochs=1, drop_last=False)
    workers = 2 if options else 0

    found = list(loader.as_dataloader(num_workers=workers, **options))

    alone = Loader(Windows(finished, 32), 8, epochs=1, drop_last=False, shuffle="part")
    assert same(found, list(alone))
    assert loader.position == alone.position


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.torture)])
def test_a_dataloader_with_workers_that_are_not_forked(stream, finished, same, method):
    loader = Loader(Windows(stream(), 32), 8, epochs=1)

    found = list(loader.as_dataloader(num_workers=1, multiprocessing_context=method))

    assert same(found, list(Loader(Windows(finished, 32), 8, epochs=1, shuffle="part")))


def test_a_stream_can_be_read_document_by_document(stream, finished):
    assert [each.tolist() for each in stream()] == [each.tolist() for each in finished]


def test_a_timeout_of_0_is_refused(stream):
    with pytest.raises(StoreError, match="timeout=0"):
        stream(timeout=0)


def test_a_snapshot_is_an_ordinary_store_over_the_parts_so_far(stream, held, tmp_path, conftest):
    path = tmp_path / "in.txt"
    text = conftest.lines(held_at=[600])
    path.write_text(text)
    streamed = stream(path, tokenizer=held)
    # All parts before the line that waits: until it is let on there cannot be another.
    streamed.await_parts(text.index(conftest.SLOW) // conftest.SLICE_BYTES)
    first = streamed.snapshot()
    documents = [each.tolist() for each in first]

    assert first is streamed.snapshot()
    assert not first.sealed
    assert len(first) == len(documents) > 0
    held.let_on()
    streamed.await_parts(10_000)
    last = streamed.snapshot()
    assert last.sealed
    assert last.digest == penstock.TokenStore(tmp_path / "s").digest
    assert [last.document(number).tolist() for number in range(len(first))] == documents


def test_rows_are_indexed_as_far_as_they_are_known(stream, held, tmp_path, conftest):
    path = tmp_path / "in.txt"
    path.write_text(conftest.lines(held_at=[600]))
    streamed = stream(path, tokenizer=held)
    plan = StreamedPlan(Windows(streamed, 32))
    plan.reach(1)

    assert plan.rows[0]["tokens"].tolist() == streamed.snapshot().tokens(0, 33).tolist()
    assert "StreamedPlan(Windows(Snapshot('" in repr(plan)
    assert f"; {plan.num_rows:,} rows so far, seed 0)" in repr(plan)
    assert plan._repr_html_() == f"<pre>{plan}</pre>"
    assert "so far" in repr(streamed)
    for number in (-1, 10**9):
        with pytest.raises(UnknownLengthError, match="still being written"):
            plan.rows[number]


def test_a_streamed_store_is_indexed_and_waits_for_the_document(stream, tmp_path):
    streamed = stream(penstock.Texts([f"text {n}" for n in range(300)]), tokenizer="bytes")

    assert bytes(streamed[299][:-1].astype(np.uint8)) == b"text 299"  # waits
    with pytest.raises(IndexError, match="document 300 is not in a store of 300 documents"):
        streamed[300]
    assert streamed[-1].tolist() == streamed[299].tolist()
    assert len(streamed[10:20]) == 10


def test_the_end_of_a_streamed_store_is_not_known_while_it_is_written(
    stream, held, tmp_path, conftest
):
    path = tmp_path / "in.txt"
    path.write_text(conftest.lines(held_at=[600]))
    streamed = stream(path, tokenizer=held)

    assert len(streamed[0])
    for index in (-1, slice(0, 3)):
        with pytest.raises(UnknownLengthError, match="the number of documents is not known"):
            streamed[index]


@pytest.mark.parametrize("kind", [Windows, Packs])
def test_the_documents_of_rows_are_named_while_others_are_still_made(
    stream, held, tmp_path, conftest, kind
):
    path = tmp_path / "in.txt"
    path.write_text(conftest.lines(held_at=[600]))
    streamed = stream(path, tokenizer=held)
    plan = StreamedPlan(kind(streamed, 32))

    described = documents_at(plan, 0, 1)

    assert not streamed.sealed
    assert str(path.name) in described
    with pytest.raises(IndexError):
        streamed.snapshot().origin(1_100)
