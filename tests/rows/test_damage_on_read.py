"""Damage is noticed where it is read, by every way to read a store, and off by request."""

import os
import random
import shutil
import threading
import zlib
from dataclasses import replace

import made_store
import numpy as np
import pytest
import xxhash
import zygote

import penstock as ps
from penstock.disk import BLOCK_BYTES, HEADER_BYTES, block_sums, header
from penstock.errors import StoreError
from penstock.store.blocks import joined_sum
from penstock.store.manifest import (
    CHECKED_KINDS,
    part_file,
    read_manifest,
)

WORDS = [f"word {number} of a document, and more {number * 7919}" for number in range(8_000)]
# In block 3 of 10 of the token file.
DAMAGED = 3 * BLOCK_BYTES + 1_000


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    place = tmp_path_factory.mktemp("good") / "store"
    return ps.build(ps.Texts(WORDS), place, tokenizer="bytes").path


@pytest.fixture(scope="module")
def good_chats(tmp_path_factory):
    """A store with loss masks of more than one block."""
    rows = [
        {"messages": [{"role": "user", "content": w}, {"role": "assistant", "content": w * 5}]}
        for w in WORDS[:600]
    ]
    place = tmp_path_factory.mktemp("chats")
    import json

    (place / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    store = place / "store"
    ps.build(place / "a.jsonl", store, chat=ps.Chat("chatml", "bytes", add_tokens="auto"))
    return store


@pytest.fixture
def store(good, tmp_path):
    return shutil.copytree(good, tmp_path / "store")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def flip(path, place):
    with path.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 1]))


def all_rows(rows):
    return rows.read(np.arange(len(rows)))


READERS = {
    "iteration": lambda path: list(ps.TokenStore(path)),
    "documents": lambda path: ps.TokenStore(path)[:],
    "a range of tokens": lambda path: ps.TokenStore(path).tokens(90_000, 110_000),
    "a whole part": lambda path: ps.TokenStore(path).part_array(0, "tokens"),
    "decode": lambda path: [ps.TokenStore(path).decode(number) for number in range(2_000, 3_000)],
    "windows": lambda path: all_rows(ps.Windows(path, 64)),
    "windows longer than a block": lambda path: all_rows(ps.Windows(path, 70_000)),
    "windows of two stores": lambda path: all_rows(ps.Windows([path, path], 64)),
    "packs": lambda path: all_rows(ps.Packs(path, 64)),
    "single documents": lambda path: all_rows(ps.Documents(path, 64)),
    "a loader": lambda path: list(ps.Loader(ps.Windows(path, 64), 64, epochs=1)),
    "a mixture": lambda path: list(
        ps.Loader(ps.Plan({"a": ps.Windows(path, 64), "b": ps.Windows(path, 64)}), 64, epochs=1)
    ),
    "an export": lambda path: list(ps.stream(ps.Texts(WORDS), path, tokenizer="bytes")),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_flipped_bit_in_the_tokens_is_an_error_that_names_the_bytes(store, read):
    read(store)
    flip(store / "part-00000.tokens.npy", DAMAGED)

    wanted = (
        r"part-00000\.tokens\.npy, block 3 \(bytes 196,608 to 262,144\), is damaged.*penstock build"
    )
    with pytest.raises(StoreError, match=wanted):
        read(store)


def test_other_blocks_of_a_damaged_part_can_be_read(store):
    flip(store / "part-00000.tokens.npy", DAMAGED)
    opened = ps.TokenStore(store)

    assert opened.decode(0) == WORDS[0]
    assert opened.decode(-1) == WORDS[-1]


def read_everything(path):
    opened = ps.TokenStore(path)
    list(opened)
    for number in range(0, len(opened), 50):
        opened.origin(number)
    rows = ps.Windows(opened, 1_000, tail="pad", borders=True)
    for first in range(0, len(rows), 50):
        rows.read(np.arange(first, min(first + 50, len(rows))))


@pytest.mark.parametrize("name", ["good", "good_chats"])
def test_forty_flipped_bits_are_all_noticed_by_a_reader(name, tmp_path, request):
    path = shutil.copytree(request.getfixturevalue(name), tmp_path / "flipped")
    chance, files = random.Random(5), sorted(path.glob("part-*.npy"))
    read_everything(path)
    for _ in range(40):
        file = chance.choice(files)
        place = chance.randrange(file.stat().st_size)
        flip(file, place)
        with pytest.raises(StoreError, match="part-0"):
            read_everything(path)
        flip(file, place)


@pytest.fixture
def two_parts(tmp_path):
    """A store whose two parts have files of equal shapes, and other contents."""
    path = tmp_path / "two"
    for number in range(2):
        texts = ps.Texts([f"{number} and then {line:06d}" for line in range(5_000)])
        ps.build(texts, path, tokenizer="bytes", append=number > 0)
    return path


@pytest.mark.parametrize(
    "kinds", [["tokens"], ["checks"], ["tokens", "checks"], [*CHECKED_KINDS[:3], "checks"]]
)
def test_files_of_equal_parts_that_were_swapped_are_noticed(two_parts, kinds):
    for kind in kinds:
        one, two = (two_parts / part_file(number, kind) for number in range(2))
        assert one.stat().st_size == two.stat().st_size
        contents = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(contents)

    for number in (0, -1):
        with pytest.raises(StoreError, match=r"part-0000\d\..* is damaged"):
            ps.TokenStore(two_parts).document(number)


def test_a_part_of_another_store_is_noticed(two_parts, tmp_path):
    texts = ps.Texts([f"2 and then {line:06d}" for line in range(5_000)])
    other = ps.build(texts, tmp_path / "other", tokenizer="bytes").path
    for kind in (*CHECKED_KINDS[:3], "checks"):
        shutil.copy(other / part_file(0, kind), two_parts / part_file(1, kind))

    with pytest.raises(
        StoreError, match=r"part-00001\.checks\.npy is damaged, or it is of another"
    ):
        ps.TokenStore(two_parts).document(-1)


def forge(path, kind, change, *, checks=True):
    """Change an array of part 0, with checksums and a manifest that agree with the change."""
    manifest = read_manifest(path)
    record, file = manifest.parts[0], path / part_file(0, kind)
    data = file.read_bytes()
    dtype = {"tokens": "<u2", "bounds": "<u8", "origin": "<u8", "loss": "u1"}[kind]
    array = np.frombuffer(data, dtype, offset=HEADER_BYTES).copy()
    change(array)
    file.write_bytes(data[:HEADER_BYTES] + array.tobytes())
    kinds = [each for each in CHECKED_KINDS if each in record.files]
    sums = [block_sums((path / part_file(0, each)).read_bytes()) for each in kinds]
    table = np.concatenate(sums).astype("<u4")
    (path / part_file(0, "checks")).write_bytes(header(table.dtype, table.shape) + table.tobytes())
    files = {}
    for each in (*kinds, *(["checks"] if checks else [])):
        data = (path / part_file(0, each)).read_bytes()
        files[each] = (len(data), xxhash.xxh3_128(data).hexdigest())
    contents = {key: value for key, value in manifest.contents.items() if key != "digest"}
    parts = [replace(record, files=files), *manifest.parts[1:]]
    made_store.write(path, contents, parts)


@pytest.mark.parametrize("checks", [True, False], ids=["checksums", "no checksums"])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_ids_that_are_not_in_the_vocabulary_are_refused(store, read, checks):
    def change(tokens):
        tokens[100_000] = 257

    forge(store, "tokens", change, checks=checks)
    if "stream" in read.__code__.co_names:
        pytest.skip("another store than the one that would be built is refused before")
    with pytest.raises(StoreError, match="holds the token id 257, but the vocabulary has 257 ids"):
        read(store)


BOUNDS = {
    "decreasing": lambda bounds: bounds.__setitem__(5, bounds[3]),
    "beyond the tokens": lambda bounds: bounds.__setitem__(5, 10**12),
    "wrapped": lambda bounds: bounds.__setitem__(5, 2**64 - 1),
    "the last beyond the tokens": lambda bounds: bounds.__setitem__(-1, 2**40),
    "the last before the end": lambda bounds: bounds.__setitem__(-1, bounds[-2] + 1),
}


@pytest.mark.parametrize("checks", [True, False], ids=["checksums", "no checksums"])
@pytest.mark.parametrize("change", BOUNDS.values(), ids=BOUNDS)
def test_forged_bounds_are_refused_by_every_reader(store, change, checks):
    forge(store, "bounds", change, checks=checks)

    from penstock.store.summary import summarize

    readers = [
        lambda: ps.TokenStore(store).document(5),
        lambda: list(ps.TokenStore(store)),
        lambda: ps.Packs(store, 64),
        lambda: ps.Documents(store, 64),
        lambda: ps.Windows(store, 64, borders=True).read(np.arange(3)),
        lambda: ps.Windows(store, 64).origins(3),
        lambda: summarize(ps.TokenStore(store)),
        lambda: ps.verify(store),
    ]
    for read in readers:
        with pytest.raises(StoreError, match=r"part 0: its bounds do not ascend to"):
            read()


def test_a_block_is_checked_once_in_a_process(store):
    """What changes on disk after that is found by the next process, or by `verify`."""
    opened = ps.TokenStore(store)
    rows = ps.Windows(opened, 64)
    all_rows(rows)
    flip(store / "part-00000.tokens.npy", DAMAGED)
    all_rows(rows)
    list(opened)

    with pytest.raises(StoreError, match="is damaged"):
        list(ps.TokenStore(store))
    with pytest.raises(StoreError, match="is damaged"):
        ps.verify(store)


def test_several_threads_read_and_check_at_once(store):
    opened, found = ps.TokenStore(store), []
    rows = ps.Windows(opened, 64)
    right = all_rows(ps.Windows(store, 64))["tokens"]

    def read():
        found.append((all_rows(rows)["tokens"] == right).all())

    threads = [threading.Thread(target=read) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert found == [True] * 8


def test_worker_processes_notice_damage(store):
    flip(store / "part-00000.tokens.npy", DAMAGED)
    loader = ps.Loader(ps.Windows(store, 64), 8, epochs=1)

    from penstock.loader import as_dataloader

    with pytest.raises(StoreError, match="is damaged"):
        list(as_dataloader(loader, num_workers=2))


def test_checks_of_blocks_can_be_turned_off(store, monkeypatch):
    flip(store / "part-00000.tokens.npy", DAMAGED)
    monkeypatch.setenv("PENSTOCK_CHECKSUMS", "0")
    for name, read in READERS.items():
        if name != "decode":  # the changed byte may be no text
            read(store)

    monkeypatch.setenv("PENSTOCK_CHECKSUMS", "off")
    with pytest.raises(StoreError, match=r"PENSTOCK_CHECKSUMS is 'off'\. Set it to 0"):
        ps.TokenStore(store)


def test_wrong_checksums_of_good_files_are_found_by_verify(store):
    """A reader would refuse them, so a store is not intact with them."""

    def nothing(array):
        pass

    path = store / part_file(0, "checks")
    forge(store, "tokens", nothing)
    table = bytearray(path.read_bytes())
    table[HEADER_BYTES] ^= 1
    path.write_bytes(table)
    manifest = read_manifest(store)
    record = manifest.parts[0]
    files = {**record.files, "checks": (len(table), xxhash.xxh3_128(table).hexdigest())}
    contents = {key: value for key, value in manifest.contents.items() if key != "digest"}
    made_store.write(store, contents, [replace(record, files=files)])

    with pytest.raises(StoreError, match="block 0"):
        ps.verify(store)


def test_the_checksum_of_several_blocks_follows_from_theirs():
    data = np.random.default_rng(3).integers(0, 256, 9 * BLOCK_BYTES, np.uint8).tobytes()
    for count in range(10):
        joined = data[: count * BLOCK_BYTES]
        assert joined_sum(block_sums(joined)) == zlib.crc32(joined)


def test_isal_computes_the_same_checksums():
    isal_zlib = pytest.importorskip("isal.isal_zlib")
    data = bytes(range(256)) * 300

    assert isal_zlib.crc32(data) == zlib.crc32(data)


_TRUNCATE = """
import os, sys
import penstock as ps

path, kind, rows = sys.argv[1:]
made = {
    "windows": lambda: ps.Windows(path, 64, borders=kind == "bounds"),
    "packs": lambda: ps.Packs(path, 64),
}[rows]()
# Without a thread that may read the file at this moment (docs/reliability.md, known limits).
loader = ps.Loader(made, 8, epochs=50, prefetch=0)
for number, batch in enumerate(loader):
    if number == 20:
        file = f"{path}/part-00000.{kind}.npy" if kind != "index" else next(
            os.path.join(folder, name)
            for folder, _, names in os.walk(os.environ["PENSTOCK_CACHE"])
            for name in names if name.endswith(".npy")
        )
        os.truncate(file, 4096)
"""


@pytest.mark.parametrize(
    ("kind", "rows"),
    [("tokens", "windows"), ("bounds", "windows"), ("tokens", "packs"), ("index", "packs")],
)
def test_a_file_that_is_truncated_under_a_running_loader_is_a_clear_error(store, kind, rows):
    """Touching a page that the file no longer has would end the process with SIGBUS."""
    command = ["-c", _TRUNCATE, store, kind, rows]
    done = zygote.run(command, capture_output=True, text=True, timeout=120, env=os.environ)

    assert done.returncode == 1, done.returncode
    assert "StoreError" in done.stderr
    assert "has 4,096 bytes" in done.stderr.splitlines()[-2] + done.stderr.splitlines()[-1]
