"""Stores whose parts are in a table beside the manifest, because there are many of them."""

import gc
import hashlib
import json
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

import penstock
from penstock.errors import MissingStoreError, StoreError
from penstock.sources.settings import Texts
from penstock.sources.slices import cut
from penstock.store import manifest as manifests
from penstock.store import maps
from penstock.store.manifest import FILE_NAME, manifest_files, read_manifest, write_manifest
from penstock.store.part_table import PartRecord, PartTable, joined_parts
from penstock.store.verify import chain

TEXTS = [f"document {number} of some text" for number in range(9)]


def small_slices(patch):
    patch.setitem(cut.__kwdefaults__, "slice_bytes", 20)


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """A store of several parts that its manifest lists."""
    with pytest.MonkeyPatch.context() as patch:
        small_slices(patch)
        place = tmp_path_factory.mktemp("listed")
        return penstock.build(Texts(TEXTS), place, tokenizer="bytes", documents="lines")


def contents_of(manifest):
    return {key: value for key, value in manifest.contents.items() if key != "digest"}


@pytest.fixture
def place(listed, tmp_path):
    """The same store, with its parts in a table: the limit is lower than their number."""
    for path in listed.path.glob("[!.]*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    write_manifest(tmp_path, contents_of(listed.manifest), listed.manifest.parts, most_listed=2)
    return tmp_path


def table_of_store(place):
    (path,) = place.glob("parts-*.npy")
    return path


def forge(place, table, contents):
    """Replace the table of a store, with digests that fit; nothing is synced."""
    table_of_store(place).unlink()
    for name, data in manifest_files(contents, PartTable(table, 2)).items():
        (place / name).write_bytes(data)


def test_a_table_holds_the_same_records_as_a_list(listed, place):
    manifest = read_manifest(place)

    assert len(listed.manifest.parts) > 2
    assert isinstance(manifest.parts, PartTable)
    assert manifest.contents["version"] == 3
    assert list(manifest.parts) == list(listed.manifest.parts)
    assert manifest.parts[-1] == listed.manifest.parts[-1]
    assert manifest.parts[1:] == listed.manifest.parts[1:]
    with pytest.raises(IndexError):
        manifest.parts[len(manifest.parts)]
    for kind in ("tokens", "bounds", "origin", "loss", "checks"):
        sizes = [part.files.get(kind, (0, ""))[0] for part in listed.manifest.parts]
        assert manifest.file_sizes(kind).tolist() == sizes
        assert manifest.has(kind) == listed.manifest.has(kind)
    for name in ("num_tokens", "num_documents", "num_pieces", "num_unchecked"):
        assert getattr(manifest, name) == getattr(listed.manifest, name)


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
    assert table.shape == (24, manifest["parts"]["number"])
    assert table[3].sum() == manifest["counts"]["tokens"]
    tokens = place / f"part-{table[0, 1]:05d}.tokens.npy"
    assert table[4:8, 1].tobytes() == hashlib.sha256(tokens.read_bytes()).digest()


def test_stores_up_to_the_limit_keep_their_bytes(listed):
    contents, parts = contents_of(listed.manifest), listed.manifest.parts
    known = {FILE_NAME: (listed.path / FILE_NAME).read_bytes()}

    assert manifests.MOST_LISTED == 16_384
    assert manifest_files(contents, parts) == known
    assert manifest_files(contents, parts, most_listed=len(parts)) == known
    assert [*manifest_files(contents, parts, most_listed=len(parts) - 1)][-1] == FILE_NAME


def test_the_bytes_of_a_table_never_change(place):
    assert table_of_store(place).name == "parts-b1f20acf552e3678.npy"
    assert read_manifest(place).digest == (
        "09454dcb50ca1d37b7fb5379b266939204a9080bf8e8a006944231f95572d575"
    )


def test_an_append_makes_a_longer_table_and_removes_the_old_one(listed, place, monkeypatch):
    small_slices(monkeypatch)
    opened = penstock.TokenStore(place)
    old = table_of_store(place)
    more = ["some more text", "and the end of it"]

    penstock.build(Texts(more), place, tokenizer="bytes", documents="lines", append=True)
    store = penstock.verify(place)

    assert isinstance(store.manifest.parts, PartTable)
    assert [store.decode(n) for n in range(len(store))] == TEXTS + more
    assert store.manifest.parts[: len(opened.manifest.parts)] == listed.manifest.parts
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
    parts = PartTable(before.parts.table[:, :-1], 2)
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
    parts = PartTable(before.parts.table[:, :-1], 2)
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

    with pytest.raises(StoreError, match="bytes, but the manifest says"):
        penstock.TokenStore(place)


def test_a_table_that_is_cut_off_while_it_is_open_does_not_end_the_process(place):
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


def put(row, column, value):
    """A change of one word of a table."""

    def change(table):
        table[row, column] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(0, 0, 1), "lists parts twice or out of order"),
        (put(0, -1, 0), "lists parts twice or out of order"),
        (put(0, -1, 2**63), "lists parts twice or out of order"),
        (put(1, 0, 2**64 - 1), "more documents or tokens than a store can have"),
        (put(3, 0, 2**64 - 1), "more documents or tokens than a store can have"),
        (put(3, 0, 2**62), "more documents or tokens than a store can have"),
        (put(3, 0, 2**50), "its parts hold"),
        (put(1, 0, 7), "its parts hold"),
        (put(2, 0, 2**63), "more pieces of a part continue"),
        (put(slice(4, 8), 1, 0), "lacks one of the files tokens, bounds, origin"),
        (put(slice(12, 16), 1, 0), "lacks one of the files tokens, bounds, origin"),
        (lambda table: np.hstack((table, table[:, -1:])), "its parts hold|lists parts twice"),
        (lambda table: table[:-1], "does not have"),
        (lambda table: table.T, "does not have|is not a table of"),
    ],
)
def test_a_forged_table_is_refused(place, change, message):
    table = np.array(read_manifest(place).parts.table)
    changed = change(table)
    contents = contents_of(read_manifest(place))
    forge(place, table if changed is None else np.ascontiguousarray(changed), contents)

    with pytest.raises(StoreError, match=message):
        penstock.TokenStore(place)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"number": 2**70}, "parts.number is"),
        ({"number": -1}, "parts.number is"),
        ({"number": 10**15}, "does not have"),
        ({"bytes": 10**15}, "does not have"),
        ({"number": 10**12, "bytes": 128 + 192 * 10**12}, "but the manifest says"),
        ({"sha256": "../../etc/passwd"}, "parts.sha256 is"),
        ({"sha256": None}, "parts.sha256 is"),
        ({"sha256": "0" * 64}, "parts-0000000000000000.npy is missing"),
    ],
)
def test_a_forged_entry_of_a_table_is_refused_before_anything_is_allocated(place, change, message):
    entry = json.loads((place / FILE_NAME).read_bytes())["parts"]
    contents = contents_of(read_manifest(place))
    (place / FILE_NAME).write_bytes(manifests.manifest_bytes(contents, {**entry, **change}))

    with pytest.raises(StoreError, match=message):
        penstock.TokenStore(place)


def test_a_pickle_in_the_place_of_a_table_is_never_run(place, tmp_path):
    """With digests that fit: the header of the file says that it holds objects."""
    path, contents = table_of_store(place), contents_of(read_manifest(place))
    num_bytes, number = path.stat().st_size, len(read_manifest(place).parts)
    header = f"{{'descr': '|O', 'fortran_order': False, 'shape': (24, {number}), }}"
    data = b"\x93NUMPY\x01\x00\x76\x00" + header.encode().ljust(117) + b"\n"
    data += pickle.dumps(print).ljust(num_bytes - len(data))
    digest = hashlib.sha256(data).hexdigest()
    (place / f"parts-{digest[:16]}.npy").write_bytes(data)
    entry = {"number": number, "bytes": num_bytes, "sha256": digest}
    (place / FILE_NAME).write_bytes(manifests.manifest_bytes(contents, entry))

    with pytest.raises(StoreError, match="is not a table of"):
        penstock.TokenStore(place)


def test_random_forgeries_end_in_a_named_error_or_change_no_token(listed, place):
    """200 tables with a random word or byte changed, and digests that fit."""
    draw = random.Random(17)
    original = np.array(read_manifest(place).parts.table)
    known = [document.tolist() for document in listed]
    contents, refused = contents_of(read_manifest(place)), 0

    for _ in range(200):
        table = original.copy()
        row, column = draw.randrange(len(table)), draw.randrange(table.shape[1])
        word = int(table[row, column])
        values = [0, 1, word ^ 1 << draw.randrange(64), word + 1, draw.getrandbits(64), 2**63]
        table[row, column] = draw.choice(values) % 2**64
        forge(place, table, contents)
        try:
            store = penstock.TokenStore(place)
            assert [document.tolist() for document in store] == known
            penstock.verify(place)
        except StoreError:
            refused += 1
    assert refused > 150


def test_a_list_of_many_parts_is_kept_in_an_array_and_stays_a_list(listed, tmp_path):
    record = listed.manifest.parts[0]
    parts = [replace(record, number=number) for number in range(300)]
    contents = {**contents_of(listed.manifest), "counts": manifests.counts(parts)}
    write_manifest(tmp_path, contents, parts)
    manifest = read_manifest(tmp_path)
    longer = joined_parts(manifest.parts, [replace(record, number=300)], 2)

    assert isinstance(manifest.parts, PartTable)
    assert manifest.table is None
    assert list(manifest.parts) == parts
    assert manifest_files(contents, manifest.parts) == {
        FILE_NAME: (tmp_path / FILE_NAME).read_bytes()
    }
    assert [*manifest_files(contents, longer)] == [FILE_NAME]
    assert longer[300].files == record.files


def test_what_is_known_of_parts_is_bounded():
    kept = {}
    for number in range(maps._MOST_KEPT + 100):
        assert maps.keep_newest(kept, number, str(number)) == str(number)

    assert len(kept) == maps._MOST_KEPT
    assert 99 not in kept
    assert maps.keep_newest(kept, 5_000, "another") == "5000", "the first entry stays"


def num_records():
    return sum(isinstance(each, PartRecord) for each in gc.get_objects())


def test_opening_many_parts_makes_no_object_for_each(tmp_path, listed):
    """Sixty thousand parts, of which only the table exists."""
    number = 60_000
    table = np.zeros((24, number), np.uint64)
    table[0], table[1], table[3] = np.arange(number), 2, 100
    table[4:16] = table[20:24] = 7
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


@pytest.mark.parametrize(("number", "version"), [(16_384, 2), (16_385, 3)])
def test_more_parts_than_the_limit_are_written_as_a_table(number, version, listed, tmp_path):
    record = listed.manifest.parts[0]
    parts = [
        PartRecord(n, record.num_documents, record.num_tokens, record.files) for n in range(number)
    ]
    contents = {**contents_of(listed.manifest), "counts": manifests.counts(parts)}
    write_manifest(tmp_path, contents, parts)
    found = read_manifest(tmp_path)

    assert found.contents["version"] == version
    assert (found.table is not None) == (version == 3)
    assert found.parts[number - 1] == parts[-1]
    assert found.num_tokens == number * record.num_tokens
