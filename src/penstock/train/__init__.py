"""The reference trainer: from rows to a loss curve.

    recipe ── rows, plan, loader ── model ── run ──► checkpoints, metrics.jsonl, curve.svg

The trainer is short enough to read completely, and you may copy from it: `model` has GPT-2 and
its variants, `run` has the training loop. Both need only NumPy and torch.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.train.config import SIZES as SIZES
    from penstock.train.config import ModelConfig as ModelConfig
    from penstock.train.config import OptimizationConfig as OptimizationConfig
    from penstock.train.config import TrainingConfig as TrainingConfig
    from penstock.train.config import TrainingJob as TrainingJob
    from penstock.train.config import model_config as model_config
    from penstock.train.display import Display as Display
    from penstock.train.display import documents_at as documents_at
    from penstock.train.distributed import World as World
    from penstock.train.gpt2 import from_gpt2 as from_gpt2
    from penstock.train.gpt2 import gpt2_config as gpt2_config
    from penstock.train.gpt2 import to_gpt2 as to_gpt2
    from penstock.train.learner import Learner as Learner
    from penstock.train.logs import read_metrics as read_metrics
    from penstock.train.metrics import RunProgress as RunProgress
    from penstock.train.metrics import RunReport as RunReport
    from penstock.train.metrics import RunResult as RunResult
    from penstock.train.model import GPT as GPT
    from penstock.train.optimize import Optimizers as Optimizers
    from penstock.train.run import train as train
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "config": "SIZES ModelConfig OptimizationConfig TrainingConfig "
            "TrainingJob model_config",
            "display": "Display documents_at",
            "distributed": "World",
            "gpt2": "from_gpt2 gpt2_config to_gpt2",
            "learner": "Learner",
            "logs": "read_metrics",
            "metrics": "RunProgress RunReport RunResult",
            "model": "GPT",
            "optimize": "Optimizers",
            "run": "train",
        },
    )
