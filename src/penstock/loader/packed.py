"""Keeps the documents of packed rows apart in models of the library transformers.

    input_ids       a a a b b c        a row of three documents
    position_ids    0 1 2 0 1 0        the only field that marks where each begins
    use_cache       False              with the cache, which is on by default, no model reads them

Models of transformers compute their attention mask from `position_ids` only if they are called
without an `attention_mask` and without a cache. So packed batches have no mask, and they switch the
cache off. Some models ignore the borders nevertheless, and raise no error. They are tested here.

FlashAttention finds documents in batches of one row only, so the rows of a batch are concatenated.

This module never imports transformers: if no other module did, there is no model to test.
"""

import re
import sys
from typing import Any

import torch

from penstock.errors import PlanError

# The first version that computes masks from position_ids was 4.53.1 for Llama, 4.55 for GPT-2.
_LEAST = (4, 55)
# If the first document is changed, the logits of the second may change by at most this fraction
# of the change in the logits of the first.
_TOLERANCE = 1e-3

_ONE_EACH = "rows of one document each: Documents, or LLMDataModule(…, packing=False)"


def keep_documents_apart(model: Any) -> Any:
    """Test that packed documents do not attend to each other in a model, and return the model.

    The model is called with two short documents in one row. If another first document changes the
    output for the second, it ignores `position_ids`.

    Raises:
        PlanError: attention crosses documents, or there is no model of transformers.
    """
    one_row = needs_one_row(model)
    if one_row is None:
        raise PlanError(
            f"{type(model).__name__} contains no model of transformers. Pass a model that was "
            "loaded with transformers."
        )
    if one_row:
        raise PlanError(
            f"{type(model).__name__} uses FlashAttention, which finds packed documents in batches "
            "of one row only. Pass the model to StepLoader(…, model=model), RowsTrainer or "
            'LLMDataModule, which concatenate rows; or load it with attn_implementation="sdpa".'
        )
    return model


def needs_one_row(module: Any) -> bool | None:
    """Test the models of transformers in a module; return whether they need batches of one row.

    Returns None if the module contains no model of transformers.

    Raises:
        PlanError: attention crosses documents.
    """
    models = outermost_models(module)
    for model in models:
        _refuse_leak(model)
    # Parts of a model, such as an encoder, may have a separate config.
    configs = (getattr(each, "config", None) for model in models for each in model.modules())
    kinds = {str(getattr(config, "_attn_implementation", None)) for config in configs}
    return any("flash" in kind for kind in kinds) if models else None


def outermost_models(module: Any) -> list[Any]:
    """Return the models of transformers in a module that are not inside another one."""
    loaded = sys.modules.get("transformers.modeling_utils")
    if loaded is None or not isinstance(module, torch.nn.Module):
        return []
    if isinstance(module, loaded.PreTrainedModel):
        return [module]
    return [model for child in module.children() for model in outermost_models(child)]


def without_cache(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch for `model(**batch)`: with `use_cache=False` if it has `position_ids`.

    The value is no tensor, because the model needs it on the host.

    Raises:
        PlanError: an imported transformers is so old that it ignores `position_ids`.
    """
    if "position_ids" not in batch:
        return batch
    version = getattr(sys.modules.get("transformers"), "__version__", None)
    if version and tuple(map(int, re.findall(r"\d+", version)[:2])) < _LEAST:
        least = ".".join(map(str, _LEAST))
        raise PlanError(
            f"transformers {version} does not keep packed documents apart; {least} is the first "
            f'that does for GPT-2 and Llama. Run: pip install "transformers>={least}". Or use '
            f"{_ONE_EACH}."
        )
    return {**batch, "use_cache": False}


def one_row(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a packed batch as one row; no row predicts the first token of the next row."""
    batch["labels"][:, 0] = -100
    return {name: values.reshape(1, -1) for name, values in batch.items()}


def _refuse_leak(model: Any) -> None:
    """Raise if changing one document of a row changes the output for the next."""
    weights = list(model.parameters())
    device, attention = weights[0].device, str(model.config._attn_implementation)
    flash = "flash" in attention
    # A call on one rank would hang if parameters are sharded. FlashAttention needs a GPU. Other
    # kinds of attention may have to be compiled first, which takes minutes.
    sharded = ("ds_id", "device_mesh", "_is_flat_param", "_fsdp_flattened")
    whole = all(
        not each.is_meta and each.numel() and not any(hasattr(each, name) for name in sharded)
        for each in weights
    )
    if not whole or not (attention in ("eager", "sdpa") or (flash and device.type == "cuda")):
        return
    size = int(model.config.get_text_config().vocab_size)
    rows = torch.tensor([[1, 1, 3, 2], [2, 2, 3, 2]], device=device) % size
    call = {"position_ids": torch.tensor([[0, 1, 0, 1]], device=device), "use_cache": False}
    training = [each for each in model.modules() if each.training]
    model.eval()  # no dropout
    try:
        # FlashAttention takes no float32.
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=flash):
            # Two calls of the same shape use the same kernels, so they round in the same way.
            calls = [model(input_ids=row[None], **call)[0][0] for row in rows]
    finally:
        for each in training:  # the modes of the parts may differ
            each.training = True
    first, second = (calls[0] - calls[1]).float().abs().split(2)
    if float(second.max()) > _TOLERANCE * float(first.max()):
        raise PlanError(
            f"{type(model).__name__} of transformers {sys.modules['transformers'].__version__} "
            "does not keep packed documents apart: another first document changes its output for "
            f"the second by {float(second.max()):.2g}. Use another model, or {_ONE_EACH}. "
            "Packs(…, borders=False) lets documents see each other."
        )
