"""Weights to transformers' GPT2LMHeadModel, and back.

    ours                        theirs                              as they keep it
    tokens.weight               transformer.wte, lm_head            without our padding rows
    places.weight               transformer.wpe
    layers.3.attend.mix         transformer.h.3.attn.c_attn         (in, out): transposed
    layers.3.attend.project     transformer.h.3.attn.c_proj         transposed
    layers.3.grow, shrink       transformer.h.3.mlp.c_fc, c_proj    transposed
    layers.3.norm_attend        transformer.h.3.ln_1

Both are plain dicts of tensors, so transformers itself is not needed to make them:

    from transformers import GPT2Config, GPT2LMHeadModel
    theirs = GPT2LMHeadModel(GPT2Config(**gpt2_config(model.shape)))
    theirs.load_state_dict(to_gpt2(model))
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PlanError
from penstock.train.model import GPT, Shape

__all__ = ["from_gpt2", "gpt2_config", "to_gpt2"]

_END = 50_256
_WHOLE = {"tokens.weight": "wte.weight", "places.weight": "wpe.weight"}
_WHOLE |= {f"norm.{kind}": f"ln_f.{kind}" for kind in ("weight", "bias")}
_LAYER = {
    "norm_attend": "ln_1",
    "attend.mix": "attn.c_attn",
    "attend.project": "attn.c_proj",
    "norm_think": "ln_2",
    "grow": "mlp.c_fc",
    "shrink": "mlp.c_proj",
}


def gpt2_config(shape: Shape) -> dict[str, Any]:
    """The arguments of the GPT2Config that means the same model.

    Raises:
        PlanError: GPT-2 has no such model.
    """
    plain = {"positions": "learned", "qk_norm": False, "activation": "gelu"}
    others = {name: getattr(shape, name) for name in plain if getattr(shape, name) != plain[name]}
    if others:
        raise PlanError(
            f"GPT-2 has no {', '.join(f'{name}={value!r}' for name, value in others.items())}: a "
            "model with these options cannot be given to transformers' GPT2LMHeadModel."
        )
    return {
        "vocab_size": shape.vocab_size,
        "n_positions": shape.length,
        "n_embd": shape.width,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "resid_pdrop": shape.dropout,
        "embd_pdrop": shape.dropout,
        "attn_pdrop": 0.0,
        # GPT-2's own tokens at the ends, where the model has them.
        **{f"{end}_token_id": _END if shape.vocab_size > _END else None for end in ("bos", "eos")},
    }


def to_gpt2(model: GPT) -> dict[str, Tensor]:
    """The weights of `model` under their names in GPT2LMHeadModel, as copies."""
    gpt2_config(model.shape)
    given: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        theirs, transposed = _their_name(name)
        given[theirs] = (weight.t() if transposed else weight).clone().contiguous()
    given["transformer.wte.weight"] = given["transformer.wte.weight"][: model.shape.vocab_size]
    return {**given, "lm_head.weight": given["transformer.wte.weight"]}


def from_gpt2(weights: Mapping[str, Tensor], *, heads: int = 12) -> GPT:
    """A model with the weights of a GPT2LMHeadModel, or of the GPT2Model inside one."""
    held = {
        f"transformer.{name.removeprefix('transformer.')}": each for name, each in weights.items()
    }
    vocab_size, width = held["transformer.wte.weight"].shape
    layers = 1 + max(int(name.split(".")[2]) for name in held if name.startswith("transformer.h."))
    length = len(held["transformer.wpe.weight"])
    model = GPT(
        Shape(layers=layers, heads=heads, width=width, length=length, vocab_size=vocab_size)
    )
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            theirs, transposed = _their_name(name)
            value = held[theirs].t() if transposed else held[theirs]
            weight[: len(value)].copy_(value)
            weight[len(value) :].zero_()
    return model


def _their_name(name: str) -> tuple[str, bool]:
    """What transformers calls one of our weights, and whether it is kept transposed there."""
    if name in _WHOLE:
        return f"transformer.{_WHOLE[name]}", False
    _, number, rest = name.split(".", 2)
    part, _, kind = rest.rpartition(".")
    theirs = _LAYER[part]
    return f"transformer.h.{number}.{theirs}.{kind}", "c_" in theirs and kind == "weight"
