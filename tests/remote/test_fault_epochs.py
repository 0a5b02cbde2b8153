"""Epochs over a remote store whose server fails in three of ten requests."""

import time

import pytest

import penstock as ps
from penstock.errors import RemoteError, StoreError
from penstock.sources.slices import cut
from penstock.store.objects import Objects

SECONDS = 16


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A store of 9 parts in a directory."""
    folder = tmp_path_factory.mktemp("local")
    lines = (" ".join(str(n * k) for k in range(1, 40)) for n in range(200))
    (folder / "in.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cut.__kwdefaults__, "slice_bytes", 4_000)
        ps.build(folder / "in.txt", folder / "store", tokenizer="bytes", documents="lines")
    return folder / "store"


def epoch(store, **options):
    loader = ps.Loader(ps.Windows(store, 64, borders=True), 8, epochs=1, **options)
    return [{name: value.clone() for name, value in batch.items()} for batch in loader]


@pytest.mark.parametrize(
    "num_epochs", [3, pytest.param(200, marks=pytest.mark.torture)], ids=["3", "200"]
)
def test_an_epoch_under_faults_equals_the_local_one_or_ends_in_a_named_error(
    local, bucket, monkeypatch, tmp_path, figure, num_epochs
):
    for path in sorted(local.iterdir()):
        if not path.name.startswith("."):
            bucket.put(f"owt/{path.name}", path.read_bytes())
    monkeypatch.setenv("PENSTOCK_REMOTE_SECONDS", str(SECONDS))
    shuffle = ps.Plan(ps.Windows(f"{bucket.url}/owt", 64)).shuffle
    expected = {seed: epoch(local, shuffle=shuffle, seed=seed) for seed in range(2)}
    failed, faults, longest = [], 0, 0.0
    for number in range(num_epochs):
        monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / f"cache-{number}"))
        bucket.proxy.set(rate=0.3, seed=number, stall_seconds=2 * SECONDS)
        begun = time.monotonic()
        try:
            read = epoch(f"{bucket.url}/owt", seed=number % 2)
        except StoreError as error:
            failed.append(str(error))
        else:
            for one, other in zip(expected[number % 2], read, strict=True):
                assert one.keys() == other.keys()
                assert all((one[name] == other[name]).all() for name in one)
        longest = max(longest, time.monotonic() - begun)
        faults += bucket.proxy.faults.total()
    bucket.proxy.set()
    assert faults > 5 * num_epochs
    assert all(bucket.url in text and bucket.secret not in text for text in failed)
    figure(
        f"{num_epochs} epochs with {faults:,} faults: {num_epochs - len(failed)} equal to "
        f"the local one, {len(failed)} ended in a named error, 0 wrong rows; the longest took "
        f"{longest:.0f} s"
    )


@pytest.mark.parametrize("kind", ["wrong", "short", "stall"])
def test_a_server_that_always_fails_ends_in_an_error(local, bucket, monkeypatch, kind):
    for path in sorted(local.iterdir()):
        if not path.name.startswith("."):
            bucket.put(f"owt/{path.name}", path.read_bytes())
    store = ps.TokenStore(f"{bucket.url}/owt")
    monkeypatch.setenv("PENSTOCK_REMOTE_SECONDS", "2")
    later = ps.TokenStore(f"{bucket.url}/owt", store.manifest)
    bucket.proxy.set(rate=1.0, kinds=(kind,), stall_seconds=4)

    with pytest.raises(RemoteError, match=rf"{bucket.url}/owt/part-00000\.(bounds|checks)\.npy"):
        later.document(0)
    with pytest.raises(StoreError, match=f"{bucket.url}/owt/penstock.json"):
        ps.TokenStore(f"{bucket.url}/owt")
    bucket.proxy.set()
    assert Objects(f"{bucket.url}/owt").size("penstock.json")
