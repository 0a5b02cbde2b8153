"""Builds that are shared by the tasks of a job array."""

import signal
import subprocess

import pytest
import zygote

import penstock
from penstock.errors import SourceError, StoreBusyError, StoreError
from penstock.store.journal import Journal
from penstock.store.lock import lock_path, locked, locked_by_task
from penstock.store.tasks import build_task, commit_tasks

OPTIONS = {"tokenizer": "bytes", "documents": "lines", "max_bad": 10, "threads": 2}


@pytest.fixture
def clean(inputs, tmp_path, small_slices, sums):
    """The files of a store that one process has built."""
    store = penstock.build(inputs, tmp_path / "clean", **OPTIONS)
    assert len(store.manifest.parts) > 4
    return sums(tmp_path / "clean")


def test_tasks_in_any_order_make_the_bytes_of_a_local_build(inputs, tmp_path, clean, sums):
    store = tmp_path / "store"
    made = [build_task(inputs, store, task=task, num_tasks=3, **OPTIONS) for task in (2, 0, 1)]

    assert sorted(record.number for share in made for record in share) == list(
        range(sum(map(len, made)))
    )
    assert {record.number % 3 for record in made[0]} == {2}
    opened = commit_tasks(inputs, store, **OPTIONS)
    assert sums(store) == clean
    assert opened.digest == penstock.verify(store).digest
    assert not list(tmp_path.glob(".*.lock"))


@pytest.mark.parametrize(
    "options", [{"split": "hash:0.3"}, {"append": True}], ids=["split", "append"]
)
def test_tasks_build_splits_and_appends(options, inputs, tmp_path, small_slices, sums):
    for name in ("clean", "store"):
        if "append" in options:
            penstock.build(penstock.Texts(["one", "two"]), tmp_path / name, tokenizer="bytes")
    settings = {**OPTIONS, **options}
    if "append" in options:
        settings["eos"] = True
    penstock.build(inputs, tmp_path / "clean", **settings)
    for task in range(2):
        build_task(inputs, tmp_path / "store", task=task, num_tasks=2, **settings)
    commit_tasks(inputs, tmp_path / "store", **settings)

    assert sums(tmp_path / "store") == sums(tmp_path / "clean")


def test_a_commit_names_the_tasks_that_are_missing(inputs, tmp_path, clean, sums):
    store = tmp_path / "store"
    with pytest.raises(StoreError, match="no task has begun"):
        commit_tasks(inputs, store, **OPTIONS)
    build_task(inputs, store, task=1, num_tasks=4, **OPTIONS)
    with pytest.raises(StoreError, match=r"3 of 4 tasks .*: 0/4, 2/4, 3/4\."):
        commit_tasks(inputs, store, **OPTIONS)
    with pytest.raises(StoreError, match="not finished"):
        penstock.TokenStore(store)
    for task in (0, 2, 3):
        build_task(inputs, store, task=task, num_tasks=4, **OPTIONS)
    # A record that is gone is a slice that is missing.
    next(store.glob(".slice-000002.json")).unlink()
    with pytest.raises(StoreError, match=r"1 of 4 tasks .*: 2/4\."):
        commit_tasks(inputs, store, **OPTIONS)
    build_task(inputs, store, task=2, num_tasks=4, **OPTIONS)
    commit_tasks(inputs, store, **OPTIONS)

    assert sums(store) == clean
    assert build_task(inputs, store, task=2, num_tasks=4, **OPTIONS) == []
    assert commit_tasks(inputs, store, **OPTIONS).digest == penstock.TokenStore(store).digest


def test_a_local_build_finishes_what_tasks_have_begun(inputs, tmp_path, clean, sums):
    build_task(inputs, tmp_path / "store", task=1, num_tasks=3, **OPTIONS)
    penstock.build(inputs, tmp_path / "store", **OPTIONS)

    assert sums(tmp_path / "store") == clean


def test_tasks_share_the_lock_and_nobody_else_gets_it(inputs, tmp_path, clean):
    store = tmp_path / "store"
    build_task(inputs, store, task=0, num_tasks=2, **OPTIONS)
    with locked_by_task(store):
        build_task(inputs, store, task=1, num_tasks=2, **OPTIONS)
        with pytest.raises(StoreBusyError):
            penstock.build(inputs, store, **OPTIONS)
        with pytest.raises(StoreBusyError) as caught:
            commit_tasks(inputs, store, **OPTIONS)
    assert "Commit when all have ended" in caught.value.__notes__[0]
    assert not lock_path(store).exists()
    with locked(store), pytest.raises(StoreBusyError):
        build_task(inputs, store, task=1, num_tasks=2, **OPTIONS)


def test_a_task_of_another_build_is_refused(inputs, tmp_path, clean):
    store = tmp_path / "store"
    build_task(inputs, store, task=0, num_tasks=2, **OPTIONS)
    with pytest.raises(StoreError, match="a build of 2 tasks, and this is one of 3"):
        build_task(inputs, store, task=1, num_tasks=3, **OPTIONS)
    with pytest.raises(StoreError, match=r"other settings: .*errors"):
        build_task(inputs, store, task=1, num_tasks=2, **OPTIONS, errors="replace")
    with pytest.raises(StoreError, match="numbered from 0"):
        build_task(inputs, store, task=2, num_tasks=2, **OPTIONS)
    with pytest.raises(StoreError, match="cannot replace a store"):
        build_task(inputs, store, task=1, num_tasks=2, overwrite=True)
    with pytest.raises(StoreError, match="every task reads the inputs"):
        build_task("-", tmp_path / "other", task=1, num_tasks=2)


def test_too_many_rejected_records_are_refused_when_the_tasks_are_committed(
    inputs, tmp_path, small_slices
):
    options = {**OPTIONS, "max_bad": 1}
    for task in range(2):
        build_task(inputs, tmp_path / "store", task=task, num_tasks=2, **options)
    with pytest.raises(SourceError, match="records were rejected, more than the 1"):
        commit_tasks(inputs, tmp_path / "store", **options)

    assert commit_tasks(inputs, tmp_path / "store", **{**options, "max_bad": 3})


TASK = """
import os, pathlib, signal, sys
import penstock
from penstock.sources.slices import cut
from penstock.store.tasks import build_task
cut.__kwdefaults__["slice_bytes"] = 4_000
if len(sys.argv) > 4:
    rename = os.rename
    def dying(old, new, **places):
        if pathlib.Path(new).name.startswith(sys.argv[4]):
            os.kill(os.getpid(), signal.SIGKILL)
        rename(old, new, **places)
    os.rename = dying
task, num_tasks = map(int, sys.argv[3].split("/"))
build_task(
    sys.argv[1], sys.argv[2], task=task, num_tasks=num_tasks,
    tokenizer="bytes", documents="lines", max_bad=10, threads=2,
)
"""


def test_a_task_that_runs_twice_at_once_and_one_that_is_killed_do_no_harm(
    inputs, tmp_path, clean, sums
):
    def start(*arguments):
        command = ["-c", TASK, inputs, tmp_path / "store", *arguments]
        return zygote.Popen(command)

    # All begin at once, so one of them begins the journal and the others wait for it.
    twice = [start("0/3"), start("0/3")]
    killed, last = start("1/3", ".slice-000004"), start("2/3")
    assert [each.wait(timeout=60) for each in (*twice, last)] == [0, 0, 0]
    assert killed.wait(timeout=60) == -signal.SIGKILL
    with pytest.raises(StoreError, match=r"1 of 3 tasks .*: 1/3\."):
        commit_tasks(inputs, tmp_path / "store", **OPTIONS)
    assert start("1/3").wait(timeout=60) == 0
    commit_tasks(inputs, tmp_path / "store", **OPTIONS)

    assert sums(tmp_path / "store") == clean


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.torture)])
def test_a_task_or_a_commit_killed_at_any_call_can_be_repeated(
    every, inputs, tmp_path, clean, sums, killed, figure
):
    store = tmp_path / "store"

    def all_tasks():
        for task in range(2):
            build_task(inputs, store, task=task, num_tasks=2, **OPTIONS)
        commit_tasks(inputs, store, **OPTIONS)

    point = 1
    while killed(all_tasks, point):
        all_tasks()
        assert sums(store) == clean, f"killed before call {point}"
        for path in (store, *store.parent.glob(".store.*")):
            subprocess.run(["rm", "-rf", str(path)], check=True)
        point += every

    figure(f"tasks killed before every {every}. of {point - 1} calls that touch the disk")
    assert point > 20
    assert not Journal(store).exists


def test_the_command_runs_tasks_and_commits_them(inputs, tmp_path, clean, sums, run_json, invoke):
    command = ["build", str(inputs), "-o", "store", "--tokenizer", "bytes", "--documents", "lines"]
    command += ["--max-bad", "10"]
    values = [run_json(*command, "--task", f"{task}/2") for task in range(2)]
    assert sum(each["num_rejected"] for each in values) == 3
    done = run_json(*command, "--commit")

    assert sums(tmp_path / "store") == clean
    assert done["num_tokens"] == sum(each["num_tokens"] for each in values)
    assert "task 1 of 2" in invoke(*command, "--task", "1/2").stdout
    assert "--task one is not I/N" in invoke(*command, "--task", "one", code=2).stderr
    both = invoke(*command, "--task", "0/2", "--commit", code=2).stderr
    assert "leave one of them out" in both
