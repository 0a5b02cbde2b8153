"""The training loop: its losses, its files, its errors, and how it resumes."""

import errno
import itertools
import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.errors import PlanError, ResumeError, TrainError
from penstock.loader.fingerprints import read_fingerprints
from penstock.train import (
    Learner,
    OptimizationConfig,
    RunReport,
    TrainingConfig,
    World,
    documents_at,
    read_metrics,
    train,
)
from penstock.train.checkpoint import Checkpoints
from penstock.train.distributed import select_device, stop_signals
from penstock.train.loaders import step_rows


def lines(job, kind="step"):
    return [each for each in read_metrics(job.output / "metrics.jsonl") if each["kind"] == kind]


def losses(job):
    return {each["step"]: each["loss"] for each in lines(job)}


def run(job, **options):
    return train(job, device="cpu", **options)


def test_it_learns_and_leaves_its_traces(pictures, job):
    made = job(steps=40, val_every=10, save_every=10, target_val_loss=4.0)
    logged = []
    result = run(made, log=logged.append)

    vals = [each["val_loss"] for each in lines(made, "val")]
    assert [each["step"] for each in lines(made, "val")] == [0, 10, 20, 30, 40]
    assert vals == sorted(vals, reverse=True)
    assert result.finished
    assert result.progress.step == 40
    assert result.progress.val_loss == vals[-1] < 3.0
    assert result.progress.tokens == 40 * 4 * 32
    assert sorted(losses(made)) == list(range(1, 41))
    assert [path.name for path in sorted((made.output / "checkpoints").iterdir())] == [
        "step-00000030.pt",
        "step-00000040.pt",
    ]
    assert "<svg" in (made.output / "curve.svg").read_text()
    (target,) = lines(made, "target")
    assert target["step"] == result.progress.target_step
    assert target["val_loss"] <= 4.0
    assert any(str(each).startswith("target reached: validation loss") for each in logged)
    assert sum(isinstance(each, RunReport) for each in logged) == 40


def test_the_fingerprints_are_those_of_the_plan(job):
    made = job()
    run(made)
    loader = ps.Loader(made.plan, 4)
    right = [loader.fingerprint for _, _ in zip(range(12), loader, strict=False)]

    assert [each["fingerprint"] for each in lines(made)] == right
    logged = list(read_fingerprints(made.output / "fingerprints.jsonl"))
    assert [each.rows for each in logged] == right
    assert [each.step for each in logged] == [each["step"] for each in lines(made)]


def test_parts_of_a_step_are_added_up_to_the_same_step(job):
    """To 1e-5: the same sums, in another order. Dropout would be drawn otherwise."""
    model = replace(job().model, dropout=0.0)
    whole = run(job(batch_size=8, model=model))
    parts = run(
        replace(job(batch_size=2, global_batch_size=8, model=model), output=whole.output / "parts")
    )

    pairs = zip(whole.model.parameters(), parts.model.parameters(), strict=True)
    assert all(torch.allclose(one, two, atol=1e-5) for one, two in pairs)


def test_packed_rows_train_with_their_masks(job, store):
    rows = ps.Packs(store, 32)
    result = run(job(plan=ps.Plan(rows, seed=2), val=rows, steps=30))

    assert result.progress.val_loss < 4.5
    # Targets across documents count for nothing, so there are fewer than places.
    assert result.progress.tokens < 30 * 4 * 32


def test_validation_reads_the_same_rows_whatever_the_batch_size(job, store, tmp_path):
    """To 1e-6: the last batch is filled up with rows that do not count."""
    found = []
    for number, rows in enumerate((1, 3, 8)):
        made = replace(job(batch_size=rows, steps=1, val_rows=50), output=tmp_path / f"{number}")
        run(made)
        found.append(lines(made, "val")[0]["val_loss"])

    assert max(found) - min(found) < 1e-6
    whole = replace(job(steps=1, val_rows=10**6), output=tmp_path / "whole")
    run(whole)
    assert abs(lines(whole, "val")[0]["val_loss"] - found[0]) > 1e-5


def test_an_interrupted_run_resumes_bitwise(job, tmp_path):
    """In one process here; tests/train/test_parallel.py kills real ones."""
    straight = replace(job(steps=20), output=tmp_path / "straight")
    run(straight)
    broken = job(steps=20, save_every=4)
    with pytest.raises(KeyboardInterrupt):
        run(broken, log=stopper(after=10))
    assert max(losses(broken)) == 10
    logged = []
    run(broken, log=logged.append)

    assert logged[0] == "resuming after step 8"
    assert losses(broken) == losses(straight)
    assert lines(broken, "val")[-1]["val_loss"] == lines(straight, "val")[-1]["val_loss"]


def stopper(after):
    """Something that raises as a kill would, out of the middle of a run."""

    def log(logged):
        if isinstance(logged, RunReport) and logged.progress.step == after:
            raise KeyboardInterrupt

    return log


def test_a_finished_run_is_recognised(pictures, job):
    first = run(job())
    logged = []
    again = run(job(), log=logged.append)

    assert again.progress == first.progress
    assert logged[-1].endswith("run is already finished, after step 12")


def test_more_steps_go_on_from_the_end(job):
    run(job())
    result = run(job(steps=15))

    assert result.progress.step == 15
    assert sorted(losses(job())) == list(range(1, 16))


def test_another_model_or_other_data_are_refused(job, tiny, store):
    run(job())

    with pytest.raises(TrainError, match=r"contains a run of another model: layers 2 -> 3\."):
        run(job(steps=20, model=replace(tiny, layers=3)))
    with pytest.raises(ResumeError, match="seed 1 -> 9"):
        run(job(steps=20, plan=ps.Plan(ps.Windows(store, 32), seed=9)))


def test_a_damaged_checkpoint_is_named(job):
    run(job())
    newest = sorted((job().output / "checkpoints").iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:1000])

    logged = (
        r"step-00000012\.pt cannot be read as a checkpoint: .*\. Remove it to resume after step 6\."
    )
    with pytest.raises(TrainError, match=logged):
        run(job(steps=20))
    newest.write_bytes(b"")
    with pytest.raises(TrainError, match=r"cannot be read as a checkpoint: .+\. Remove it"):
        run(job(steps=20))
    torch.save([1, 2], newest)
    with pytest.raises(
        TrainError, match=r"is not a checkpoint of penstock\. Remove it to resume after"
    ):
        run(job(steps=20))
    newest.unlink()
    assert run(job(steps=20)).progress.step == 20


def test_two_runs_into_one_output_are_one_too_many(job):
    def log(_):
        with pytest.raises(
            TrainError,
            match=r"is training into .*run; .*Wait for it, stop it, or use another output",
        ):
            run(job())

    assert run(job(steps=2), log=log).finished
    assert run(job(steps=3)).finished


def test_a_finished_run_can_be_seen_where_nothing_can_be_written(job, monkeypatch):
    run(job())

    real = os.open

    def refuse(path, flags, *mode, **place):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(errno.EACCES, "read-only")
        return real(path, flags, *mode, **place)

    monkeypatch.setattr(os, "open", refuse)
    assert run(job()).progress.step == 12


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances by 10 ms whenever the loop reads it, so 50 ms a step."""
    ticks = itertools.count()
    fake = SimpleNamespace(perf_counter=lambda: next(ticks) / 100)
    for module in ("penstock.train.run", "penstock.train.metrics"):
        monkeypatch.setattr(sys.modules[module], "time", fake)


def test_other_minutes_are_planned_for_anew(job, clock):
    short = run(job(steps=None, max_minutes=0.005)).progress
    longer = run(job(steps=None, max_minutes=0.02)).progress

    assert short.minutes is None or short.minutes == 0.005
    assert longer.step > short.step
    assert longer.seconds > 0.6
    # How far a run gets in its time depends on the machine, so the rest is compared loosely.
    again = run(job(steps=None, max_minutes=0.02)).progress
    assert again.step >= longer.step
    run(job(steps=again.step + 1))
    assert run(job(steps=None, max_minutes=0.1)).progress.step > again.step + 1


def test_more_minutes_do_not_raise_the_learning_rate_to_its_peak(job, clock):
    limits = {"steps": None, "save_every": 10, "val_every": 1_000}
    first = run(job(max_minutes=0.05, **limits))
    logged = []
    made = job(max_minutes=0.1, **limits)
    again = run(made, log=logged.append).progress
    rates = [each["rate"] for each in lines(made) if "rate" in each]

    step = first.progress.step
    assert rates[step - 1] < 0.2
    assert rates[step] < 0.8
    assert again.step > step
    assert rates[-1] < 0.2
    (raised,) = [each for each in logged if "learning rate" in str(each)]
    assert raised.startswith("the schedule now ends after about ")


def set_clock(monkeypatch, *ticks):
    """Let the clock advance by these seconds when the loop reads it, each (seconds, readings)."""
    steps = itertools.chain.from_iterable([each] * count for each, count in ticks)
    now = itertools.accumulate(steps)
    fake = SimpleNamespace(perf_counter=lambda: next(now))
    for module in ("penstock.train.run", "penstock.train.metrics"):
        monkeypatch.setattr(sys.modules[module], "time", fake)


def test_a_run_that_becomes_slower_ends_its_schedule_in_time(job, monkeypatch):
    set_clock(monkeypatch, (0.01, 400), (0.03, 10_000))
    logged = []
    made = job(steps=None, max_minutes=0.2, val_every=10, save_every=10)
    progress = run(made, log=logged.append).progress

    assert progress.steps - progress.step <= 2
    assert [each["rate"] for each in lines(made) if "rate" in each][-1] < 0.11
    (shorter, *_) = [each for each in logged if "instead of" in str(each)]
    assert shorter.startswith("planned ")
    # A checkpoint has the plan that was made after its validation.
    saved = Checkpoints(made.output / "checkpoints", keep_last=2).load(made.model)
    assert saved["progress"]["steps"] == progress.steps


def test_a_slow_start_leaves_no_time_unused(job, monkeypatch):
    set_clock(monkeypatch, (0.03, 150), (0.01, 10_000))
    logged = []
    made = job(steps=None, max_minutes=0.2, val_every=10, save_every=10_000)
    progress = run(made, log=logged.append).progress

    assert any("instead of" in str(each) for each in logged)
    assert progress.seconds > 0.9 * 12
    assert [each["rate"] for each in lines(made) if "rate" in each][-1] < 0.11


def test_an_estimate_from_slow_steps_does_not_end_a_resumed_run(job, monkeypatch):
    set_clock(monkeypatch, (0.1, 60), (0.01, 10_000))
    first = run(job(steps=8, val_every=1_000)).progress
    again = run(job(steps=None, max_minutes=0.2, val_every=1_000)).progress

    assert first.seconds > 3
    assert again.step > 60
    assert again.seconds > 10


def test_a_validation_loss_that_is_no_number_ends_the_run_before_it_is_saved(job):
    hot = OptimizationConfig(learning_rate=1e30, warmup_steps=0)
    made = job(steps=1, optimization=hot)

    with pytest.raises(TrainError, match=r"validation loss after step 1 is nan.*Nothing is saved"):
        run(made)
    assert not list((made.output / "checkpoints").glob("*"))
    skipping = run(job(steps=1, optimization=hot, on_nonfinite="skip")).progress
    assert skipping.val_loss != skipping.val_loss


def test_unusable_devices_and_seeds_are_errors():
    with pytest.raises(PlanError, match=r"device='mps' is not supported\. Use cpu, cuda"):
        select_device("mps")
    with pytest.raises(PlanError, match=r"seed must be below 2\*\*63; got 18446744073709551616"):
        TrainingConfig(steps=1, seed=2**64)


WILD = OptimizationConfig(learning_rate=1e30, warmup_steps=0, clip=0.0)


def test_a_loss_that_is_no_number_names_the_step_and_its_documents(job):
    with pytest.raises(TrainError) as caught:
        run(job(optimization=WILD, val=None))

    message = str(caught.value)
    step = int(message.split()[1])
    first = (step - 1) * 4
    assert f"It read positions {first} to {first + 3}: document " in message
    assert re.search(r" \(texts-[0-9a-f]{16}, item \d+\)", message)
    assert "Nothing is saved yet." in message
    assert not list(job().output.glob("checkpoints/*"))


def test_the_documents_are_those_that_the_step_read(job, store):
    made = job(optimization=WILD, val=None)
    with pytest.raises(TrainError) as caught:
        run(made)
    message = str(caught.value)
    position = int(message.split("positions ")[1].split()[0].replace(",", ""))
    (sample,) = made.plan.samples(position, position + 1)
    named = int(message.split(": document ")[1].split()[0].replace(",", ""))

    ends = torch.tensor([len(each) for each in store]).cumsum(0)
    assert named == int((ends <= sample.sample * 32).sum())


@pytest.mark.parametrize("kind", [ps.Windows, ps.Packs])
def test_the_documents_of_a_row_are_those_of_its_tokens(store, kind):
    rows = kind(store, 32)
    plan = ps.Plan(rows, seed=2)
    ends = np.cumsum([len(each) for each in store])
    for sample in plan.samples(0, 40):
        logged = documents_at(plan, sample.position, sample.position + 1)
        named = [int(each) for each in re.findall(r"document (\d+) of ", logged)]
        spans = rows.spans(sample.sample)
        offsets = np.concatenate([np.arange(start, start + size) for start, size in spans])
        right = np.searchsorted(ends, offsets, side="right").tolist()

        assert named == list(dict.fromkeys(right))


def test_rows_without_documents_are_reported(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(500, dtype=np.uint16))
    plan = ps.Plan(ps.Windows(tmp_path / "ids.npy", 32))

    assert documents_at(plan, 0, 4) == "rows that do not record their documents"


def test_such_steps_can_be_skipped(job):
    logged = []
    made = job(optimization=WILD, on_nonfinite="skip", val=None)
    result = run(made, log=logged.append)
    skipped = [
        each for each in logged if isinstance(each, str) and each.startswith("skipped: Step")
    ]

    assert result.finished
    assert skipped
    assert all(weight.isfinite().all() for weight in result.model.parameters())
    assert None in losses(made).values()


def test_sigterm_saves_and_ends_the_run_cleanly(job):
    before = signal.getsignal(signal.SIGTERM)
    made = job(steps=100_000, val_every=100_000, save_every=100_000)

    def after_a_few_steps():
        path = made.output / "metrics.jsonl"
        while not path.exists() or path.read_text().count("step") < 10:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=after_a_few_steps)
    thread.start()
    result = run(made)
    thread.join()

    assert not result.finished
    assert signal.getsignal(signal.SIGTERM) is before
    (saved,) = (made.output / "checkpoints").iterdir()
    assert saved.name == f"step-{result.progress.step:08d}.pt"
    again = run(replace(made, training=replace(made.training, steps=result.progress.step + 2)))
    assert sorted(losses(made)) == list(range(1, again.progress.step + 1))


def test_a_second_ctrl_c_ends_a_step_that_hangs(monkeypatch):
    seconds = [0.0]
    fake = SimpleNamespace(monotonic=lambda: seconds[0])
    monkeypatch.setattr(sys.modules["penstock.train.distributed"], "time", fake)
    with stop_signals() as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked.is_set()
        seconds[0] = 0.9
        signal.raise_signal(signal.SIGINT)  # torchrun forwards the first one
        seconds[0] = 1.1
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_device_that_is_not_there_is_named(job):
    with pytest.raises(PlanError, match="There is no device 'gpu'"):
        train(job(), device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(PlanError, match="device='cuda' does not exist: torch finds 0 GPUs"):
            train(job(), device="cuda")


def test_minutes_become_a_number_of_steps_that_is_kept(pictures, job, clock):
    made = job(steps=None, max_minutes=0.06, val=None, val_every=10_000, save_every=10_000)
    logged = []
    result = run(made, log=logged.append)

    (planned,) = [each for each in logged if "to end within max_minutes=" in str(each)]
    steps = int(planned.removeprefix("planned ").split()[0].replace(",", ""))
    assert result.progress.steps == steps
    assert lines(made)[-1]["rate"] < 0.5  # the schedule came down in time
    assert run(made, log=logged.append).progress == result.progress
    assert "is already finished" in logged[-1]


def test_a_run_without_an_end_is_refused():
    with pytest.raises(PlanError, match="A run needs an end: set steps or max_minutes"):
        TrainingConfig()
    with pytest.raises(PlanError, match="val_every must be above 0 and finite; got 0"):
        TrainingConfig(steps=1, val_every=0)


def test_parts_that_do_not_fill_a_step_are_refused(job):
    with pytest.raises(PlanError, match="Use a multiple of 4"):
        run(job(batch_size=4, global_batch_size=10))


def test_the_batch_size_is_found_where_it_is_not_given(job):
    logged = []
    run(job(batch_size="auto", global_batch_size=12, steps=1), log=logged.append)

    assert "batch_size: 6 rows of 32 tokens at once" in logged


def test_fewer_rows_than_processes_are_refused_and_not_a_crash(job):
    """As the first of four processes would find it."""
    made, world = job(batch_size="auto", global_batch_size=2), World(0, 4, torch.device("cpu"))
    rows = Learner(made, world).fitting_rows()

    assert rows == 1
    with pytest.raises(PlanError, match="Use a multiple of 4"):
        step_rows(made.training, rows, world)


def test_fp8_without_torchao_says_what_is_missing(job):
    pytest.importorskip("torch")
    try:
        import torchao  # noqa: F401
    except ImportError:
        with pytest.raises(TrainError, match='precision="fp8" needs torchao'):
            run(job(precision="fp8"))


def test_bfloat16_trains_too(job):
    assert run(job(precision="bfloat16", steps=30)).progress.val_loss < 4.5


def test_the_random_state_of_the_process_is_left_alone_where_no_dropout_is_drawn(job, tiny):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run(job(model=replace(tiny, dropout=0.0)))

    assert torch.equal(torch.get_rng_state(), before)


def test_a_resumed_run_says_that_its_steps_have_another_number_of_rows(job):
    run(job(steps=6))
    logged = []
    run(job(steps=8, batch_size=2), log=logged.append)
    again = []
    run(job(steps=9, batch_size=2), log=again.append)

    assert logged[1].startswith("the schedule now ends after 8 steps, so the learning rate rises")
    assert logged[2] == (
        "a step had 4 rows before, on 1 process, and now has 2, on 1 process. To keep the steps of "
        "a run the same on any number of processes, set training.global_batch_size=4."
    )
    assert again[0] == "resuming after step 8"
    assert not any("a step had" in str(line) for line in again)
