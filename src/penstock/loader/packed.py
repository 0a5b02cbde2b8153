"""Packed rows for models of transformers: make sure that documents do not see each other.

    input_ids       a a a b b c        a row of three documents
    position_ids    0 1 2 0 1 0        the only sign of where each begins

These models build their mask from `position_ids` only when they are called without an
`attention_mask` and without a cache. The cache is on by default, and a model that ignores the
borders says nothing. FlashAttention finds documents in batches of one row only.

Transformers is never imported here: where it was not, there is no model of it.
"""

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from penstock.errors import PlanError

__all__ = ["check_packed", "keep_documents_apart", "one_row", "prepare"]

# 4.53.1 was the first that masks by position_ids, in Llama; 4.55 the first in GPT-2.
_LEAST = (4, 55)
# Attention whose masks a plain forward call on any device can show.
_TRIED = ("eager", "sdpa")
# Logits of a document may change by so much of what those of the changed document do.
_TOLERANCE = 1e-3

_prepared: "WeakSet[torch.nn.Module]" = WeakSet()


def check_packed() -> None:
    """Check, before the first packed batch, what can be checked without the model.

    Warns as long as no model was prepared: what the training loop does is not known here.
    """
    if "transformers" not in sys.modules:
        return
    _refuse_old()
    if not _prepared:
        warnings.warn(
            "Rows of these batches hold several documents, and models of transformers keep them "
            "apart only when called without a cache and without an attention_mask. Call "
            "penstock.integrations.huggingface.keep_documents_apart(model) once before training, "
            "which switches the cache off and tries the model.",
            stacklevel=3,
        )


def keep_documents_apart(model: Any) -> Any:
    """Make a model of transformers ready for packed rows, or refuse it; returns the model.

    Switches the cache off (`model.config.use_cache = False`) and calls the model with two short
    documents in one row, to see that the first does not change what it says of the second.

    Raises:
        PlanError: packed documents would see each other, or there is no model of transformers.
    """
    if prepare(model):
        raise PlanError(
            f"{type(model).__name__} uses FlashAttention, which finds packed documents in batches "
            "of one row only. Give the model to StepLoader(…, model=model), RowsTrainer or "
            'LLMDataModule, which put rows end to end; or load it with attn_implementation="sdpa".'
        )
    if model not in _prepared:
        raise PlanError(f"{type(model).__name__} has no model of transformers in it.")
    return model


def prepare(module: Any) -> bool:
    """Make all models of transformers in a module ready; whether they want batches of one row.

    Raises:
        PlanError: packed documents would see each other.
    """
    models = list(_outermost(module))
    if not models:
        return False
    _refuse_old()
    implementations = set()
    for model in models:
        for each in model.modules():
            config = getattr(each, "config", None)
            if getattr(config, "use_cache", None):
                config.use_cache = False  # type: ignore[union-attr]
            implementations.add(str(getattr(config, "_attn_implementation", None)))
        if model.config._attn_implementation in _TRIED and _is_whole(model):
            _refuse_leak(model)
    _prepared.add(module)
    return any("flash" in name for name in implementations)


def one_row(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A packed batch as one row, of the same documents; no row predicts the next one's first."""
    batch["labels"][:, 0] = -100
    return {name: values.reshape(1, -1) for name, values in batch.items()}


def _outermost(module: Any) -> Iterator[Any]:
    """The models of transformers in a module that are in no other one."""
    loaded = sys.modules.get("transformers.modeling_utils")
    if loaded is None or not isinstance(module, torch.nn.Module):
        return
    if isinstance(module, loaded.PreTrainedModel):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _refuse_old() -> None:
    version = sys.modules["transformers"].__version__
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if found < _LEAST:
        least = ".".join(map(str, _LEAST))
        raise PlanError(
            f"transformers {version} does not keep packed documents apart; {least} is the first "
            f'that does for GPT-2 and Llama. Run: pip install "transformers>={least}". Or use '
            "Documents, which have one document in each row."
        )


def _is_whole(model: Any) -> bool:
    """Whether the parameters are here, and not shards of them: a call by itself would hang."""
    sharded = ("ds_id", "device_mesh", "_is_flat_param", "_fsdp_flattened")
    return all(
        not each.is_meta and each.numel() and not any(hasattr(each, name) for name in sharded)
        for each in model.parameters()
    )


def _refuse_leak(model: Any) -> None:
    """Raise where changing one document of a row changes the output for the next."""
    device = next(model.parameters()).device
    size = int(model.config.get_text_config().vocab_size)
    rows = torch.tensor([[1, 1, 3, 2], [2, 2, 3, 2]], device=device) % size
    positions = torch.tensor([[0, 1, 0, 1]], device=device)
    with _evaluating(model), torch.no_grad():
        # One call each, of the same shape: the same kernels round alike.
        calls = [model(input_ids=row[None], position_ids=positions)[0][0] for row in rows]
    first, second = (calls[0] - calls[1]).float().abs().split(2)
    if float(second.max()) > _TOLERANCE * float(first.max()):
        version = sys.modules["transformers"].__version__
        raise PlanError(
            f"{type(model).__name__} of transformers {version} does not keep packed documents "
            f"apart: another first document changes its output for the second by "
            f"{float(second.max()):.2g}. Use Documents, which have one document in each row, or "
            "another model. Packs(…, borders=False) lets documents see each other."
        )


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Without dropout, and with every module as it was afterwards."""
    training = [each for each in model.modules() if each.training]
    model.eval()
    try:
        yield
    finally:
        for each in training:
            each.training = True
