"""Loaders on a device mesh: groups that read the same rows."""

import json
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch.distributed import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock.errors import PlanError
from penstock.loader.loader import Loader
from penstock.rows.packs import Packs
from penstock.rows.windows import Windows
from penstock.testing import assert_resumable

TIMEOUT = 200
MESHES = [  # of eight processes
    {"dp": 4, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    {"dp": 2, "cp": 4},
    {"pp": 2, "dp": 2, "cp": 2},
    {"replicate": 2, "cp": 2, "shard": 2},
]
SAME = ("tp", "pp", "cp")


@pytest.fixture
def as_rank():
    """Makes this process one of several, without any of the others."""

    def become(rank, world_size):
        leave()
        torch.distributed.init_process_group(
            "fake", rank=rank, world_size=world_size, store=FakeStore()
        )

    def leave():
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    yield become
    leave()


def mesh_of(sizes):
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("kind", ["windows", "packs"])
def test_groups_read_the_same_rows_and_all_together_read_each_row_once(store, as_rank, sizes, kind):
    rows = Windows(store, 16) if kind == "windows" else Packs(store, 32)
    alone = Loader(rows, global_batch_size=8, seed=3)
    expected = [(alone[step], alone.make(step).fingerprint) for step in range(3)]
    alone.seek(24)
    found = {}
    for rank in range(8):
        as_rank(rank, 8)
        mesh = mesh_of(sizes)
        loader = Loader(rows, global_batch_size=8, seed=3, mesh=mesh)
        read = [(batch, loader.fingerprint) for _, batch in zip(range(3), loader, strict=False)]
        assert json.dumps(loader.state_dict()) == json.dumps(alone.state_dict())
        coordinate = zip(sizes, mesh.get_coordinate(), strict=True)
        group = tuple(at for name, at in coordinate if name not in SAME)
        found.setdefault(group, []).append((loader.rank, read))

    # Ranks count in the order of the mesh, and all processes of a group read the same rows.
    groups = [found[group] for group in sorted(found)]
    assert [{rank for rank, _ in group} for group in groups] == [{n} for n in range(len(groups))]
    for step, (batch, fingerprint) in enumerate(expected):
        for group in groups:
            for _, read in group[1:]:
                assert read[step][1] == group[0][1][step][1]
                for name, values in read[step][0].items():
                    assert torch.equal(values, group[0][1][step][0][name])
        parts = [group[0][1][step] for group in groups]
        assert sum(each for _, each in parts) % 2**64 == fingerprint
        for name in {"inputs", "targets", "position_ids", "document_ids"} & batch.keys():
            assert torch.equal(torch.cat([each[name] for each, _ in parts]), batch[name]), name


def test_a_run_resumes_in_meshes_of_other_shapes(store, as_rank):
    """Rank r of w is a process of a mesh with w data ranks, in one of two shapes."""
    shapes = {1: {"tp": 2}, 2: {"dp": 2, "cp": 2}, 4: {"dp_replicate": 2, "tp": 3, "dp_shard": 2}}

    def make(rank, world_size, prefetch):
        sizes = shapes[world_size]
        for each in range(int(np.prod(list(sizes.values())))):
            as_rank(each, int(np.prod(list(sizes.values()))))
            loader = Loader(
                Windows(store, 16),
                global_batch_size=8,
                seed=3,
                epochs=1,
                prefetch=prefetch,
                mesh=mesh_of(sizes),
            )
            assert loader.world_size == world_size
            if loader.rank == rank:
                return loader
        raise AssertionError(f"no process of the mesh has rank {rank}")

    assert_resumable(make, world_sizes=(1, 2, 4), steps=12, stops=range(0, 12, 5))


def test_a_mesh_that_does_not_say_who_reads_what_is_refused(store, as_rank):
    as_rank(1, 4)
    mesh = mesh_of({"dp": 2, "fsdp": 2})
    message = r"'fsdp' does not say .* Dimensions: dp \(2\), fsdp \(2\)\. Give rank="

    with pytest.raises(PlanError, match=message):
        Loader(Windows(store, 16), 4, mesh=mesh)


def test_a_dimension_of_one_rank_may_have_any_name(store, as_rank):
    as_rank(1, 2)

    loader = Loader(Windows(store, 16), 4, mesh=mesh_of({"dp": 2, "cp": 1, "other": 1}))

    assert (loader.rank, loader.world_size) == (1, 2)


def test_a_mesh_takes_the_place_of_rank_and_world_size(store, as_rank):
    as_rank(1, 2)
    mesh = mesh_of({"dp": 2})

    with pytest.raises(PlanError, match=r"rank=1 and world_size=2 .* Leave out rank="):
        Loader(Windows(store, 16), 4, mesh=mesh, rank=1, world_size=2)
    with pytest.raises(PlanError, match=r"mesh=\(2, 2\) is not a DeviceMesh"):
        Loader(Windows(store, 16), 4, mesh=(2, 2))
    with pytest.raises(PlanError, match="have no names"):
        Loader(Windows(store, 16), 4, mesh=init_device_mesh("cpu", (2,)))


def test_the_data_dimension_of_a_mesh_is_a_mesh_and_its_other_dimensions_are_not(store, as_rank):
    as_rank(3, 4)
    mesh = mesh_of({"dp": 2, "tp": 2})

    data = mesh["dp"]
    assert Loader(Windows(store, 16), 4, mesh=data).rank == 1
    # As docs/loading.md advises for the integrations.
    assert (data.get_local_rank(), data.size()) == (1, 2)
    with pytest.raises(PlanError, match=r"2 of 4 processes and no data dimension .*whole mesh"):
        Loader(Windows(store, 16), 4, mesh=mesh["tp"])


def test_context_parallel_of_torch_slices_whole_rows_that_were_copied(store, as_rank):
    """It writes into its buffers, and inputs and targets of a loader share one."""
    # Here, because the processes of the test below import this file, and this takes 1 s.
    from torch.distributed.tensor.experimental import context_parallel

    read = {"inputs": [], "targets": [], "position_ids": []}
    for rank in range(2):
        as_rank(rank, 2)
        mesh = mesh_of({"dp": 1, "cp": 2})
        rows = Windows(store, 16, borders=True)
        batch = Loader(rows, 4, seed=1, mesh=mesh)[0]
        whole = {name: batch[name].clone() for name in read}
        buffers = [batch[name].contiguous() for name in read]
        options = {"buffer_seq_dims": [1] * 3, "no_restore_buffers": set(buffers)}
        with context_parallel(mesh["cp"], buffers=buffers, **options):
            for name, part in zip(read, buffers, strict=True):
                read[name].append(part.clone())

    # It gives each rank a slice from the beginning and one from the end of the row.
    columns = [0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]
    for name, parts in read.items():
        for part, chosen in zip(parts, columns, strict=True):
            assert torch.equal(part, whole[name][:, chosen]), name


def train(rank, meeting, store, barrier, answers):
    """Six steps on each mesh, resumed in the next one, with sums over its data dimensions."""
    torch.set_num_threads(1)
    barrier.wait(TIMEOUT)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=8,
        timeout=timedelta(seconds=60),
    )
    state, sums = None, []
    for sizes in MESHES[:4]:
        mesh = mesh_of(sizes)
        loader = Loader(Windows(store, 16), global_batch_size=8, seed=3, mesh=mesh)
        if state is not None:
            loader.load_state_dict(json.loads(state))
        for _, batch in zip(range(6), loader, strict=False):
            # Over all ranks that hold different tokens: one of each group.
            total = torch.stack([batch["inputs"].sum(), batch["targets"].sum()])
            low = torch.tensor(loader.fingerprint & 0xFFFF_FFFF)
            for name in sizes:
                if name not in SAME:
                    torch.distributed.all_reduce(total, group=mesh.get_group(name))
                if name.startswith("dp"):
                    torch.distributed.all_reduce(low, group=mesh.get_group(name))
            sums.append([*total.tolist(), low.item() & 0xFFFF_FFFF])
        state = json.dumps(loader.state_dict())
    torch.distributed.destroy_process_group()
    answers.put((rank, sums, state))


def test_eight_processes_resume_from_mesh_to_mesh(store, tmp_path, imported_once):
    """One step too many anywhere would hang an all-reduce."""
    context = imported_once
    answers = context.Queue()
    arguments = (tmp_path / "meet", str(store.path), context.Barrier(8), answers)
    children = [context.Process(target=train, args=(rank, *arguments)) for rank in range(8)]
    for child in children:
        child.start()
    found = [answers.get(timeout=TIMEOUT) for _ in children]
    for child in children:
        child.join(TIMEOUT)

    alone = Loader(Windows(store, 16), 8, seed=3)
    expected = []
    for _, batch in zip(range(24), alone, strict=False):
        low = alone.fingerprint & 0xFFFF_FFFF
        expected.append([batch["inputs"].sum().item(), batch["targets"].sum().item(), low])
    assert sorted(rank for rank, _, _ in found) == list(range(8))
    assert [sums for _, sums, _ in found] == [expected] * 8
    assert {state for _, _, state in found} == {json.dumps(alone.state_dict())}
