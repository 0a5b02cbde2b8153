"""Loaders on a device mesh: groups that read the same rows, and slices of rows."""

import json
import pickle
from datetime import timedelta
from itertools import product

import numpy as np
import pytest
import torch
from torch.distributed import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock.errors import PlanError
from penstock.loader import MeshRoles
from penstock.loader.loader import Loader
from penstock.loader.mesh import locate
from penstock.rows.documents import Documents
from penstock.rows.packs import Packs
from penstock.rows.windows import Windows
from penstock.testing import assert_resumable

TIMEOUT = 200
SLICED = {"cp": "slice"}
# The dimensions of meshes of eight processes, and the roles that their names do not say.
MESHES = [
    ({"dp": 4, "tp": 2}, {}),
    ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {}),
    ({"dp": 2, "cp": 4}, SLICED),
    ({"pp": 2, "dp": 2, "cp": 2}, SLICED),
    ({"outer": 2, "cp": 2, "inner": 2}, {"outer": "data", "inner": "data", "cp": "same"}),
]


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


def test_every_mesh_of_three_dimensions_gives_each_rank_and_slice_to_one_group():
    for shape in product((1, 2, 3), repeat=3):
        for roles in product(("data", "same", "slice"), repeat=3):
            places = {}
            for coordinate in np.ndindex(shape):
                rank, world_size, row_slice = locate(roles, shape, coordinate)
                number, total = row_slice or (0, 1)
                # What this process reads, in the coordinates that decide it.
                at = [
                    tuple(c for c, role in zip(coordinate, roles, strict=True) if role == wanted)
                    for wanted in ("data", "slice")
                ]
                places.setdefault((rank, number), set()).add(tuple(at))
                assert world_size == np.prod(
                    [s for s, r in zip(shape, roles, strict=True) if r == "data"]
                )
                assert total == np.prod(
                    [s for s, r in zip(shape, roles, strict=True) if r == "slice"]
                )
            assert set(places) == set(product(range(world_size), range(total)))
            assert all(len(found) == 1 for found in places.values())
            # Ranks count in the order of the mesh.
            assert [min(places[key]) for key in sorted(places)] == sorted(
                found for one in places.values() for found in one
            )


def read_on_all(as_rank, sizes, roles, make, steps):
    """The batches, fingerprints and state of every process of a mesh, by coordinate."""
    world_size = int(np.prod(list(sizes.values())))
    found = {}
    for rank in range(world_size):
        as_rank(rank, world_size)
        mesh = mesh_of(sizes)
        loader = make(mesh=MeshRoles(mesh, roles) if roles else mesh)
        read = []
        for batch in loader:
            read.append((batch, loader.fingerprint))
            if len(read) == steps:
                break
        found[tuple(mesh.get_coordinate())] = read, json.dumps(loader.state_dict())
    return found


def put_together(found, sizes, roles, step):
    """The global batch of a step, of one process of each group; every group must agree."""
    names = list(sizes)
    groups = {}
    for coordinate, (read, _) in found.items():
        data = tuple(
            at
            for name, at in zip(names, coordinate, strict=True)
            if roles.get(name, "same" if name in ("tp", "pp") else "data") == "data"
        )
        at = dict(zip(names, coordinate, strict=True))
        number = at["cp"] if roles.get("cp") == "slice" else 0
        groups.setdefault(data, {}).setdefault(number, []).append(read[step])
    whole, prints = [], []
    for data in sorted(groups):
        for same in groups[data].values():
            for batch, _ in same[1:]:
                assert list(batch) == list(same[0][0])
                assert all(torch.equal(batch[name], same[0][0][name]) for name in batch)
        slices = [groups[data][number][0] for number in sorted(groups[data])]
        prints.append({fingerprint for _, fingerprint in slices})
        whole.append(
            {
                name: torch.cat([batch[name] for batch, _ in slices], dim=1)
                for name, values in slices[0][0].items()
                if values.ndim == 2
            }
        )
    assert all(len(each) == 1 for each in prints), "a group does not agree on its fingerprint"
    joined = {name: torch.cat([batch[name] for batch in whole]) for name in whole[0]}
    return joined, sum(each.pop() for each in prints) % 2**64


@pytest.mark.parametrize(("sizes", "roles"), MESHES, ids=str)
@pytest.mark.parametrize("kind", ["windows", "packs"])
def test_groups_read_the_same_rows_and_all_together_read_each_row_once(
    store, as_rank, sizes, roles, kind
):
    rows = Windows(store, 16) if kind == "windows" else Packs(store, 32)
    alone = Loader(rows, global_batch_size=8, seed=3)
    expected = [(alone[step], alone.make(step).fingerprint) for step in range(3)]

    def make(**options):
        return Loader(rows, global_batch_size=8, seed=3, **options)

    found = read_on_all(as_rank, sizes, roles, make, 3)

    for step, (batch, fingerprint) in enumerate(expected):
        joined, total = put_together(found, sizes, roles, step)
        assert total == fingerprint
        for name in ("inputs", "targets", "position_ids", "document_ids"):
            if name in batch:
                assert torch.equal(joined[name], batch[name]), name
    alone.seek(24)
    assert {state for _, state in found.values()} == {json.dumps(alone.state_dict())}


def test_slices_of_windows_have_the_positions_of_the_whole_row(store, as_rank):
    as_rank(3, 4)
    mesh = mesh_of({"dp": 1, "cp": 4})
    loader = Loader(Windows(store, 16), 2, mesh=MeshRoles(mesh, SLICED))

    # Workers of a DataLoader get a pickled loader, without the mesh.
    loader = pickle.loads(pickle.dumps(loader))
    assert loader[0]["position_ids"].tolist() == [[12, 13, 14, 15]] * 2
    assert loader[0]["inputs"].shape == (2, 4)


def test_the_last_target_of_a_slice_is_the_first_input_of_the_next(store, as_rank):
    batches = []
    for rank in range(2):
        as_rank(rank, 2)
        mesh = MeshRoles(mesh_of({"cp": 2}), SLICED)
        batches.append(Loader(Windows(store, 16), 4, mesh=mesh, format="narrow")[5])

    assert torch.equal(batches[0]["tokens"][:, -1], batches[1]["tokens"][:, 0])


def test_slices_of_packed_rows_keep_the_documents_and_targets_of_the_whole_row(store, as_rank):
    rows = Packs(store, 32)
    whole = Loader(rows, 4, seed=1)[2]
    assert (whole["document_ids"][:, 16] > 0).any()
    assert (whole["position_ids"][:, 16] > 0).any()
    assert (whole["targets"] == -100).any()
    for rank in range(2):
        as_rank(rank, 2)
        part = Loader(rows, 4, seed=1, mesh=MeshRoles(mesh_of({"cp": 2}), SLICED))[2]
        columns = slice(16 * rank, 16 * rank + 16)
        for name in ("inputs", "targets", "position_ids", "document_ids"):
            assert torch.equal(part[name], whole[name][:, columns]), name
        # Attention over the group needs the documents of the whole rows.
        assert torch.equal(part["cu_seqlens"], whole["cu_seqlens"])


def test_slices_of_padded_documents_count_positions_without_the_padding(store, as_rank):
    for side in ("right", "left"):
        rows = Documents(store, 64, side=side, pad_to_multiple_of=4)
        whole = Loader(rows, 4, seed=1, rank=0, world_size=1)[0]
        assert not whole["attention_mask"].all()
        parts = []
        for rank in range(4):
            as_rank(rank, 4)
            mesh = MeshRoles(mesh_of({"cp": 4}), SLICED)
            parts.append(Loader(rows, 4, seed=1, mesh=mesh)[0])
        joined = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
        for name in whole:
            assert torch.equal(joined[name], whole[name]), name
        real = whole["attention_mask"].bool()
        for row, positions in zip(real, joined["position_ids"], strict=True):
            assert positions[row].tolist() == list(range(int(row.sum())))


def test_a_run_resumes_in_meshes_of_other_shapes(store, as_rank):
    """Rank r of w is a process of a mesh with w data ranks, in one of two shapes."""
    shapes = {1: {"tp": 2}, 2: {"dp": 2, "cp": 2}, 4: {"dp_replicate": 2, "tp": 3, "dp_shard": 2}}

    def make(rank, world_size, prefetch):
        sizes = shapes[world_size]
        found = (
            np.ravel_multi_index(at, tuple(sizes.values()))
            for at in np.ndindex(tuple(sizes.values()))
            if locate(
                ["same" if n in ("tp", "cp") else "data" for n in sizes], tuple(sizes.values()), at
            ).rank
            == rank
        )
        as_rank(int(next(found)), int(np.prod(list(sizes.values()))))
        roles = {"cp": "same"} if "cp" in sizes else {}
        loader = Loader(
            Windows(store, 16),
            global_batch_size=8,
            seed=3,
            epochs=1,
            prefetch=prefetch,
            mesh=MeshRoles(mesh_of(sizes), roles),
        )
        assert (loader.rank, loader.world_size) == (rank, world_size)
        return loader

    assert_resumable(make, world_sizes=(1, 2, 4), steps=12, stops=range(0, 12, 5))


@pytest.mark.parametrize(
    ("sizes", "roles", "message"),
    [
        ({"dp": 2, "fsdp": 2}, {}, r"'fsdp' does not say .* Dimensions: dp \(2\), fsdp \(2\)"),
        ({"dp": 2, "cp": 2}, {}, r"Say who slices rows .*\"cp\": \"same\".*\"cp\": \"slice\""),
        ({"dp": 4}, {"tp": "same"}, r"names the dimension 'tp', but the mesh has: dp"),
        ({"dp": 4}, {"dp": "rows"}, r"role of 'dp' is 'rows', not \"data\""),
    ],
)
def test_a_mesh_that_does_not_say_who_reads_what_is_refused(store, as_rank, sizes, roles, message):
    as_rank(1, 4)
    mesh = mesh_of(sizes)

    with pytest.raises(PlanError, match=message):
        Loader(Windows(store, 16), 4, mesh=MeshRoles(mesh, roles) if roles else mesh)


def test_a_dimension_of_one_rank_needs_no_role(store, as_rank):
    as_rank(1, 2)

    loader = Loader(Windows(store, 16), 4, mesh=mesh_of({"dp": 2, "cp": 1, "other": 1}))

    assert (loader.rank, loader.world_size) == (1, 2)
    assert "position_ids" not in loader[0]


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


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("hf", "first target of each slice would be lost"),
        ("tuple", "cannot hold position_ids"),
    ],
)
def test_a_format_that_slices_would_break_is_refused(store, as_rank, format, message):
    as_rank(0, 2)
    mesh = mesh_of({"cp": 2})

    with pytest.raises(PlanError, match=message):
        Loader(Windows(store, 16, stride=15), 4, format=format, mesh=MeshRoles(mesh, SLICED))
    whole = Loader(Windows(store, 16), 4, format="tuple", mesh=MeshRoles(mesh, {"cp": "same"}))
    assert whole[0][0].shape == (4, 16)


def test_rows_that_do_not_divide_into_slices_are_refused(store, as_rank):
    as_rank(0, 3)
    mesh = MeshRoles(mesh_of({"cp": 3}), SLICED)

    with pytest.raises(PlanError, match="have 16 tokens, which do not divide into 3 slices"):
        Loader(Windows(store, 16), 4, mesh=mesh)
    with pytest.raises(PlanError, match=r"Documents\(…, pad_to_multiple_of=3\)"):
        Loader(Documents(store, 18), 4, mesh=mesh)


def test_context_parallel_of_torch_slices_whole_rows_that_were_copied(store, as_rank):
    """It writes into its buffers, and inputs and targets of a loader share one."""
    # Here, because the processes of the test below import this file, and this takes 1 s.
    from torch.distributed.tensor.experimental import context_parallel

    read = {"inputs": [], "targets": [], "position_ids": []}
    for rank in range(2):
        as_rank(rank, 2)
        mesh = mesh_of({"dp": 1, "cp": 2})
        rows = Windows(store, 16, borders=True)
        batch = Loader(rows, 4, seed=1, mesh=MeshRoles(mesh, {"cp": "same"}))[0]
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
    for sizes, roles in MESHES[:4]:
        mesh = mesh_of(sizes)
        loader = Loader(
            Windows(store, 16), global_batch_size=8, seed=3, mesh=MeshRoles(mesh, roles)
        )
        if state is not None:
            loader.load_state_dict(json.loads(state))
        for _, batch in zip(range(6), loader, strict=False):
            # Over all ranks that hold different tokens: one of each tensor parallel group.
            total = torch.stack([batch["inputs"].sum(), batch["targets"].sum()])
            low = torch.tensor(loader.fingerprint & 0xFFFF_FFFF)
            for name in sizes:
                if name not in ("tp", "pp"):
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
