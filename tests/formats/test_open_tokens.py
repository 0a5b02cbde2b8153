"""Token files of other tools are opened with equal tokens and documents, or refused in words."""

import gzip
import pickle
from functools import partial

import numpy as np
import pytest

import penstock as ps
from penstock import Documents, Packs, Plan, Windows
from penstock.errors import MissingStoreError, MissingTokenizerError, PlanError, StoreError
from penstock.formats import verify_tokens
from penstock.testing import assert_resumable

TEXTS = [f"document {number} " * (number % 5 + 1) for number in range(40)]
LAYOUTS = ["llmc", "nanogpt", "olmo", "npy", "megatron", "old-megatron", "datatrove"]
LAYOUTS += ["mds", "mds-zstd", "litdata", "litdata-zstd", "arrow", "parquet"]
DOCUMENTS = [[5, 6, 7], [], [8] * 40, list(range(90)), [1]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_corpora_are_read_with_equal_tokens_and_documents(layouts, layout, tmp_path):
    for seed in range(50):
        generator = np.random.default_rng(seed)
        directory = tmp_path / str(seed)
        directory.mkdir()
        documents = layouts.random_corpus(generator, shortest=layout in layouts.NOT_EMPTY)
        dtypes = layouts.LAYOUTS[layout][1]
        dtype = dtypes[seed % len(dtypes)]
        path, named = layouts.write(layout, directory, documents, dtype)

        opened = ps.open_tokens(path, vocab_size=100, **named)
        ids = [token for each in documents for token in each]
        assert opened.dtype == np.dtype(dtype)
        assert layouts.all_ids(opened).tolist() == ids
        assert opened.num_tokens == verify_tokens(opened) == len(ids)
        assert opened.has_documents == (layout in layouts.WITH_DOCUMENTS)
        if opened.has_documents:
            assert [each.tolist() for each in opened] == documents
        if len(ids) > 8:
            read = Windows(opened, 8, tail="pad").read(np.array([0]))
            assert read["tokens"][0].tolist() == ids[:9]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pickled_set_is_opened_again_unless_its_tokens_changed(layouts, layout, tmp_path):
    documents = [each for each in DOCUMENTS if each or layout not in layouts.NOT_EMPTY]
    path, named = layouts.write(layout, tmp_path, documents)
    opened = ps.open_tokens(path, vocab_size=100, **named)
    pickled = pickle.dumps(opened)

    assert pickle.loads(pickled).digest == opened.digest
    assert len(pickled) < 2000
    layouts.write(layout, tmp_path, [*documents, [2]])
    with pytest.raises(StoreError, match="was changed after it was pickled"):
        pickle.loads(pickled)


def test_a_megatron_set_is_opened_by_its_prefix_and_by_either_file(layouts, tmp_path):
    layouts.write_megatron(tmp_path / "web.en", DOCUMENTS, split=3, modes=True)
    names = ("web.en", "web.en.bin", "web.en.idx")
    opened = [ps.open_tokens(tmp_path / name) for name in names]

    assert len({each.digest for each in opened}) == 1
    assert [each.tolist() for each in opened[0]] == DOCUMENTS
    assert opened[0].format == "megatron"


def test_a_megatron_index_without_documents_has_its_sequences_as_documents(layouts, tmp_path):
    layouts.write_megatron(tmp_path / "x", DOCUMENTS)
    index = tmp_path / "x.idx"
    data = bytearray(index.read_bytes())
    data[26:34] = (1).to_bytes(8, "little")
    index.write_bytes(data[: -8 * len(DOCUMENTS)])

    assert [each.tolist() for each in ps.open_tokens(tmp_path / "x")] == DOCUMENTS


def test_a_loss_mask_of_datatrove_excludes_targets(layouts, tmp_path):
    mask = [token % 2 for each in DOCUMENTS for token in each]
    layouts.write_datatrove(tmp_path / "x.ds", DOCUMENTS, loss=mask)
    opened = ps.open_tokens(tmp_path / "x.ds")

    read = Windows(opened, 10).read(np.array([0]))
    assert read["target_mask"][0].tolist() == [bool(each) for each in mask[1:11]]


def test_arrays_in_memory_are_read_without_a_copy():
    torch = pytest.importorskip("torch")
    ids = np.arange(50, dtype=np.int64)
    opened = ps.open_tokens(ids, vocab_size=50)

    assert np.shares_memory(opened.part_ids(0), ids)
    assert not opened.part_ids(0).flags.writeable
    assert pickle.loads(pickle.dumps(opened)).digest == opened.digest
    assert ps.open_tokens(torch.arange(50)).digest == opened.digest
    with pytest.raises(StoreError, match="holds float64 values; token ids are integers"):
        ps.open_tokens(np.ones(3))
    with pytest.raises(StoreError, match=r"shape \(2, 2\)"):
        ps.open_tokens(np.ones((2, 2), int))


def test_packs_and_documents_are_those_of_a_native_store(layouts, tmp_path):
    native = ps.build(ps.Texts(TEXTS), tmp_path / "store", tokenizer="bytes")
    layouts.write_megatron(tmp_path / "x", list(native), native.dtype.name)
    foreign = ps.open_tokens(tmp_path / "x")

    for make in (Packs, partial(Documents, pad_id=0)):
        one, two = make(native, 16), make(foreign, 16)
        rows = np.arange(len(one))
        for name, values in one.read(rows).items():
            assert np.array_equal(values, two.read(rows)[name]), name
    bordered = [Windows(each, 16, borders=True).read(np.arange(4)) for each in (native, foreign)]
    for name, values in bordered[0].items():
        assert np.array_equal(values, bordered[1][name]), name


def test_a_plan_that_mixes_a_store_and_two_foreign_sets_resumes_at_every_step(layouts, tmp_path):
    documents = [list(range(each, each + 50)) for each in range(8)]
    native = ps.build(ps.Texts(TEXTS), tmp_path / "store", tokenizer="bytes")
    layouts.write_megatron(tmp_path / "meg", documents, "int32")
    layouts.write_llmc(tmp_path / "llmc.bin", documents)
    sources = {
        "native": Windows(native, 12),
        "megatron": Windows(ps.open_tokens(tmp_path / "meg"), 12),
        "llmc": Windows(str(tmp_path / "llmc.bin"), 12),
    }
    plan = Plan(sources, weights={"native": 2, "megatron": 1, "llmc": 1}, shuffle="full", seed=7)

    def make_loader(rank, world_size, prefetch):
        return ps.Loader(
            plan, global_batch_size=24, rank=rank, world_size=world_size, prefetch=prefetch
        )

    assert_resumable(make_loader, world_sizes=(1, 2, 3, 8), prefetch=(0, 2), steps=12)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_a_loader_gives_the_same_batches_for_every_dtype(layouts, dtype, tmp_path):
    layouts.write_megatron(tmp_path / "x", DOCUMENTS, dtype)
    batch = next(iter(ps.Loader(Packs(str(tmp_path / "x"), 100), 2)))

    assert sorted(batch["inputs"][0, :94].tolist()) == sorted(DOCUMENTS[0] + [1] + DOCUMENTS[3])


def test_a_list_of_a_store_and_a_foreign_set_is_one_stream(layouts, tmp_path):
    native = ps.build(ps.Texts(TEXTS), tmp_path / "store", tokenizer="bytes")
    layouts.write_megatron(tmp_path / "x", list(native), "int32")
    rows = Packs([native, ps.open_tokens(tmp_path / "x")], 32)

    assert rows.stream.num_tokens == 2 * native.num_tokens
    assert len(rows) == 2 * len(Packs(native, 32))
    layouts.write_llmc(tmp_path / "y.bin", DOCUMENTS)
    with pytest.raises(PlanError, match=r"y\.bin does not record where documents end"):
        Packs([native, ps.open_tokens(tmp_path / "y.bin")], 32)


def test_files_without_a_header_need_a_name_and_a_vocabulary(layouts, tmp_path):
    layouts.write_raw(tmp_path / "x.bin", DOCUMENTS)
    with pytest.raises(StoreError, match=r'open_tokens\(path, format="nanogpt", vocab_size='):
        ps.open_tokens(tmp_path / "x.bin")
    with pytest.raises(StoreError, match=r"Pass vocab_size= or tokenizer= with format=.nanogpt"):
        ps.open_tokens(tmp_path / "x.bin", format="nanogpt")
    opened = ps.open_tokens(tmp_path / "x.bin", format="nanogpt", tokenizer="bytes")
    assert opened.vocab_size == 257


def test_a_file_of_llmc_is_not_read_as_one_of_nanogpt(layouts, tmp_path):
    layouts.write_llmc(tmp_path / "x.bin", DOCUMENTS)
    with pytest.raises(StoreError, match="its header would become tokens"):
        ps.open_tokens(tmp_path / "x.bin", format="nanogpt", vocab_size=50257)


def test_a_file_of_two_formats_is_refused_with_the_argument_that_decides(layouts, tmp_path):
    layouts.write_megatron(tmp_path / "x", DOCUMENTS)
    layouts.write_llmc(tmp_path / "x.bin", DOCUMENTS)
    with pytest.raises(
        StoreError, match=r'llmc, megatron. Pass format="llmc" or format="megatron"'
    ):
        ps.open_tokens(tmp_path / "x.bin")
    assert ps.open_tokens(tmp_path / "x.bin", format="llmc").num_tokens == 134


def test_a_wrong_dtype_is_refused_in_both_directions(layouts, tmp_path):
    ids = [np.random.default_rng(0).integers(0, 50257, 1000).tolist()]
    layouts.write_raw(tmp_path / "narrow.bin", ids)
    layouts.write_raw(tmp_path / "wide.bin", ids, "uint32")
    known = {"format": "nanogpt", "vocab_size": 50257}

    with pytest.raises(StoreError, match=r'vocabulary has 50,257 ids.*pass dtype="uint16"'):
        ps.open_tokens(tmp_path / "narrow.bin", dtype="uint32", **known)
    with pytest.raises(StoreError, match=r'in every second place.*Pass dtype="uint32"'):
        ps.open_tokens(tmp_path / "wide.bin", **known)
    assert ps.open_tokens(tmp_path / "wide.bin", dtype="uint32", **known).num_tokens == 1000
    with pytest.raises(StoreError, match="A vocabulary of 128,256 ids does not fit uint16"):
        ps.open_tokens(tmp_path / "narrow.bin", format="nanogpt", vocab_size=128256)
    layouts.write_llmc(tmp_path / "x.bin", ids)
    with pytest.raises(StoreError, match="holds uint16 ids, not dtype='int32'"):
        ps.open_tokens(tmp_path / "x.bin", dtype="int32")


def test_an_id_beyond_the_vocabulary_is_found_when_opened_or_by_verify(layouts, tmp_path):
    ids = np.zeros(3_000_000, "uint16")
    ids[-5] = 60_000
    layouts.write_llmc(tmp_path / "end.bin", [ids])
    with pytest.raises(StoreError, match="token id 60,000, but the vocabulary has 50,257"):
        ps.open_tokens(tmp_path / "end.bin", vocab_size=50257)
    ids[-5], ids[100_000] = 0, 60_000  # between two sampled blocks
    layouts.write_llmc(tmp_path / "between.bin", [ids])
    opened = ps.open_tokens(tmp_path / "between.bin", vocab_size=50257)
    with pytest.raises(StoreError, match="token id 60,000, but the vocabulary has 50,257"):
        verify_tokens(opened)


def test_object_arrays_floats_and_tables_are_refused_and_nothing_is_unpickled(tmp_path):
    for name, array in {
        "object": np.array([{}], object),
        "float": np.ones(4),
        "table": np.ones((2, 2), "uint16"),
        "fields": np.zeros(3, [("a", "u2")]),
    }.items():
        np.save(tmp_path / name, array)
        with pytest.raises(StoreError, match=r"token ids are integers|holds an array of shape"):
            ps.open_tokens(tmp_path / f"{name}.npy")


def test_an_array_with_another_number_of_ids_than_its_header_says_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(134, "uint16"))
    data = (tmp_path / "x.npy").read_bytes()
    for changed in (data.replace(b"(134,)", b"(34,) "), data + b"ab", data[:-2]):
        (tmp_path / "x.npy").write_bytes(changed)
        with pytest.raises(StoreError, match="but its header says"):
            ps.open_tokens(tmp_path / "x.npy")


def test_paths_that_hold_no_token_file_are_refused(tmp_path):
    with pytest.raises(MissingStoreError, match="does not exist"):
        ps.open_tokens(tmp_path / "none.bin")
    with pytest.raises(StoreError, match="is a directory"):
        ps.open_tokens(tmp_path)
    with pytest.raises(StoreError, match="is not on this machine"):
        ps.open_tokens("s3://bucket/x.bin")
    (tmp_path / "x").write_bytes(b"abcd")
    with pytest.raises(StoreError, match="format='tfrecord' is not one of"):
        ps.open_tokens(tmp_path / "x", format="tfrecord")


def test_a_file_that_was_overwritten_is_not_read(layouts, tmp_path):
    layouts.write_llmc(tmp_path / "x.bin", DOCUMENTS)
    rows = Windows(ps.open_tokens(tmp_path / "x.bin"), 8)
    layouts.write_llmc(tmp_path / "x.bin", DOCUMENTS[:3])
    with pytest.raises(StoreError, match="overwritten in between"):
        rows.read(np.array([0]))


def test_a_small_table_that_decompresses_to_billions_of_rows_is_refused_early(layouts, tmp_path):
    layouts.write_raw(tmp_path / "x.npy", DOCUMENTS)
    for rows in (b"0,0,a,b,1\n" * 10**5, b"0" * 10**7):
        (tmp_path / "x.csv.gz").write_bytes(gzip.compress(rows))
        with pytest.raises(StoreError, match=r"row 1,292 is for|or more"):
            ps.open_tokens(tmp_path / "x.npy", format="olmo", vocab_size=100)


def test_a_set_with_a_tokenizer_is_decoded_and_not_mixed_with_another_one(layouts, tmp_path):
    layouts.write_megatron(tmp_path / "x", [list(b"one"), list(b"two")])
    opened = ps.open_tokens(tmp_path / "x", tokenizer="bytes")
    assert opened.decode(1) == "two"
    with pytest.raises(MissingTokenizerError, match="does not record its tokenizer"):
        ps.open_tokens(tmp_path / "x").decode(0)
    other = ps.build(ps.Texts(["a b c"]), tmp_path / "store", tokenizer="bytes")
    assert Windows([other, opened], 4).stream.num_tokens == other.num_tokens + 6
