"""Files of a sharded checkpoint: each process writes its rows, and reads the rows that it needs.

    checkpoints/step-00000500/
    ├── 00000-4f1c09ab27de4410.bin    the rows of process 0: tensor after tensor, raw bytes
    ├── 00001-b92c7711f0a4c3d8.bin
    └── checkpoint.json               written last: progress, loader's state, where each tensor is

`torch.distributed.checkpoint` plans who writes what, and which pieces a process reads if the number
of processes has changed; if one process fails, all raise its error. Its own files contain pickles,
which run code when they are loaded. So the files here are JSON and raw bytes, and each piece is
compared with its SHA-256 before it is used.

The name of a file of rows depends on its contents. So a checkpoint that is saved again replaces no
file that checkpoint.json names: the rename of checkpoint.json is the only commit point.
"""

import hashlib
import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from penstock.digest import checked_json
from penstock.errors import TrainError
from penstock.store.files import (
    make_directory,
    remove_file,
    remove_temporary,
    sync_directory,
    write_file,
)
from penstock.store.folders import open_to_read, remove_tree

_FILE = re.compile(r"\d{5,}-[0-9a-f]{16}\.bin")
_TYPES = {
    str(each).removeprefix("torch."): each
    for each in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
}


class _Piece(NamedTuple):
    """Some rows of a tensor, and where their bytes are."""

    first: int
    num_rows: int
    file: str
    start: int
    sha256: str


def save_shards(
    manifest: Path, tensors: dict[str, Tensor], contents: dict[str, Any], rank: int
) -> None:
    """Write a checkpoint; all processes call this with their tensors.

    Args:
        manifest: checkpoint.json, in the directory of the checkpoint. All processes must see the
            same directory.
        tensors: Whole tensors, which one process writes, and sharded ones (`DTensor`).
        contents: Further values, which JSON can hold. Those of process 0 are written.
        rank: The rank of this process.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False)
    with _errors_of_processes():
        save(tensors, storage_writer=_Writer(manifest, contents, rank), planner=planner)


def load_shards(
    manifest: Path, tables: dict[str, dict[str, Any]], tensors: dict[str, Tensor]
) -> None:
    """Fill `tensors` from a checkpoint; if there are several processes, all call this.

    Args:
        manifest: checkpoint.json, in the directory of the checkpoint.
        tables: Its "tensors".
        tensors: A tensor for each table, whole or sharded over any number of processes.

    Raises:
        TrainError: a file is missing or damaged.
        ValueError: a table is not one that `save_shards` has written.
    """
    reader = _Reader(manifest, tables)
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    with _errors_of_processes(), warnings.catch_warnings():
        # torch warns if there is one process only.
        warnings.filterwarnings("ignore", "torch.distributed is ", UserWarning)
        load(tensors, storage_reader=reader, planner=planner)


@contextmanager
def _errors_of_processes() -> Iterator[None]:
    """Raise the error of the first process that failed, in every process."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class _Writer(StorageWriter):
    """Writes the rows of this process; on process 0, also checkpoint.json."""

    def __init__(self, manifest: Path, contents: dict[str, Any], rank: int) -> None:
        self._manifest, self._directory = manifest, manifest.parent
        self._contents, self._rank = contents, rank

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to do: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the directory, on process 0; the others write only after that."""
        if not is_coordinator:
            return
        if self._directory.is_dir() and not self._manifest.exists():
            remove_tree(self._directory)  # of a run that was killed while it saved
        make_directory(self._directory)
        remove_temporary(self._directory)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return torch's plan for this process."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return torch's plans for all processes."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write one file with all pieces of this process, to the disk."""
        if not self._directory.is_dir():
            raise TrainError(
                f"Process {self._rank} does not see {self._directory}, which process 0 has made. "
                "All machines of a run must see the same output directory."
            )
        pieces = [_bytes_of(planner.resolve_data(item)) for item in plan.items]
        digests = [hashlib.sha256(piece) for piece in pieces]
        all_digests = hashlib.sha256(b"".join(each.digest() for each in digests)).hexdigest()
        name = f"{self._rank:05d}-{all_digests[:16]}.bin"
        write_file(self._directory / name, pieces)
        sync_directory(self._directory)
        results = []
        start = 0
        for item, piece, digest in zip(plan.items, pieces, digests, strict=True):
            place = (name, start, digest.hexdigest())
            results.append(WriteResult(item.index, len(piece), place))
            start += len(piece)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write checkpoint.json, after all processes have written their rows; on process 0."""
        places = {
            (result.index.fqn, tuple(result.index.offset or ())): result.storage_data
            for each in results
            for result in each
        }
        tables = {}
        for name, found in metadata.state_dict_metadata.items():
            assert isinstance(found, TensorStorageMetadata)  # nothing but tensors is saved
            pieces = []
            for chunk in found.chunks:
                if not math.prod(chunk.sizes):  # a process without rows of this tensor
                    continue
                first, num_rows = (*chunk.offsets, 0)[0], (*chunk.sizes, 1)[0]
                pieces.append(_Piece(first, num_rows, *places[name, tuple(chunk.offsets)]))
            tables[name] = {
                "dtype": str(found.properties.dtype).removeprefix("torch."),
                "shape": list(found.size),
                "pieces": sorted(pieces),
            }
        write_file(self._manifest, [checked_json({**self._contents, "tensors": tables})])
        sync_directory(self._directory)
        sync_directory(self._directory.parent)
        used = {file for file, *_ in places.values()}
        for path in self._directory.glob("*.bin"):
            if path.name not in used:  # of the checkpoint that was saved here before
                remove_file(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return False: torch never chooses this class by the name of a checkpoint."""
        return False


class _Reader(StorageReader):
    """Reads pieces of tensors, and compares each with its digest."""

    def __init__(self, manifest: Path, tables: dict[str, dict[str, Any]]) -> None:
        self._directory = manifest.parent
        self._pieces: dict[tuple[str, tuple[int, ...]], tuple[_Piece, torch.Size, torch.dtype]] = {}
        self._metadata = Metadata({name: self._table(name, each) for name, each in tables.items()})

    def _table(self, name: str, table: dict[str, Any]) -> TensorStorageMetadata:
        """What torch needs to know of a tensor, from its table in checkpoint.json, checked."""
        shape, dtype = torch.Size(table["shape"]), _TYPES[table["dtype"]]
        chunks, done = [], 0
        for piece in (_Piece(*each) for each in table["pieces"]):
            # Every row is in one piece: otherwise rows would keep the values that they had.
            numbers = (piece.first, piece.num_rows, piece.start)
            right = all(type(each) is int and each >= 0 for each in numbers)
            if not right or piece.first != done or not _FILE.fullmatch(piece.file):
                raise ValueError(f"odd piece {piece!r:.100} of {name}")
            done += piece.num_rows
            # A tensor without dimensions has one piece, of one row.
            sizes = torch.Size([piece.num_rows, *shape[1:]] if shape else [])
            offsets = torch.Size([piece.first, *[0] * (len(shape) - 1)] if shape else [])
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            self._pieces[name, tuple(offsets)] = (piece, sizes, dtype)
        if done != (shape[0] if shape else 1):
            raise ValueError(f"{done} rows of {name}, which has the shape {list(shape)}")
        return TensorStorageMetadata(TensorProperties(dtype), shape, chunks)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to do: a reader is used once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the names, shapes and pieces of all tensors."""
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: the tables were checked before."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return torch's plan for this process."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return torch's plans for all processes."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the rows that this process needs into its tensors."""
        for item in plan.items:
            index = item.storage_index
            values = self._read(*self._pieces[index.fqn, tuple(index.offset or ())])
            for axis, (first, size) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                values = values.narrow(axis, first, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(values)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, piece: _Piece, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The values of a piece."""
        path = self._directory / piece.file
        size = shape.numel() * dtype.itemsize
        with open_to_read(path) as stream:
            # The size is compared first: a forged table must not allocate more than the file has.
            data = bytearray()
            if piece.start + size <= os.fstat(stream.fileno()).st_size:
                stream.seek(piece.start)
                data = bytearray(size)
            view = memoryview(data)
            while view and (done := stream.readinto(view)):  # Linux reads at most 2 GiB at once
                view = view[done:]
        if hashlib.sha256(data).hexdigest() != piece.sha256:
            raise TrainError(
                f"{path} is damaged: the digest of {size:,} bytes at {piece.start:,} is not that "
                f"in checkpoint.json. Remove {self._directory} to resume from the checkpoint "
                "before it."
            )
        return torch.frombuffer(data, dtype=dtype).reshape(shape)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return False: torch never chooses this class by the name of a checkpoint."""
        return False


def _bytes_of(values: Any) -> memoryview:
    """The bytes of a tensor, copied from the device."""
    return memoryview(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
