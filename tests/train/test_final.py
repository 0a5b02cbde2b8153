"""The final loss over all validation data, and the time that is kept for it."""

import json
import signal
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from penstock.train import TrainingConfig, train
from penstock.train.time_limit import TimeLimit


def run(job, **options):
    return train(job, device="cpu", **options)


def result(job):
    return json.loads((job.output / "result.json").read_bytes())


def plain_loss(model, tokens, length):
    """The mean loss over all tokens but the first, in rows of `length`."""
    model.eval()
    total = 0.0
    for start in range(0, len(tokens) - 1, length):
        row = torch.from_numpy(tokens[start : start + length + 1].astype("int64"))
        with torch.no_grad():
            logits = model(row[None, :-1])[0]
        total += float(cross_entropy(logits.double(), row[1:], reduction="sum"))
    return total / (len(tokens) - 1)


def test_every_token_is_a_target_once(job, store, tiny):
    # 320 ids are a multiple of 64, so the embedding has no rows of padding.
    made = job(final_val=True, val_rows=3, model=replace(tiny, vocab_size=320))
    model = run(made).model
    tokens = store.tokens(0, store.num_tokens)

    assert (len(tokens) - 1) % 32
    assert result(made)["num_targets"] == len(tokens) - 1
    assert result(made)["loss"] == pytest.approx(plain_loss(model, tokens, 32), abs=1e-6)
    assert result(made)["val"][0]["digest"] == store.digest
    assert result(made)["seconds"] > 0


def test_a_run_writes_no_result_unless_asked(job):
    run(job(steps=1))

    assert not (job().output / "result.json").exists()


def test_a_missing_result_is_computed_without_a_step(job):
    first = job(final_val=True)
    run(first)
    known = result(first)
    (first.output / "result.json").unlink()

    again = run(job(final_val=True))

    assert again.finished
    assert again.progress.step == 12
    assert result(first)["loss"] == known["loss"]


def test_a_longer_run_replaces_the_result(job):
    run(job(final_val=True))
    run(job(final_val=True, steps=14))

    assert result(job())["step"] == 14


def test_a_stopped_evaluation_writes_nothing_and_is_repeated(job):
    made = job(final_val=True)

    def stop_at_the_end(report):
        if str(report).startswith("step 12"):
            signal.raise_signal(signal.SIGTERM)

    stopped = run(made, log=stop_at_the_end)
    exists = (made.output / "result.json").exists()
    again = run(job(final_val=True))

    assert (stopped.finished, exists) == (False, False)
    assert again.finished
    assert result(made)["step"] == 12


class Clock:
    """A speed of two seconds a step, and of 2.5 since the last plan."""

    num_steps, last_pause, seconds_per_step = 20, 3.0, 2.0

    def recent_seconds_per_step(self):
        return 2.5


def test_time_is_kept_for_the_final_loss():
    config = TrainingConfig(max_minutes=10, val_every=30)

    # 582 s are planned, 82 s are over, 3 s are for the last validation, and 10 steps of 2 s are for
    # the final loss.
    assert TimeLimit(config, Clock(), 10).num_steps(82) == int(477 / 2.1)
    assert TimeLimit(config, Clock(), 0).num_steps(82) == int(497 / 2.1)
    # A validation of 3 s, the final loss, the step that is queued and the one after it.
    assert not TimeLimit(config, Clock(), 10).is_over(573)
    assert TimeLimit(config, Clock(), 10).is_over(573.1)


def test_another_speed_changes_the_plan_if_the_reserve_is_used_up_or_much_time_is_left():
    limit = TimeLimit(TrainingConfig(max_minutes=10, val_every=30), Clock(), 0)
    usual = int((600 * 0.98 - 103) / 2.6)

    assert limit.other_steps(70, 10**6) is None  # thirty seconds go by between two plans
    assert limit.other_steps(99, 10**6) is None
    assert limit.other_steps(100, 192) == usual == 186
    assert limit.other_steps(129, 10**6) is None
    assert limit.other_steps(130, int((600 - 133) / 2.6)) is None
    assert limit.other_steps(160, 10) == int((600 * 0.98 - 163) / 2.6)


def test_a_gpu_ends_more_steps_after_it_was_asked():
    config = TrainingConfig(max_minutes=10)

    assert not TimeLimit(config, Clock(), 0).is_over(593)
    assert TimeLimit(config, Clock(), 0, queued_steps=4).is_over(589.1)


def test_a_run_without_a_limit_is_never_over():
    assert not TimeLimit(TrainingConfig(steps=1), Clock(), 10).is_over(1e9)
