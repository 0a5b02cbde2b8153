"""The loop.

    batch ─ parts ─ forward, backward ─ sum over processes ─ clip ─ step ─► the next batch
                                                   │
              every so often: validate, save       └─ numbers, read one step late

The loop never waits for the GPU: what a step gave is copied beside it and read after the next
step was queued. A loss that is not a number is therefore seen one step later, and always before
anything is saved; with `on_nonfinite="skip"` it is read at once, and the step is left out.

The same command goes on where a run stopped: killed, out of time, or on another number of
processes. On a CPU in float32 the losses are then bitwise those of a run that never stopped.
"""

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.digest import derive_key
from penstock.errors import TrainError
from penstock.train.checkpoint import Checkpoints
from penstock.train.curve import write_curve
from penstock.train.feed import Feed
from penstock.train.fit import fitting_rows
from penstock.train.job import Job, Outcome, Progress, Report, Tell
from penstock.train.learner import Learner
from penstock.train.metrics import Metrics, peak_flops, read_metrics
from penstock.train.output import alone
from penstock.train.pace import TIMED_STEPS, Pace, Reading, device_memory, signals
from penstock.train.trace import documents_at
from penstock.train.vocabulary import check_vocabulary
from penstock.train.world import World, signed, world

__all__ = ["train"]

_TIME_SHARE = 0.97  # of the minutes that are planned for
_ASKED = 1 << 20  # above any number of processes that are late


def train(job: Job, *, device: str | None = None, tell: Tell | None = None) -> Outcome:
    """Run a job to its end, from where it stopped if it did.

    Args:
        job: What to train on what.
        device: "cpu", "cuda" or "cuda:1"; the GPU where there is one.
        tell: Called after every step with how it stands, and with what is worth a line.
    """
    with world(device) as here, signals() as asked, alone(job.output, here):
        if here.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        return _Run(job, here, tell or (lambda _: None), asked).go()


class _Taken(NamedTuple):
    """A step that was queued."""

    step: int
    numbers: Reading  # loss, length of the gradient
    counts: Reading  # targets, fingerprint, whether to stop
    rate: float
    waited: float


class _Run:
    """One process's part of a run."""

    def __init__(self, job: Job, here: World, tell: Tell, asked: threading.Event) -> None:
        self.job, self.world, self.asked = job, here, asked
        self.settings = job.training
        self.tell: Tell = tell if here.leads else (lambda _: None)
        check_vocabulary(job.plan.sources, job.val, job.shape.vocab_size)
        self.learner = Learner(job, here)
        rows = self.settings.batch_size
        if rows == "auto":
            rows = here.agreed(fitting_rows(self.learner.model, here.device, self.settings))
            self.tell(f"batch_size: {rows} rows of {job.shape.length:,} tokens at once")
        self.feed = Feed(job, here, rows)
        kept = self.settings.keep_last
        self.checkpoints = Checkpoints(job.output / "checkpoints", keep_last=kept)
        self.now = Progress(steps=self.settings.steps)  # of steps whose numbers are known
        self._resume()
        self.queued = self.saved = self.now.step
        self.stopping = self.interrupted = False
        self.pace = Pace()
        self.peak = peak_flops(here.device)
        self.begun = time.perf_counter() - self.now.seconds
        self.metrics: Metrics | None = None

    def _resume(self) -> None:
        saved = self.checkpoints.load()
        if saved is None:
            return
        ours = asdict(self.job.shape)
        if saved["shape"] != ours:
            changed = [
                f"{name} {value!r} -> {ours.get(name)!r}"
                for name, value in saved["shape"].items()
                if ours.get(name) != value
            ]
            raise TrainError(
                f"{self.job.output} holds a run of another model: {', '.join(changed)}. Go on with "
                "the model it has, or name another output."
            )
        self.learner.load(saved)
        self.feed.loader.load_state_dict(saved["data"])
        self.now = Progress(**saved["progress"])
        minutes = self.settings.max_minutes
        if self.settings.steps is not None:
            self.now = replace(self.now, steps=self.settings.steps, minutes=None)
        elif saved["progress"].get("minutes", minutes) != minutes:  # older ones do not say
            self.now = replace(self.now, steps=None, minutes=None)  # planned anew
        self.tell(f"going on after step {self.now.step:,}")

    def go(self) -> Outcome:
        """Steps until the end, and what is left behind after it."""
        late = self.world.agreed(int(self._is_late()))
        self.stopping = bool(late and self.now.step)
        path, curve = self.job.output / "metrics.jsonl", self.job.output / "curve.svg"
        finished = self._is_over() and self.now.validated == self.now.step
        if finished:
            self.tell(f"{self.job.output} was finished before, after step {self.now.step:,}")
        else:
            self._work(path)
        if self.world.leads and not (finished and curve.exists()):
            title = f"{self.job.output.name}: {self.now.tokens:,} tokens"
            target = self.settings.target_val_loss
            write_curve(curve, read_metrics(path), title=title, target=target)
        self.world.wait()
        return self._outcome()

    def _work(self, path: Path) -> None:
        """From the first step to the last checkpoint, written down at `path`."""
        self.learner.begin()
        if self.world.leads:
            now, board = self.now, self.settings.tensorboard
            self.metrics = Metrics(path, step=now.step, validated=now.validated, tensorboard=board)
        try:
            if self.now.step == 0:
                with self.pace.paused():
                    self._validate()
                if self.settings.compile:
                    self.pace.pause = 0.0  # most of it was compiling, which comes once
            self._loop(iter(self.feed.loader))
            if self.now.validated != self.now.step and not self.interrupted:
                self._validate()
                self.saved = -1  # what was saved of this step does not know of it
            if self.saved != self.now.step:
                self._save()
        finally:
            if self.metrics is not None:
                self.metrics.close()

    def _is_over(self) -> bool:
        """Whether no step is left to take."""
        reached = self.now.steps is not None and self.queued >= self.now.steps
        return self.stopping or reached

    def _outcome(self) -> Outcome:
        return Outcome(
            now=self.now,
            finished=not self.interrupted,
            rank=self.world.rank,
            model=self.learner.model,
            output=self.job.output,
        )

    def _loop(self, batches: Iterator[dict[str, Tensor]]) -> None:
        pending: _Taken | None = None
        while not self._is_over():
            taken = self._take(batches)
            if pending is not None:
                self._settle(pending)
            pending = taken
            if taken is None:
                break
            pauses = self._is_due(self.settings.val_every) or self._is_due(self.settings.save_every)
            if pauses or self.world.device.type == "cpu":  # where everything is done already
                self._settle(taken)
                pending = None
            if pauses:
                self._pause()
        if pending is not None:
            self._settle(pending)

    def _is_due(self, every: int) -> bool:
        return self.queued % every == 0

    def _pause(self) -> None:
        """Validate or save, on time that does not count as training."""
        with self.pace.paused():
            if self._is_due(self.settings.val_every):
                self._validate()
            if self._is_due(self.settings.save_every):
                self._save()

    def _take(self, batches: Iterator[dict[str, Tensor]]) -> _Taken | None:
        """Queue one step; returns its numbers, still on their way. None where data has ended."""
        begun = time.perf_counter()
        batch = next(batches, None)
        waited = time.perf_counter() - begun
        if batch is None:
            return None
        if self.job.shape.dropout:
            # Drawn from a key of its own, so that a step is the same in every run that takes it.
            key = derive_key("dropout", self.settings.seed, self.queued, self.world.rank)
            torch.manual_seed(key >> 1)
        # All processes must stop after the same step, so each tells the others.
        stop = self._is_late() + self.asked.is_set() * _ASKED
        counts = self.world.put([0, signed(self.feed.loader.fingerprint or 0), stop])
        counts[0] = (batch["targets"] != -100).sum()
        self.world.sum(counts)
        numbers = self.learner.gradients(self.feed.parts(batch), counts[0])
        rate = self.job.optimization.rate(self.queued, self.now.steps)
        if self.settings.on_nonfinite == "stop" or bool(numbers.isfinite().all()):
            self.learner.optimizers.step(rate)
        self.learner.optimizers.clear()
        self.queued += 1
        return _Taken(self.queued, Reading(numbers.double()), Reading(counts), rate, waited)

    def _settle(self, taken: _Taken) -> None:
        """Read the numbers of a step, write them down, and see whether to go on."""
        loss, norm = taken.numbers.read()
        num_targets, fingerprint, stop = taken.counts.read()
        if not math.isfinite(loss + norm):
            self._refuse(taken.step, loss, norm)
        self.now = replace(
            self.now,
            step=taken.step,
            tokens=self.now.tokens + num_targets,
            seconds=time.perf_counter() - self.begun,
            loss=loss,
        )
        self.stopping |= stop > 0
        self.interrupted |= stop >= _ASKED
        self.pace.add(num_targets, taken.waited)
        if self.now.steps is None and self.pace.num_steps == TIMED_STEPS:
            minutes = self.settings.max_minutes
            self.now = replace(self.now, steps=self._planned(), minutes=minutes)
        if self.metrics is None:
            return
        self.metrics.add(
            "step",
            self.now.step,
            loss=loss,
            norm=norm,
            rate=taken.rate,
            tokens=self.now.tokens,
            seconds=round(self.now.seconds, 4),
            tokens_per_second=round(self.pace.tokens_per_second, 1),
            waited=round(taken.waited, 6),
            fingerprint=fingerprint % 2**64,
        )
        self.tell(self._report())

    def _refuse(self, step: int, loss: float, norm: float) -> None:
        """A loss or gradient that is not a number: say where it came from, and stop or skip."""
        rows = self.feed.whole
        first = self.feed.loader.position - (self.queued - step + 1) * rows
        told = (
            f"Step {step:,} has a loss of {loss} and a gradient of length {norm}. It read "
            f"positions {first:,} to {first + rows - 1:,}: "
            f"{documents_at(self.job.plan, first, first + rows)}."
        )
        if self.settings.on_nonfinite == "skip":
            self.tell(f"skipped: {told}")
            return
        raise TrainError(
            f"{told} {self._last_saved()}. Lower the learning rate, look at these documents, or "
            'pass on_nonfinite="skip" to leave such steps out.'
        )

    def _last_saved(self) -> str:
        kept = list(self.checkpoints.paths())
        return f"The last checkpoint is of step {kept[-1]:,}" if kept else "Nothing was saved yet"

    def _is_late(self) -> bool:
        """Whether the minutes are over, but for what the last validation will take."""
        minutes = self.settings.max_minutes
        spent = time.perf_counter() - self.begun + self.pace.pause
        return minutes is not None and spent > 60 * minutes

    def _planned(self) -> int | None:
        """How many steps the minutes will do, by the time that the last few took."""
        minutes = self.settings.max_minutes
        assert minutes is not None  # a run without a number of steps has minutes
        left = 60 * minutes * _TIME_SHARE - self.now.seconds
        each = self.pace.seconds_per_step + self.pace.pause / self.settings.val_every
        steps = self.world.agreed(self.queued + max(0, int(left / each)))
        took = self.pace.seconds_per_step * 1e3
        self.tell(f"{minutes:g} minutes will do about {steps:,} steps of {took:,.0f} ms")
        return steps

    def _report(self) -> Report:
        speed, each = self.pace.tokens_per_second, self.pace.seconds_per_step
        flops = self.job.shape.flops_per_token(self.job.shape.length) * speed
        steps = self.now.steps
        return Report(
            now=self.now,
            tokens_per_second=speed,
            mfu=flops / (self.peak * self.world.size) if self.peak else None,
            waiting=self.pace.waiting,
            remaining=None if steps is None else each * (steps - self.now.step),
            memory=device_memory(self.world.device),
        )

    def _validate(self) -> None:
        """The mean loss of the validation rows, and whether it is the one hoped for."""
        self.now = replace(self.now, validated=self.now.step)
        if self.feed.val is None:
            return
        self.feed.val.seek(0)
        loss = self.learner.evaluate(chain.from_iterable(map(self.feed.parts, self.feed.val)))
        self.now = replace(self.now, val_loss=loss, seconds=time.perf_counter() - self.begun)
        self._record("val", val_loss=loss)
        if not math.isfinite(loss) and self.settings.on_nonfinite == "stop":
            raise TrainError(
                f"The validation loss after step {self.now.step:,} is {loss}: the model's numbers "
                f"are not finite any more. {self._last_saved()}. Lower the learning rate."
            )
        self.tell(f"step {self.now.step:,}: validation loss {loss:.4f}")
        target = self.settings.target_val_loss
        if target is not None and loss <= target and self.now.target_step is None:
            self.now = replace(self.now, target_step=self.now.step)
            self._record("target", val_loss=loss, target=target)
            self.tell(
                f"target reached: validation loss {loss:.4f} <= {target:g} at step "
                f"{self.now.step:,}, after {self.now.seconds / 60:.1f} minutes and "
                f"{self.now.tokens:,} tokens"
            )

    def _record(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            seconds = round(self.now.seconds, 4)
            self.metrics.add(kind, self.now.step, **values, tokens=self.now.tokens, seconds=seconds)

    def _save(self) -> None:
        """Write a checkpoint, by the process that leads; the others wait for it."""
        self.saved = self.now.step
        self.now = replace(self.now, seconds=time.perf_counter() - self.begun)
        if self.world.leads:
            contents = {
                "progress": asdict(self.now),
                "shape": asdict(self.job.shape),
                "data": self.feed.loader.state_dict(),
                **self.learner.state(),
            }
            if self.metrics is not None:
                self.metrics.sync()  # a power cut must not leave a checkpoint without its lines
            self.checkpoints.save(self.now.step, contents)
        self.world.wait()
