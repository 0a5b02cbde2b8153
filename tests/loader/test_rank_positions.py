"""Ranks that begin at different positions are noticed: real processes in a group of two."""

import subprocess
import sys
import textwrap

import pytest
import zygote

import penstock

# Each process prints what happened on it. The steps between batches have no collective.
SCRIPT = """
import sys, warnings
import torch
import penstock as ps
from penstock.loader import rank_positions

rank, meeting, store, case, folder = int(sys.argv[1]), *sys.argv[2:]
torch.set_num_threads(1)
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
)

def loader(**options):
    return ps.Loader(ps.Windows(store, 16), 2, **{"seed": 3, **options})

def state(step, **options):
    saved = loader(**options)
    saved.seek(4 * step)
    return saved.state_dict()

def first(batches):
    return next(iter(batches))

def short_wait():
    rank_positions._WAIT_SECONDS = 0.5

shown = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        exec(case)
    except ps.errors.ResumeError as error:
        shown.append(f"ResumeError: {error}")
shown += [f"warned: {each.message}" for each in caught]
torch.distributed.barrier()  # the store of the group ends with the process that keeps it
print("\\n".join(shown or ["nothing"]))
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def together(tmp_path, store):
    """Runs a case on two ranks; returns what each has printed."""

    def together(case):
        script = tmp_path / "rank.py"
        script.write_text(SCRIPT)
        running = [
            zygote.Popen(
                [
                    str(script),
                    str(rank),
                    str(tmp_path / "meeting"),
                    str(store.path),
                    textwrap.dedent(case),
                    str(tmp_path),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        found = []
        for each in running:
            try:
                out, errors = each.communicate(timeout=120)
            finally:
                each.kill()
            assert each.returncode == 0, errors
            found.append(out)
        return found

    return together


@pytest.mark.parametrize("options", ["", "prefetch=0"])
@pytest.mark.parametrize("move", ["each.load_state_dict(state(at))", "each.seek(4 * at)"])
def test_different_positions_are_an_error_on_all_ranks(together, move, options):
    shown = together(f"""
        at = (30, 60)[rank]
        each = loader({options})
        {move}
        first(each)
    """)

    assert shown[0] == shown[1]
    assert shown[0].startswith("ResumeError: The ranks are at different positions of the data")
    assert "rank 0 is at position 120, rank 1 is at position 240. Save the state" in shown[0]
    assert "rename the file, call torch.distributed.barrier() on all ranks" in shown[0]


def test_a_rank_that_loaded_nothing_is_named_on_all_ranks(together):
    shown = together("""
        each = loader()
        if rank == 1:
            each.load_state_dict(state(30))
        first(each)
    """)

    assert shown[0] == shown[1]
    assert (
        "rank 0 is at position 0 (without load_state_dict or seek), rank 1 is at position 120."
        in shown[0]
    )


def test_the_iterator_of_a_dataloader_is_compared_too(together):
    shown = together("""
        each = loader()
        each.seek(4 * (30, 60)[rank])
        first(each.as_dataloader(num_workers=1))
    """)

    assert shown[0] == shown[1]
    assert "rank 0 is at position 120, rank 1 is at position 240" in shown[0]


def test_equal_positions_are_read_and_later_moves_are_compared_again(together):
    shown = together("""
        each = loader()
        for at in (0, 5, 7, 2):  # the reports of earlier moves are deleted
            each.load_state_dict(state(at))
            if not torch.equal(first(each)["inputs"], each[at]["inputs"]):
                shown.append("other rows")
        list(zip(range(3), each))
        each.seek(4 * (8, 9)[rank])
        first(each)
    """)

    assert shown[0] == shown[1]
    assert "rank 0 is at position 32, rank 1 is at position 36" in shown[0]


@pytest.mark.parametrize(
    ("settings", "difference"),
    [("seed=(3, 4)[rank]", "seed 3 -> 4"), ("global_batch_size=(4, 8)[rank]", "")],
)
def test_ranks_that_resume_in_another_order_are_named(together, settings, difference):
    shown = together(f"""
        short_wait()
        options = dict({settings})
        each = ps.Loader(
            ps.Windows(store, 16), **{{"seed": 3, "global_batch_size": 4, **options}}
        )
        each.seek(40)
        first(each)
    """)

    difference = difference or "global_batch_size 4 -> 8"
    assert "ResumeError: Rank 1 reads the data in another order than rank 0" in shown[0]
    assert f"than rank 0: {difference}. So some rows" in shown[0]
    assert "ResumeError: Rank 0 reads the data in another order than rank 1" in shown[1]


@pytest.mark.parametrize("move", ["pass", "each.seek(0)"])
def test_one_rank_that_reads_alone_is_warned_and_goes_on(together, move):
    shown = together(f"""
        short_wait()
        each = loader(seed=8)
        {move}
        if rank == 0:
            first(each)
        train = loader()
        train.seek(20)
        rank_positions._WAIT_SECONDS = 30
        first(train)  # compared with the loader of the same data on the other rank
    """)

    assert shown[0].startswith("warned: Rank 1 did not come to the first batch within")
    assert "give the loader rank=0 and world_size=1" in shown[0]
    assert shown[1] == "nothing\n"


def test_a_rank_that_comes_late_still_compares(together):
    shown = together("""
        each = loader()
        each.seek(4 * (30, 60)[rank])
        if rank == 0:
            short_wait()
            first(each)
        torch.distributed.barrier()
        if rank == 1:
            first(each)
    """)

    assert shown[0].startswith("warned: Rank 1 did not come")
    assert "rank 0 is at position 120, rank 1 is at position 240" in shown[1]


def test_loaders_of_other_ranks_than_those_of_the_group_are_not_compared(together):
    shown = together("""
        alone = loader(rank=0, world_size=1)  # evaluation on one rank
        alone.seek(rank)
        if rank == 0:
            list(zip(range(3), alone))
        part = loader(rank=rank, world_size=4)
        part.seek(8 * rank)
        first(part)
        each = loader()
        each.seek(rank)
        each[3]  # any batch can be read without moving the loader
    """)

    assert shown == ["nothing\n", "nothing\n"]


def test_step_loaders_multiplex_loaders_and_sft_batches_are_compared(together):
    pytest.importorskip("transformers")
    shown = together("""
        from penstock.integrations.huggingface import StepLoader
        from penstock.integrations.multiplex import create_multiplex_dataloader
        from penstock.integrations.sft import SFTBatches

        rows = [{"n": number} for number in range(90)]
        render = lambda row: ([row["n"], 1], [True, True])
        makers = (
            lambda: StepLoader(ps.Windows(store, 16), 2),
            lambda: create_multiplex_dataloader([("some", rows)], 2),
            lambda: SFTBatches(rows, 2, render, pad_token_id=0),
        )
        for make in makers:
            states, iterator, one = [], None, make()
            iterator = iter(one)
            for _ in range(3):
                next(iterator)
                states.append(one.state_dict())
            for which in ((0, 0), (0, 2)):
                each = make()
                each.load_state_dict(states[which[rank]])
                try:
                    next(iter(each))
                    shown.append("read")
                except ps.errors.ResumeError as error:
                    shown.append(str(error)[:130])
    """)

    assert shown[0] == shown[1]
    lines = shown[0].splitlines()
    assert lines[::2] == ["read"] * 3
    assert all("rank 0 is at position" in each for each in lines[1::2])


def test_a_rank_that_streams_is_compared_with_one_that_reads_the_finished_store(together, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {number}: the fox jumps.\n" for number in range(300)))
    penstock.build(text, tmp_path / "built", tokenizer="bytes", documents="lines")
    shown = together("""
        place = folder + "/built"
        opened = ps.TokenStore(place)
        if rank == 1:
            opened = ps.stream(
                folder + "/text.txt", place, tokenizer="bytes", documents="lines"
            )
        for at in ((5, 5), (30, 60)):
            each = ps.Loader(ps.Windows(opened, 16), 2, shuffle="part")
            each.seek(4 * at[rank])
            first(each)
            shown.append("read")
    """)

    assert shown[0] == shown[1]
    assert shown[0].startswith("read\nResumeError: The ranks are at different positions")


def test_data_modules_are_compared(together):
    pytest.importorskip("lightning")
    shown = together("""
        from penstock.integrations.lightning import LLMDataModule

        def module():
            made = LLMDataModule("bytes", 2, 16, num_workers=0, data={"train": store})
            made.prepare_data()
            made.setup("fit")
            return made

        states, one = [], module()
        iterator = iter(one.train_dataloader())
        for _ in range(3):
            next(iterator)
            states.append(one.state_dict())
        for which in ((0, 0), (0, 2)):
            each = module()
            each.load_state_dict(states[which[rank]])
            batches = iter(each.train_dataloader())
            list(zip(range(3), batches))
    """)

    assert "rank 0 is at position 4, rank 1 is at position 12" in shown[0]
    assert shown[0].splitlines()[0] == shown[1].splitlines()[0]


@pytest.mark.skipif(sys.platform == "win32", reason="DataLoader workers are forked")
def test_a_loader_in_a_worker_of_a_dataloader_does_not_use_the_group(together):
    shown = together("""
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                each = loader(prefetch=0)
                each.seek(4 * rank)
                return iter(each)

        batches = torch.utils.data.DataLoader(Stream(), batch_size=None, num_workers=1)
        first(batches)
    """)

    assert shown == ["nothing\n", "nothing\n"]
