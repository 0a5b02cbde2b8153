"""GPT-2 and its near relations, in one file.

    tokens ─ embed (+ positions) ─ [ attend, think ] x layers ─ norm ─ logits ─ loss

The plain settings are GPT-2 as it was published, and its weights go to transformers and back
(`penstock.train.exchange`). Three options make it learn faster from the same tokens: rotary
positions, norms on queries and keys, and squared ReLU.

Rows of several documents bring `document_ids`; then no token looks at another document. On a
GPU the mask goes to FlexAttention, which skips what it hides; elsewhere it is an array.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.errors import PlanError

__all__ = ["GPT", "SIZES", "Shape"]

_PADDED_TO = 64  # rows of the embedding: whole tiles of the matrix units, 25 % faster logits
_ROTARY_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Everything that decides which weights a model has, and what it computes."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    length: int = 1024
    """The longest row."""
    vocab_size: int = 50_257
    dropout: float = 0.0
    """Of what layers add; not of attention, whose fast kernels know none."""
    positions: Literal["learned", "rotary"] = "learned"
    qk_norm: bool = False
    """Whether queries and keys are normed, which bears larger learning rates."""
    activation: Literal["gelu", "relu2"] = "gelu"

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.width, self.length, self.vocab_size) < 1:
            raise PlanError(f"{self} has a dimension below 1.")
        if self.width % self.heads or self.width // self.heads % 2:
            raise PlanError(
                f"A width of {self.width} does not divide into {self.heads} heads of even size."
            )
        if not 0 <= self.dropout < 1:
            raise PlanError(f"dropout={self.dropout} is not a share below 1.")

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding."""
        return -(-self.vocab_size // _PADDED_TO) * _PADDED_TO

    def flops_per_token(self, length: int) -> float:
        """Floating-point operations of a token, forward and backward, as papers count them.

        Six a weight that multiplies something, and twelve a layer, channel and token looked at.
        """
        weights = 12 * self.layers * self.width**2 + self.padded_vocab * self.width
        return 6.0 * weights + 12.0 * self.layers * self.width * length


SIZES: dict[str, Shape] = {
    "nano": Shape(layers=4, heads=4, width=128, length=128, dropout=0.1),
    "124M": Shape(),
    "350M": Shape(layers=24, heads=16, width=1024),
}


class GPT(nn.Module):
    """A decoder; called with inputs and targets it gives the sum of the losses.

    Args:
        shape: Which one.
        recompute: Whether activations are computed again in the backward pass, layer by layer,
            instead of being kept.
    """

    def __init__(self, shape: Shape, *, recompute: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.recompute = recompute
        self.tokens = nn.Embedding(shape.padded_vocab, shape.width)
        learned = shape.positions == "learned"
        self.places = nn.Embedding(shape.length, shape.width) if learned else None
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self._begin()

    def _begin(self) -> None:
        """GPT-2's first weights: small, and smaller where layers add to what flows through."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                adds = name.endswith(("attend.project.weight", "shrink.weight"))
                scale = (2 * self.shape.layers) ** -0.5 if adds else 1.0
                nn.init.normal_(weight, std=0.02 * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(
        self,
        inputs: Tensor,  # (rows, length) int64
        targets: Tensor | None = None,  # the same; -100 counts for nothing
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """The sum of the losses of all targets; without targets, the logits."""
        hidden = self.tokens(inputs)
        if position_ids is None:
            position_ids = torch.arange(inputs.shape[1], device=inputs.device)
        turns = None
        if self.places is not None:
            hidden = hidden + self.places(position_ids)
        else:
            turns = _turns(position_ids, self.shape.width // self.shape.heads)
        hidden = functional.dropout(hidden, self.shape.dropout, self.training)
        mask = None if document_ids is None else _mask(document_ids)
        for layer in self.layers:
            if self.recompute and self.training:
                hidden = checkpoint(layer, hidden, turns, mask, use_reentrant=False)
            else:
                hidden = layer(hidden, turns, mask)
        # The head is the embedding, tied as in GPT-2.
        logits = functional.linear(self.norm(hidden), self.tokens.weight)
        if targets is None:
            return logits[..., : self.shape.vocab_size]
        return functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum"
        )


class Layer(nn.Module):
    """Attention, then a feed-forward network, each added to what comes in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_attend = nn.LayerNorm(shape.width)
        self.attend = Attention(shape)
        self.norm_think = nn.LayerNorm(shape.width)
        self.grow = nn.Linear(shape.width, 4 * shape.width)
        self.shrink = nn.Linear(4 * shape.width, shape.width)
        self.squared = shape.activation == "relu2"
        self.dropout = shape.dropout

    def forward(self, hidden: Tensor, turns: Any, mask: Any) -> Tensor:
        """The same shape as `hidden`."""
        hidden = hidden + self._dropped(self.attend(self.norm_attend(hidden), turns, mask))
        inner = self.grow(self.norm_think(hidden))
        inner = (
            inner.relu().square() if self.squared else functional.gelu(inner, approximate="tanh")
        )
        return hidden + self._dropped(self.shrink(inner))

    def _dropped(self, added: Tensor) -> Tensor:
        return functional.dropout(added, self.dropout, self.training)


class Attention(nn.Module):
    """Every token looks at those before it, in its own document where there is a mask."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qk_norm = shape.qk_norm
        self.mix = nn.Linear(shape.width, 3 * shape.width)
        self.project = nn.Linear(shape.width, shape.width)

    def forward(self, hidden: Tensor, turns: Any, mask: Any) -> Tensor:
        """The same shape as `hidden`."""
        rows, length, width = hidden.shape
        query, key, value = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)  # (rows, heads, length, size)
            for part in self.mix(hidden).chunk(3, dim=-1)
        )
        if self.qk_norm:
            query, key = (functional.rms_norm(each, each.shape[-1:]) for each in (query, key))
        if turns is not None:
            query, key = _turned(query, turns), _turned(key, turns)
        # Norms and turns are done in float32 under autocast; attention wants one kind of number.
        query, key = query.to(value.dtype), key.to(value.dtype)
        if mask is None or isinstance(mask, Tensor):
            looked = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None
            )
        else:
            looked = _flex()(query, key, value, block_mask=mask)
        together = looked.transpose(1, 2).reshape(rows, length, width)
        projected: Tensor = self.project(together)
        return projected


def _mask(document_ids: Tensor) -> Any:
    """What each place may look at: places before it, and itself, of the same document.

    FlexAttention's blocks on a GPU, where it is a sparse kernel; an array of booleans,
    (rows, 1, length, length), elsewhere.
    """
    rows, length = document_ids.shape
    if document_ids.device.type == "cuda":
        from torch.nn.attention.flex_attention import create_block_mask

        def visible(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (document_ids[row, query] == document_ids[row, key])

        return create_block_mask(visible, rows, None, length, length, document_ids.device)
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return (same & torch.ones_like(same[0]).tril()).unsqueeze(1)


def _flex() -> Any:
    """FlexAttention as a kernel: inside a model that is compiled it is compiled with it."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else _compiled_flex()


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _turns(position_ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines by which the two halves of a head are turned at each position."""
    halves = torch.arange(size // 2, device=position_ids.device, dtype=torch.float32)
    angles = position_ids[..., None].float() * _ROTARY_BASE ** (-halves * 2 / size)
    angles = angles.unsqueeze(-3)  # (rows, 1, length, size / 2), or without rows
    return angles.cos(), angles.sin()


def _turned(heads: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    cosines, sines = turns
    first, second = heads.chunk(2, dim=-1)
    turned = (first * cosines - second * sines, first * sines + second * cosines)
    return torch.cat(turned, dim=-1).to(heads.dtype)


def shape_of(size: str, **changes: Any) -> Shape:
    """A size by name, with some of it changed.

    >>> shape_of("124M", positions="rotary").width
    768
    """
    if size not in SIZES:
        raise PlanError(f"There is no model size {size!r}; there are {', '.join(SIZES)}.")
    return replace(SIZES[size], **changes)
