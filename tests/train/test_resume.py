"""Going on with a run: whatever happened to it, and whatever is changed."""

import signal
from dataclasses import replace

import pytest
import torch

import penstock as ps
from penstock.errors import TrainError
from penstock.train import Learner, OptimizationConfig, RunReport, World, read_metrics, train


def lines(job, kind):
    return [each for each in read_metrics(job.output / "metrics.jsonl") if each["kind"] == kind]


def run(job, **options):
    return train(job, device="cpu", **options)


def stopper(when):
    """Something that raises as a kill would, at the first thing logged that `when` is true of."""

    def log(logged):
        if when(logged):
            raise KeyboardInterrupt

    return log


def at_step(step):
    return lambda logged: isinstance(logged, RunReport) and logged.progress.step == step


def test_fewer_steps_than_were_taken_are_a_finished_run(pictures, job):
    run(job())
    logged = []
    result = run(job(steps=5), log=logged.append)

    assert result.progress.step == 12
    assert logged[-1].endswith("is already finished, after step 12")


def test_a_run_killed_before_its_first_checkpoint_begins_its_metrics_again(job):
    made = job(target_val_loss=9.0)
    with pytest.raises(KeyboardInterrupt):
        run(made, log=stopper(at_step(2)))
    assert [each["step"] for each in lines(made, "val")] == [0]
    run(made)

    assert [each["step"] for each in lines(made, "val")].count(0) == 1
    assert len(lines(made, "target")) == 1
    assert [each["step"] for each in lines(made, "step")] == list(range(1, 13))


def test_the_last_checkpoint_knows_the_last_validation(job):
    """Also where it is saved at the last step because it was due, before validating."""
    made = job(steps=12, save_every=4, val_every=5)
    first = run(made)
    again = run(made)

    assert first.progress.validated == again.progress.validated == 12
    assert again.progress.val_loss == first.progress.val_loss == lines(made, "val")[-1]["val_loss"]


def test_a_run_killed_in_its_last_validation_makes_up_for_it(job, pictures):
    made = job(steps=12, save_every=4, val_every=5)
    with pytest.raises(KeyboardInterrupt):
        run(made, log=stopper(lambda logged: str(logged).startswith("step 12: validation")))
    assert not (made.output / "curve.svg").exists()
    result = run(made)

    assert [each["step"] for each in lines(made, "val")] == [0, 5, 10, 12]
    assert result.progress.validated == 12
    assert (made.output / "curve.svg").exists()


def test_a_picture_that_a_kill_left_out_is_drawn_the_next_time(job, pictures):
    run(job())
    curve = job().output / "curve.svg"
    drawn = curve.read_bytes()
    curve.unlink()
    run(job())

    assert curve.read_bytes() == drawn


@pytest.mark.parametrize("order", [("adamw", "muon"), ("muon", "adamw")])
def test_another_optimizer_is_refused(job, order):
    first, second = (OptimizationConfig(optimizer=name, warmup_steps=2) for name in order)
    run(job(optimization=first))

    with pytest.raises(TrainError, match=f"another optimizer than optimizer='{order[1]}'"):
        run(job(steps=14, optimization=second))


def test_a_resumed_run_uses_the_new_settings(job):
    before = OptimizationConfig(learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    after = OptimizationConfig(learning_rate=2e-3, weight_decay=0.3, betas=(0.8, 0.99))
    run(job(optimization=before))
    learner = Learner(job(optimization=after), World(0, 1, torch.device("cpu")))
    saved = torch.load(job().output / "checkpoints" / "step-00000012.pt", weights_only=True)
    learner.load(saved)
    (adamw,) = learner.optimizers.all

    assert [group["weight_decay"] for group in adamw.param_groups] == [0.3, 0.0]
    assert all(tuple(group["betas"]) == (0.8, 0.99) for group in adamw.param_groups)
    assert all(group["highest_lr"] == 2e-3 for group in adamw.param_groups)
    assert all(state["step"] == 12 for state in adamw.state.values())


def test_packed_rows_in_parts_are_the_same_step(job, store):
    """Targets are not alike in number from part to part; each counts once. To 1e-5."""
    rows = ps.Packs(store, 32)
    model = replace(job().model, dropout=0.0)
    whole = run(job(plan=ps.Plan(rows, seed=2), val=rows, batch_size=8, model=model, steps=8))
    made = job(plan=ps.Plan(rows, seed=2), val=rows, batch_size=1, model=model, steps=8)
    made = replace(made, training=replace(made.training, global_batch_size=8))
    parts = run(replace(made, output=whole.output / "parts"))

    pairs = zip(whole.model.parameters(), parts.model.parameters(), strict=True)
    assert all(torch.allclose(one, two, atol=1e-5) for one, two in pairs)
    assert whole.progress.loss == pytest.approx(parts.progress.loss, abs=1e-5)


def test_a_validation_that_ctrl_c_cut_short_is_made_up_for(job, tmp_path):
    straight = replace(job(), output=tmp_path / "straight")
    run(straight)

    def ctrl_c(logged):
        if at_step(6)(logged):  # step 6 ends with a validation and a checkpoint
            signal.raise_signal(signal.SIGINT)

    stopped = run(job(), log=ctrl_c)
    assert not stopped.finished
    assert (stopped.progress.step, stopped.progress.validated) == (6, 0)
    assert [each["step"] for each in lines(job(), "val")] == [0]

    assert run(job()).finished
    for kind, value in (("val", "val_loss"), ("step", "loss")):
        found = [[each[value] for each in lines(one, kind)] for one in (job(), straight)]
        assert found[0] == found[1]
