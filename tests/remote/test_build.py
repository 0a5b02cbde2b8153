"""Stores that are built in object storage: the bytes of a local build, safe to kill."""

import hashlib
import itertools
import json
import logging
import os
import re
import subprocess
import time
import traceback
from contextlib import suppress

import pytest
import zygote

import penstock
from penstock.errors import MissingStoreError, RemoteError, StoreError

pytestmark = pytest.mark.usefixtures("small_slices")
SETTINGS = {"tokenizer": "bytes", "documents": "lines", "max_bad": 10}
# Builds the first argument to the second, with the settings of the third as JSON.
CHILD = """
import json, sys
import penstock
from penstock.sources.slices import cut

cut.__kwdefaults__["slice_bytes"] = 4_000
print("begin", flush=True)
try:
    penstock.build(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))
    print("end", flush=True)
except penstock.errors.PenstockError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


def build(inputs, store, **settings):
    return penstock.build(inputs, store, **{**SETTINGS, **settings})


def start(inputs, url, **settings):
    """Begin a build in another process."""
    text = json.dumps({**SETTINGS, **settings})
    return zygote.Popen(
        ["-c", CHILD, str(inputs), url, text],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def inputs(tmp_path):
    """A file of a few slices, with a record that is refused."""
    lines = [f"line {number} of some text {number * 7919}\n" for number in range(400)]
    (tmp_path / "in.txt").write_bytes("".join(lines).encode() + b"bad \xff byte\n")
    return tmp_path / "in.txt"


@pytest.fixture
def more(tmp_path):
    """Another file."""
    (tmp_path / "more.txt").write_text("".join(f"more text, line {n}\n" for n in range(300)))
    return tmp_path / "more.txt"


@pytest.fixture
def local(inputs, tmp_path, sums):
    """The digests of the files that a local build of `inputs` makes."""
    return sums(build(inputs, tmp_path / "local").path)


@pytest.fixture
def url(bucket):
    return f"{bucket.url}/some/store"


def found(bucket, prefix="some/store"):
    """The digests of all objects of the store."""
    objects = bucket.objects(prefix)
    return {name: hashlib.sha256(data).hexdigest() for name, data in objects.items()}


def lose_cache(monkeypatch, tmp_path):
    """Continue as on another machine: without the staging directory and the cache."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / f"cache-{os.urandom(4).hex()}"))


def test_a_remote_store_has_the_bytes_of_a_local_one(bucket, url, inputs, local):
    store = build(inputs, url)

    assert found(bucket) == local
    assert store.num_tokens == len(inputs.read_bytes()) - len(b"bad \xff byte\n")
    assert url in repr(store)


def test_every_object_is_signed_with_its_digest(bucket, url, inputs):
    """So a server that checks signatures, as S3 does, refuses bytes that changed on the way."""
    signed = []

    def on_request(request):
        if request.method == "PUT":
            claimed = re.search(rb"(?im)^x-amz-content-sha256: *(\w+)", request.head)
            digest = hashlib.sha256(request.body).hexdigest()
            signed.append(claimed is not None and claimed[1].decode() == digest)

    bucket.proxy.set(on_request=on_request)
    build(inputs, url)

    assert len(signed) > 10
    assert all(signed)


def test_an_append_gives_the_bytes_of_a_local_append(bucket, url, inputs, more, tmp_path, sums):
    for place in (tmp_path / "local", url):
        build(inputs, place)
        build(more, place, append=True)

    assert found(bucket) == sums(tmp_path / "local")


def test_both_sides_of_a_split_are_written(bucket, url, inputs, more, tmp_path, sums):
    for place in (tmp_path / "local", url):
        build(inputs, place, split="hash:0.2")
        build(more, place, split="hash:0.2", append=True)

    assert found(bucket) == sums(tmp_path / "local")


def test_parts_are_deleted_here_when_they_are_there(bucket, url, inputs, tmp_path):
    cache, left = tmp_path / "cache" / "building", []

    def on_request(request):
        if request.method == "PUT":
            left.append([path.name for path in cache.rglob("part-*")])

    bucket.proxy.set(on_request=on_request)
    build(inputs, url, workers=1)

    assert any(left)
    assert not left[-1]  # before the manifest is put


def test_the_same_build_returns_at_once_and_another_is_refused(bucket, url, inputs, more, local):
    build(inputs, url)
    bucket.proxy.set()

    build(inputs, url)

    assert bucket.proxy.count("PUT") == 0
    with pytest.raises(StoreError, match=rf"^{url} is a finished store that was built differently"):
        build(more, url)
    with pytest.raises(StoreError, match=rf"are in {url} already|is in {url} already"):
        build(inputs, url, append=True)
    assert found(bucket) == local


def test_what_is_not_a_store_is_not_touched(bucket, url, inputs):
    bucket.put("some/store/notes.txt", b"mine")

    with pytest.raises(StoreError, match=rf"{url} is not empty and not a store; it holds notes"):
        build(inputs, url)
    with pytest.raises(StoreError, match=r"is not only a store: it holds notes\.txt"):
        build(inputs, url, overwrite=True)
    assert list(bucket.objects()) == ["some/store/notes.txt"]


def test_overwrite_replaces_a_store(bucket, url, inputs, more, local):
    build(more, url, split="hash:0.5")

    build(inputs, url, overwrite=True)

    assert found(bucket) == local


def test_an_append_needs_a_store(bucket, url, inputs):
    with pytest.raises(MissingStoreError, match=rf"{url} has no penstock\.json"):
        build(inputs, url, append=True)


@pytest.mark.parametrize(
    "url", ["https://host/store", "hf://datasets/a/b/store", "s3://bucket/store?sig=hunter2"]
)
def test_a_url_that_cannot_be_written_is_refused(url, inputs):
    with pytest.raises(StoreError, match=r"cannot be written\. Write to s3://") as no:
        build(inputs, url)
    assert "hunter2" not in str(no.value)


def test_a_stream_is_not_written_to_object_storage(url, inputs):
    with pytest.raises(StoreError, match=rf"{url} is in object storage.*Stream to a directory"):
        penstock.stream(inputs, url, tokenizer="bytes")


def interrupt(bucket, inputs, url, number, monkeypatch):
    """Begin a build and let the server fail from the n-th PUT on: an unfinished build is left."""
    puts = []

    def on_request(request):
        puts.append(request.method == "PUT")
        if sum(puts) > number:
            bucket.proxy.rate = 1.0

    with monkeypatch.context() as patch:
        patch.setenv("PENSTOCK_REMOTE_SECONDS", "3")
        bucket.proxy.set(kinds=("503",), on_request=on_request)
        with pytest.raises(RemoteError, match="503"):
            build(inputs, url)
    bucket.proxy.set()


def kill_at(bucket, process, number, method="PUT"):
    """Kill a process when the proxy receives its n-th request of a method."""
    seen = []

    def on_request(request):
        seen.append(request.method)
        if seen.count(method) >= number:
            process().kill()
            process().wait(30)

    bucket.proxy.set(on_request=on_request)


def num_puts(bucket, inputs, url, **settings):
    bucket.proxy.set()
    build(inputs, url, **settings)
    return bucket.proxy.count("PUT")


def killed_builds(bucket, inputs, url, points, **settings):
    """Builds that were killed at these requests, each then finished by the caller."""
    for point in points:
        started = []
        kill_at(bucket, lambda: started[0], point)  # noqa: B023  (used before the next round)
        started.append(start(inputs, f"{url}-{point}", **settings))
        output = started[0].communicate(timeout=60)[0]
        bucket.proxy.set()
        yield point, "end" not in output


def test_a_killed_build_is_resumed(bucket, url, inputs, local):
    """Between parts, and after all slices were sent and recorded."""
    total = num_puts(bucket, inputs, f"{bucket.url}/whole")
    points = [total * 2 // 3, total - 1]
    for point, is_killed in killed_builds(bucket, inputs, url, points):
        assert is_killed
        build(inputs, f"{url}-{point}")
        assert found(bucket, f"some/store-{point}") == local
    # Parts of slices that have a record are not sent again.
    sent = [name for (method, name) in bucket.proxy.counts if method == "PUT"]
    assert not [name for name in sent if "/part-" in name]


@pytest.mark.torture
def test_a_build_killed_at_every_request_is_resumed(
    bucket, url, inputs, more, local, tmp_path, figure, sums
):
    total = num_puts(bucket, inputs, f"{bucket.url}/whole")
    points = range(1, total + 1)
    for point, _ in killed_builds(bucket, inputs, url, points):
        build(inputs, f"{url}-{point}")
        assert found(bucket, f"some/store-{point}") == local
    split = {"split": "hash:0.2", "append": True}
    build(inputs, tmp_path / "split", split="hash:0.2")
    build(more, tmp_path / "split", **split)
    expected = sums(tmp_path / "split")
    build(inputs, f"{bucket.url}/whole-split", split="hash:0.2")
    appends = num_puts(bucket, more, f"{bucket.url}/whole-split", **split)
    for point in range(1, appends + 1):
        build(inputs, f"{url}-{point}", split="hash:0.2", overwrite=True)
    for point, _ in killed_builds(bucket, more, url, range(1, appends + 1), **split):
        with suppress(StoreError):  # the append was complete
            build(more, f"{url}-{point}", **split)
        assert found(bucket, f"some/store-{point}") == expected
    figure(f"killed at each of {total} PUTs of a build and {appends} of an append with a split")


def test_a_build_that_failed_may_have_other_settings_next(bucket, url, inputs, local):
    with pytest.raises(penstock.errors.SourceError, match="1 of 401 records were rejected"):
        build(inputs, url, max_bad=0, eos=False)
    assert any(name.startswith("part-") for name in found(bucket))

    build(inputs, url)

    assert found(bucket) == local


def test_an_unfinished_build_is_not_taken_for_another(bucket, url, inputs, more, monkeypatch):
    interrupt(bucket, inputs, url, 4, monkeypatch)

    with pytest.raises(StoreError, match=rf"^{url} holds an unfinished build with other settings"):
        build(more, url)
    build(more, url, overwrite=True)
    assert penstock.TokenStore(url).manifest.inputs[0]["name"] == "more.txt"
    assert not [name for name in found(bucket) if name.startswith(".building")]


def test_a_part_that_somebody_deleted_is_made_again(bucket, url, inputs, local, monkeypatch):
    interrupt(bucket, inputs, url, 12, monkeypatch)
    part = min(name for name in found(bucket) if name.startswith("part-"))
    bucket.delete(f"some/store/{part}")

    build(inputs, url)

    assert found(bucket) == local


def test_an_unfinished_build_of_another_machine_is_not_touched(
    bucket, url, inputs, more, local, monkeypatch, tmp_path
):
    interrupt(bucket, inputs, url, 4, monkeypatch)
    before = found(bucket)
    lose_cache(monkeypatch, tmp_path)

    with pytest.raises(StoreError, match=rf"{url} holds a build with other settings.*--overwrite"):
        build(more, url)
    assert found(bucket) == before
    build(inputs, url)
    assert found(bucket) == local


@pytest.mark.parametrize(
    ("seeds", "seconds"),
    [(range(1), 6), pytest.param(range(1, 41), 12, marks=pytest.mark.torture)],
)
def test_with_faults_a_build_is_right_or_says_what_is_wrong(
    seeds, seconds, bucket, inputs, more, tmp_path, sums, monkeypatch, figure
):
    """30 % of all requests fail in some way, and each call has a deadline."""
    monkeypatch.setenv("PENSTOCK_REMOTE_SECONDS", str(seconds))
    expected, failed, faults, slowest = {}, 0, 0, 0.0
    build(inputs, tmp_path / "local")
    for append in (False, True):
        if append:
            build(more, tmp_path / "local", append=True)
        expected[append] = sums(tmp_path / "local")
    for seed, append in itertools.product(seeds, (False, True)[: len(seeds)]):
        url, file = f"{bucket.url}/{seed}", more if append else inputs
        bucket.proxy.set(rate=0.3, seed=seed, stall_seconds=2 * seconds)
        begun = time.monotonic()
        with suppress(RemoteError):
            build(file, url, append=append)
            failed -= 1
        failed += 1
        slowest = max(slowest, time.monotonic() - begun)
        faults += sum(bucket.proxy.faults.values())
        bucket.proxy.set()
        with suppress(StoreError):  # an append that is complete is refused
            build(file, url, append=append)
        assert found(bucket, str(seed)) == expected[append]
    figure(
        f"{faults} faults in {len(seeds)} builds: {failed} RemoteErrors, at most {slowest:.0f} s"
    )


def test_no_secret_is_written_or_printed(bucket, inputs, more, tmp_path, caplog, monkeypatch):
    """Those of the environment and of the URL, in what is stored, logged, shown and raised."""
    secrets = (bucket.secret, "s3cr3t-token", "pass-word-1")
    monkeypatch.setenv("AWS_SESSION_TOKEN", secrets[1])
    monkeypatch.setenv("PENSTOCK_REMOTE_SECONDS", "3")
    caplog.set_level(logging.DEBUG)
    logging.getLogger("werkzeug").propagate = False
    shown = []
    url = f"s3://me:{secrets[2]}@{bucket.name}/store"

    def attempt(*arguments, **settings):
        try:
            shown.append(repr(build(*arguments, **settings)))
        except Exception as error:  # noqa: BLE001  (whatever it is, it must not show a secret)
            shown.append("".join(traceback.format_exception(error)))

    for kinds in ((), ("503",), ("reset",)):
        bucket.proxy.set(rate=1 if kinds else 0, kinds=kinds, stall_seconds=1)
        for place in (f"{bucket.url}/store", url, f"s3://absent-{bucket.name}/store"):
            attempt(more, place)
    bucket.proxy.set()
    attempt(inputs, f"{bucket.url}/store", append=True)
    written = b"".join(bucket.objects().values())
    written += b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in secrets:
        assert secret not in "".join(shown)
        assert secret not in caplog.text
        assert secret.encode() not in written
    assert any("RemoteError" in text for text in shown)


def test_the_command_builds_and_inspects_a_remote_store(bucket, inputs, invoke, run_json):
    url = f"{bucket.url}/store"
    settings = ("--tokenizer", "bytes", "--documents", "lines", "--max-bad", "1")

    done = run_json("build", inputs, "-o", url, *settings)
    assert done["stores"][0]["path"] == url
    assert not done["finished_before"]
    assert not done["resumed"]
    assert run_json("build", inputs, "-o", url, *settings)["finished_before"]
    shown = invoke("build", inputs, "-o", url, *settings).stdout
    assert f"{url} is already finished" in shown
    assert f"next: penstock info {url}" in shown
    assert str(done["num_documents"]) in invoke("info", url).stdout


def test_process_workers_make_the_same_remote_store(bucket, url, inputs, local):
    build(inputs, url, workers="processes:4")

    assert found(bucket) == local
