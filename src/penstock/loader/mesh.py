"""Which rows a process of a device mesh reads.

    mesh ("dp", "tp"), 2 x 2

           tp 0     tp 1
    dp 0   rows 0   rows 0
    dp 1   rows 1   rows 1

Processes that differ in a data dimension read different rows. Processes that differ in other
dimensions only, such as those of tensor, pipeline and context parallelism, read the same rows. So
the rank of a loader is the number of the process among the data dimensions, in the order of the
mesh.
"""

from typing import Any

import torch.distributed
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PlanError

# The names that torchtitan, Lightning, accelerate, transformers and the tutorials of PyTorch use,
# where all of them mean the same. "fsdp" is not one: with torchtitan it also contains "cp".
_DATA = {"dp", "dp_replicate", "dp_shard", "data_parallel", "batch", "replicate", "shard"}
_SAME = {"tp", "tensor_parallel", "pp", "pipeline_parallel"} | {
    *("cp", "sp", "context_parallel", "sequence_parallel")
}


def rank_in(mesh: DeviceMesh, rank: Any, world_size: Any) -> tuple[int, int]:
    """Return the rank of this process among those that read different rows, and their number.

    Args:
        mesh: The mesh.
        rank: Must be None, because the mesh determines it.
        world_size: The same.

    Raises:
        PlanError: the mesh does not say which rows this process reads.
    """
    if rank is not None or world_size is not None:
        raise PlanError(
            f"rank={rank} and world_size={world_size} were given together with mesh=, which "
            "determines both. Leave out rank= and world_size=."
        )
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(
            f"mesh={mesh!r:.80} is not a DeviceMesh. Make one with "
            'torch.distributed.init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp")).'
        )
    names, shape = mesh.mesh_dim_names, tuple(mesh.shape)
    if not names:
        raise PlanError(
            f"The dimensions of the mesh {shape} have no names, so it does not say which ranks "
            'read different rows. Give init_device_mesh mesh_dim_names=, for example ("dp", "tp").'
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise PlanError(
            f"This process (rank {torch.distributed.get_rank()}) is not in the mesh, so it has no "
            "rows to read. Make the loader on the ranks of the mesh only."
        )
    if not set(names) & _DATA and mesh.size() < torch.distributed.get_world_size():
        raise PlanError(
            f"The mesh has {mesh.size()} of {torch.distributed.get_world_size()} processes and no "
            f"data dimension ({', '.join(names)}), so all processes would read the same rows. Give "
            "the whole mesh, not a part of it."
        )
    number, count = 0, 1
    for name, size, at in zip(names, shape, coordinate, strict=True):
        if name in _DATA:
            # As in an array in C order: the last dimension changes fastest.
            number, count = number * size + at, count * size
        elif name not in _SAME and size > 1:  # one rank has all rows, whatever its name means
            shown = ", ".join(f"{each} ({many})" for each, many in zip(names, shape, strict=True))
            raise PlanError(
                f"The name of the mesh dimension {name!r} does not say which rows its ranks read, "
                f"and a wrong guess would repeat or lose rows. Dimensions: {shown}. Give rank= and "
                "world_size= instead of mesh=, counted among the ranks that read different rows."
            )
    return number, count
