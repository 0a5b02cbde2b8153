"""The settings of a training run.

    table of a recipe    dataclass             it decides
    [model]              ModelConfig           which weights there are, and what they compute
    [optimization]       OptimizationConfig    how gradients change the weights
    [training]           TrainingConfig        how long, how much at once, what is saved

`penstock.recipe` fills these dataclasses from a TOML file; its table [data] becomes a plan and
rows. A script creates all of them in Python, as a `TrainingJob`. Each dataclass checks its values
when it is created.
"""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.errors import PlanError
from penstock.loader.run import AnyPlan
from penstock.rows.protocol import Rows

if TYPE_CHECKING:  # it imports this module
    from penstock.recipe import EarlierSources

# The embedding has a multiple of 64 rows. Matrix units work on whole tiles: the logits of
# 50,304 ids are computed 25 % faster than those of 50,257.
_VOCAB_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The size and the options of a GPT."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    length: int = 1024
    """The most tokens in a row."""
    vocab_size: int = 50_257
    dropout: float = 0.0
    """Applied to the embeddings and to the output of each sub-layer. Attention weights get none,
    because the fast attention kernels do not support it."""
    positions: Literal["learned", "rotary"] = "learned"
    qk_norm: bool = False
    """Whether queries and keys are normalised, which allows higher learning rates."""
    activation: Literal["gelu", "relu2"] = "gelu"
    norm: Literal["layer", "rms"] = "layer"
    """"rms" is a norm without mean and without weights."""
    bias: bool = True
    """Whether the linear layers have biases."""
    tied: bool = True
    """Whether the output layer has the weights of the embedding."""
    zero_init: bool = False
    """Whether the layers that add to the residual stream, and an output layer that is not tied,
    begin with weights of 0."""

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.width, self.length, self.vocab_size) < 1:
            raise PlanError(
                f"Every dimension of a model must be at least 1; got layers={self.layers}, "
                f"heads={self.heads}, width={self.width}, length={self.length}, "
                f"vocab_size={self.vocab_size}."
            )
        if self.width % (2 * self.heads):  # rotary positions turn pairs of channels
            raise PlanError(
                f"width={self.width} cannot be split into {self.heads} heads of an even size. Use "
                f"a multiple of {2 * self.heads}."
            )
        if not 0 <= self.dropout < 1:
            raise PlanError(f"dropout must be at least 0 and below 1; got {self.dropout}.")

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to a multiple of 64."""
        return -(-self.vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE

    @property
    def matrix_weights(self) -> int:
        """The number of weights in matrices: nearly all weights of the model."""
        return 12 * self.layers * self.width**2 + self.padded_vocab * self.width

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations per token in rows of `length`, forward and backward.

        As in the PaLM paper: 6 for each weight of a matrix product, and 12 for each layer,
        channel and token of context.
        """
        return 6.0 * self.matrix_weights + 12.0 * self.layers * self.width * self.length


SIZES: dict[str, ModelConfig] = {
    "nano": ModelConfig(layers=4, heads=4, width=128, length=128, dropout=0.1),
    "124M": ModelConfig(),
    "350M": ModelConfig(layers=24, heads=16, width=1024),
}


def model_config(size: str, **changes: Any) -> ModelConfig:
    """The configuration of a model size by its name, with some settings changed.

    >>> model_config("124M", positions="rotary").width
    768
    """
    if size not in SIZES:
        raise PlanError(f"There is no model size {size!r}. Use one of {', '.join(SIZES)}.")
    return replace(SIZES[size], **changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizationConfig:
    """The optimizer and its learning rate schedule."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 6e-4
    """The highest learning rate of AdamW."""
    muon_rate: float = 0.02
    """The highest learning rate of Muon."""
    warmup_steps: int = 100
    floor: float = 0.1
    """The final learning rate, as a fraction of the highest."""
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    """Gradients with a larger norm are scaled down to this norm. 0 turns clipping off."""

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise PlanError(f"floor must be between 0 and 1; got {self.floor}.")
        _check_numbers(self, may_be_zero=("warmup_steps", "floor", "weight_decay", "clip"))
        if not all(0 <= beta < 1 for beta in self.betas):
            raise PlanError(f"betas must be at least 0 and below 1; got {list(self.betas)}.")

    def rate(self, step: int, steps: int | None) -> float:
        """The learning rate of a step, as a fraction of the highest.

        It rises over the warm-up, then follows half a cosine down to `floor`. If the number of
        steps is not known yet, it stays at 1 after the warm-up.

        >>> config = OptimizationConfig(warmup_steps=2)
        >>> [round(config.rate(step, 10), 2) for step in (0, 1, 2, 6, 9)]
        [0.5, 1.0, 1.0, 0.55, 0.13]
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if steps is None or steps <= self.warmup_steps:
            return 1.0
        # A resumed run can have fewer steps than it has done; the cosine must not rise again.
        done = min(1.0, (step - self.warmup_steps) / (steps - self.warmup_steps))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """The length of a run, its batch sizes and precision, and what it saves."""

    steps: int | None = None
    """Steps in total. If None, the first steps are timed, and as many are run as fit into
    `max_minutes`."""
    max_minutes: float | None = None
    batch_size: int | Literal["auto"] = "auto"
    """Rows of a micro-batch, on each device. "auto" is the most that fit on the GPU, but no more
    than 65,536 tokens; without a GPU, 8 rows."""
    global_batch_size: int | None = None
    """Rows of a step on all devices; gradients are accumulated over several micro-batches. If None,
    `batch_size` rows on each device, so a step has other rows on another number of devices."""
    precision: Literal["float32", "bfloat16", "fp8"] = "float32"
    compile: bool = False
    recompute: bool = False
    """Whether the backward pass recomputes activations: less memory, more time."""
    prefetch: int = 2
    """Blocks of consecutive batches that a background thread prepares ahead; with 0, there is no
    such thread."""
    val_every: int = 250
    val_rows: int = 1_024
    """Rows of the validation set to read; the same ones every time."""
    final_val: bool = False
    """Whether to compute the loss over all validation data at the end, each token a target once.
    It is written to result.json, and its time is part of `max_minutes`."""
    save_every: int = 500
    """Steps from one checkpoint to the next. There is always one at the end, and after Ctrl-C."""
    keep_last: int = 2
    """The number of checkpoints to keep; older ones are deleted."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    target_val_loss: float | None = None
    seed: int = 0
    """Seed of the initial weights and of dropout."""
    tensorboard: bool = False
    """Whether to write the numbers of metrics.jsonl for TensorBoard too."""
    wandb: bool = False
    """Whether to log the numbers of metrics.jsonl to Weights & Biases too."""

    def __post_init__(self) -> None:
        if self.steps is None and self.max_minutes is None:
            raise PlanError("A run needs an end: set steps or max_minutes.")
        _check_numbers(self, may_be_zero=("seed", "prefetch"))
        if self.seed >= 1 << 63:
            raise PlanError(f"seed must be below 2**63; got {self.seed}.")


def _check_numbers(
    config: OptimizationConfig | TrainingConfig, may_be_zero: tuple[str, ...]
) -> None:
    """Raise a PlanError unless all numbers are finite and above 0, or 0 if in `may_be_zero`."""
    for name, value in asdict(config).items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not math.isfinite(value) or value < 0 or (value == 0 and name not in may_be_zero):
            least = "at least" if name in may_be_zero else "above"
            raise PlanError(f"{name} must be {least} 0 and finite; got {value}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """The opened data and all settings of a run."""

    plan: AnyPlan
    val: Rows | None
    """Rows to validate on, if any."""
    model: ModelConfig
    training: TrainingConfig
    optimization: OptimizationConfig
    output: Path
    """The directory for checkpoints, metrics and the loss curve."""
    recipe: dict[str, Any] | None = None
    """The tables of the recipe, which are written to run.json."""
    earlier: "tuple[EarlierSources, ...]" = ()
    """The sources that the run had before its recipe was changed; run.json records them."""
