"""Builds on a Ray cluster whose nodes are all on this machine.

A node is killed by SIGKILL of its raylet; the workers of the node die with it, or a moment later.
"""

import gzip
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import penstock
from penstock.errors import (
    DiskFullError,
    MissingInputError,
    SourceError,
    StoreError,
    TokenMismatchError,
    WorkerError,
)
from penstock.options import BuildOptions
from penstock.paths import StoreUrl
from penstock.sources.slices import cut
from penstock.store.build import begin
from penstock.store.job import prepare
from penstock.store.journal import Journal
from penstock.store.ray_tasks import RayRunner, make_slice, remote_job
from penstock.store.slice_work import Order
from penstock.store.upload import Destination
from penstock.tokenize.tokenizer import load_tokenizer

ray = pytest.importorskip("ray", reason="Ray is not installed")

# Nothing is sent anywhere, and no token is written into the home directory.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
QUIET["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # older versions warn otherwise
# A dead node is noticed after a second or two, and not after ten.
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5_000,
    "health_check_failure_threshold": 3,
}
SLICE_BYTES = 2_000
# Builds argv[1] into argv[2] with the workers argv[3], and prints how many bytes are done. Its
# tokenizer sleeps, so that nodes are killed while they work, and the machine has little to do.
DRIVER = f"""
import sys, time
import penstock
from penstock.paths import StoreUrl
from penstock.sources.slices import cut

class Slow:
    vocab_size = 256
    def encode(self, text):
        time.sleep(0.02)
        return list(text.encode())

cut.__kwdefaults__["slice_bytes"] = {SLICE_BYTES}
penstock.build(
    sys.argv[1], sys.argv[2], tokenizer=Slow(), eos=False, documents="lines", workers=sys.argv[3],
    progress=lambda now: print("done", now.done_bytes, flush=True),
)
"""


class Nodes:
    """A Ray cluster of up to three nodes with one core each; all but the head can be killed."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        self._started = []
        self._add(_system_config=HEALTH)
        self.others = []

    def _add(self, **settings):
        node = self.cluster.add_node(
            num_cpus=1,
            object_store_memory=80 << 20,
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
            **settings,
        )
        self._started.append(node)
        return node

    def add_missing(self):
        """Have three nodes, as a cloud replaces spot nodes that it took away."""
        while len(self.others) < 2:
            self.others.append(self._add())

    def kill_one(self, chance):
        """SIGKILL a node and all that runs there; returns whether a slice was being made there."""
        node = self.others.pop(chance.randrange(len(self.others)))
        [raylet] = [each.process.pid for each in node.all_processes["raylet"]]
        is_busy = any(parent == raylet for _, parent in makers())
        self.cluster.remove_node(node, allow_graceful=False)
        return is_busy

    def close(self):
        """Stop the cluster, and delete its clients in the process that has their threads.

        Ray's handlers of `atexit` keep all nodes. From Python 3.13 on, a forked child drops these
        handlers, and the deletion of a client waits there for ever for threads that it lacks.
        """
        self.cluster.shutdown()
        for node in self._started:
            node._gcs_client = None


def makers():
    """The processes that make slices now, with the id of their parent: (pid, ppid)."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if path.joinpath("cmdline").read_bytes().startswith(b"ray::make_slice"):
                parent = int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                found.append((int(path.name), parent))
        except OSError:  # it has ended
            pass
    return found


@pytest.fixture(scope="module")
def nodes():
    # Not a directory of pytest: the paths of sockets must be short.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in {**QUIET, "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        on_terminate = signal.getsignal(signal.SIGTERM)  # Ray sets another handler
        nodes = Nodes()
        patch.setenv("RAY_ADDRESS", nodes.cluster.address)
        try:
            yield nodes
        finally:
            ray.shutdown()
            nodes.close()
            signal.signal(signal.SIGTERM, on_terminate)


@pytest.fixture
def connected(nodes):
    """A cluster that this process is connected to, as a user may be before a build."""
    if not ray.is_initialized():
        ray.init(logging_level="ERROR", log_to_driver=False)
    return nodes


@pytest.fixture
def disconnected(nodes):
    ray.shutdown()
    return nodes


@pytest.fixture(autouse=True)
def _slices_of_one_size(monkeypatch):
    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", SLICE_BYTES)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of 60 slices, with ten documents each."""
    path = tmp_path_factory.mktemp("ray") / "in.txt"
    path.write_text("".join(f"{number:04} {'some text ' * 19}text\n" for number in range(600)))
    return path


class Driver:
    """A build by another process."""

    def __init__(self, text, place, workers="ray", **environment):
        self._child = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(text), str(place), workers],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, num_bytes):
        """Wait until so many bytes are done; False if the build ended before."""
        for line in self._child.stdout:
            # Ray prints lines too, when a node dies.
            found = re.search(r"done (\d+)$", line)
            if found and int(found[1]) >= num_bytes:
                return True
        return False

    def kill(self):
        self._child.kill()
        self._child.communicate()

    def end(self):
        """Wait for the end of the build; returns its exit code."""
        _, errors = self._child.communicate(timeout=120)
        sys.stderr.write(errors)
        return self._child.returncode


@pytest.fixture(scope="module")
def clean(text, sums, tmp_path_factory):
    """The sums of the store that threads build."""

    class Slow:  # as in the driver, without sleep
        vocab_size = 256

        def encode(self, text):
            return list(text.encode())

    place = tmp_path_factory.mktemp("clean") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cut.__kwdefaults__, "slice_bytes", SLICE_BYTES)
        penstock.build(text, place, tokenizer=Slow(), eos=False, documents="lines")
    assert len(list(place.glob("*.tokens.npy"))) == 60
    return sums(place)


@pytest.mark.parametrize(
    "num_rounds", [1, pytest.param(20, marks=[pytest.mark.torture, pytest.mark.timeout(3_600)])]
)
def test_a_build_whose_nodes_and_driver_are_killed_ends_with_the_bytes_of_a_local_build(
    nodes, text, clean, num_rounds, tmp_path, sums, figure
):
    """Two of the three nodes are killed, and the driver between them, each at a random moment."""
    chance = random.Random(num_rounds)
    size = text.stat().st_size
    num_busy = 0
    for number in range(num_rounds):
        place = tmp_path / f"store-{number}"
        nodes.add_missing()
        first, second, third = sorted(chance.randrange(size * 4 // 5) for _ in range(3))
        driver = Driver(text, place)
        assert driver.wait_for(first)
        num_busy += nodes.kill_one(chance)
        assert driver.wait_for(second)
        driver.kill()
        assert not (place / "penstock.json").exists()

        driver = Driver(text, place)
        assert driver.wait_for(third)
        num_busy += nodes.kill_one(chance)
        assert driver.end() == 0
        assert sums(place) == clean
    figure(
        f"Ray: {num_rounds} builds with {2 * num_rounds} nodes killed, {num_busy} of them while "
        f"they made a slice, and {num_rounds} drivers killed: all stores identical"
    )


@pytest.mark.torture
def test_an_interrupted_build_stops_its_tasks_and_is_resumed(connected, text, tmp_path, sums):
    def interrupt(now):
        if now.done_bytes > now.total_bytes / 3:
            raise KeyboardInterrupt

    options = {"tokenizer": "bytes", "documents": "lines", "workers": "ray"}
    with pytest.raises(KeyboardInterrupt):
        penstock.build(text, tmp_path / "store", progress=interrupt, **options)
    assert not makers()
    assert ray.is_initialized()
    penstock.build(text, tmp_path / "store", **options)
    penstock.build(text, tmp_path / "clean", **options | {"workers": "threads"})

    assert sums(tmp_path / "store") == sums(tmp_path / "clean")
    assert ray.is_initialized()


@pytest.mark.parametrize(
    "options",
    [
        {"split": "hash:0.3"},
        {"tokenizer": "gpt2", "documents": "file"},
        {"overwrite": True},
    ],
)
def test_ray_and_threads_write_the_same_bytes(
    connected, options, inputs, tmp_path, monkeypatch, sums
):
    """Text, JSON Lines and a compressed file, named by relative paths; then more is appended."""
    (inputs / "c.txt.gz").write_bytes(gzip.compress(b"a line of a compressed file\n" * 300))
    more = tmp_path / "more.jsonl"
    more.write_text('{"text": "appended"}\n' * 300)
    monkeypatch.chdir(tmp_path)
    options = {"tokenizer": "bytes", "documents": "lines", "max_bad": 10, **options}
    for workers in ("ray", "threads"):
        penstock.build("in", workers, workers=workers, **options)
        penstock.build(
            more, workers, workers=workers, append=True, **options | {"overwrite": False}
        )

    assert sums(tmp_path / "ray") == sums(tmp_path / "threads")


def full_disk():
    # Local to a function, so that Ray sends the class itself: nodes do not have this file.
    class Full:
        vocab_size = 256

        def encode(self, text):
            if "7 of" in text:
                raise DiskFullError(28, "No room to write: for a test")
            return list(text.encode())

    return Full()


@pytest.mark.parametrize("case", ["bad records", "wrong tokens", "full disk"])
def test_errors_are_those_of_threads(connected, case, inputs, gpt2, tmp_path):
    expected, options = {
        "bad records": (SourceError, {"max_bad": 1}),
        "wrong tokens": (
            TokenMismatchError,
            {"tokenizer": replace(gpt2, reference=load_tokenizer("bytes").engine)},
        ),
        "full disk": (DiskFullError, {"tokenizer": full_disk(), "eos": False}),
    }[case]
    options = {"tokenizer": "bytes", "documents": "lines", "max_bad": 9} | options
    told = []
    for workers in ("ray", "threads:1"):
        with pytest.raises(expected) as error:
            penstock.build(inputs, tmp_path / workers.partition(":")[0], workers=workers, **options)
        told.append((type(error.value), str(error.value)))

    assert told[0] == told[1]


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="only Linux has such a link")
@pytest.mark.parametrize("unseen", ["input", "store"])
def test_a_path_that_a_node_does_not_have_is_an_error_that_names_both(
    connected, unseen, inputs, tmp_path, monkeypatch
):
    """The link leads each process to its own working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir()
    here = Path("/proc/self/cwd")
    source, place = (here / "in", "store") if unseen == "input" else ("in", here / "store")
    what = "/proc/self/cwd/in/a.txt" if unseen == "input" else "the build in /proc/self/cwd/store"
    expected = MissingInputError if unseen == "input" else StoreError

    with pytest.raises(expected, match=rf"Ray node \S+ \([\d.]+\) does not find {what}.*same path"):
        penstock.build(
            source, place, tokenizer="bytes", documents="lines", max_bad=9, workers="ray"
        )


@pytest.fixture
def task(connected, inputs, tmp_path):
    """Begin a build; returns it, and a function that makes its first slice as a task does."""

    def task(**options):
        options = {"tokenizer": "bytes", "documents": "lines", "max_bad": 9, **options}
        job = begin(prepare(inputs, tmp_path / "store", BuildOptions(**options)))
        Journal(job.directory).begin(job.stamped, 0)
        order, sent = (
            Order(next(job.slices()), is_first=True),
            ray.put(ray.cloudpickle.dumps(remote_job(job))),
        )
        return job, partial(make_slice, penstock.__version__, [sent], order)

    return task


def test_copies_of_a_task_at_the_same_time_give_the_same_bytes(task, sums):
    job, make = task()
    made, _ = make()
    once = sums(job.directory)
    # A third of a core each, so that three processes make the same slice at once.
    again = ray.get([ray.remote(num_cpus=0.3)(make_slice).remote(*make.args) for _ in range(12)])

    assert {str(each.record) for each, _ in again} == {str(made.record)}
    assert sums(job.directory) == once


def test_a_node_without_the_staging_directory_says_how_to_build_to_object_storage(task):
    pytest.importorskip("obstore", reason="needs penstock[remote]")
    job, make = task()
    there = remote_job(replace(job, remote=Destination(StoreUrl("s3://bucket/web"))))
    sent = ray.put(ray.cloudpickle.dumps(there))
    Journal(job.directory).end()

    with pytest.raises(StoreError, match=r"cannot build s3://bucket/web: .* `penstock copy`"):
        make_slice(penstock.__version__, [sent], make.args[2])


def test_a_task_that_outlives_its_build_writes_nothing(task):
    job, make = task()
    journal = Journal(job.directory)
    journal.end()

    with pytest.raises(StoreError, match="does not find the build in"):
        make()
    journal.begin({"another": "build"}, 0)
    with pytest.raises(StoreError, match="does not find the build in"):
        make()
    assert not list(job.directory.glob("part-*"))


def test_a_task_writes_no_file_after_its_build_has_ended(task, tmp_path):
    journal = Journal(tmp_path / "store")

    class Ending:
        vocab_size = 256

        def encode(self, text):
            if "0 of" in text:
                journal.end()
            return list(text.encode())

    job, make = task(tokenizer=Ending(), eos=False)

    with pytest.raises(StoreError, match="does not find the build in"):
        make()
    assert not list(job.directory.iterdir())


def test_a_node_with_another_version_is_refused(task):
    _, make = task()

    with pytest.raises(StoreError, match=r"node has penstock \d.*started with penstock 0\.0\."):
        make_slice("0.0.0", *make.args[1:])


def test_an_address_is_refused_if_this_process_is_connected_already(connected, inputs, tmp_path):
    with pytest.raises(StoreError, match=r'use workers="ray" of.*ray\.shutdown\(\) first'):
        penstock.build(inputs, tmp_path / "store", workers="ray://127.0.0.1:10001")
    assert ray.is_initialized()


def test_a_build_that_cannot_be_sent_is_refused(connected, inputs, tmp_path):
    class Locked:
        vocab_size = 256
        lock = threading.Lock()

        def encode(self, text):
            return list(text.encode())

    with pytest.raises(StoreError, match=r'cannot be pickled.*workers="threads"'):
        penstock.build(inputs, tmp_path / "s", tokenizer=Locked(), eos=False, workers="ray")


@pytest.mark.torture
def test_nodes_that_join_during_a_build_make_slices_too(nodes, text, clean, tmp_path, sums):
    while nodes.others:
        nodes.kill_one(random.Random(0))
    driver = Driver(text, tmp_path / "store")
    assert driver.wait_for(1)
    nodes.add_missing()
    raylets = {each.process.pid for node in nodes.others for each in node.all_processes["raylet"]}
    found = set()
    while driver.wait_for(1):
        found |= {parent for _, parent in makers()} & raylets

    assert driver.end() == 0
    assert sums(tmp_path / "store") == clean
    assert found == raylets


@pytest.mark.torture
def test_a_cluster_that_a_build_has_started_is_stopped_at_its_end(nodes, text, clean, sums):
    """In a process of its own, which finds no cluster."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        place = Path(folder, "store")
        driver = Driver(text, place, RAY_ADDRESS="", RAY_TMPDIR=folder)
        assert driver.wait_for(1)
        assert processes_of(folder)
        assert driver.end() == 0
        assert not processes_of(folder)
        assert sums(place) == clean


def processes_of(folder):
    """The processes of the Ray cluster that has its files in `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = path.read_bytes()
            found += [command] * (f"{folder}/ray".encode() in command)
    return found


@pytest.mark.torture
def test_a_driver_of_ray_client_that_is_killed_is_resumed(nodes, text, clean, tmp_path, sums):
    """The tasks of the first driver run for up to 30 seconds more, beside those of the second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = [f"--address={nodes.cluster.address}", "--host=127.0.0.1", f"--port={port}"]
    server = subprocess.Popen([sys.executable, "-m", "ray.util.client.server", *where])
    try:
        for share in (0.2, 0.4):
            driver = Driver(text, tmp_path / "store", f"ray://127.0.0.1:{port}")
            assert driver.wait_for(share * text.stat().st_size)
            driver.kill()
        driver = Driver(text, tmp_path / "store", f"ray://127.0.0.1:{port}")
        assert driver.end() == 0
    finally:
        server.kill()
        server.wait()

    assert sums(tmp_path / "store") == clean


@pytest.mark.torture  # Ray tries for 30 seconds
@pytest.mark.filterwarnings("ignore:Ray Client connection timed out:UserWarning")
def test_an_address_where_no_cluster_answers_is_an_error(inputs, tmp_path):
    ray.shutdown()

    with pytest.raises(WorkerError, match=r"No Ray cluster answers at ray://127\.0\.0\.1:9: "):
        penstock.build(inputs, tmp_path / "store", workers="ray://127.0.0.1:9")


@pytest.mark.torture
def test_nodes_without_penstock_are_an_error_that_says_so(disconnected, inputs, tmp_path):
    (tmp_path / "penstock.py").write_text("raise ImportError('not installed')")
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": str(tmp_path)}}, log_to_driver=False)
    try:
        with pytest.raises(WorkerError, match=r"Install penstock 0.* on all nodes(.|\n)*ip="):
            penstock.build(inputs, tmp_path / "store", workers="ray")
    finally:
        ray.shutdown()


def test_the_command_builds_on_ray_and_prints_only_its_result(connected, inputs, run_json, sums):
    """stdout holds one JSON object, also if Ray prints something."""
    options = ["--tokenizer", "bytes", "--documents", "lines", "--max-bad", 9]
    by_ray = run_json("build", inputs, "-o", "ray", "--workers", "ray", *options)
    by_threads = run_json("build", inputs, "-o", "threads", "--workers", "threads", *options)

    assert by_ray["num_tokens"] == by_threads["num_tokens"]
    assert sums("ray") == sums("threads")


def test_tasks_in_flight_are_bounded_by_cores(task):
    job, _ = task()
    cores = int(ray.cluster_resources()["CPU"])
    runner = RayRunner(job)
    try:
        # A quarter more than there are cores, and one.
        assert runner.num_slots == cores + 1 + cores // 4
    finally:
        runner.close()


def test_workers_with_another_name_are_refused(inputs, tmp_path):
    with pytest.raises(StoreError, match=r"workers='dask' \(--workers\) is not .*ray://HOST:PORT"):
        penstock.build(inputs, tmp_path / "store", workers="dask")


@pytest.mark.torture
def test_half_written_files_of_dead_nodes_are_removed_at_the_end(connected, text, tmp_path, sums):
    place, options = tmp_path / "store", {"tokenizer": "bytes", "documents": "lines"}
    left = place / ".part-00007.tokens.npy.4711.0123456789ab.tmp"

    def die(now):
        if 0 < now.done_bytes < now.total_bytes:
            left.write_bytes(b"half of a part")

    penstock.build(text, place, workers="ray", progress=die, **options)
    assert not left.exists()
    penstock.build(text, tmp_path / "clean", workers="threads", **options)
    assert sums(place) == sums(tmp_path / "clean")
