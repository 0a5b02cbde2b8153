"""Weights of GPT-2, exchanged with the GPT2LMHeadModel of transformers.

    here                           in transformers                     stored there
    token_embedding                transformer.wte, lm_head            without the padding rows
    position_embedding             transformer.wpe
    layers.3.attention.qkv         transformer.h.3.attn.c_attn         (in, out): transposed
    layers.3.attention.project     transformer.h.3.attn.c_proj         transposed
    layers.3.expand, contract      transformer.h.3.mlp.c_fc, c_proj    transposed
    layers.3.attention_norm        transformer.h.3.ln_1

Both sides are plain dicts of tensors, so transformers is not needed here:

    from transformers import GPT2Config, GPT2LMHeadModel
    exported = GPT2LMHeadModel(GPT2Config(**gpt2_config(model.config)))
    exported.load_state_dict(to_gpt2(model))
"""

from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor

from penstock.errors import PlanError
from penstock.train.config import ModelConfig
from penstock.train.model import GPT

# The id of <|endoftext|> in GPT-2's vocabulary.
_END_OF_TEXT = 50_256
_NAMES = {
    "token_embedding.weight": "wte.weight",
    "position_embedding.weight": "wpe.weight",
    "norm.weight": "ln_f.weight",
    "norm.bias": "ln_f.bias",
}
_LAYER_NAMES = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.project": "attn.c_proj",
    "mlp_norm": "ln_2",
    "expand": "mlp.c_fc",
    "contract": "mlp.c_proj",
}


def gpt2_config(config: ModelConfig) -> dict[str, int | float | None]:
    """The arguments of transformers' GPT2Config for the same model.

    Raises:
        PlanError: the model has an option that GPT-2 does not have.
    """
    plain = ModelConfig()
    names = ("positions", "qk_norm", "activation", "norm", "bias", "tied")
    gpt2 = {name: asdict(plain)[name] for name in names}
    settings = asdict(config)
    changed = [f"{name}={settings[name]!r}" for name in gpt2 if settings[name] != gpt2[name]]
    if changed:
        raise PlanError(
            f"GPT-2 has no {', '.join(changed)}, so this model cannot become a GPT2LMHeadModel."
        )
    # transformers warns about special tokens outside of the vocabulary.
    end = _END_OF_TEXT if config.vocab_size > _END_OF_TEXT else None
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.length,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "bos_token_id": end,
        "eos_token_id": end,
    }


def to_gpt2(model: GPT) -> dict[str, Tensor]:
    """Copies of the weights of `model`, under their names in GPT2LMHeadModel."""
    gpt2_config(model.config)  # raises if GPT-2 has no such model
    exported: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        gpt2_name, transposed = _gpt2_name(name)
        # A transposed view shares memory with the weight, and safetensors refuses such views.
        exported[gpt2_name] = (weight.t() if transposed else weight).clone().contiguous()
    embedding = exported["transformer.wte.weight"][: model.config.vocab_size]
    return {**exported, "transformer.wte.weight": embedding, "lm_head.weight": embedding}


def from_gpt2(weights: Mapping[str, Tensor], *, heads: int = 12) -> GPT:
    """A model with the weights of a GPT2LMHeadModel, or of the GPT2Model inside one.

    The weights do not say how many attention heads there are: pass `heads`.
    """
    # A GPT2Model has the same names as a GPT2LMHeadModel, but without the prefix.
    prefix = "transformer."
    weights = {f"{prefix}{name.removeprefix(prefix)}": each for name, each in weights.items()}
    vocab_size, width = weights["transformer.wte.weight"].shape
    # "transformer.h.3.attn.c_attn.weight" belongs to layer 3.
    numbers = [int(name.split(".")[2]) for name in weights if name.startswith("transformer.h.")]
    model = GPT(
        ModelConfig(
            layers=1 + max(numbers),
            heads=heads,
            width=width,
            length=len(weights["transformer.wpe.weight"]),
            vocab_size=vocab_size,
        )
    )
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            gpt2_name, transposed = _gpt2_name(name)
            value = weights[gpt2_name].t() if transposed else weights[gpt2_name]
            weight[: len(value)].copy_(value)
            weight[len(value) :].zero_()  # the padding rows of the embedding
    return model


def _gpt2_name(name: str) -> tuple[str, bool]:
    """The name of a weight in transformers, and whether it is stored transposed there."""
    if name in _NAMES:
        return f"transformer.{_NAMES[name]}", False
    _, number, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    gpt2_module = _LAYER_NAMES[module]
    # GPT-2 stores its projections, all named "c_…", as Conv1D: (in, out) instead of (out, in).
    transposed = "c_" in gpt2_module and kind == "weight"
    return f"transformer.h.{number}.{gpt2_module}.{kind}", transposed
