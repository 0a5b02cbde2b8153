"""The training loop.

    batch ─ micro-batches ─ forward, backward ─ sum over processes ─ clip ─ update ─► next batch
                                                       │
              now and then: validate, save             └─ loss and norm, read one step later

The loop does not wait for the GPU. It starts to copy the loss of a step to the host, queues the
next step, and only then reads the loss. So a loss that is not finite is noticed one step late, but
always before a checkpoint is saved. With `on_nonfinite="skip"` the loss is read at once, and the
update of that step is skipped.

The same command resumes a run that was killed or ran out of time, also with another number of
processes. On a CPU in float32 the losses are then bitwise those of an uninterrupted run.
"""

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.digest import derive_key
from penstock.errors import TrainError
from penstock.loader.fingerprints import FingerprintLog, LoggedStep
from penstock.train import loaders, vocabulary
from penstock.train.checkpoint import Checkpoints, locked_output
from penstock.train.config import TrainingJob
from penstock.train.display import documents_at, write_curve
from penstock.train.distributed import HostCopy, World, join_processes, stop_signals
from penstock.train.final import FinalLoss
from penstock.train.learner import Learner
from penstock.train.logs import Metrics, read_metrics
from penstock.train.metrics import Log, RunProgress, RunResult, Throughput
from penstock.train.record import changed_step, record_run
from penstock.train.time_limit import TimeLimit, is_planned, raised_rate, resumed

# Each process adds 1 to a sum if its time is over, and this number if it was asked to stop. It is
# above any number of processes, so the sum shows both.
_STOP_REQUEST = 1 << 20


def train(job: TrainingJob, *, device: str | None = None, log: Log | None = None) -> RunResult:
    """Train to the end of a job, from its last checkpoint if there is one.

    Args:
        job: The data and the settings.
        device: "cpu", "cuda" or "cuda:1"; by default the GPU if there is one.
        log: Called with a `RunReport` after every step, and with a line of text for other
            events. `Display` shows both.
    """
    with (
        join_processes(device) as world,
        stop_signals(world) as stop,
        locked_output(job.output, world),
    ):
        if world.device.type == "cuda":
            # TensorFloat-32: products of float32 are rounded to ten bits, and are much faster.
            torch.set_float32_matmul_precision("high")
        return _Loop(job, world, log or (lambda _: None), stop).run()


class _QueuedStep(NamedTuple):
    """A step whose results are still being copied to the host."""

    step: int
    results: HostCopy  # loss, norm of the gradient
    counts: HostCopy  # targets, fingerprints of rows and of tokens, requests to stop
    rate: float  # a fraction of the highest learning rate
    waited: float


class _Loop:
    """The training loop of one process."""

    def __init__(self, job: TrainingJob, world: World, log: Log, stop: threading.Event) -> None:
        started = time.perf_counter()
        self.job, self.config, self.world, self.stop = job, job.training, world, stop
        self.log: Log = log if world.is_main else (lambda _: None)
        vocabulary.check_vocabulary(job)
        self.learner = Learner(job, world)
        if self.config.batch_size == "auto":
            self.rows = self.learner.fitting_rows()
            self.log(f"batch_size: {self.rows} rows of {job.model.length:,} tokens at once")
        else:
            self.rows = self.config.batch_size
        self.step_rows = loaders.step_rows(self.config, self.rows, world)
        self.loader = loaders.training_loader(job, world, self.step_rows)
        self.reader = loaders.row_reader(job)
        self.val_loader = loaders.validation_loader(job, world, self.rows)
        self.final = FinalLoss(job, world, self.rows, stop, self.log)
        self.checkpoints = Checkpoints(job.output / "checkpoints", keep_last=self.config.keep_last)
        self.progress = RunProgress(steps=self.config.steps)  # of steps whose loss is known
        self._resume()
        self.queued = self.saved = self.progress.step
        self.stopping = self.interrupted = self.has_validated = False
        self.throughput = Throughput(job.model, world)
        self.limit = TimeLimit(
            self.config,
            self.throughput,
            self.final.steps(self.step_rows),
            # The loop asks before a step whether time is over, and ends after it. On a GPU the step
            # before is still running then, and the answer is read a step later.
            queued_steps=2 if world.device.type == "cpu" else 4,
        )
        # The time that earlier sessions took is subtracted, as if there had been one session.
        self.started = started - self.progress.seconds
        self.metrics: Metrics | None = None
        self.fingerprints: FingerprintLog | None = None

    def _resume(self) -> None:
        """Load the last checkpoint, if there is one."""
        saved = self.checkpoints.load(self.job.model)
        if saved is None:
            return
        with self.checkpoints.refuse_odd_fields():
            self.learner.load(saved)
            self.loader.load_state_dict(saved["data"])
            before = RunProgress(**saved["progress"])
        self.progress = resumed(before, self.config)
        self.log(f"resuming after step {self.progress.step:,}")
        if raised := raised_rate(before, self.progress, self.config, self.job.optimization):
            self.log(raised)
        if changed := changed_step(self.job.output, self.step_rows, self.world.size):
            self.log(changed)

    def run(self) -> RunResult:
        """Train to the end, and draw the loss curve."""
        self.stopping = bool(self.world.from_main(int(self._is_late())) and self.progress.step)
        path, curve = self.job.output / "metrics.jsonl", self.job.output / "curve.svg"
        finished = self._is_over() and self.progress.validated == self.progress.step
        if finished:
            self.log(f"{self.job.output} is already finished, after step {self.progress.step:,}")
        else:
            self._train(path)
        if not self.interrupted and self.final.is_due(self.progress.step):
            self.interrupted = not self.final.run(self.learner, self.progress, self.started)
        if self.world.is_main and not (finished and curve.exists()):
            title = f"{self.job.output.name}: {self.progress.tokens:,} tokens"
            target = self.config.target_val_loss
            write_curve(curve, read_metrics(path), title=title, target=target, log=self.log)
        # The caller of any process may read the files, so all wait until they are written.
        self.world.barrier()
        rank, model, finished = self.world.rank, self.learner.model, not self.interrupted
        return RunResult(self.progress, finished, rank, model, self.job.output)

    def _train(self, path: Path) -> None:
        """Take all steps, with validations and checkpoints, up to the last checkpoint."""
        self.learner.start()
        if self.world.is_main:
            self.metrics = Metrics(path, self.progress, self.config, self.job.recipe)
            record_run(self.job, self.step_rows, self.world.size)
            self.fingerprints = FingerprintLog(path.parent, self.job.plan, self.loader.position)
        try:
            # Before the first step, and after a stop that cut the validation of this step short.
            validates = self.progress.step % self.config.val_every == 0
            if validates and self.progress.validated != self.progress.step:
                with self.throughput.pause():
                    self._validate()
                self._forget_compilation()
            self._take_steps(iter(self.loader))
            if self.progress.validated != self.progress.step and not self.interrupted:
                self._validate()
                self.saved = -1  # an existing checkpoint of this step lacks this validation
            if self.saved != self.progress.step:
                self._save()
            step, steps = self.progress.step, self.progress.steps
            # The run may also end early because its data has ended.
            if self.stopping and not self.interrupted and steps is not None and step < steps:
                self.log(f"time is over: step {step:,} of {steps:,} planned steps is the last")
        finally:
            if self.metrics is not None:
                self.metrics.close()

    def _forget_compilation(self) -> None:
        """Count no time for the first validation of this session if it has compiled."""
        self.has_validated = True
        if self.config.compile:
            self.throughput.last_pause = 0.0

    def _is_over(self) -> bool:
        steps = self.progress.steps if is_planned(self.progress, self.config) else None
        return self.stopping or (steps is not None and self.queued >= steps)

    def _take_steps(self, batches: Iterator[dict[str, Tensor]]) -> None:
        """Queue steps until the end, reading the numbers of each after the next is queued."""
        pending: _QueuedStep | None = None
        while not self._is_over():
            queued = self._queue_step(batches)
            if pending is not None:
                self._finish_step(pending)
            pending = queued
            if queued is None:
                break
            validates = self.queued % self.config.val_every == 0
            saves = self.queued % self.config.save_every == 0
            # On a CPU the numbers are there already.
            if validates or saves or self.world.device.type == "cpu":
                self._finish_step(queued)
                pending = None
            if validates or saves:
                is_first = validates and not self.has_validated
                with self.throughput.pause():
                    if validates:
                        self._validate()
                        self._plan_again()
                    if saves:
                        self._save()
                if is_first:
                    self._forget_compilation()
        if pending is not None:
            self._finish_step(pending)

    def _queue_step(self, batches: Iterator[dict[str, Tensor]]) -> _QueuedStep | None:
        """Queue one step on the device; None if the data has ended."""
        started = time.perf_counter()
        batch = next(batches, None)
        waited = time.perf_counter() - started
        if batch is None:
            return None
        if self.job.model.dropout:
            # A key for each step and rank: a resumed run draws the dropout of the original.
            key = derive_key("dropout", self.config.seed, self.queued, self.world.rank)
            torch.manual_seed(key >> 1)
        # All processes must stop after the same step, so requests to stop are summed with the
        # counts of the step.
        stop = self._is_late() + self.stop.is_set() * _STOP_REQUEST
        counts = self.world.put([0, *loaders.step_fingerprints(self.loader, self.reader), stop])
        counts[0] = (batch["targets"] != -100).sum()
        self.world.sum(counts)
        results = self.learner.compute_gradients(loaders.microbatches(batch, self.rows), counts[0])
        rate = self.job.optimization.rate(self.queued, self.progress.steps)
        if self.config.on_nonfinite == "stop" or bool(results.isfinite().all()):
            self.learner.optimizers.step(rate)
        self.learner.optimizers.zero_grad()
        self.queued += 1
        return _QueuedStep(self.queued, HostCopy(results.double()), HostCopy(counts), rate, waited)

    def _finish_step(self, queued: _QueuedStep) -> None:
        """Read the numbers of a step, write them to the metrics, and decide whether to stop."""
        loss, norm = queued.results.read()
        num_targets, *prints, stop = queued.counts.read()
        # Fingerprints were summed as signed numbers; the remainders are the unsigned ones again.
        rows, tokens = (each % 2**64 for each in prints)
        if not math.isfinite(loss + norm):
            self._on_nonfinite(queued.step, loss, norm)
        self.progress = replace(
            self.progress,
            step=queued.step,
            tokens=self.progress.tokens + num_targets,
            seconds=time.perf_counter() - self.started,
            loss=loss,
        )
        self.stopping |= stop > 0
        self.interrupted |= stop >= _STOP_REQUEST
        self.throughput.add_step(num_targets, queued.waited)
        is_timed = self.throughput.num_steps == Throughput.TIMED_STEPS
        if is_timed and not is_planned(self.progress, self.config):
            self._plan_steps()
        learning_rate = self.job.optimization.learning_rate * queued.rate
        values = {
            "rate": queued.rate,
            "learning_rate": learning_rate,
            "tokens_per_second": round(self.throughput.tokens_per_second, 1),
            "fingerprint": rows,
        }
        self._record("step", loss=loss, norm=norm, waited=round(queued.waited, 6), **values)
        if self.fingerprints is not None:
            position = self._span(queued.step)[1]
            self.fingerprints.write(LoggedStep(queued.step, position, rows, tokens))
        if self.world.is_main:
            self.log(self.throughput.report(self.progress, learning_rate))

    def _on_nonfinite(self, step: int, loss: float, norm: float) -> None:
        """Raise for a step whose loss or norm is not finite, or log it; names its documents."""
        first, stop = self._span(step)
        message = (
            f"Step {step:,} has loss {loss} and gradient norm {norm}. It read positions {first:,} "
            f"to {stop - 1:,}: {documents_at(self.job.plan, first, stop)}."
        )
        if self.config.on_nonfinite == "skip":
            self.log(f"skipped: {message}")
            return
        raise TrainError(
            f"{message} {self.checkpoints.last_saved()} Lower the learning rate, inspect these "
            'documents, or set on_nonfinite="skip" to skip such steps.'
        )

    def _span(self, step: int) -> tuple[int, int]:
        """The first position of a step that was queued, and the position after its last."""
        # The loader's position is after the last queued step. That is this step, or the next one
        # if the loss of this step was read late.
        stop = self.loader.position - (self.queued - step) * self.step_rows
        return stop - self.step_rows, stop

    def _is_late(self) -> bool:
        """Whether `max_minutes` would be over after one more validation."""
        return self.limit.is_over(time.perf_counter() - self.started)

    def _plan_steps(self) -> None:
        """Set the number of steps that fit into `max_minutes`, from the speed so far."""
        minutes = self.config.max_minutes
        steps = self.world.from_main(self.queued + self.limit.num_steps(self.progress.seconds))
        self.progress = replace(self.progress, steps=steps, minutes=minutes)
        each = f"{self.throughput.seconds_per_step * 1e3:,.0f} ms"
        self.log(f"planned {steps:,} steps of {each}, to end within max_minutes={minutes:g}")

    def _plan_again(self) -> None:
        """Let the schedule end earlier or later if the speed of steps has changed."""
        planned = self.progress.steps
        if planned is None or self.progress.minutes is None:
            return
        other = self.limit.other_steps(time.perf_counter() - self.started, planned - self.queued)
        steps = self.world.from_main(planned if other is None else self.queued + other)
        if steps != planned:
            self.progress = replace(self.progress, steps=steps)
            rates = [
                self.job.optimization.learning_rate * self.job.optimization.rate(self.queued, each)
                for each in (planned, steps)
            ]
            self.log(
                f"planned {steps:,} steps instead of {planned:,}, by the speed of the last ones; "
                f"the learning rate is {rates[1]:.2g} instead of {rates[0]:.2g}"
            )

    def _validate(self) -> None:
        """Compute the validation loss, and see whether it reaches the target."""
        step, rows = self.progress.step, self.rows
        if self.val_loader is None:
            self.progress = replace(self.progress, validated=step)
            return
        self.val_loader.move(0)
        batches = loaders.evaluation_microbatches(self.val_loader, rows, self.job.model.vocab_size)
        # Several processes must stop at the same batch, so these validate to the end.
        found = self.learner.evaluate(batches, self.stop if self.world.size == 1 else None)
        if found is None:
            self.stopping = self.interrupted = True
            return
        loss, _ = found
        seconds = time.perf_counter() - self.started
        self.progress = replace(self.progress, val_loss=loss, validated=step, seconds=seconds)
        self._record("val", val_loss=loss)
        if not math.isfinite(loss) and self.config.on_nonfinite == "stop":
            raise TrainError(
                f"The validation loss after step {step:,} is {loss}, so the weights are no longer "
                f"usable. {self.checkpoints.last_saved()} Lower the learning rate."
            )
        self.log(f"step {step:,}: validation loss {loss:.4f}")
        target = self.config.target_val_loss
        if target is not None and loss <= target and self.progress.target_step is None:
            self.progress = replace(self.progress, target_step=step)
            self._record("target", val_loss=loss, target=target)
            self.log(
                f"target reached: validation loss {loss:.4f} <= {target:g} at step {step:,}, after "
                f"{seconds / 60:.1f} minutes and {self.progress.tokens:,} tokens"
            )

    def _record(self, kind: str, **values: float | None) -> None:
        """Write a line to metrics.jsonl, on the main process."""
        if self.metrics is not None:
            progress = self.progress
            shared = {"tokens": progress.tokens, "seconds": round(progress.seconds, 4)}
            self.metrics.add(kind, progress.step, **values, **shared)

    def _save(self) -> None:
        """Write a checkpoint; processes that do not write wait for it."""
        self.saved = self.progress.step
        self.progress = replace(self.progress, seconds=time.perf_counter() - self.started)
        if self.world.is_main:
            self._write_checkpoint()
        self.world.barrier()

    def _write_checkpoint(self) -> None:
        configs = {"progress": asdict(self.progress), "model_config": asdict(self.job.model)}
        contents = {**configs, "data": self.loader.state_dict(), **self.learner.state()}
        # The logs first: a power cut must not leave a checkpoint without its lines.
        for log in (self.metrics, self.fingerprints):
            if log is not None:
                log.sync()
        self.checkpoints.save(self.progress.step, contents)
