"""Going on with a run: whatever happened to it, and whatever is changed."""

from dataclasses import replace

import pytest
import torch

import penstock as ps
from penstock.errors import TrainError
from penstock.train.job import Report
from penstock.train.learner import Learner
from penstock.train.metrics import read_metrics
from penstock.train.optimize import Optimization
from penstock.train.run import train
from penstock.train.world import World


def lines(job, kind):
    return [each for each in read_metrics(job.output / "metrics.jsonl") if each["kind"] == kind]


def run(job, **options):
    return train(job, device="cpu", **options)


def stopper(when):
    """Something that raises as a kill would, at the first thing told that `when` is true of."""

    def tell(told):
        if when(told):
            raise KeyboardInterrupt

    return tell


def at_step(step):
    return lambda told: isinstance(told, Report) and told.now.step == step


def test_fewer_steps_than_were_taken_are_a_finished_run(job):
    run(job())
    told = []
    outcome = run(job(steps=5), tell=told.append)

    assert outcome.now.step == 12
    assert told[-1].endswith("was finished before, after step 12")


def test_a_run_killed_before_its_first_checkpoint_begins_its_metrics_again(job):
    made = job(target_val_loss=9.0)
    with pytest.raises(KeyboardInterrupt):
        run(made, tell=stopper(at_step(2)))
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

    assert first.now.validated == again.now.validated == 12
    assert again.now.val_loss == first.now.val_loss == lines(made, "val")[-1]["val_loss"]


def test_a_run_killed_in_its_last_validation_makes_up_for_it(job):
    made = job(steps=12, save_every=4, val_every=5)
    with pytest.raises(KeyboardInterrupt):
        run(made, tell=stopper(lambda told: str(told).startswith("step 12: validation")))
    assert not (made.output / "curve.svg").exists()
    outcome = run(made)

    assert [each["step"] for each in lines(made, "val")] == [0, 5, 10, 12]
    assert outcome.now.validated == 12
    assert (made.output / "curve.svg").exists()


def test_a_picture_that_a_kill_left_out_is_drawn_the_next_time(job):
    run(job())
    curve = job().output / "curve.svg"
    drawn = curve.read_bytes()
    curve.unlink()
    run(job())

    assert curve.read_bytes() == drawn


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("order", [("adamw", "muon"), ("muon", "adamw")])
def test_another_optimizer_is_refused(job, order):
    first, second = (Optimization(optimizer=name, warmup_steps=2) for name in order)
    run(job(optimization=first))

    with pytest.raises(TrainError, match=f"begun with another optimizer than '{order[1]}'"):
        run(job(steps=14, optimization=second))


def test_a_run_goes_on_under_the_settings_of_now(job):
    before = Optimization(learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    after = Optimization(learning_rate=2e-3, weight_decay=0.3, betas=(0.8, 0.99))
    run(job(optimization=before))
    learner = Learner(job(optimization=after), World(0, 1, torch.device("cpu")))
    saved = torch.load(job().output / "checkpoints" / "step-00000012.pt", weights_only=True)
    learner.load(saved)
    (adamw,) = learner.optimizers.all

    assert [group["weight_decay"] for group in adamw.param_groups] == [0.3, 0.0]
    assert all(tuple(group["betas"]) == (0.8, 0.99) for group in adamw.param_groups)
    assert all(group["highest"] == 2e-3 for group in adamw.param_groups)
    assert all(state["step"] == 12 for state in adamw.state.values())


def test_packed_rows_in_parts_are_the_same_step(job, store):
    """Targets are not alike in number from part to part; each counts once. To 1e-5."""
    rows = ps.Packs(store, 32)
    shape = replace(job().shape, dropout=0.0)
    whole = run(job(plan=ps.Plan(rows, seed=2), val=rows, batch_size=8, shape=shape, steps=8))
    made = job(plan=ps.Plan(rows, seed=2), val=rows, batch_size=1, shape=shape, steps=8)
    made = replace(made, training=replace(made.training, global_batch_size=8))
    parts = run(replace(made, output=whole.output / "parts"))

    pairs = zip(whole.model.parameters(), parts.model.parameters(), strict=True)
    assert all(torch.allclose(one, two, atol=1e-5) for one, two in pairs)
    assert whole.now.loss == pytest.approx(parts.now.loss, abs=1e-5)
