"""Ten million documents, and packed runs of many shapes stopped at every step."""

import json
import sys
from pathlib import Path

import made_store
import numpy as np
import pytest
import xxhash

import penstock
from penstock import Documents, Loader, Packs, Plan, Windows
from penstock.disk import header
from penstock.loader import BatchFormat
from penstock.store.manifest import PartRecord, part_file, read_manifest
from penstock.testing import assert_resumable

pytestmark = pytest.mark.torture

PACK = """
import json, resource, time
import numpy as np
from penstock.rows.packing import pack

lengths = np.maximum(1, np.random.default_rng(0).lognormal(6.2, 1.1, 10**7)).astype(np.int64)
bounds = np.cumsum(lengths).astype(np.uint64)
begun = time.perf_counter()
index = pack(bounds, 2048)
took = time.perf_counter() - begun
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
counts, starts, sizes = index.spans(np.arange(index.num_rows))
filled = np.add.reduceat(sizes, np.cumsum(counts) - counts)
starts = starts.astype(np.uint64)
counted = np.bincount(np.searchsorted(bounds, starts, side="right"), minlength=10**7)
print(json.dumps({
    "seconds": took, "megabytes": peak / 1e3, "rows": len(filled), "widest": int(filled.max()),
    "padding": 1 - float(filled.sum()) / (2048 * len(filled)),
    "targets": int(sizes.sum() - len(sizes)),
    "right": int((lengths - 1).sum()),
    "placed": bool((counted == np.maximum(1, -(-(lengths - 1) // 2047))).all()),
}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in kilobytes there")
def test_ten_million_documents_are_packed_in_seconds_and_nearly_without_padding(python, figure):
    told = json.loads(python(PACK, timeout=600).stdout)
    figure(
        f"packing 10,000,000 documents: {told['seconds']:.1f} s, {told['megabytes']:,.0f} MB peak, "
        f"{told['padding']:.4%} padding"
    )

    assert told["widest"] <= 2048
    assert told["targets"] == told["right"]
    assert told["placed"]
    assert told["padding"] < 0.005
    assert told["megabytes"] < 2_000
    assert told["seconds"] < 10


def built(place, seed):
    """A store of bytes in many small parts, some of its tokens marked as not to be trained on."""
    generator = np.random.default_rng(seed)
    sizes = generator.lognormal(3, 1.3, 400).astype(int).clip(1, 2_000)
    texts = ["".join(map(chr, generator.integers(97, 123, size))) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        from penstock.sources.slices import cut

        patch.setitem(cut.__kwdefaults__, "slice_bytes", 2_000)
        store = penstock.build(penstock.Texts(texts), place, tokenizer="bytes")
    if seed % 2 == 0:
        return store
    manifest = read_manifest(Path(place))
    records = []
    for record in manifest.parts:
        marks = generator.integers(0, 2, record.num_tokens, dtype=np.uint8)
        data = header(marks.dtype, marks.shape) + marks.tobytes()
        (Path(place) / part_file(record.number, "loss")).write_bytes(data)
        files = {**record.files, "loss": (len(data), xxhash.xxh3_128(data).hexdigest())}
        records.append(PartRecord(record.number, record.num_documents, record.num_tokens, files))
    told = manifest.contents.items()
    contents = {name: value for name, value in told if name != "digest"}
    made_store.write(Path(place), contents, records)
    return penstock.TokenStore(place)


def num_trained(store):
    """Targets of a run over all documents, counted one document after the other."""
    count = 0
    for number, part in enumerate(store.manifest.parts):
        marks = np.ones(part.num_tokens, int)
        if "loss" in part.files:
            marks = store.part_array(number, "loss").astype(int)
        count += marks.sum()
        begins = np.concatenate(([0], store.part_array(number, "bounds")[:-1])).astype(int)
        count -= marks[begins].sum()
    return int(count)


@pytest.mark.parametrize("seed", range(12))
def test_packed_runs_of_any_shape_train_on_everything_and_resume_anywhere(tmp_path, seed):
    store = built(tmp_path / "store", seed)
    length = [8, 64, 100, 257][seed % 4]
    shuffle = ["full", "part", "block"][seed % 3]
    expected = num_trained(store)
    for rows in (Packs(store, length), Documents(store, length, overflow="split")):
        plan = Plan(rows, seed=seed, shuffle=shuffle)
        for format, name in (("dict", "targets"), ("hf", "labels")):
            loader = Loader(plan, 7, epochs=1, drop_last=False, format=format)
            assert sum(int((batch[name] != -100).sum()) for batch in loader) == expected

    def packed(**where):
        sources = {"packs": Packs(store, length), "windows": Windows(store, length)}
        plan = Plan(sources, weights={"packs": 2, "windows": 1}, seed=seed, shuffle=shuffle)
        return Loader(
            plan, global_batch_size=24, steps=40, format=BatchFormat(fingerprint="tokens"), **where
        )

    def grouped(**where):
        plan = Plan(Documents(store, length, overflow="split"), seed=seed, shuffle=shuffle)
        return Loader(plan, global_batch_size=24, steps=40, format=BatchFormat(ids=True), **where)

    assert_resumable(packed, world_sizes=(1, 3, 8), steps=40)
    assert_resumable(grouped, world_sizes=(1, 2, 4), steps=40)
