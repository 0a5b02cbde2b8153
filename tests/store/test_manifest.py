"""Manifests that are damaged, or of another version."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.digest import digest_bytes
from penstock.errors import StoreError
from penstock.sources.settings import Texts
from penstock.store.manifest import FILE_NAME, read_manifest


@pytest.fixture(scope="module")
def small_store(tmp_path_factory):
    """A store of two parts whose manifest the tests of this file change."""
    from penstock.sources.slices import cut

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cut.__kwdefaults__, "slice_bytes", 20)
        texts = Texts(["some document", "and another one", "a third"])
        return penstock.build(
            texts, tmp_path_factory.mktemp("m"), tokenizer="bytes", documents="lines"
        )


@pytest.fixture(scope="module")
def contents(small_store):
    """The manifest as JSON."""
    return json.loads((small_store.path / FILE_NAME).read_bytes())


def signed(value):
    """Bytes of a manifest that says `value`, with a digest that is right."""
    zeros = "0" * 64
    text = json.dumps({**value, "digest": zeros}) if isinstance(value, dict) else json.dumps(value)
    if isinstance(value, dict):
        rest = {key: each for key, each in value.items() if key != "digest"}
        text = json.dumps({"digest": zeros, **rest})
    data = text.encode()
    return data.replace(zeros.encode(), digest_bytes(data).encode(), 1)


@pytest.fixture(scope="module")
def opened(small_store, tmp_path_factory):
    """Try to use a store whose manifest is `data`; returns what was read."""
    place = tmp_path_factory.mktemp("changed")
    for path in small_store.path.glob("[!.]*"):
        (place / path.name).write_bytes(path.read_bytes())

    def opened(data):
        (place / FILE_NAME).write_bytes(data)
        store = penstock.TokenStore(place)
        repr(store)
        documents = [document.tolist() for document in store]
        origins = [store.origin(number) for number in range(len(store))]
        penstock.verify(place)
        return documents, origins, [store.decode(number, "bytes") for number in range(len(store))]

    return opened


def test_a_manifest_that_is_spelled_otherwise_says_the_same(contents, opened, small_store):
    assert opened(signed(contents)) == opened((small_store.path / FILE_NAME).read_bytes())


@given(junk=st.binary(max_size=300))
def test_bytes_that_are_no_manifest_are_refused(junk, opened):
    with pytest.raises(StoreError):
        opened(junk)
    zeros = b'{"digest": "' + b"0" * 64 + b'"' + junk
    with pytest.raises(StoreError):
        opened(zeros.replace(b"0" * 64, digest_bytes(zeros).encode(), 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "this penstock reads"),
        ({"version": 2, "parts": []}, r"store', 2\), .*Build the store again"),
        ({"parts": {"sha256": "../../../x" * 7}}, "not the manifest of a token store"),
    ],
)
def test_a_manifest_of_another_version_is_refused(change, message, contents, opened):
    with pytest.raises(StoreError, match=message):
        opened(signed({**contents, **change}))


def test_a_flipped_bit_in_a_manifest_is_refused(small_store, opened):
    data = bytearray((small_store.path / FILE_NAME).read_bytes())
    for at in range(0, len(data), 7):
        data[at] ^= 4
        with pytest.raises(StoreError, match="is damaged or was changed"):
            opened(bytes(data))
        data[at] ^= 4


def test_a_directory_that_is_no_store_says_so(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="does not exist, so there is no store"):
        read_manifest(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"has no penstock\.json, so it is not a store"):
        read_manifest(tmp_path)
    with pytest.raises(StoreError, match=r"has no penstock\.json"):
        read_manifest(tmp_path / "file")
