"""Which rows, and which slice of them, a process of a device mesh reads.

    mesh ("dp", "tp"), 2 x 2            mesh ("dp", "cp"), 2 x 2, {"cp": "slice"}

           tp 0     tp 1                        cp 0                cp 1
    dp 0   rows 0   rows 0              dp 0    rows 0, left half   rows 0, right half
    dp 1   rows 1   rows 1              dp 1    rows 1, left half   rows 1, right half

Processes that differ in a "data" dimension read different rows. Processes that differ in other
dimensions only, such as those of tensor and pipeline parallelism, read the same rows. So the rank
of a loader is the number of the process among the data dimensions, in the order of the mesh.

A context parallel group can slice its rows along the sequence. The slices are contiguous, and their
fields are those of the whole rows: positions and document numbers continue from slice to slice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PlanError
from penstock.loader.batch_format import BatchFormat
from penstock.rows.protocol import Array, Fields, Rows

Role = Literal["data", "same", "slice"]

# The names that torchtitan, Lightning, accelerate, transformers and the tutorials of PyTorch use,
# where all of them mean the same. "fsdp" is not one: with torchtitan it also contains "cp".
_KNOWN: dict[str, Role] = {
    **dict.fromkeys(("dp", "dp_replicate", "dp_shard", "data_parallel", "batch"), "data"),
    **dict.fromkeys(("replicate", "shard"), "data"),
    **dict.fromkeys(("tp", "tensor_parallel", "pp", "pipeline_parallel"), "same"),
}
_CONTEXT = ("cp", "sp", "context_parallel", "sequence_parallel")


@dataclass(frozen=True)
class MeshRoles:
    """A device mesh, and what some of its dimensions mean for the rows.

    A role is "data" (its ranks read different rows), "same" (the same rows), or "slice" (slices of
    the same rows along the sequence). Usual names such as "dp_shard" and "tp" need none.
    """

    mesh: DeviceMesh
    roles: Mapping[str, Role] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, DeviceMesh):
            raise PlanError(
                f"mesh={self.mesh!r:.80} is not a DeviceMesh. Make one with "
                'torch.distributed.init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp")).'
            )
        names = self.mesh.mesh_dim_names
        if not names:
            raise PlanError(
                f"The dimensions of the mesh {tuple(self.mesh.shape)} have no names, so it does "
                "not say which ranks read different rows. Give init_device_mesh "
                'mesh_dim_names=, for example ("dp", "tp").'
            )
        for name, role in self.roles.items():
            if name not in names:
                raise PlanError(
                    f"MeshRoles names the dimension {name!r}, but the mesh has: {', '.join(names)}."
                )
            if role not in ("data", "same", "slice"):
                raise PlanError(f'The role of {name!r} is {role!r}, not "data", "same" or "slice".')

    def of_dimensions(self) -> list[Role]:
        """Return the role of each dimension.

        Raises:
            PlanError: the name of a dimension does not say its role.
        """
        names, sizes = self.mesh.mesh_dim_names or (), self.mesh.shape
        shown = ", ".join(f"{name} ({size})" for name, size in zip(names, sizes, strict=True))
        found: list[Role] = []
        for name, size in zip(names, sizes, strict=True):
            role = self.roles.get(name, _KNOWN.get(name))
            if role is None and size == 1:
                role = "same"  # one rank has all rows and the whole of them, whatever its role
            if role is None and name in _CONTEXT:
                raise PlanError(
                    f"The mesh has the dimension {name!r} with {size} ranks. Say who slices rows "
                    "along the sequence. If your training code does, for example with torch's "
                    f'context_parallel: mesh=MeshRoles(mesh, {{"{name}": "same"}}). If the loader '
                    f'should: mesh=MeshRoles(mesh, {{"{name}": "slice"}}). MeshRoles is in '
                    "penstock.loader."
                )
            if role is None:
                raise PlanError(
                    f"The name of the mesh dimension {name!r} does not say which rows its ranks "
                    f"read, and a wrong guess would repeat or lose rows. Dimensions: {shown}. Say "
                    f'it with penstock.loader.MeshRoles: mesh=MeshRoles(mesh, {{"{name}": "data"}})'
                    ' if these ranks read different rows, or "same" if they read the same.'
                )
            found.append(role)
        return found


AnyMesh = DeviceMesh | MeshRoles


class RowSlice(NamedTuple):
    """One of `total` equal slices of every row."""

    number: int
    total: int

    def check(self, format: BatchFormat, sources: Mapping[str, Rows]) -> None:
        """Check that rows can be sliced.

        Raises:
            PlanError: slices would lose targets or positions, or rows do not divide.
        """
        if format.fields == "hf":
            raise PlanError(
                'format="hf" returns labels that the model shifts inside each slice, so the first '
                'target of each slice would be lost. Use format="dict", whose targets are shifted '
                "before rows are sliced."
            )
        if format.fields == "tuple":
            raise PlanError(
                'format="tuple" cannot hold position_ids, without which a slice does not say where '
                'in the row it begins. Use format="dict".'
            )
        for name, rows in sources.items():
            if rows.side is not None and rows.multiple % self.total:
                raise PlanError(
                    f'Rows of source "{name}" are as wide as their documents, so they do not '
                    f"divide into {self.total} slices. Use "
                    f"Documents(…, pad_to_multiple_of={self.total})."
                )
            if rows.length % self.total:
                raise PlanError(
                    f'Rows of source "{name}" have {rows.length:,} tokens, which do not divide '
                    f"into {self.total} slices. Use a length that is a multiple of {self.total}."
                )

    def cut(self, arrays: Fields) -> Fields:
        """Return the slice of each field, as views, and `position_ids` if there were none.

        `cu_seqlens` stays that of the whole rows, as varlen attention over a group needs it.

        >>> rows = {"tokens": np.arange(9)[None]}
        >>> {name: values.tolist() for name, values in RowSlice(1, 2).cut(rows).items()}
        {'tokens': [[4, 5, 6, 7, 8]], 'position_ids': [[4, 5, 6, 7]]}
        """
        width = arrays["tokens"].shape[1] - 1
        if "position_ids" not in arrays:
            arrays = {**arrays, "position_ids": _positions(arrays, width)}
        size = width // self.total
        first = self.number * size
        # `tokens` has one column more than the other fields: the target of the last input.
        return {
            name: each[:, first : first + size + (name == "tokens")] if each.ndim == 2 else each
            for name, each in arrays.items()
        }


def _positions(arrays: Fields, width: int) -> Array:
    """Return the position of each token in its row; padding on the left has no positions."""
    mask = arrays.get("attention_mask", np.ones((len(arrays["tokens"]), width), np.uint8))
    return np.maximum(np.cumsum(mask, axis=1, dtype=np.int32) - 1, 0)


class Place(NamedTuple):
    """The part of every step that a process reads."""

    rank: int
    """The number of the process among those that read different rows."""
    world_size: int
    """How many processes read different rows."""
    row_slice: RowSlice | None = None
    """The columns of rows that it reads; None if it reads whole rows."""


def locate(roles: Sequence[Role], shape: Sequence[int], coordinate: Sequence[int]) -> Place:
    """Return the place of the process at `coordinate` of a mesh.

    >>> locate(("data", "slice", "data"), (2, 2, 3), (1, 0, 2))
    Place(rank=5, world_size=6, row_slice=RowSlice(number=0, total=2))
    """
    flat = {"data": (0, 1), "slice": (0, 1), "same": (0, 1)}
    for role, size, at in zip(roles, shape, coordinate, strict=True):
        # As in an array in C order: the last dimension changes fastest.
        number, count = flat[role]
        flat[role] = number * size + at, count * size
    row_slice = RowSlice(*flat["slice"])
    return Place(*flat["data"], row_slice if row_slice.total > 1 else None)


def place_in(mesh: AnyMesh, rank: Any, world_size: Any) -> Place:
    """Return the place of this process in a mesh; `rank` and `world_size` must be None.

    Raises:
        PlanError: the mesh does not say which rows this process reads.
    """
    if rank is not None or world_size is not None:
        raise PlanError(
            f"rank={rank} and world_size={world_size} were given together with mesh=, which "
            "determines both. Leave out rank= and world_size=."
        )
    chosen = mesh if isinstance(mesh, MeshRoles) else MeshRoles(mesh)
    roles, size = chosen.of_dimensions(), chosen.mesh.size()
    coordinate = chosen.mesh.get_coordinate()
    if coordinate is None:
        raise PlanError(
            f"This process (rank {torch.distributed.get_rank()}) is not in the mesh, so it has no "
            "rows to read. Make the loader on the ranks of the mesh only."
        )
    if "data" not in roles and size < torch.distributed.get_world_size():
        raise PlanError(
            f"The mesh has {size} of {torch.distributed.get_world_size()} processes and no data "
            f"dimension ({', '.join(chosen.mesh.mesh_dim_names or ())}), so all processes would "
            "read the same rows. Give the whole mesh, not a part of it."
        )
    return locate(roles, tuple(chosen.mesh.shape), coordinate)
