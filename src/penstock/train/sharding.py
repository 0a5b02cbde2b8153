"""FSDP2: every process keeps some rows of each weight, of its gradient and of its optimizer state.

    a weight of 8 rows     0  1  2 │ 3  4  5 │ 6  7
    kept by process           0    │    1    │   2

Before a layer computes, its processes gather its weights; after it, they drop the rows of others.
`fully_shard` of torch does this. It replaces each weight by a `DTensor`, which has the shape of the
whole weight and the rows of this process. The functions here also take tensors that are whole, and
return them as they are, so that callers need not know how the model is trained.
"""

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.train.distributed import World

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def shard_model(model: nn.Module, layers: nn.ModuleList, world: World) -> None:
    """Shard the weights of a model over all processes, in place, and move them to the device.

    Args:
        model: The model, with the same weights on every process.
        layers: Its layers, which are gathered one after the other. All other weights, such as the
            embedding, stay whole from the forward pass to the end of the backward pass.
        world: The processes.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # FSDP2 of torch 2.6 fails in its first step on a CPU: streams of a CPU lack this method there.
    if world.device.type == "cpu" and "record_event" not in vars(torch.cpu.Stream):
        raise PlanError(
            f'parallel="fsdp" does not work on CPUs with torch {torch.__version__}. Use torch 2.7 '
            'or later, GPUs, or parallel="ddp".'
        )
    # Without a mesh, torch would choose the GPU even if device="cpu" was asked for.
    mesh = init_device_mesh(world.device.type, (world.size,))
    # A layer is moved to the device and sharded before the next one is moved, so the GPU never
    # holds the whole model.
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_sharded(values: Tensor) -> "TypeGuard[DTensor]":
    """Whether `values` is a `DTensor`."""
    # The module takes a second to import. While nothing has imported it, there is no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(values, module.DTensor)


def own_rows(values: Tensor) -> Tensor:
    """The rows of a tensor that this process keeps, in the same memory."""
    return values.to_local() if is_sharded(values) else values


def gathered(values: Tensor) -> Tensor:
    """The whole of a tensor, whose rows are sent between all processes: all must call this."""
    return values.full_tensor() if is_sharded(values) else values


def sharded_as(values: Tensor, like: Tensor) -> Tensor:
    """The whole tensor `values`, sharded as `like`; nothing is sent."""
    if not is_sharded(like):
        return values
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    copied = DTensor.from_local(values.to(like.device), mesh, [Replicate()], run_check=False)
    return copied.redistribute(placements=like.placements)


def joined_as(rows: Tensor, like: Tensor) -> Tensor:
    """The rows of this process as a part of a tensor that is sharded as `like`."""
    if not is_sharded(like):
        return rows
    from torch.distributed.tensor import DTensor

    # Without shape and stride, torch would take it that all processes have as many rows as this.
    return DTensor.from_local(
        rows,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
