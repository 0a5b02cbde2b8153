"""Copies between directories and object storage are whole, or are not there."""

import hashlib
import itertools
import shutil
import subprocess
import time
import traceback
from contextlib import suppress

import pytest
import zygote

import penstock
from penstock.errors import MissingStoreError, RemoteError, StoreError
from penstock.sources.slices import cut

# Copies the first argument to the second.
CHILD = """
import sys
import penstock

penstock.copy(sys.argv[1], sys.argv[2])
print("end", flush=True)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store of two parts, with a log of rejected records."""
    folder = tmp_path_factory.mktemp("store")
    lines = b"".join(b"line %d of some text\n" % number for number in range(300))
    (folder / "in.txt").write_bytes(lines + b"bad \xff byte\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cut.__kwdefaults__, "slice_bytes", 4_000)
        settings = {"tokenizer": "bytes", "documents": "lines", "max_bad": 2}
        return penstock.build(folder / "in.txt", folder / "store", **settings).path


@pytest.fixture(scope="module")
def split(store):
    """A store with a split."""
    settings = {"tokenizer": "bytes", "documents": "lines", "max_bad": 2, "split": "hash:0.2"}
    return penstock.build(
        store.with_name("in.txt"), store.with_name("split"), **settings
    ).path.parent


def found(bucket, prefix):
    objects = bucket.objects(prefix)
    return {name: hashlib.sha256(data).hexdigest() for name, data in objects.items()}


def test_a_store_goes_there_and_back_again(bucket, store, tmp_path, sums):
    reports = []

    there = penstock.copy(store, f"{bucket.url}/a", progress=lambda *now: reports.append(now))
    again = penstock.copy(f"{bucket.url}/a", f"{bucket.url}/b")
    back = penstock.copy(f"{bucket.url}/b", tmp_path / "back")

    assert found(bucket, "a") == found(bucket, "b") == sums(tmp_path / "back") == sums(store)
    assert there.digest == again.digest == back.digest
    assert (
        reports[-1][0]
        == reports[-1][1]
        == sum(path.stat().st_size for path in store.iterdir() if path.name != "penstock.json")
    )
    assert [each.tolist() for each in back] == [each.tolist() for each in there]


def test_a_store_goes_there_is_appended_to_and_comes_back(bucket, store, tmp_path, sums):
    table = tmp_path / "table"
    shutil.copytree(store, table)
    more = tmp_path / "more.txt"
    more.write_text("some more text\n")

    there = penstock.copy(table, f"{bucket.url}/a")
    penstock.build(more, f"{bucket.url}/a", append=True, tokenizer="bytes", documents="lines")
    back = penstock.copy(f"{bucket.url}/a", tmp_path / "back")
    remote = penstock.TokenStore(f"{bucket.url}/a")
    penstock.build(more, table, append=True, tokenizer="bytes", documents="lines")

    assert len([name for name in sums(table) if name.startswith("parts-")]) == 1
    assert len(back) == len(there) + 1 == 301
    assert remote.digest == back.digest == penstock.TokenStore(table).digest
    assert [each.tolist() for each in remote] == [each.tolist() for each in back]
    penstock.verify(tmp_path / "back")


def test_both_sides_of_a_split_are_copied(bucket, split, tmp_path, sums):
    penstock.copy(split, f"{bucket.url}/a")
    back = penstock.copy(f"{bucket.url}/a", tmp_path / "back")

    assert found(bucket, "a") == sums(tmp_path / "back") == sums(split)
    assert back.path.name == "train"


def test_a_complete_copy_is_not_sent_again_and_another_is_refused(bucket, store, split):
    url = f"{bucket.url}/a"
    penstock.copy(store, url)
    bucket.proxy.set()

    penstock.copy(store, url)

    assert bucket.proxy.count("PUT") == 0
    with pytest.raises(StoreError, match=rf"{url} is a finished store, and another one"):
        penstock.copy(split / "train", url)
    bucket.put("b/notes.txt", b"mine")
    with pytest.raises(StoreError, match="b is not empty and not a store; it holds notes"):
        penstock.copy(store, f"{bucket.url}/b")
    with pytest.raises(MissingStoreError, match=r"c has no penstock\.json, so it is not a store"):
        penstock.copy(f"{bucket.url}/c", f"{bucket.url}/d")


def fail_after(bucket, number):
    """Let the server fail from its n-th PUT on."""
    if bucket.proxy.count("PUT") > number:
        bucket.proxy.rate = 1.0


def test_a_copy_and_a_build_do_not_mix(bucket, store, split, tmp_path, monkeypatch):
    """A copy that is not finished claims its URL, as a build does."""
    url = f"{bucket.url}/a"
    monkeypatch.setenv("PENSTOCK_REMOTE_SECONDS", "3")
    bucket.proxy.set(kinds=("503",), on_request=lambda request: fail_after(bucket, 3))
    with pytest.raises(RemoteError, match="503"):
        penstock.copy(store, url)
    bucket.proxy.set()
    monkeypatch.setenv("PENSTOCK_REMOTE_SECONDS", "20")

    with pytest.raises(StoreError, match=r"a holds a build or a copy of another store that"):
        penstock.copy(split / "train", url)
    with pytest.raises(StoreError, match=r"a holds an unfinished build with other settings: .*cop"):
        penstock.build(penstock.Texts(["text"]), url, tokenizer="bytes")
    penstock.copy(store, url)
    assert ".building" not in found(bucket, "a")


def test_damaged_bytes_are_not_sent_and_not_kept(bucket, store, tmp_path):
    shutil.copytree(store, tmp_path / "damaged")
    path = tmp_path / "damaged" / "part-00000.tokens.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(StoreError, match=r"part-00000\.tokens\.npy is damaged: its XXH3-128"):
        penstock.copy(tmp_path / "damaged", f"{bucket.url}/a")
    assert "part-00000.tokens.npy" not in found(bucket, "a")

    penstock.copy(store, f"{bucket.url}/b")
    bucket.put("b/part-00000.tokens.npy", path.read_bytes())
    with pytest.raises(RemoteError, match=r"part-00000\.tokens\.npy has other contents than the"):
        penstock.copy(f"{bucket.url}/b", tmp_path / "back")
    assert not any((tmp_path / "back").iterdir())


def kill_at(bucket, source, target, number, method="PUT"):
    """Kill a copy when the proxy receives its n-th request of a method; whether it was killed."""
    started, seen = [], []

    def on_request(request):
        seen.append(request.method)
        if seen.count(method) >= number and started:
            started[0].kill()
            started[0].wait(30)

    bucket.proxy.set(on_request=on_request)
    command = ["-c", CHILD, str(source), str(target)]
    started.append(zygote.Popen(command, stdout=subprocess.PIPE, text=True))
    output = started[0].communicate(timeout=60)[0]
    bucket.proxy.set()
    return "end" not in output


@pytest.mark.parametrize(
    "points", [[5], pytest.param(range(1, 13), marks=pytest.mark.torture)], ids=["one", "every"]
)
def test_a_killed_copy_is_resumed(points, bucket, store, tmp_path, sums, figure):
    expected = sums(store)
    for point in points:
        assert kill_at(bucket, store, f"{bucket.url}/{point}", point) or point > 11
        penstock.copy(store, f"{bucket.url}/{point}")
        assert found(bucket, str(point)) == expected
        # The manifest and nine files are read.
        is_killed = kill_at(bucket, f"{bucket.url}/{point}", tmp_path / str(point), point, "GET")
        assert is_killed or point > 9
        if is_killed:
            with pytest.raises(MissingStoreError):
                penstock.TokenStore(tmp_path / str(point))
        penstock.copy(f"{bucket.url}/{point}", tmp_path / str(point))
        assert sums(tmp_path / str(point)) == expected
    figure(f"copies to and from object storage killed at {len(points)} requests each")


@pytest.mark.parametrize(
    ("seeds", "seconds"),
    [(range(1), 6), pytest.param(range(1, 41), 12, marks=pytest.mark.torture)],
)
def test_with_faults_a_copy_is_right_or_says_what_is_wrong(
    seeds, seconds, bucket, store, tmp_path, sums, monkeypatch, figure
):
    """30 % of all requests fail in some way, and each call has a deadline."""
    monkeypatch.setenv("PENSTOCK_REMOTE_SECONDS", str(seconds))
    expected, failed, faults, slowest = sums(store), 0, 0, 0.0
    for seed in seeds:
        url, back = f"{bucket.url}/{seed}", tmp_path / f"back-{seed}"
        for source, target in ((store, url), (url, back)):
            bucket.proxy.set(rate=0.3, seed=seed, stall_seconds=2 * seconds)
            begun = time.monotonic()
            with suppress(RemoteError):
                penstock.copy(source, target)
                failed -= 1
            failed += 1
            slowest = max(slowest, time.monotonic() - begun)
            faults += sum(bucket.proxy.faults.values())
            bucket.proxy.set()
            penstock.copy(source, target)
            assert (found(bucket, str(seed)) if target == url else sums(back)) == expected
    how = f"{failed} RemoteErrors, {slowest:.0f} s at most"
    figure(f"{faults} faults in {2 * len(seeds)} copies: {how}")


def test_no_secret_is_shown_by_a_copy(bucket, store, tmp_path, monkeypatch, invoke):
    """Of the environment and of the URL, in the errors and the output of the command."""
    monkeypatch.setenv("PENSTOCK_REMOTE_SECONDS", "0.5")
    url = "https://me:pass-word-1@127.0.0.1:1/store?X-Amz-Signature=s3cr3t"
    shown = []
    for source, target in itertools.permutations((str(store), url, f"{bucket.url}/a"), 2):
        for rate in (0, 1):
            bucket.proxy.set(rate=rate, kinds=("503",))
            try:
                shown.append(repr(penstock.copy(source, target)))
            except Exception as error:  # noqa: BLE001  (whatever it is, it must not show a secret)
                shown.append("".join(traceback.format_exception(error)))
    bucket.proxy.set()
    shown.append(invoke("copy", url, str(tmp_path / "x"), code=1).output)
    text = "".join(shown)
    for secret in (bucket.secret, "pass-word-1", "s3cr3t"):
        assert secret not in text.replace(url, "")
    assert "https://127.0.0.1:1/store" in text


def test_the_command_copies_and_counts(bucket, store, invoke, run_json):
    done = invoke("copy", store, f"{bucket.url}/a").stdout

    assert done.startswith(f"{bucket.url}/a is a whole copy: 2 parts, ")
    assert run_json("copy", store, f"{bucket.url}/a")["digest"] == penstock.TokenStore(store).digest
