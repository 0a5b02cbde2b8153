"""Stores in object storage are read like stores on disk."""

import json
import os
import pickle
import shutil
import subprocess
import time

import numpy as np
import pytest
import xxhash
import zygote
from typer.testing import CliRunner

import penstock as ps
from penstock.cli.app import app
from penstock.errors import MissingStoreError, RemoteError, ResumeError, StoreError
from penstock.inspect import compare_runs, inspect_step, open_run
from penstock.order import Block
from penstock.recipe import parse_recipe
from penstock.sources.slices import cut
from penstock.store import open_sides
from penstock.store.objects import Objects
from penstock.train.command import run_recipe

PARTS = Block(rows="part", group=4)
KINDS = ("tokens", "checks", "bounds")


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A store of 13 parts in a directory."""
    folder = tmp_path_factory.mktemp("local")
    lines = (" ".join(str(n * k) for k in range(1, 40)) for n in range(300))
    (folder / "in.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cut.__kwdefaults__, "slice_bytes", 4_000)
        ps.build(folder / "in.txt", folder / "store", tokenizer="bytes", documents="lines")
    return folder / "store"


def upload(directory, url):
    objects = Objects(url)
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            objects.put(path.relative_to(directory).as_posix(), path)


_uploaded = {}


@pytest.fixture
def remote(local, s3, s3_server):
    """The URL of the same store, which tests do not change; nobody has asked for it yet."""
    if local not in _uploaded:
        upload(local, f"{s3}/owt")
        _uploaded[local] = f"{s3}/owt"
    s3_server.forget()
    return _uploaded[local]


@pytest.fixture
def changed(local, s3):
    """The URL of a copy of the store, which a test may change."""
    upload(local, f"{s3}/owt")
    return f"{s3}/owt"


@pytest.fixture
def cached(tmp_path):
    """A function that returns the files of the cache, by their names."""

    def files():
        folder = tmp_path / "cache" / "remote"
        return {path.name: path for path in folder.iterdir() if path.is_file()}

    return files


def equal(one, two):
    assert one.keys() == two.keys()
    return all((one[name] == two[name]).all() for name in one)


def test_a_remote_store_is_the_local_one(local, remote):
    here, there = ps.TokenStore(local), ps.TokenStore(remote)

    assert there.digest == here.digest
    assert len(there) == len(here) > 100
    assert repr(there) == repr(here).replace(str(local), remote)
    assert all((a == b).all() for a, b in zip(here, there, strict=True))
    assert (there.tokens(100, 20_000) == here.tokens(100, 20_000)).all()
    assert [there.decode(n) for n in (0, 5, -1)] == [here.decode(n) for n in (0, 5, -1)]
    assert there.origin(77) == here.origin(77)


def test_only_the_files_that_are_needed_are_downloaded(remote, s3_server):
    rows = ps.Windows(remote, 32)

    def kinds():
        return {path.split(".")[-2] for path in s3_server.requests("GET", f"{remote[5:]}/part-")}

    assert kinds() == set()
    rows[0]
    assert kinds() == {"tokens", "checks"}
    assert len(s3_server.requests("GET", f"{remote[5:]}/part-00001")) == 0
    ps.Windows(remote, 32, borders=True)[0]
    assert kinds() == {"tokens", "checks", "bounds"}
    ps.TokenStore(remote).origin(0)
    assert kinds() == {"tokens", "checks", "bounds", "origin"}


@pytest.mark.parametrize(
    "make",
    [
        lambda store: ps.Windows(store, 64),
        lambda store: ps.Windows(store, 48, stride=20, tail="pad", borders=True),
        lambda store: ps.Packs(store, 64),
        lambda store: ps.Documents(store, 200, overflow="split"),
    ],
    ids=["windows", "padded", "packs", "documents"],
)
@pytest.mark.parametrize("shuffle", [None, "full"])
def test_an_epoch_equals_that_of_the_local_store(local, remote, make, shuffle):
    there = ps.Loader(make(remote), 8, epochs=1, seed=3, shuffle=shuffle)
    here = ps.Loader(make(local), 8, epochs=1, seed=3, shuffle=there.plan.shuffle)

    assert there.plan.digest == here.plan.digest
    assert all(equal(a, b) for a, b in zip(here, there, strict=True))


def test_over_remote_stores_the_default_order_is_that_of_groups_of_parts(local, remote):
    there, here = ps.Plan(ps.Windows(remote, 64)), ps.Plan(ps.Windows(local, 64))
    assert there.shuffle == PARTS
    assert here.shuffle == "full"
    assert ps.Plan({"a": ps.Windows(local, 64), "b": ps.Windows(remote, 64)}).shuffle == PARTS
    assert ps.Plan(ps.Windows(remote, 64), shuffle="full").shuffle == "full"

    samples = there.locate(np.arange(64))[2]
    ends = np.cumsum(ps.Windows(remote, 64).part_rows)
    assert len(np.unique(np.searchsorted(ends, samples, side="right"))) <= 4


def test_a_run_continues_from_the_state_of_the_other_store_if_the_order_is_the_same(local, remote):
    there = ps.Loader(ps.Windows(remote, 64), 8, seed=5)
    batches = [batch["inputs"] for batch, _ in zip(there, range(30), strict=False)]
    there.seek(8 * 10)
    state = json.loads(json.dumps(there.state_dict()))

    here = ps.Loader(ps.Windows(local, 64), 4, seed=5, shuffle=PARTS, rank=1, world_size=4)
    here.load_state_dict(state)
    shares = [batch["inputs"] for batch, _ in zip(here, range(5), strict=False)]
    # Rank 1 of 4 with 4 rows has the second half of every even batch of 8.
    assert all((shares[n] == batches[10 + 2 * n][4:]).all() for n in range(5))
    with pytest.raises(ResumeError, match="shuffle"):
        ps.Loader(ps.Windows(local, 64), 8, seed=5).load_state_dict(state)


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.torture)])
def test_workers_of_a_dataloader_read_a_remote_store(local, remote, start_method):
    there = ps.Loader(ps.Windows(remote, 64), 32, epochs=1)
    here = ps.Loader(ps.Windows(local, 64), 32, epochs=1, shuffle=PARTS)
    batches = there.as_dataloader(num_workers=1, multiprocessing_context=start_method)

    assert all(equal(a, b) for a, b in zip(here, batches, strict=True))


def test_a_forked_process_downloads_through_another_one(local, remote, s3, cached):
    """A fork copies no threads, so a forked process cannot use obstore after its parent has."""
    expected = ps.Windows(local, 64).read(np.arange(200))["tokens"]
    ps.TokenStore(remote)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            rows = ps.Windows(ps.TokenStore(remote), 64)
            assert (rows.read(np.arange(200))["tokens"] == expected).all()
            last = np.array([len(rows) - 1])
            assert rows.read_ahead(last) > 0
            while rows.read_ahead(last):
                time.sleep(0.05)
            with pytest.raises(MissingStoreError, match=rf"^{s3}/none has no penstock\.json"):
                ps.TokenStore(f"{s3}/none")
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert len(cached()) % 2 == 0  # tokens and checksums


def test_a_pickled_store_keeps_its_manifest_while_the_store_is_appended_to(
    local, changed, tmp_path
):
    shutil.copytree(local, tmp_path / "store")
    local = tmp_path / "store"
    store = ps.TokenStore(changed)
    sent = pickle.dumps(store)
    before = store.document(3)
    (tmp_path / "more.txt").write_text("more text\n" * 50)
    ps.build(tmp_path / "more.txt", local, tokenizer="bytes", documents="lines", append=True)
    upload(local, changed)

    received = pickle.loads(sent)
    assert received.digest == store.digest != ps.TokenStore(changed).digest
    assert (received.document(3) == before).all()
    assert len(list(received)) == len(store)


def test_the_commands_take_a_url(local, remote):
    run = CliRunner().invoke

    shown = json.loads(run(app, ["info", remote, "--json"]).stdout)
    known = json.loads(run(app, ["info", str(local), "--json"]).stdout)
    assert shown == {**known, "store": remote}
    assert run(app, ["decode", remote, "--document", "3"]).stdout.count("offset") == 1
    assert f"{remote} is intact" in run(app, ["verify", remote]).stdout


def test_the_sides_of_a_split_store_are_opened_together(s3, tmp_path, small_slices):
    (tmp_path / "in.txt").write_text("some text here\n" * 2_000)
    ps.build(
        tmp_path / "in.txt", tmp_path / "s", tokenizer="bytes", documents="lines", split="tail:0.1"
    )
    upload(tmp_path / "s", f"{s3}/s")

    train, val = open_sides(f"{s3}/s")
    assert len(train) + len(val) == 2_000
    assert CliRunner().invoke(app, ["verify", f"{s3}/s"]).stdout.count("is intact") == 2
    with pytest.raises(StoreError, match=rf"{s3}/s was built with a split. Open {s3}/s/train inst"):
        ps.TokenStore(f"{s3}/s")


def test_a_url_without_a_store_is_an_error(s3):
    with pytest.raises(MissingStoreError, match=rf"{s3}/none has no penstock.json, so there is no"):
        ps.Windows(f"{s3}/none", 64)


def test_a_damaged_manifest_is_an_error(changed):
    objects = Objects(changed)
    objects.put("penstock.json", objects.read("penstock.json").replace(b"bytes", b"bytez"))

    with pytest.raises(StoreError, match="was changed after it was written"):
        ps.TokenStore(changed)


def test_a_part_with_other_bytes_is_an_error_and_not_kept(changed, cached):
    objects = Objects(changed)
    data = bytearray(objects.read("part-00002.tokens.npy"))
    data[500] ^= 1
    objects.put("part-00002.tokens.npy", bytes(data))
    store = ps.TokenStore(changed)

    with pytest.raises(RemoteError, match=r"part-00002.tokens.npy was downloaded twice, and its X"):
        list(store)
    assert store.manifest.parts[2].files["tokens"][1] not in cached()
    with pytest.raises(RemoteError, match=r"part-00002\.tokens\.npy was downloaded twice"):
        ps.verify(changed)


DAMAGES = [(damage, kind) for damage in ("flip", "header") for kind in KINDS]
DAMAGES += [("cut", "tokens"), ("longer", "checks")]
DAMAGES += [
    pytest.param(damage, kind, marks=pytest.mark.torture)
    for damage in ("cut", "longer")
    for kind in KINDS
    if (damage, kind) not in DAMAGES
]


@pytest.mark.parametrize(("damage", "kind"), DAMAGES)
def test_a_damaged_file_of_the_cache_is_downloaded_again(local, remote, cached, damage, kind):
    store = ps.TokenStore(remote)
    assert [store.document(n)[0] for n in (0, 100)]
    path = cached()[store.manifest.parts[0].files[kind][1]]
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[130] ^= 1
    elif damage == "header":
        data[20] ^= 1
    elif damage == "cut":
        data = data[:-1]
    elif damage == "longer":
        data += b"x"
    path.write_bytes(data)

    again, here = ps.TokenStore(remote), ps.TokenStore(local)
    assert all((a == b).all() for a, b in zip(again, here, strict=True))


def test_a_file_that_is_cut_while_it_is_mapped_is_downloaded_again(local, remote, cached):
    store = ps.TokenStore(remote)
    store.document(0)
    os.truncate(cached()[store.manifest.parts[0].files["tokens"][1]], 200)

    assert (store.document(0) == ps.TokenStore(local).document(0)).all()


def size_of(folder):
    found = 0
    for path in folder.iterdir():
        try:
            found += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return found


def test_the_limit_of_the_cache_holds_and_rows_are_the_same(local, remote, cached, tmp_path):
    store = ps.TokenStore(remote, cache_bytes=60_000)
    loader = ps.Loader(ps.Windows(store, 64), 8, epochs=1)
    here = ps.Loader(ps.Windows(local, 64), 8, epochs=1, shuffle=PARTS)

    largest = 0
    for a, b in zip(here, loader, strict=True):
        assert equal(a, b)
        largest = max(largest, size_of(tmp_path / "cache" / "remote"))
    assert 30_000 < largest <= 60_000


def test_kept_manifests_count_and_the_oldest_are_removed(remote, tmp_path):
    kept, old = tmp_path / "cache" / "manifests", f"{7:064x}.json"
    store = ps.TokenStore(remote, cache_bytes=60_000)
    (kept / old).write_bytes(bytes(50_000))
    os.utime(kept / old, (0, 0))

    largest = 0
    for part in range(len(store.manifest.parts)):
        store.part_array(part, "tokens")
        largest = max(largest, size_of(tmp_path / "cache" / "remote") + size_of(kept))
    assert not (kept / old).exists()
    assert 30_000 < largest <= 60_000
    assert len(list(store)) == len(ps.TokenStore(remote))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1kB", r"only 1,000 bytes of .* Raise PENSTOCK_CACHE_BYTES"),
        ("1 KiB", "only 1,024 bytes of"),
        ("much", "PENSTOCK_CACHE_BYTES is 'much'"),
        ("1XB", "PENSTOCK_CACHE_BYTES is '1XB'"),
    ],
)
def test_a_limit_below_one_part_or_that_is_no_size_is_refused(remote, monkeypatch, value, message):
    monkeypatch.setenv("PENSTOCK_CACHE_BYTES", value)

    with pytest.raises(StoreError, match=message):
        ps.TokenStore(remote).document(0)


def test_the_oldest_files_are_removed_first_and_maps_of_them_stay_valid(remote, cached):
    store = ps.TokenStore(remote, cache_bytes=40_000)
    first = store.part_array(0, "tokens")
    copy = np.array(first)
    names = [part.files["tokens"][1] for part in store.manifest.parts]
    for part in range(1, 12):
        store.part_array(part, "tokens")

    assert names[0] not in cached()
    assert names[11] in cached()
    assert (first == copy).all()
    assert len(store.files._state.maps) < 20  # their space is given back


RACE = """
import sys, penstock as ps
store = ps.TokenStore(sys.argv[1])
print(sum(int(document.sum()) for document in store))
"""


def start(code, *arguments):
    command = ["-c", code, *map(str, arguments)]
    return zygote.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def race(code, remote, num_processes, monkeypatch):
    # Not the 20 seconds of other tests: on a busy machine, a request may time out and be repeated.
    monkeypatch.setenv("PENSTOCK_REMOTE_SECONDS", "280")
    processes = [start(code, remote) for _ in range(num_processes)]
    printed = [each.communicate(timeout=280) for each in processes]
    assert [errors for _, errors in printed if errors] == []
    return [int(total) for total, _ in printed]


@pytest.mark.parametrize(
    "num_processes", [4, pytest.param(16, marks=pytest.mark.torture)], ids=["4", "16"]
)
def test_processes_that_race_on_a_cold_cache_download_each_file_once(
    local, remote, s3_server, num_processes, monkeypatch
):
    expected = sum(int(document.sum()) for document in ps.TokenStore(local))

    assert race(RACE, remote, num_processes, monkeypatch) == [expected] * num_processes
    asked = s3_server.requests("GET", f"{remote[5:]}/part-")
    # Tokens, bounds and checksums of each part.
    assert len(asked) == len(set(asked)) == 3 * len(ps.TokenStore(local).manifest.parts)


READ = """
import sys, penstock as ps
store = ps.TokenStore(sys.argv[1])
for number in range(len(store)):
    store.document(number)
print("done")
"""


@pytest.mark.parametrize("kills", [3, pytest.param(60, marks=pytest.mark.torture)], ids=["3", "60"])
def test_kills_during_downloads_poison_nothing_and_block_nobody(
    local, remote, cached, tmp_path, kills
):
    for number in range(kills):
        before = len(cached()) if (tmp_path / "cache" / "remote").exists() else -1
        reader = start(READ, remote)
        # Until it downloads, and then up to 100 ms.
        while reader.poll() is None:
            if (tmp_path / "cache" / "remote").exists() and len(cached()) > before:
                break
            time.sleep(0.005)
        time.sleep(number * 37 % 50 / 500)
        reader.kill()
        reader.communicate()
        for name, path in cached().items():
            if not name.endswith(".tmp"):
                assert xxhash.xxh3_128(path.read_bytes()).hexdigest() == name
        if number % 7 == 6:  # begin again with a cold cache
            for path in cached().values():
                path.unlink()

    # A lock of a killed process would be waited for until the deadline, which is an error.
    store = ps.TokenStore(remote)
    assert all((a == b).all() for a, b in zip(ps.TokenStore(local), store, strict=True))
    assert not [name for name in cached() if name.endswith(".tmp")]


def test_a_missing_table_of_parts_is_named(changed):
    objects = Objects(changed)
    (name,) = (name for name, _ in objects.list() if name.startswith("parts-"))
    objects.delete(name)

    with pytest.raises(RemoteError, match=rf"^{changed}/{name} is missing\. It lists the parts"):
        ps.TokenStore(changed)


def test_a_run_that_has_read_a_remote_store_is_inspected_by_its_directory(remote, tmp_path):
    model = {"size": "nano", "layers": 1, "width": 8, "heads": 1}
    training = {"steps": 2, "batch_size": 2, "save_every": 2, "val_every": 2}
    data = {"train": remote, "length": 16}
    tables = {"output": str(tmp_path / "run"), "data": data, "model": model, "training": training}
    run_recipe(parse_recipe(tables, "a test"), device="cpu", log=lambda _: None)

    opened = open_run(str(tmp_path / "run"))
    rows = inspect_step(opened.plan, opened.steps, 2).rows
    assert [each.documents[0].store for each in rows] == [remote, remote]
    assert compare_runs(str(tmp_path / "run"), str(tmp_path / "run")).identical_steps == (2, 2)
