"""The final loss of a run, over all validation data, and the file result.json.

    {"loss": 3.4567, "num_targets": 66401233, "length": 512, "step": 12960, "seconds": 5371.2, …}

Every token of the validation data but the very first is a target once, whatever the number of
processes. The file also has what others need to check the loss: digests of the tokenizer and the
stores, versions, and the device. The settings of the run are beside it in run.json.
"""

import json
import platform
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from penstock.disk import read_file, write_file
from penstock.errors import PlanError
from penstock.paths import is_remote, redacted
from penstock.rows.protocol import Rows
from penstock.store.reader import TokenStore
from penstock.train import loaders
from penstock.train.config import TrainingJob
from penstock.train.distributed import World
from penstock.train.learner import Learner
from penstock.train.metrics import Log, RunProgress
from penstock.train.vocabulary import stores_of

FILE_NAME = "result.json"
# A forward pass takes a third of the time of a step, because the backward pass takes two. The rest
# is reserve, for a step also updates weights that are not used here.
_SHARE_OF_A_STEP = 0.5
_PACKAGES = ("penstock", "numpy", "tokenizers", "gigatoken")


class FinalLoss:
    """The evaluation on all validation data, if the job asks for it."""

    def __init__(
        self, job: TrainingJob, world: World, rows: int, stop: threading.Event, log: Log
    ) -> None:
        """Open the data.

        Args:
            job: The settings.
            world: The processes of the run.
            rows: How many rows are computed at once.
            stop: Set if the run has to stop.
            log: Gets a line with the loss.
        """
        self._job, self._world, self._rows, self._log = job, world, rows, log
        # Several processes must stop at the same batch, so these evaluate to the end.
        self._stop = stop if world.size == 1 else None
        self._loader = loaders.final_loader(job, world, rows) if job.training.final_val else None

    def steps(self, step_rows: int) -> float:
        """How many training steps take at least as long as the evaluation."""
        if self._loader is None:
            return 0.0
        return _SHARE_OF_A_STEP * len(self._loader.plan.sources["val"]) / step_rows

    def is_due(self, step: int) -> bool:
        """Whether the loss after `step` is wanted, and not known yet."""
        if self._loader is None:
            return False
        is_known = False
        with suppress(OSError, ValueError, KeyError, TypeError):
            is_known = json.loads(read_file(self._job.output / FILE_NAME))["step"] == step
        return not self._world.from_main(int(is_known))

    def run(self, learner: Learner, progress: RunProgress, started: float) -> bool:
        """Compute the loss and write result.json; False if the run had to stop.

        Args:
            learner: The trained model.
            progress: The progress of the run, after its last step.
            started: When the run began, by `time.perf_counter`.
        """
        assert self._loader is not None  # `is_due` was true
        self._loader.move(0)
        vocab_size = self._job.model.vocab_size
        batches = loaders.evaluation_microbatches(self._loader, self._rows, vocab_size)
        found = learner.evaluate(batches, self._stop)
        if found is None:
            return False
        if self._world.is_main:
            progress = replace(progress, seconds=time.perf_counter() - started)
            path = self._write(*found, progress)
            self._log(f"final loss {found[0]:.4f} over {found[1]:,} targets, in {path}")
        return True

    def _write(self, loss: float, num_targets: int, progress: RunProgress) -> Path:
        job = self._job
        device = self._world.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        plan = None
        with suppress(PlanError):  # a store that is still being written has no digest
            plan = job.plan.digest
        found = {
            "loss": loss,
            "num_targets": num_targets,
            "length": job.model.length,
            "step": progress.step,
            "trained_tokens": progress.tokens,
            "seconds": round(progress.seconds, 3),
            "device": f"{self._world.size} x {name}",
            "precision": job.training.precision,
            "model": asdict(job.model),
            "plan": plan,
            "train": [each for rows in job.plan.sources.values() for each in _described(rows)],
            "val": _described(job.val),
            "versions": {"python": platform.python_version(), **_versions()},
        }
        path = job.output / FILE_NAME
        write_file(path, [json.dumps(found, indent=1).encode() + b"\n"])
        return path


def _described(rows: Rows | None) -> list[dict[str, Any]]:
    """The stores that rows are read from, with their digests."""
    found = []
    for store in () if rows is None else stores_of(rows):
        path = str(store.path)
        # A URL may contain a password, and the file is made for others.
        path = redacted(path) if is_remote(path) else path
        described: dict[str, Any] = {"path": path, "digest": store.digest}
        if isinstance(store, TokenStore):
            tokenizer = store.manifest.contents["tokenizer"]
            kept = {key: tokenizer[key] for key in ("name", "digest", "vocab_size", "canary")}
            described |= {"num_tokens": store.num_tokens, "tokenizer": kept}
            described["inputs"] = list(store.manifest.inputs)
        found.append(described)
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    # The metadata of a package does not always name the build, such as 2.6.0+cu124.
    return found | {"torch": torch.__version__}
