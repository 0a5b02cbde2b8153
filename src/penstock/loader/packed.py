"""Checks that models of the library transformers keep the documents of packed rows apart.

    input_ids       a a a b b c        a row of three documents
    position_ids    0 1 2 0 1 0        the only field that marks where each begins

These models compute their attention mask from `position_ids` only if they are called without an
`attention_mask` and without a cache. The cache is on by default, and a model that ignores the
borders raises no error. FlashAttention finds documents in batches of one row only, and only in
models that pass `position_ids` to their attention: GPT-2 of transformers 4.55 to 5.0 does not.

This module never imports transformers: if no other module did, there is no model to check.
"""

import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from penstock.errors import PlanError
from penstock.rows.protocol import Rows

# The first version that computes masks from position_ids was 4.53.1 for Llama, 4.55 for GPT-2.
_LEAST = (4, 55)
# Attention that can be checked by a plain forward call on any device.
_TRIED = ("eager", "sdpa")
# If the first document is changed, the logits of the second may change by at most this fraction
# of the change in the logits of the first.
_TOLERANCE = 1e-3

_ONE_EACH = "rows of one document each: Documents, or LLMDataModule(…, packing=False)"

# Weak, so that a model that is dropped frees its memory.
_prepared: "WeakSet[torch.nn.Module]" = WeakSet()


def check_packed_rows(format: str, sources: Iterable[Rows]) -> None:
    """Call `check_packed` if batches of this format hold several documents in a row."""
    if format == "hf" and any(rows.gives_positions for rows in sources):
        check_packed()


def check_packed(model: object = None) -> None:
    """Check the version of transformers before the first packed batch.

    Warns if no model was prepared, because the loader does not know how the model is called; and
    if `model`, which gets the batches, has no part that could be prepared.
    """
    if model is not None and model not in _prepared:
        warnings.warn(
            f"Rows of these batches hold several documents, and {type(model).__name__} contains no "
            "model of transformers, which alone is tested here. Keep documents apart in its "
            "attention by position_ids, which begin at 0 in each document, or use "
            f"{_ONE_EACH}.",
            stacklevel=3,
        )
        return
    if "transformers" not in sys.modules:
        return
    _refuse_old()
    if not _prepared:
        warnings.warn(
            "Rows of these batches hold several documents, and models of transformers keep them "
            "apart only if they are called without a cache and without an attention mask. Call "
            "penstock.loader.keep_documents_apart(model) once before training. It switches the "
            "cache off and tests the model.",
            stacklevel=3,
        )


def keep_documents_apart(model: Any) -> Any:
    """Prepare a model of transformers for packed rows, and return it.

    Switches the cache off (`model.config.use_cache = False`) and calls the model with two short
    documents in one row, to test that the first one does not change the output for the second.

    Raises:
        PlanError: attention would cross documents, or there is no model of transformers.
    """
    if prepare(model):
        raise PlanError(
            f"{type(model).__name__} uses FlashAttention, which finds packed documents in batches "
            "of one row only. Pass the model to StepLoader(…, model=model), RowsTrainer or "
            'LLMDataModule, which concatenate rows; or load it with attn_implementation="sdpa".'
        )
    if model not in _prepared:
        raise PlanError(
            f"{type(model).__name__} contains no model of transformers. Pass a model that was "
            "loaded with transformers."
        )
    return model


def prepare(module: Any) -> bool:
    """Prepare all models of transformers in a module; return whether they need one-row batches.

    Raises:
        PlanError: attention would cross documents.
    """
    models = list(_outermost(module))
    if not models:
        return False
    _refuse_old()
    implementations = set()
    for model in models:
        for each in model.modules():
            # Parts of a model, such as an encoder, may have a separate config.
            config = getattr(each, "config", None)
            if getattr(config, "use_cache", None):
                config.use_cache = False  # type: ignore[union-attr]
            implementations.add(str(getattr(config, "_attn_implementation", None)))
        if not _is_whole(model):
            continue
        if model.config._attn_implementation in _TRIED:
            _refuse_leak(model)
        elif "flash" in str(model.config._attn_implementation):
            _refuse_lost_positions(model)
    _prepared.add(module)
    return any("flash" in name for name in implementations)


def one_row(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a packed batch as one row; no row predicts the first token of the next row."""
    batch["labels"][:, 0] = -100
    return {name: values.reshape(1, -1) for name, values in batch.items()}


def _outermost(module: Any) -> Iterator[Any]:
    """Yield the models of transformers in a module that are not inside another one."""
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
            f"{_ONE_EACH}."
        )


def _is_whole(model: Any) -> bool:
    """Return whether this process has all parameters; if not, a call on one rank would hang."""
    sharded = ("ds_id", "device_mesh", "_is_flat_param", "_fsdp_flattened")
    return all(
        not each.is_meta and each.numel() and not any(hasattr(each, name) for name in sharded)
        for each in model.parameters()
    )


def _refuse_leak(model: Any) -> None:
    """Raise if changing one document of a row changes the output for the next."""
    device = next(model.parameters()).device
    size = int(model.config.get_text_config().vocab_size)
    rows = torch.tensor([[1, 1, 3, 2], [2, 2, 3, 2]], device=device) % size
    positions = torch.tensor([[0, 1, 0, 1]], device=device)
    with _evaluating(model), torch.no_grad():
        # Two calls of the same shape use the same kernels, so they round in the same way.
        calls = [model(input_ids=row[None], position_ids=positions)[0][0] for row in rows]
    first, second = (calls[0] - calls[1]).float().abs().split(2)
    if float(second.max()) > _TOLERANCE * float(first.max()):
        version = sys.modules["transformers"].__version__
        raise PlanError(
            f"{type(model).__name__} of transformers {version} does not keep packed documents "
            f"apart: another first document changes its output for the second by "
            f"{float(second.max()):.2g}. Use another model, or {_ONE_EACH}. "
            "Packs(…, borders=False) lets documents see each other."
        )


def _refuse_lost_positions(model: Any) -> None:
    """Raise if attention does not get `position_ids`, from which FlashAttention knows documents.

    FlashAttention runs on some GPUs only, and the model may be moved there later. So the model is
    called with another attention here, and the arguments of its attention modules are examined.
    """
    device = next(model.parameters()).device
    positions = torch.tensor([[0, 1, 0, 1]], device=device)
    attention = [each for each in model.modules() if "Attention" in type(each).__name__]
    seen: list[bool] = []

    def examine(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = [each for each in (*given, *named.values()) if isinstance(each, torch.Tensor)]
        tensors = [each for each in tensors if each.shape == positions.shape]
        # Not torch.equal: the parts of a model may be on several devices.
        seen.append(any(each.tolist() == positions.tolist() for each in tensors))

    hooks = [each.register_forward_pre_hook(examine, with_kwargs=True) for each in attention]
    # The setter of transformers also changes the configs of parts, which may have other values.
    configs = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
    kept = {key: each._attn_implementation for key, each in configs.items()}
    model.config._attn_implementation = "sdpa"
    try:
        with _evaluating(model), torch.no_grad():
            model(input_ids=torch.ones_like(positions), position_ids=positions)
    finally:
        for key, implementation in kept.items():  # the outermost first
            configs[key]._attn_implementation = implementation
        for hook in hooks:
            hook.remove()
    if seen and not any(seen):
        version = sys.modules["transformers"].__version__
        raise PlanError(
            f"{type(model).__name__} of transformers {version} does not pass position_ids to "
            "FlashAttention, so packed documents would see each other. Load the model with "
            f'attn_implementation="sdpa", use a newer version of transformers, or use {_ONE_EACH}.'
        )


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Switch dropout off, and restore the mode of every module afterwards."""
    training = [each for each in model.modules() if each.training]
    model.eval()
    try:
        yield
    finally:
        for each in training:
            each.training = True
