"""Directories and patterns of token files are one set, in natural order, or are refused."""

import json

import numpy as np
import pytest

import penstock as ps
from penstock import Packs, Plan, Windows
from penstock.errors import MissingStoreError, StoreError
from penstock.formats import verify_tokens
from penstock.testing import assert_resumable

GROUPS = [[[number] * (number + 1), [], [number, 7]] for number in range(12)]
IDS = [token for group in GROUPS for each in group for token in each]
DOCUMENTS = [each for group in GROUPS for each in group]


def write_parts(write, directory, name, **options):
    """Write twelve files, of which 10 and 11 are before 2 by their bytes."""
    directory.mkdir()
    for number, group in enumerate(GROUPS):
        write(directory / name.format(number), group, **options)


@pytest.mark.parametrize(
    ("layout", "name", "named"),
    [
        ("llmc", "fineweb_train_{}.bin", {}),
        ("datatrove", "{}_tokens.ds", {}),
        ("olmo", "part-0-{}.npy", {"format": "olmo"}),
        ("npy", "ids{}.npy", {}),
        ("megatron", "web_{}_document", {}),
        ("raw", "train{}.bin", {"format": "nanogpt"}),
        ("parquet", "train-{}-of-12.parquet", {}),
    ],
)
def test_a_directory_of_files_is_one_set_in_natural_order(layouts, layout, name, named, tmp_path):
    write_parts(getattr(layouts, f"write_{layout}"), tmp_path / "set", name)
    opened = ps.open_tokens(tmp_path / "set", vocab_size=100, **named)

    assert layouts.all_ids(opened).tolist() == IDS
    assert verify_tokens(opened) == len(IDS)
    if opened.has_documents:
        assert [each.tolist() for each in opened] == DOCUMENTS
        assert opened.document(-1).tolist() == DOCUMENTS[-1]
    ending = "bin" if layout == "megatron" else name.rpartition(".")[2]
    pattern = ps.open_tokens(tmp_path / "set" / f"*.{ending}", vocab_size=100, **named)
    assert pattern.digest == opened.digest
    assert Windows(opened, 16).read(np.array([1]))["tokens"][0].tolist() == IDS[16:33]


def test_the_file_with_an_id_beyond_the_vocabulary_is_numbered(layouts, tmp_path):
    write_parts(layouts.write_llmc, tmp_path / "set", "x{}.bin")
    with pytest.raises(StoreError, match=r"set \(file 11 of 12\) has the token id 10, but the"):
        ps.open_tokens(tmp_path / "set", vocab_size=10)


def test_random_sets_of_several_files_have_equal_documents(layouts, tmp_path):
    for seed in range(50):
        generator = np.random.default_rng(seed)
        groups = [layouts.random_corpus(generator, 100) for _ in range(generator.integers(1, 13))]
        directory = tmp_path / str(seed)
        directory.mkdir()
        for number, group in enumerate(groups):
            layouts.write_megatron(directory / f"x{number}", group, "int32")

        found = [each.tolist() for each in ps.open_tokens(directory, vocab_size=100)]
        assert found == [each for group in groups for each in group]


def test_windows_and_lists_take_patterns_and_directories(layouts, tmp_path):
    write_parts(layouts.write_megatron, tmp_path / "set", "web_{}")
    by_path, by_pattern = Windows(str(tmp_path / "set"), 8), Windows(f"{tmp_path}/set/*.bin", 8)

    assert by_path.digest == by_pattern.digest
    assert Packs([tmp_path / "set", tmp_path / "set"], 16).stream.num_tokens == 2 * len(IDS)


def test_files_of_several_splits_are_refused_unless_a_pattern_names_them(layouts, tmp_path):
    for name in ("train_1.bin", "train_2.bin", "val_1.bin"):
        layouts.write_llmc(tmp_path / name, GROUPS[3])
    with pytest.raises(StoreError, match=r"several names: train_\*\.bin, val_\*\.bin.*pattern"):
        ps.open_tokens(tmp_path)
    assert ps.open_tokens(tmp_path / "train_*.bin").num_tokens == 2 * 6
    assert ps.open_tokens(f"{tmp_path}/*").num_tokens == 3 * 6


def test_other_files_and_directories_in_a_directory_are_refused_with_their_names(layouts, tmp_path):
    layouts.write_llmc(tmp_path / "train_1.bin", GROUPS[3])
    (tmp_path / "README.md").write_text("ids of a corpus")
    with pytest.raises(StoreError, match=r"1 of 2 files without the contents.*README\.md"):
        ps.open_tokens(tmp_path)
    (tmp_path / "README.md").unlink()
    (tmp_path / ".hidden").write_text("")
    assert ps.open_tokens(tmp_path).num_tokens == 6
    (tmp_path / "more").mkdir()
    with pytest.raises(StoreError, match="It has the directories more"):
        ps.open_tokens(tmp_path)
    with pytest.raises(MissingStoreError, match="matches no file"):
        ps.open_tokens(tmp_path / "*.ds")
    with pytest.raises(StoreError, match="matches the directory"):
        ps.open_tokens(tmp_path / "m*")


def test_files_of_two_formats_are_not_one_set(layouts, tmp_path):
    layouts.write_llmc(tmp_path / "x1", GROUPS[3])
    layouts.write_npy(tmp_path / "x2", GROUPS[3])
    with pytest.raises(StoreError, match="files of several formats: llmc, npy"):
        ps.open_tokens(tmp_path)


def test_a_store_is_not_opened_as_a_directory_of_arrays(tmp_path):
    store = ps.build(ps.Texts(["one two three"] * 9), tmp_path / "store", tokenizer="bytes")
    with pytest.raises(StoreError, match=r"is a store of penstock\. Open it with TokenStore"):
        ps.open_tokens(store.path)
    (tmp_path / "store" / "penstock.json").unlink()
    with pytest.raises(StoreError, match="penstock build"):
        Windows(str(store.path), 8)


def test_a_dataset_dict_is_refused_with_its_splits(layouts, tmp_path):
    for name in ("train", "test"):
        layouts.write_arrow(tmp_path / name, DOCUMENTS)
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(StoreError, match=r"the splits train, test\. Pass one of them, for example"):
        ps.open_tokens(tmp_path)
    assert [each.tolist() for each in ps.open_tokens(tmp_path / "train")] == DOCUMENTS


def test_an_index_of_two_formats_is_refused_with_the_argument_that_decides(layouts, tmp_path):
    layouts.write_mds(tmp_path, [[1, 2], [3]])
    index = json.loads((tmp_path / "index.json").read_text())
    layouts.write_litdata(tmp_path, [[1, 2], [3]])
    both = {**index, **json.loads((tmp_path / "index.json").read_text())}
    (tmp_path / "index.json").write_text(json.dumps(both))
    with pytest.raises(StoreError, match=r'mds, litdata\. Pass format="mds" or format="litdata"'):
        ps.open_tokens(tmp_path)
    assert ps.open_tokens(tmp_path, format="litdata").num_tokens == 3


def test_more_files_than_the_process_may_open_are_read(layouts, python, tmp_path):
    directory = tmp_path / "set"
    directory.mkdir()
    for number in range(200):
        layouts.write_llmc(directory / f"x{number}.bin", [[number] * 9])
    code = f"""
import resource
import numpy as np
import penstock as ps
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
opened = ps.open_tokens({str(directory)!r}, vocab_size=200)
rows = ps.Windows(opened, 8, tail="pad")
for start in (0, 0):
    read = rows.read(np.arange(len(rows)))["tokens"]
print(len(opened.part_tokens), opened.num_tokens, int(read.max()))
"""
    assert python(code).stdout == "200 1800 199\n"


def test_a_plan_of_a_store_a_megatron_set_and_an_mds_set_resumes_at_every_step(layouts, tmp_path):
    documents = [list(range(each, each + 50)) for each in range(8)]
    texts = [f"document {number} " * (number % 5 + 1) for number in range(40)]
    native = ps.build(ps.Texts(texts), tmp_path / "store", tokenizer="bytes")
    (tmp_path / "meg").mkdir()
    for number in range(2):
        layouts.write_megatron(tmp_path / "meg" / f"x{number}", documents[number::2], "int32")
    layouts.write_mds(tmp_path / "mds", documents, "uint16", shards=3)
    sources = {
        "native": Windows(native, 12),
        "megatron": Windows(ps.open_tokens(tmp_path / "meg"), 12),
        "mds": Packs(str(tmp_path / "mds"), 12),
    }
    plan = Plan(sources, weights={"native": 2, "megatron": 1, "mds": 1}, shuffle="full", seed=7)

    def make_loader(rank, world_size, prefetch):
        return ps.Loader(
            plan, global_batch_size=24, rank=rank, world_size=world_size, prefetch=prefetch
        )

    assert_resumable(make_loader, world_sizes=(1, 2, 3, 8), prefetch=(0, 2), steps=6)
