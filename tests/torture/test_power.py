"""Power cuts: what a disk holds at a random moment, as a copy of the image it is made of."""

import filecmp
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import penstock
from penstock.errors import StoreError
from penstock.sources.slices import cut

pytestmark = [
    pytest.mark.torture,
    pytest.mark.timeout(3_600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount an image"),
    pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="mkfs.ext4 is not installed"),
]


@contextmanager
def mounted(image, folder):
    """The ext4 file system in `image`; its journal is replayed as after a crash."""
    folder.mkdir(exist_ok=True)
    tried = subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"images cannot be mounted here: {tried.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def copy_of(image, copy):
    """A copy of the image as it was at one moment.

    The build stands still, but the kernel may go on with what it was asked to write. If all that
    was copied is found unchanged afterwards, it was all there between the two.
    """
    shutil.copy(image, copy)
    while not filecmp.cmp(image, copy, shallow=False):
        shutil.copy(image, copy)
    return copy


def snapshots(trial, image, folder, times):
    """Copies of the image made while a build writes into it, and one after its end."""
    subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^64bit", image, "24M"], check=True)
    copies = []
    with mounted(image, folder) as disk:
        trial.place = disk / "store"
        child = subprocess.Popen(trial.command(), stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "begin\n"
        begin = time.monotonic()
        for moment in times:
            time.sleep(max(0, moment - (time.monotonic() - begin)))
            if child.poll() is None:
                child.send_signal(signal.SIGSTOP)
            copies.append(copy_of(image, Path(f"{image}.{len(copies)}")))
            if child.poll() is None:
                child.send_signal(signal.SIGCONT)
        child.communicate(timeout=60)
        copies.append(copy_of(image, Path(f"{image}.end")))
    return copies


def test_a_power_cut_leaves_a_store_that_is_whole_or_goes_on(long_trial, tmp_path, sums, figure):
    chance = random.Random(11)
    whole = unfinished = 0
    for number in range(10):
        times = sorted(chance.uniform(0, 0.6) for _ in range(10))
        image = tmp_path / f"disk{number}.img"
        copies = snapshots(long_trial, image, tmp_path / "disk", times)
        for copy in copies:
            with mounted(copy, tmp_path / "crashed") as disk:
                try:
                    penstock.verify(disk / "store")
                    whole += 1
                except StoreError:
                    if copy == copies[-1]:
                        raise  # a build that had ended was lost
                    unfinished += 1
                with pytest.MonkeyPatch.context() as patch:
                    patch.setitem(cut.__kwdefaults__, "slice_bytes", 6_000)
                    penstock.build(
                        long_trial.inputs,
                        disk / "store",
                        tokenizer="bytes",
                        documents="lines",
                        max_bad=2,
                    )
                assert sums(disk / "store") == long_trial.expected
            copy.unlink()
        image.unlink()

    figure(f"power cuts gone on from: {unfinished} unfinished and {whole} whole of 110 images")
    assert unfinished >= 50
