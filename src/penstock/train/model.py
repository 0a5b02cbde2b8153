"""GPT-2 and close variants of it.

    tokens ─ embedding (+ positions) ─ [ attention, MLP ] x layers ─ norm ─ logits ─ loss

The default settings are GPT-2 as it was published; `penstock.train.gpt2` converts the
weights to and from transformers. Other options make the model faster, or let it learn more from the
same tokens: rotary positions, normalised queries and keys, squared ReLU, norms without weights, no
biases, and layers that begin at 0.

Rows with several documents come with `document_ids`; then no token attends to another document.
On a GPU the mask goes to FlexAttention, which skips masked blocks. On a CPU it is a boolean array.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.train.config import ModelConfig

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    Mask = Tensor | BlockMask

_ROTARY_BASE = 10_000.0
Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines of the rotary angles, for each position and channel."""


class GPT(nn.Module):
    """A decoder-only transformer.

    Args:
        config: Its size and options.
        recompute: Whether the backward pass recomputes the activations of each layer, instead of
            keeping them in memory.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: ModelConfig, *, recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.recompute = recompute
        learned = config.positions == "learned"
        # Without memory at first: else each layer would draw weights, which `_initialise` replaces.
        with torch.device("meta"):
            self.token_embedding = nn.Embedding(config.padded_vocab, config.width)
            self.position_embedding = nn.Embedding(config.length, config.width) if learned else None
            self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
            self.norm = _norm(config)
            shape = (config.padded_vocab, config.width)
            self.head = None if config.tied else nn.Parameter(torch.empty(shape))
        self.to_empty(device="cpu")
        self._initialise()
        if not learned:
            # A table, because the compiled kernels would compute each cosine again for each token,
            # head and layer, which took a fifth of the time of a step. It is not saved.
            for name, table in zip(("cosines", "sines"), _rotation(config), strict=True):
                self.register_buffer(name, table, persistent=False)

    def _initialise(self) -> None:
        """Draw GPT-2's initial weights.

        Two matrices of each layer add their output to the residual stream. They start smaller by
        1 / sqrt(2 * layers), so that the stream's variance does not grow with depth.
        """
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                adds = name.endswith(("attention.project.weight", "contract.weight"))
                scale = (2 * self.config.layers) ** -0.5 if adds else 1.0
                if self.config.zero_init and (adds or name == "head"):
                    scale = 0.0
                if scale:
                    nn.init.normal_(weight, std=0.02 * scale)
                else:
                    nn.init.zeros_(weight)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
            else:  # of a norm
                nn.init.ones_(weight)

    def forward(
        self,
        inputs: Tensor,  # (rows, length) int64
        targets: Tensor | None = None,  # (rows, length) int64; -100 is ignored
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        compile_parts: bool = False,
    ) -> Tensor:
        """The sum of the losses of all targets; without targets, the logits.

        With `compile_parts`, torch compiles the embedding, one layer and the loss, and not the
        whole model: all layers share the code of one, so less is compiled. Validations use it.
        """
        embed, apply, finish = _compiled_parts() if compile_parts else (_embed, _apply, _finish)
        places = slice(inputs.shape[1]) if position_ids is None else position_ids
        hidden, rotation = embed(self, inputs, places)
        mask = None if document_ids is None else _mask(document_ids, compiled=compile_parts)
        for layer in self.layers:
            if self.recompute and self.training:
                hidden = checkpoint(layer, hidden, rotation, mask, use_reentrant=False)
            else:
                hidden = apply(layer, hidden, rotation, mask)
        return finish(self, hidden, targets)


def _embed(model: GPT, inputs: Tensor, places: slice | Tensor) -> tuple[Tensor, Rotation | None]:
    """The hidden states before the first layer, and the rotation of all layers."""
    hidden = model.token_embedding(inputs)
    rotation = None
    if model.position_embedding is not None:
        hidden = hidden + model.position_embedding.weight[places]
    else:
        rotation = model.cosines[places], model.sines[places]
    return functional.dropout(hidden, model.config.dropout, model.training), rotation


def _apply(
    layer: nn.Module, hidden: Tensor, rotation: Rotation | None, mask: "Mask | None"
) -> Tensor:
    """The output of a layer; a function, so that all layers share its compiled code."""
    output: Tensor = layer(hidden, rotation, mask)
    return output


def _finish(model: GPT, hidden: Tensor, targets: Tensor | None) -> Tensor:
    """The sum of the losses of all targets; without targets, the logits."""
    # In GPT-2 the output layer shares the weights of the embedding.
    head = model.token_embedding.weight if model.head is None else model.head
    logits = functional.linear(model.norm(hidden), head)
    if targets is None:
        # The padding rows of the embedding are not tokens.
        return logits[..., : model.config.vocab_size]
    # The loss is computed in float32: bfloat16 has 8 significant bits, too few for a sum over
    # 50,000 ids.
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum"
    )


@cache
def _compiled_parts() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    return torch.compile(_embed), torch.compile(_apply), torch.compile(_finish)


class Layer(nn.Module):
    """Attention, then an MLP; each adds its output to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.expand = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.contract = nn.Linear(4 * config.width, config.width, bias=config.bias)
        self.config = config

    def forward(self, hidden: Tensor, rotation: Rotation | None, mask: "Mask | None") -> Tensor:
        """The new hidden states, in the shape of `hidden`."""
        hidden = hidden + self._dropout(self.attention(self.attention_norm(hidden), rotation, mask))
        inner = self.expand(self.mlp_norm(hidden))
        if self.config.activation == "relu2":
            inner = inner.relu().square()
        else:
            inner = functional.gelu(inner, approximate="tanh")
        return hidden + self._dropout(self.contract(inner))

    def _dropout(self, output: Tensor) -> Tensor:
        return functional.dropout(output, self.config.dropout, self.training)


class Attention(nn.Module):
    """Causal self-attention; with a mask, within documents."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qk_norm = config.qk_norm
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.project = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, hidden: Tensor, rotation: Rotation | None, mask: "Mask | None") -> Tensor:
        """The output for each token, in the shape of `hidden`."""
        rows, length, width = hidden.shape
        qkv = self.qkv(hidden).view(rows, length, 3, self.heads, -1)
        query, key, value = qkv.unbind(2)  # (rows, length, heads, size)
        if self.qk_norm:
            query, key = _normalised(query), _normalised(key)
        if rotation is not None:
            query, key = _rotate(query, rotation), _rotate(key, rotation)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        if mask is None or isinstance(mask, Tensor):
            # A mask of documents is already causal, and torch refuses a mask with is_causal=True.
            output = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None
            )
        else:
            output = _flex_attention()(query, key, value, block_mask=mask)
        projected: Tensor = self.project(output.transpose(1, 2).reshape(rows, length, width))
        return projected


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.width, elementwise_affine=False)
    return nn.LayerNorm(config.width)


def _normalised(heads: Tensor) -> Tensor:
    """`heads` divided by their root mean square, which is computed in float32."""
    # functional.rms_norm would return float32 under autocast, and twice the memory would be moved.
    mean = heads.float().square().mean(dim=-1, keepdim=True)
    return heads * (mean + 1e-6).rsqrt().to(heads.dtype)


def _mask(document_ids: Tensor, *, compiled: bool) -> "Mask":
    """Which tokens each token attends to: itself and earlier ones of the same document.

    On a GPU a block mask for FlexAttention, whose kernel skips blocks without any visible token;
    elsewhere a boolean array, (rows, 1, length, length).
    """
    rows, length = document_ids.shape
    if document_ids.device.type == "cuda":
        from torch.nn.attention.flex_attention import create_block_mask

        def visible(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (document_ids[row, query] == document_ids[row, key])

        make = _compiled_block_mask() if compiled else create_block_mask
        return make(visible, rows, None, length, length, document_ids.device)
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return (same & torch.ones_like(same[0]).tril()).unsqueeze(1)


@cache
def _compiled_block_mask() -> "Callable[..., BlockMask]":
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)


def _flex_attention() -> Callable[..., Tensor]:
    """FlexAttention, compiled: without compilation it would be as slow as a dense mask."""
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling():  # it becomes a part of the compiled model
        return flex_attention
    return _compiled_flex_attention()


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _rotation(config: ModelConfig) -> Rotation:
    """Cosines and sines of the angles, (length, 1, size) for heads of `size` channels.

    The sines of the first half of the channels are negative, as `_rotate` needs them.
    """
    size = config.width // config.heads
    pairs = torch.arange(size // 2, dtype=torch.float32)
    positions = torch.arange(config.length, dtype=torch.float32)
    angles = positions[:, None, None] * _ROTARY_BASE ** (-pairs * 2 / size)
    cosines, sines = angles.cos(), angles.sin()
    return torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)


def _rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """`heads` with each pair of channels (i, i + size / 2) rotated by its angle."""
    cosines, sines = (each.to(heads.dtype) for each in rotation)
    # For halves a and b of the channels: (a cos - b sin, b cos + a sin). To swap the halves with
    # `roll` makes a step 1 % faster on an H200 than to join two results: compiled, a join loads and
    # computes both halves for each channel.
    return heads * cosines + heads.roll(heads.shape[-1] // 2, dims=-1) * sines
