"""DDP and FSDP2: the same run as with one process, killed, resumed and resharded.

Here are a few kills and changes of the number of processes; `tests/torture/test_parallel_kill.py`
has many.
"""

import os
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_version import HAS_FSDP_ON_CPUS, needs_fsdp

from penstock.digest import checked_json, parse_checked
from penstock.errors import PlanError, TrainError
from penstock.train import GPT, Learner, TrainingConfig, World, to_gpt2, train
from penstock.train.checkpoint import MANIFEST, Checkpoints
from penstock.train.sharding import shard_model

pytestmark = pytest.mark.skipif(os.name == "nt", reason="processes are forked")


def neighbour(name):
    """Another file of this folder."""
    spec = spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


processes, kills = neighbour("processes"), neighbour("kills")
# Runs of other numbers of processes compare only without dropout, and of other lengths at one rate.
PLAIN = {"model": {"dropout": 0.0}, "optimization": {"optimizer": "muon", "floor": 1.0}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = processes.Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


def killed_once(server, size, job, moment, generator):
    """Kill one process of a group after a step; returns whether it was still running."""
    group = server.start(size, job)
    while not any(
        line["kind"] == "step" and line["step"] >= moment for line in kills.written(job["output"])
    ):
        time.sleep(0.01)
    time.sleep(generator.random() * 0.05)
    victim = int(generator.integers(size))
    processes.kill(group[victim])
    time.sleep(0.1)  # the others find that they cannot reach it, or wait for it
    for each in group:
        processes.kill(each)
    return server.wait()[victim] == -9


def killed(server, size, job, moments, generator):
    """Run to the end through kills at these moments; returns how many were real."""
    real = sum(killed_once(server, size, job, moment, generator) for moment in moments)
    server.run(size, job)
    return real


def differences(one, two):
    """The largest difference of losses and of validation losses of two runs with equal rows."""
    found = []
    for kind, value in (("step", "loss"), ("val", "val_loss")):
        first, second = (
            {line["step"]: line[value] for line in kills.recorded(run) if line["kind"] == kind}
            for run in (one, two)
        )
        assert first.keys() <= second.keys()  # each session ends with a validation
        found += [abs(first[step] - second[step]) for step in first]
    logs = [(run / "fingerprints.jsonl").read_bytes() for run in (one, two)]
    assert logs[0] == logs[1]
    return max(found)


@pytest.fixture(scope="module")
def alone(store, tmp_path_factory):
    """The run of one process, of 10 steps, and its model."""
    output = tmp_path_factory.mktemp("alone") / "run"
    return train(processes.job_of(store.path, output, steps=10, **PLAIN), device="cpu")


@pytest.fixture(scope="module")
def resharded(server, store, tmp_path_factory):
    """The same run by FSDP2 and DDP in turns, on other numbers of processes; and its output."""
    if not HAS_FSDP_ON_CPUS:
        pytest.skip("FSDP2 works on CPUs with torch 2.7 or later")
    folder = tmp_path_factory.mktemp("resharded")
    output, seen = folder / "run", []
    for size, parallel, steps, rows in (
        (2, "fsdp", 4, 3),  # saves after 3 and 4; two micro-batches of 3 rows in each process
        (3, "fsdp", 6, 4),  # 257 tokens, and so on, in three shards that are not alike
        (2, "ddp", 7, 6),
        (1, "fsdp", 8, 6),
        (2, "fsdp", 10, 6),
    ):
        job = {"store": store.path, "output": output, "steps": steps, "parallel": parallel, **PLAIN}
        job["batch_size"] = rows
        server.run(size, job, export=str(folder / "exported"))
        seen.append(
            [
                path.name
                for path in Checkpoints(output / "checkpoints", keep_last=2).paths().values()
            ]
        )
    return output, seen, torch.load(folder / "exported", weights_only=True)


def test_a_run_is_the_same_in_every_mode_and_on_any_number_of_processes(alone, resharded):
    """Muon's too, which needs whole matrices. Losses to 1e-4 of 5 nats, weights to 1e-4."""
    output, seen, exported = resharded

    assert differences(alone.output, output) < 1e-4
    for name, weight in to_gpt2(alone.model).items():
        assert torch.allclose(weight, exported[name], atol=1e-4), name
    assert seen == [
        ["step-00000003", "step-00000004"],
        ["step-00000004", "step-00000006"],
        ["step-00000006", "step-00000007.pt"],
        ["step-00000007.pt", "step-00000008.pt"],
        ["step-00000009", "step-00000010"],
    ]


@pytest.mark.parametrize(
    ("size", "parallel", "moments"),
    [
        pytest.param(1, "ddp", [3, 8], marks=pytest.mark.torture),
        (3, "ddp", [5]),
        pytest.param(2, "fsdp", [5], marks=needs_fsdp),
    ],
)
def test_a_killed_run_has_bitwise_the_losses_of_one_that_was_not(
    server, store, tmp_path, size, parallel, moments
):
    job = {"store": store.path, "steps": 10, "parallel": parallel, "batch_size": 2}
    server.run(size, {**job, "output": tmp_path / "straight"})
    generator = np.random.default_rng(5)
    real = killed(server, size, {**job, "output": tmp_path / "run"}, moments, generator)

    assert real == len(moments)
    assert kills.recorded(tmp_path / "run") == kills.recorded(tmp_path / "straight")


@pytest.fixture
def saved(resharded, tmp_path):
    """The files of a checkpoint that two processes wrote, in another directory."""
    source = resharded[0] / "checkpoints" / "step-00000010"
    directory = tmp_path / "run" / "checkpoints" / "step-00000010"
    directory.mkdir(parents=True)
    for path in source.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    return directory


def load(directory, store):
    """Load a checkpoint into one process."""
    job = processes.job_of(store.path, directory.parents[1], steps=10, **PLAIN)
    checkpoints = Checkpoints(directory.parent, keep_last=2)
    contents = checkpoints.load(job.model)
    learner = Learner(job, World(0, 1, torch.device("cpu")))
    with checkpoints.refuse_odd_fields():
        learner.load(contents)
    return learner


def test_a_sharded_checkpoint_is_loaded_without_a_pickle(saved, store, resharded, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something is unpickled")

    for name in ("pickle.loads", "pickle.load", "pickle.Unpickler", "torch.load"):
        monkeypatch.setattr(name, refuse)
    model = load(saved, store).model

    assert {path.suffix for path in saved.iterdir()} == {".json", ".bin"}
    for name, weight in to_gpt2(model).items():
        assert torch.equal(weight, resharded[2][name]), name


def test_a_flipped_bit_in_a_sharded_checkpoint_is_an_error_that_names_it(saved, store):
    generator = np.random.default_rng(8)
    for path in sorted(saved.iterdir()):
        whole = path.read_bytes()
        for place in [0, len(whole) * 8 - 1, *generator.integers(len(whole) * 8, size=4)]:
            damaged = bytearray(whole)
            damaged[place // 8] ^= 1 << place % 8
            path.write_bytes(damaged)
            with pytest.raises(TrainError, match=r"step-00000010.* Remove "):
                load(saved, store)
        path.write_bytes(whole[:-1])
        with pytest.raises(TrainError, match=r"step-00000010.* Remove "):
            load(saved, store)
        path.write_bytes(whole)
    load(saved, store)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (NORM, {"dtype": "object"}),
        (NORM, {"shape": [1 << 40]}),
        (NORM, {"shape": "x"}),
        (NORM, {"pieces": []}),
        (NORM, {"pieces": [[0, 32, "../../secret.bin", 0, ""]]}),
        (NORM, {"pieces": [[0, 16, "00000-0123456789abcdef.bin", 0, ""]]}),
        (NORM, {"pieces": [[0, -16, "00000-0123456789abcdef.bin", 0, ""]]}),
        (NORM, {"pieces": [[0, 32.0, "00000-0123456789abcdef.bin", 0, ""]]}),
        (NORM, {"pieces": 7}),
        ("model.other", {"dtype": "float32", "shape": [], "pieces": []}),
        ("optimizers.9.0.exp_avg", {"dtype": "float32", "shape": [], "pieces": []}),
        ("optimizers.x", {"dtype": "float32", "shape": [], "pieces": []}),
    ],
    ids=str,
)
def test_a_forged_table_is_refused(saved, store, name, changes):
    contents = parse_checked((saved / MANIFEST).read_bytes())
    contents["tensors"][name] = {**contents["tensors"].get(name, {}), **changes}
    (saved / MANIFEST).write_bytes(checked_json(contents))

    with pytest.raises(TrainError, match="step-00000010 has a missing or odd field"):
        load(saved, store)


def test_a_forged_place_in_a_file_is_refused(saved, store):
    contents = parse_checked((saved / MANIFEST).read_bytes())
    contents["tensors"][NORM]["pieces"][0][3] = 1 << 60
    (saved / MANIFEST).write_bytes(checked_json(contents))

    with pytest.raises(TrainError, match=r"\.bin is damaged"):
        load(saved, store)


def test_another_optimizer_is_refused_before_tensors_are_read(saved, store):
    contents = parse_checked((saved / MANIFEST).read_bytes())
    (saved / MANIFEST).write_bytes(checked_json({**contents, "optimizers": []}))

    with pytest.raises(TrainError, match="another optimizer than optimizer='muon'"):
        load(saved, store)


def test_a_checkpoint_without_its_manifest_is_none_and_is_removed(saved, store):
    (saved / MANIFEST).unlink()
    checkpoints = Checkpoints(saved.parent, keep_last=1)
    assert checkpoints.paths() == {}

    checkpoints.save(27, {})
    assert [path.name for path in saved.parent.iterdir()] == ["step-00000027.pt"]


def test_a_link_in_the_place_of_a_sharded_checkpoint_is_removed_and_not_followed(saved, tmp_path):
    elsewhere = saved.rename(tmp_path / "elsewhere")
    saved.symlink_to(elsewhere)
    Checkpoints(saved.parent, keep_last=1).save(27, {})

    assert [path.name for path in saved.parent.iterdir()] == ["step-00000027.pt"]
    assert (elsewhere / MANIFEST).exists()


def test_eight_bit_products_are_refused_with_fsdp():
    with pytest.raises(PlanError, match=r'precision="fp8" does not work with parallel="fsdp"'):
        TrainingConfig(steps=1, parallel="fsdp", precision="fp8")


def test_fsdp_on_cpus_is_refused_with_a_torch_that_fails_in_its_first_step(monkeypatch):
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)  # as in torch 2.6
    layers = torch.nn.ModuleList()

    with pytest.raises(PlanError, match=r'parallel="fsdp" does not work on CPUs .* torch 2\.7'):
        shard_model(layers, layers, World(0, 2, torch.device("cpu")))


def test_one_process_has_nothing_to_shard(job):
    learner = Learner(job(parallel="fsdp"), World(0, 1, torch.device("cpu")))

    assert type(learner.whole_model()) is GPT
    assert learner.whole_model() is learner.model
