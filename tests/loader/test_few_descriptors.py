"""A process that may have only 32 open files builds, appends, streams, loads and verifies."""

import numpy as np
import pytest

import penstock as ps

# In a separate process: a limit can be lowered and not be raised again, and pytest has open files.
START = """
import json, os, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
import penstock as ps
from penstock.sources.slices import cut
cut.__kwdefaults__["slice_bytes"] = 4_000
place = Path(sys.argv[1])

def build(inputs, name, **settings):
    return ps.build(inputs, place / name, tokenizer="bytes", workers=2, **settings)

def lines(first):
    return [f"line {number} of some text {number * 7919}" for number in range(first, first + 9_000)]
"""


def test_a_process_with_32_descriptors_builds_appends_and_verifies(tmp_path, quick_python):
    code = """
import pyarrow as pa, pyarrow.parquet as pq
for number in range(5):
    texts = lines(number)[:2_000]
    (place / f"{number}.txt").write_text("\\n".join(texts))
    rows = "\\n".join(json.dumps({"text": text}) for text in texts)
    (place / f"{number}.jsonl").write_text(rows)
    pq.write_table(pa.table({"text": texts}), place / f"{number}.parquet", row_group_size=100)
for kind in ("txt", "jsonl", "parquet"):
    files = sorted(place.glob(f"*.{kind}"))
    documents = "lines" if kind == "txt" else "auto"
    build(files[:3], kind, documents=documents)
    store = build(files[3:], kind, documents=documents, append=True)
    assert len(store) == 10_000 and len(store.manifest.parts) > 60
    ps.verify(place / kind)
from penstock.cli.app import app
for arguments in (["verify"], ["info"], ["decode", "--document", "9999"]):
    app([arguments[0], str(place / "txt"), *arguments[1:]], standalone_mode=False)
"""
    done = quick_python(START + code, tmp_path)

    assert "is intact" in done.stdout
    assert "digest" in done.stdout
    assert f"line {1_999 + 4} of some text" in done.stdout


def test_a_process_with_32_descriptors_reads_many_parts_and_many_stores(tmp_path, quick_python):
    code = """
(place / "one.txt").write_text("\\n".join(lines(0)))
wide = build(place / "one.txt", "wide", documents="lines")
assert len(wide.manifest.parts) > 64
stores = []
for number in range(40):
    (place / "two.txt").write_text("\\n".join(lines(number)[:400]))
    stores.append(build(place / "two.txt", f"mixed-{number}", documents="lines"))

def read(rows):
    loader = ps.Loader(rows, batch_size=64)
    for _, batch in zip(range(10), loader):
        assert batch

for kind in (ps.Windows, ps.Packs):
    read(kind(wide, length=64))
read(ps.Windows(wide, length=30_000))
read(ps.Documents(wide, max_length=64))
read(ps.Windows(stores, length=64))
read(ps.Plan({str(number): ps.Windows(store, length=64) for number, store in enumerate(stores)}))
read(ps.Plan({str(number): ps.Packs(stores[number], length=64) for number in range(8)}))
assert sum(len(document) for document in wide) == wide.num_tokens
streamed = ps.stream(
    place / "one.txt", place / "streamed", tokenizer="bytes", documents="lines", workers=2
)
read(ps.Windows(streamed, length=64))
streamed.close()
print("read", len(os.listdir("/proc/self/fd")) < 32)
"""
    assert quick_python(START + code, tmp_path).stdout == "read True\n"


def test_arrays_that_keep_too_many_files_open_are_a_clear_error(tmp_path, quick_python):
    code = """
(place / "one.txt").write_text("\\n".join(lines(0)))
store = build(place / "one.txt", "wide", documents="lines")
try:
    store[:]
except ps.errors.StoreError as error:
    print(error)
"""
    printed = quick_python(START + code, tmp_path).stdout

    assert "has as many open files as it may have, 32." in printed
    assert "copy them, or allow more files, for example with ulimit -n 1024." in printed


@pytest.mark.parametrize("length", [10, 3_000])
def test_ids_across_many_parts_are_those_of_the_parts(tmp_path, length, small_slices):
    """The stream copies from each part, and returns a view only of one part."""
    (tmp_path / "in.txt").write_text("".join(f"line {n} {n * 7919}\n" for n in range(3_000)))
    store = ps.build(tmp_path / "in.txt", tmp_path / "store", tokenizer="bytes", documents="lines")
    expected = np.concatenate(
        [store.part_array(n, "tokens") for n in range(len(store.manifest.parts))]
    )
    stream = ps.Windows(store, length=length).stream

    assert len(store.manifest.parts) > 10
    for start in range(0, stream.num_tokens - length, length):
        assert (stream.tokens(start, start + length) == expected[start : start + length]).all()
    assert len(stream.tokens(5, 5)) == 0
