"""What all tests share: Hypothesis profiles, the data beside the repository, small tools.

Hypothesis runs from a fixed seed that is printed in the header, so that a failure anywhere can
be repeated with `--hypothesis-seed`. It tries 25 examples, and 5,000 with
HYPOTHESIS_PROFILE=torture, which `make torture` sets.
"""

import functools
import gc
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

# Before torch is imported. Tests run beside each other on few cores, and threads of OpenMP wait for
# each other by spinning: the tests of the demo take 39 s of processor time with two, 31 s with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import zygote
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

from penstock.options import ReadSettings
from penstock.sources.batch import Tally
from penstock.sources.listing import list_files
from penstock.sources.read import read_slice
from penstock.sources.slices import cut

ROOT = Path(__file__).parent.parent
DATA = ROOT.parent / "shared" / "data"
SEED = 20261115
LONGEST_FILES = {  # of `pytest --durations 0`, with the files of whole runs in tests/examples
    "test_surface.py",
    "test_equality.py",
    "test_crash.py",
    "test_stream_faults.py",
    "test_demo.py",
    "test_data.py",
    "test_lightning.py",
    "test_processes.py",
    "test_process_workers.py",
    "test_fuzz.py",
    "test_dataloaders.py",
    "test_order.py",
    "test_huggingface.py",
    "test_parallel.py",
    "test_interrupt.py",
    "test_benchmarks.py",
    "test_prepare_data.py",
    "test_lightning_fit.py",
    "test_chat_sft_multiplex_example.py",
    "test_train_gpt2.py",
    "test_documents_budget.py",
    "test_ray.py",
    "test_browser.py",
}

settings.register_profile(
    "default", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("torture", settings.get_profile("default"), max_examples=5_000)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    # A shell starts what runs in its background deaf to Ctrl-C, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A process of "forkserver" gets its arguments pickled, as one of "spawn" does, but is a fork of
    # one that has imported these: 0.1 s instead of 3 s of processor time.
    multiprocessing.set_forkserver_preload(
        ["torch", "pytest", "hypothesis", "penstock.loader.loader", "penstock.store.build"]
    )
    if config.getoption("numprocesses", None):
        zygote.start()  # one for all processes of pytest-xdist, and while they collect tests
    config.pluginmanager.register(_Doctests())
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
    if config.getoption("--hypothesis-seed", None) is None:
        config.option.hypothesis_seed = str(SEED)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect tests without collections of garbage, which are a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Start the longest files first, so that the processes of pytest-xdist end together."""
    items.sort(key=lambda item: item.path.name not in LONGEST_FILES)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Let collections of garbage skip what is there now: modules, and all tests.

    One in a forked worker copies all pages that it looks at, which takes 0.3 s.
    """
    gc.collect()
    gc.freeze()


class _Doctests:
    """Looks for doctests only in files that have some, which are a quarter of all files."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path):
        found = yield
        if file_path.suffix == ".py" and b">>>" not in file_path.read_bytes():
            return [each for each in found if not isinstance(each, DoctestModule)]
        return found


def pytest_report_header(config):
    return f"hypothesis seed: {config.getoption('--hypothesis-seed')}"


@pytest.fixture
def figure(record_property):
    """Tell a figure that was measured; all of them are printed at the end of the run."""
    return functools.partial(record_property, "figure")


def pytest_terminal_summary(terminalreporter):
    # By way of the reports, which come here from whichever process ran the test.
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "figure":
                terminalreporter.write_line(f"figure: {value}")


@pytest.fixture(scope="session")
def data():
    """The directory of shared test data, which is never copied into the repository."""
    if not DATA.is_dir():
        pytest.skip(f"the shared test data is not at {DATA}")
    return DATA


@pytest.fixture(scope="session")
def scratch(tmp_path_factory):
    """A directory for the files of Hypothesis examples, which come and go."""
    return tmp_path_factory.mktemp("scratch")


@dataclass
class Found:
    """All that a reader made of its inputs."""

    texts: list[bytes] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    rejects: list = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    num_slices: int = 0

    @property
    def reasons(self):
        return [reject.reason for reject in self.rejects]


@pytest.fixture(scope="session")
def read():
    """Documents, rejects and counts of inputs, as a build would see them."""

    def read(inputs, *, slice_bytes=64_000_000, **options):
        reading = ReadSettings(**{"documents": "lines", **options})
        files = list_files(inputs, reading)
        found = Found()
        for piece in cut(files, reading, slice_bytes=slice_bytes):
            found.num_slices += 1
            for batch in read_slice(files, piece, reading):
                found.texts += batch.texts.to_pylist()
                found.places += zip(batch.files.tolist(), batch.offsets.tolist(), strict=True)
                found.rejects += batch.rejects
                found.tally = Tally.total((found.tally, batch.tally))
        return found

    return read


@pytest.fixture(scope="session", autouse=True)
def gpt2(_cache):
    """GPT-2's tokenizer, loaded once: all that use "gpt2" in this process share its engine."""
    from penstock.tokenize.tokenizer import load_tokenizer

    return load_tokenizer("gpt2")


MARKERS = ["<|im_start|>", "<|im_end|>", "</s>", "<|bos|>", "<|user_start|>", "<|user_end|>"]
MARKERS += ["<|assistant_start|>", "<|assistant_end|>", "<|python_start|>", "<|python_end|>"]
MARKERS += ["<|output_start|>", "<|output_end|>"]


@pytest.fixture(scope="session")
def gpt2_chat():
    """GPT-2's tokenizer with the markers of the built-in chat templates, and `</s>`."""
    from penstock.tokenize.tokenizer import load_tokenizer

    return load_tokenizer("gpt2", add_tokens=MARKERS)


@pytest.fixture(scope="session")
def sums():
    """SHA-256 of every file of a store, by name; the stamps are not part of a store."""

    def sums(directory):
        return {
            str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(Path(directory).rglob("*"))
            if path.is_file() and path.name != ".stamps.json"
        }

    return sums


@pytest.fixture
def small_slices(monkeypatch):
    """Slices of a few kilobytes, so that small inputs make stores of many parts."""
    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", 4_000)


@pytest.fixture(scope="session")
def python():
    """Run code in a fresh interpreter, which imports all; returns the finished process."""

    def python(code, *arguments, check=True, timeout=240, **environment):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0 or not check, done.stderr
        return done

    return python


@pytest.fixture(scope="session")
def quick_python():
    """Run code in a process that has imported torch and penstock; returns the finished process."""

    def quick_python(code, *arguments, check=True, timeout=240, **environment):
        done = zygote.run(
            ["-c", code, *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0 or not check, done.stderr
        return done

    return quick_python


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Run a command in this process, from an empty directory; returns click's result."""
    from typer.testing import CliRunner

    from penstock.cli.app import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def invoke(*arguments, code=0):
        result = CliRunner().invoke(app, [str(each) for each in arguments])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return invoke


@pytest.fixture
def run_json(invoke):
    """Run a command with --json; returns the object it prints."""

    def run_json(*arguments, code=0):
        result = invoke(*arguments, "--json", code=code)
        assert not result.stderr
        return json.loads(result.stdout)

    return run_json


@pytest.fixture(scope="session")
def imported_once():
    """A context whose processes are forked from one that has imported torch and penstock."""
    return multiprocessing.get_context("forkserver")


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """Tests keep nothing in the cache of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind():
    yield
    workers = [each for each in threading.enumerate() if each.name.startswith("build-")]
    for each in workers:
        each.join(60)  # a worker stops at its next check, which takes a while on a busy machine
    left = [each.name for each in workers if each.is_alive()]
    assert not left, f"workers of a build outlived it: {left}"


CALLS = ("fsync", "replace", "unlink", "mkdir")


def _killed(build, point):
    """Run `build` in a child that dies before its `point`-th call; False if it ended before."""
    child = os.fork()
    if child == 0:
        calls, lock = count(1), threading.Lock()

        def dying(call):
            def instead(*arguments, **options):
                if str(arguments[0]).endswith(".lock"):
                    return call(*arguments, **options)  # removed when the build is complete
                with lock:
                    if next(calls) == point:
                        os.kill(os.getpid(), signal.SIGKILL)
                        signal.pause()
                return call(*arguments, **options)

            return instead

        for name in CALLS:
            setattr(os, name, dying(getattr(os, name)))
        try:
            build()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.fixture(scope="session")
def killed():
    """A function that runs another one in a child, which is killed before its n-th call."""
    return _killed
