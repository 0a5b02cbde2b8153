"""The table of the parts of a store, beside its manifest."""

import gc
import hashlib
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest
import xxhash

import penstock
from penstock.errors import MissingStoreError, StoreError
from penstock.sources.settings import Texts
from penstock.sources.slices import cut
from penstock.store import manifest as manifests
from penstock.store import parts
from penstock.store.manifest import (
    FILE_NAME,
    PartRecord,
    PartTable,
    manifest_files,
    read_manifest,
    write_manifest,
)
from penstock.store.verify import chain

TEXTS = [f"document {number} of some text" for number in range(9)]


def small_slices(patch):
    patch.setitem(cut.__kwdefaults__, "slice_bytes", 20)


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """A store of several parts."""
    with pytest.MonkeyPatch.context() as patch:
        small_slices(patch)
        place = tmp_path_factory.mktemp("listed")
        return penstock.build(Texts(TEXTS), place, tokenizer="bytes", documents="lines")


def contents_of(manifest):
    return {key: value for key, value in manifest.contents.items() if key != "digest"}


@pytest.fixture
def place(listed, tmp_path):
    """A copy of it."""
    for path in listed.path.glob("[!.]*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def table_of_store(place):
    (path,) = place.glob("parts-*.npy")
    return path


def test_a_table_gives_the_records_that_it_was_made_of(listed):
    records = list(listed.manifest.parts)
    table = PartTable.of(records, 2)

    assert len(records) > 2
    assert list(table) == records
    assert table[-1] == records[-1]
    assert table[1:] == tuple(records[1:])
    assert list(table.followed_by(records[:1])) == [*records, records[0]]
    with pytest.raises(IndexError):
        table[len(records)]
    for kind in ("tokens", "bounds", "origin", "loss", "checks"):
        sizes = [part.files.get(kind, (0, ""))[0] for part in records]
        assert table.sizes()[kind].tolist() == sizes
        assert table.has(kind).any() == any(sizes)
    assert table.num_bytes == sum(size for part in records for size, _ in part.files.values())


@pytest.mark.parametrize(("documents", "tokens"), [(0, 1), (1, 65_536), (9_000, 1), (5, 10**6)])
def test_sizes_follow_from_counts(documents, tokens):
    """As a part with and without a loss mask has them; the checksums cover the other files."""
    for loss in (False, True):
        sizes = {"tokens": 128 + 2 * tokens, "bounds": 128 + 8 * documents}
        sizes |= {"origin": 128 + 16 * documents} | ({"loss": 128 + tokens} if loss else {})
        sizes["checks"] = 128 + 4 * sum(-(-size // 65_536) for size in sizes.values())
        files = {
            kind: (size, f"{number + 1:032x}") for number, (kind, size) in enumerate(sizes.items())
        }
        record = PartRecord(7, documents, tokens, files)
        assert PartTable.of([record], 2)[0] == record


def test_everything_that_reads_a_store_reads_one_with_a_table(listed, place):
    store = penstock.verify(place)
    rows, known = penstock.Windows(place, 8), penstock.Windows(listed, 8)
    numbers = np.arange(len(rows))

    assert [each.tolist() for each in store] == [each.tolist() for each in listed]
    assert [store.origin(n) for n in range(4)] == [listed.origin(n) for n in range(4)]
    assert (rows.read(numbers)["tokens"] == known.read(numbers)["tokens"]).all()
    for number in numbers:
        assert [each[1:] for each in rows.origins(number)] == [
            each[1:] for each in known.origins(number)
        ]
    assert len(penstock.Packs(place, 8)) == len(penstock.Packs(listed, 8))
    assert chain(store, 3) == chain(listed, 3)
    assert penstock.store.summarize(store).num_tokens == listed.num_tokens
    assert pickle.loads(pickle.dumps(store)).digest == store.digest
    assert list(pickle.loads(pickle.dumps(store.manifest.parts))) == list(listed.manifest.parts)


def test_the_table_is_a_plain_array(place):
    """As docs/store-format.md says, without penstock."""
    manifest = json.loads((place / FILE_NAME).read_bytes())
    path = place / f"parts-{manifest['parts']['sha256'][:16]}.npy"
    table = np.load(path, mmap_mode="r")

    assert hashlib.sha256(path.read_bytes()).hexdigest() == manifest["parts"]["sha256"]
    assert table.dtype == np.uint64
    assert table.shape == (14, manifest["parts"]["number"])
    assert table[3].sum() == manifest["counts"]["tokens"]
    tokens = place / f"part-{table[0, 1]:05d}.tokens.npy"
    assert table[4:6, 1].tobytes() == xxhash.xxh3_128(tokens.read_bytes()).digest()


def test_the_bytes_of_a_table_never_change(place):
    assert table_of_store(place).name == "parts-c30a3f4a2c404b5e.npy"
    assert read_manifest(place).digest == (
        "492bdddcee9f40a69c674bad0c805c603a7358ff87d291419c12bbb315f2cb2a"
    )


def test_an_append_makes_a_longer_table_and_removes_the_old_one(listed, place, monkeypatch):
    small_slices(monkeypatch)
    opened = penstock.TokenStore(place)
    old = table_of_store(place)
    more = ["some more text", "and the end of it"]

    penstock.build(Texts(more), place, tokenizer="bytes", documents="lines", append=True)
    store = penstock.verify(place)

    assert [store.decode(n) for n in range(len(store))] == TEXTS + more
    assert store.manifest.parts[: len(opened.manifest.parts)] == listed.manifest.parts[:]
    assert not old.exists()
    # A reader that opened the store before keeps the old table.
    assert list(opened.manifest.parts) == list(listed.manifest.parts)
    assert opened.decode(8) == TEXTS[8]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_commit_that_is_killed_anywhere_leaves_the_old_store_or_the_new_one(
    listed, place, killed
):
    """The fewer parts are committed over the more, so that the two tables differ."""
    before = read_manifest(place)
    parts = PartTable(before.parts.words[:, :-1], 2)
    contents = {**contents_of(before), "counts": manifests.counts(parts)}
    after = hashlib.sha256(manifest_files(contents, parts)[FILE_NAME]).hexdigest()
    seen = []
    for point in count(1):
        write_manifest(place, contents_of(before), before.parts)
        is_killed = killed(lambda: write_manifest(place, contents, parts), point)
        found = read_manifest(place)
        is_new = hashlib.sha256((place / FILE_NAME).read_bytes()).hexdigest() == after
        assert list(found.parts) == list(parts if is_new else before.parts)
        seen.append(is_new)
        if not is_killed:
            break

    assert seen == sorted(seen), "the old store came back"
    assert not seen[1], "the table was written before the manifest"
    assert seen[-2], "the old table was removed after the manifest"
    assert len(list(place.glob("parts-*.npy"))) == 1


def test_a_reader_finds_the_new_table_if_an_append_removes_the_old_one(place):
    """A reader opens the store again and again, while its manifest is replaced 200 times."""
    before = read_manifest(place)
    parts = PartTable(before.parts.words[:, :-1], 2)
    contents = {**contents_of(before), "counts": manifests.counts(parts)}

    def commit():
        for _ in range(100):
            write_manifest(place, contents, parts)
            write_manifest(place, contents_of(before), before.parts)

    found = set()
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(commit)
        while not writing.done():
            found.add(len(read_manifest(place).parts))
        writing.result()

    assert found <= {len(parts), len(before.parts)}


def test_a_missing_table_is_named(place):
    path = table_of_store(place)
    path.unlink()

    with pytest.raises(MissingStoreError, match=f"{path.name} is missing. It lists the parts"):
        penstock.TokenStore(place)


@pytest.mark.parametrize("size", [0, 1, 128, -8, -1])
def test_a_table_that_was_cut_off_is_refused(place, size):
    path = table_of_store(place)
    path.write_bytes(path.read_bytes()[:size])

    with pytest.raises(StoreError, match=r"bytes, but .*penstock\.json says"):
        penstock.TokenStore(place)


def test_a_table_that_is_cut_off_while_it_is_open_does_not_end_the_process(place, monkeypatch):
    monkeypatch.setattr(manifests, "_MAPPED_BYTES", 0)
    store = penstock.TokenStore(place)
    table_of_store(place).write_bytes(b"")

    with pytest.raises(StoreError, match="table of parts of an open store was cut off"):
        store.manifest.parts[2]


def test_a_flipped_bit_in_a_table_is_refused(place):
    path = table_of_store(place)
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 61):
        data[at] ^= 4
        path.write_bytes(data)
        with pytest.raises(StoreError, match="was changed after it was written"):
            penstock.TokenStore(place)
        data[at] ^= 4


def test_what_is_known_of_parts_is_bounded():
    kept = {}
    for number in range(parts._MOST_KEPT + 100):
        assert parts.keep_newest(kept, number, str(number)) == str(number)

    assert len(kept) == parts._MOST_KEPT
    assert 99 not in kept
    assert parts.keep_newest(kept, 5_000, "another") == "5000", "the first entry stays"


def num_records():
    return sum(isinstance(each, PartRecord) for each in gc.get_objects())


def test_opening_many_parts_makes_no_object_for_each(tmp_path, listed):
    """Sixty thousand parts, of which only the table exists."""
    number = 60_000
    table = np.zeros((14, number), np.uint64)
    table[0], table[1], table[3] = np.arange(number), 2, 100
    table[4:10] = table[12:14] = 7
    parts = PartTable(table, 2)
    write_manifest(
        tmp_path, {**contents_of(listed.manifest), "counts": manifests.counts(parts)}, parts
    )
    gc.collect()
    before, records = len(gc.get_objects()), num_records()
    rows = penstock.Windows(tmp_path, 8)
    plan = penstock.Plan({"all": rows}, seed=17)
    plan.samples(10**5, 10**5 + 32)
    rows.stream.check("tokens", np.zeros(0, np.int64), np.zeros(0, np.int64), 9)

    assert rows.stream.num_tokens == 100 * number
    assert num_records() <= records
    assert len(gc.get_objects()) - before < number // 10
