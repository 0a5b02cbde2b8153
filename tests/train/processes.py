"""Groups of processes that train, forked from one that has imported torch, which takes seconds.

    python processes.py      reads a group per line of stdin, as JSON; writes the ids of its
                             processes, and the exit status of each when all have ended

The tests use `Server`, and the server runs `work` in each process.
"""

import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path


def job_of(store, output, *, steps, model=None, optimization=None, **training):
    """A job of 12 rows a step on bytes, with dropout; keywords change it."""
    import penstock as ps
    from penstock.train import ModelConfig, OptimizationConfig, TrainingConfig, TrainingJob

    shape = {"layers": 2, "heads": 2, "width": 32, "length": 32, "vocab_size": 257, "dropout": 0.1}
    settings = {"batch_size": 3, "global_batch_size": 12, "val_every": 6, "save_every": 3}
    rates = {"learning_rate": 3e-3, "warmup_steps": 3, **(optimization or {})}
    return TrainingJob(
        plan=ps.Plan(ps.Windows(store, 32), seed=1),
        val=ps.Windows(store, 32),
        model=ModelConfig(**{**shape, **(model or {})}),
        training=TrainingConfig(steps=steps, val_rows=12, **{**settings, **training}),
        optimization=OptimizationConfig(**rates),
        output=Path(output),
    )


def work(group, rank):
    """Train, as one process of a group; rank 0 writes the model's weights if that is asked for."""
    import torch

    from penstock.train import to_gpt2, train

    if group["size"] > 1:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{group['rendezvous']}",
            rank=rank,
            world_size=group["size"],
        )
    result = train(job_of(**group["job"]), device="cpu")
    if rank == 0 and "export" in group:
        torch.save(to_gpt2(result.model), group["export"])
    if group["size"] > 1:
        torch.distributed.destroy_process_group()


class Server:
    """A process that forks groups of others."""

    def __init__(self, folder):
        self._folder, self._number = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(self, size, job, **others):
        """Start a group; returns the ids of its processes."""
        self._number += 1
        job = {name: str(each) if isinstance(each, Path) else each for name, each in job.items()}
        group = {"size": size, "rendezvous": f"{self._folder}/meet-{self._number}", "job": job}
        self._process.stdin.write(json.dumps({**group, **others}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def wait(self):
        """The exit status of each process of the group; negative for a signal."""
        return self._answer()

    def run(self, size, job, **others):
        """Run a group to its end."""
        self.start(size, job, **others)
        assert self.wait() == [0] * size

    def _answer(self):
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def serve():
    """Fork a group for each line of stdin, one group after the other."""
    sys.modules["matplotlib"] = None  # a run without it draws no curve, which takes 0.3 s
    # Before the fork, so that no process imports them.
    import numpy.random  # noqa: F401
    import torch
    import torch._dynamo

    import penstock.train.run  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        group = json.loads(line)
        children = []
        for rank in range(group["size"]):
            child = os.fork()
            if child == 0:
                try:
                    work(group, rank)
                except BaseException:  # noqa: BLE001  (whatever it was, the child ends)
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        sys.stdout.write(json.dumps(children) + "\n")
        sys.stdout.flush()
        ends = []
        for child in children:
            status = os.waitpid(child, 0)[1]
            ends.append(os.waitstatus_to_exitcode(status))
        sys.stdout.write(json.dumps(ends) + "\n")
        sys.stdout.flush()


def kill(pid):
    """Send SIGKILL to a process that may have ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    serve()
