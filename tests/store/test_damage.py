"""What was damaged since is found: by `verify` always, by a reader before it serves a token."""

import os
import pickle
import random
import shutil

import made_store
import numpy as np
import pytest
import xxhash

import penstock
from penstock.errors import StoreError

pytestmark = pytest.mark.usefixtures("small_slices")


def read_all(path):
    store = penstock.TokenStore(path)
    for number in range(len(store)):
        store.document(number)
        store.origin(number)


def files(store):
    return sorted(path for path in store.path.iterdir())


def test_two_hundred_flipped_bits_are_all_found(built):
    chance = random.Random(17)
    for _ in range(200):
        path = chance.choice(files(built))
        data = path.read_bytes()
        if not data:
            continue
        place = chance.randrange(len(data))
        damaged = bytearray(data)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(StoreError):
            penstock.verify(built.path)
        path.write_bytes(data)

    penstock.verify(built.path)


@pytest.mark.parametrize("kind", ["tokens", "bounds", "origin"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "bytes, but"),
        (lambda data: data[:64], "bytes, but"),
        (lambda data: b"", "bytes, but"),
        (lambda data: data + b"\0", "bytes, but"),
        (lambda data: bytes(len(data)), "does not have the header|is damaged"),
        (lambda data: data[:6] + bytes(len(data) - 6), "does not have the header|is damaged"),
    ],
    ids=["cut", "torn", "empty", "longer", "zeros", "zeros after the magic"],
)
def test_a_damaged_part_is_refused_by_readers_and_by_verify(built, kind, damage, message):
    path = built.path / f"part-00002.{kind}.npy"
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(StoreError, match=rf"part-00002\.{kind}\.npy .*({message})"):
        read_all(built.path)
    with pytest.raises(StoreError, match=rf"part-00002\.{kind}\.npy .*({message})"):
        penstock.verify(built.path)


def test_swapped_parts_are_found(built):
    for kind in ("tokens", "bounds", "origin"):
        one, two = (built.path / f"part-0000{number}.{kind}.npy" for number in (1, 2))
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
        with pytest.raises(StoreError, match="part-00001"):
            penstock.verify(built.path)
        one.write_bytes(first)
        two.write_bytes(second)

    penstock.verify(built.path)


def test_a_part_in_the_place_of_another_is_found(built):
    for kind in ("tokens", "bounds", "origin"):
        shutil.copy(built.path / f"part-00001.{kind}.npy", built.path / f"part-00002.{kind}.npy")

    with pytest.raises(StoreError, match="part-00002"):
        penstock.verify(built.path)


@pytest.mark.parametrize(
    "name", ["part-00001.tokens.npy", "part-00003.origin.npy", "rejects.jsonl"]
)
def test_a_missing_file_is_named(built, name):
    (built.path / name).unlink()

    with pytest.raises(StoreError, match=f"{name} is missing"):
        penstock.verify(built.path)
    if name.endswith("npy"):
        with pytest.raises(
            StoreError, match=rf"{name} is missing\. Run the same penstock\.build again"
        ):
            read_all(built.path)


def test_a_manifest_of_another_store_is_found(built, tmp_path):
    from penstock.sources.settings import Texts

    other = penstock.build(Texts(["x" * 50] * 500), tmp_path / "other", tokenizer="bytes")
    shutil.copy(other.path / "penstock.json", built.path)

    with pytest.raises(StoreError):
        penstock.verify(built.path)
    with pytest.raises(StoreError):
        read_all(built.path)


def resealed(store, part, kind, data):
    """Put `data` into a file of the store and a manifest that vouches for it beside it."""
    from dataclasses import replace

    from penstock.store.manifest import read_manifest

    manifest = read_manifest(store.path)
    (store.path / f"part-{part:05d}.{kind}.npy").write_bytes(data)
    record = manifest.parts[part]
    entry = (len(data), xxhash.xxh3_128(data).hexdigest())
    parts = list(manifest.parts)
    parts[part] = replace(record, files={**record.files, kind: entry})
    contents = {key: value for key, value in manifest.contents.items() if key != "digest"}
    made_store.write(store.path, contents, parts)


def test_arrays_that_do_not_fit_together_are_found_behind_the_right_digests(built):
    original = {path: path.read_bytes() for path in files(built)}

    def lie(kind, change):
        path = built.path / f"part-00000.{kind}.npy"
        array = np.frombuffer(original[path], "<u2" if kind == "tokens" else "<u8").copy()
        change(array[64 if kind == "tokens" else 16 :])
        resealed(built, 0, kind, array.tobytes())
        with pytest.raises(StoreError) as caught:
            penstock.verify(built.path)
        for each, data in original.items():
            each.write_bytes(data)
        return str(caught.value)

    def put(place, value):
        return lambda array: array.__setitem__(place, value)

    assert "holds the token id 300, but the vocabulary has 257 ids" in lie("tokens", put(3, 300))
    assert "bounds do not ascend to" in lie("bounds", put(0, 0))
    assert "bounds do not ascend to" in lie("bounds", put(5, 2**40))
    assert "bounds do not ascend to" in lie("bounds", put(-1, 7))
    assert "names input file 9, but the store has 2" in lie("origin", put(0, 9))


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return (os.mkdir, (str(self.canary),))


@pytest.mark.parametrize("kind", ["tokens", "bounds", "origin"])
@pytest.mark.parametrize("how", ["npy", "pickle", "padded", "resealed", "spliced"])
def test_a_pickle_in_a_store_is_never_run(built, kind, how, tmp_path):
    canary = tmp_path / "canary"
    path = built.path / f"part-00000.{kind}.npy"
    honest = path.read_bytes()
    np.save(path, np.array([Payload(canary)], dtype=object), allow_pickle=True)
    hostile = pickle.dumps(Payload(canary)) if how == "pickle" else path.read_bytes()
    if how == "spliced":
        hostile = honest[:128] + hostile[128:]
    if how != "npy":
        hostile = hostile[: len(honest)].ljust(len(honest), b"\0")
    path.write_bytes(hostile)
    if how == "resealed":
        resealed(built, 0, kind, hostile)

    for use in (penstock.verify, read_all):
        try:
            use(built.path)
        except StoreError:
            continue
        assert (how, use) == ("spliced", read_all)  # a right header: only a digest can tell
    assert not canary.exists()
    pickle.loads(pickle.dumps(Payload(canary)))
    assert canary.exists(), "the payload would have worked"


def test_symbolic_links_out_of_the_store_show_nothing_that_is_not_a_part(built, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"root:x:0:0" * 1_000)
    path = built.path / "part-00000.tokens.npy"
    path.unlink()
    path.symlink_to(secret)

    with pytest.raises(StoreError, match=r"part-00000\.tokens\.npy has 10,000 bytes"):
        read_all(built.path)
    # Somebody who knows the size of a file can make a store of that size.
    size = built.manifest.parts[0].files["tokens"][0]
    secret.write_bytes((b"root:x:0:0" * 10_000)[:size])
    with pytest.raises(
        StoreError, match=r"part-00000\.tokens\.npy does not have the header"
    ) as error:
        read_all(built.path)
    assert "root:x" not in str(error.value)
