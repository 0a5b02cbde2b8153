"""Manifests from anywhere: read as they are, or refused; never followed out of the store."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.digest import digest_bytes
from penstock.errors import StoreError
from penstock.sources.settings import Texts
from penstock.store.manifest import FILE_NAME, read_manifest

HOSTILE = [
    "../evil",
    "../../etc/passwd",
    "/etc/passwd",
    "..\\evil",
    "C:\\evil",
    "a//b",
    "a/./b",
    "%2e%2e/evil",
    "nul\x00byte",
    "x" * 300,
    "．．/evil",  # noqa: RUF001  (full-width dots are the point)
    "CON",
    "/dev/zero",
    "file:///etc/passwd",
    "http://127.0.0.1/x",
    "",
    ".",
    "..",
]


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


def changed(contents, **changes):
    return signed({**contents, **changes})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "not the manifest of a token store"),
        ({"version": 4}, r"version 4; this penstock reads the versions 1 to 3\. Install a newer"),
        ({"version": 3}, "version 3 does not have parts of this kind"),
        ({"version": "1"}, "version '1'"),
        ({"dtype": "object"}, "names the dtype 'object'"),
        ({"dtype": "O"}, "names the dtype 'O'"),
        ({"dtype": "uint8"}, "names the dtype 'uint8'"),
        ({"dtype": "int64"}, "names the dtype 'int64'"),
        ({"builds": []}, "no build is listed"),
        ({"counts": {"documents": 9, "tokens": 38}}, "its parts hold 3 documents"),
        ({"parts": None}, "has a missing or wrong field"),
    ],
)
def test_what_a_manifest_may_not_say(change, message, contents, opened):
    with pytest.raises(StoreError, match=message):
        opened(changed(contents, **change))


@pytest.mark.parametrize("number", [-1, 2**63, 10**40, 1.0, True, "0", *HOSTILE])
def test_the_number_of_a_part_can_name_no_other_file(number, contents, opened):
    parts = [{**contents["parts"][0], "part": number}, *contents["parts"][1:]]

    with pytest.raises(StoreError):
        opened(changed(contents, parts=parts))


@pytest.mark.parametrize("name", HOSTILE)
def test_the_files_of_a_part_can_have_no_other_names(name, contents, opened):
    part = contents["parts"][0]
    parts = [{**part, "files": {**part["files"], name: part["files"]["tokens"]}}]

    with pytest.raises(StoreError, match="has the files"):
        opened(changed(contents, parts=parts + contents["parts"][1:]))


@pytest.mark.parametrize("field", ["documents", "tokens"])
@pytest.mark.parametrize("value", [-1, 2**61, 2**64, 10**30, 1.5, "7", None])
def test_counts_that_cannot_be_are_refused_before_anything_is_allocated(
    field, value, contents, opened
):
    parts = [{**contents["parts"][0], field: value}, *contents["parts"][1:]]

    with pytest.raises(StoreError):
        opened(changed(contents, parts=parts))


@pytest.mark.parametrize("size", [0, 187, 10**12, 188.0])
def test_the_size_of_a_file_is_what_its_counts_make_it(size, contents, opened):
    part = copy.deepcopy(contents["parts"][0])
    part["files"]["tokens"][0] = size

    with pytest.raises(StoreError, match=r"part 0 says .* bytes of tokens, not 188"):
        opened(changed(contents, parts=[part, *contents["parts"][1:]]))


def test_parts_listed_twice_or_out_of_order_are_refused(contents, opened):
    for parts in (contents["parts"][::-1], contents["parts"] + contents["parts"][:1]):
        counts = {name: sum(part[name] for part in parts) for name in ("documents", "tokens")}
        with pytest.raises(StoreError, match="twice or out of order"):
            opened(changed(contents, parts=parts, counts=counts))


def test_nesting_without_end_is_refused(opened):
    data = b'{"digest": "' + b"0" * 64 + b'", "a": ' + b"[" * 100_000
    with pytest.raises(StoreError):
        opened(data.replace(b"0" * 64, digest_bytes(data).encode(), 1))


def test_a_directory_that_is_no_store_says_so(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="does not exist, so there is no store"):
        read_manifest(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"has no penstock\.json, so it is not a store"):
        read_manifest(tmp_path)
    with pytest.raises(StoreError, match=r"has no penstock\.json"):
        read_manifest(tmp_path / "file")
