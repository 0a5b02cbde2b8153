"""A cached store is identified by contents and settings, not by names."""

import multiprocessing
import os

import pytest
from tokenizers import Tokenizer

from penstock.tokenize.definition import find_definition

pytest.importorskip("lightning", reason="needs penstock[lightning]")

from penstock.integrations import stores as stores_module
from penstock.integrations.lightning import LLMDataModule, LocalOpenWebTextDataModule

TEXT = "".join(f"line {number} of the text\n" for number in range(20))


def store_of(path, model_name="bytes", **options):
    """The directory of the store that a data module trains on."""
    made = LLMDataModule(model_name, data={"train": path}, num_workers=0, **options)
    made.setup("fit")
    (store,) = made.train_dataset.stream.members
    return store.path


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_a_relative_and_an_absolute_path_find_the_same_store(text, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.txt").symlink_to(text)
    spellings = ["text.txt", text, "./text.txt", "folder/../text.txt", "link.txt"]

    assert len({store_of(path) for path in spellings}) == 1


def test_a_copy_of_a_file_finds_the_same_store(text, tmp_path):
    first = store_of(text)
    (tmp_path / "copy.txt").write_bytes(text.read_bytes())
    text.unlink()

    assert store_of("copy.txt") == first


def test_a_file_that_was_only_touched_finds_the_same_store(text):
    first = store_of(text)
    os.utime(text, ns=(1, 1))

    assert store_of(text) == first


def test_the_name_of_a_tokenizer_and_the_object_find_the_same_store(text, tmp_path):
    definition = find_definition("gpt2").text
    (tmp_path / "tokenizer.json").write_text(definition)
    first = store_of(text, "gpt2")

    assert store_of(text, tokenizer=Tokenizer.from_str(definition)) == first
    assert store_of(text, str(tmp_path / "tokenizer.json")) == first


@pytest.mark.parametrize("same_size", [False, True])
def test_a_changed_file_gets_another_store(text, same_size):
    first = store_of(text)
    before = text.stat()
    text.write_text(TEXT.replace("line", "Line" if same_size else "longer line"))
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert store_of(text) != first


def test_another_setting_gets_another_store(text):
    settings = [{}, {"eos": True}, {"documents": "file"}, {"model_name": "gpt2"}]

    assert len({store_of(text, **each) for each in settings}) == len(settings)


def test_a_killed_build_is_resumed_under_another_path(text, tmp_path):
    """The journal of the killed build records the file's old name."""
    first = store_of(text)
    (first / "penstock.json").rename(first / ".building.json")
    (tmp_path / "copy.txt").write_bytes(text.read_bytes())

    assert store_of("copy.txt") == first


def rows_of(batches):
    return [tuple(row) for batch in batches for row in batch["input_ids"].tolist()]


def test_a_stream_of_a_copy_continues_the_run_of_the_original(text, tmp_path):
    """The finished store of the stream records the original's path."""

    def streamed(path):
        options = {"max_length": 8, "batch_size": 2, "num_workers": 0, "tokenizer": "bytes"}
        made = LocalOpenWebTextDataModule(path, path, **options)
        made.setup("fit")
        return made

    first = streamed(text)
    batches = iter(first.train_dataloader())
    begun = [next(batches) for _ in range(3)]
    state = first.state_dict()
    rest = list(batches)
    first.teardown("fit")
    (tmp_path / "copy.txt").write_bytes(text.read_bytes())
    text.unlink()
    second = streamed("copy.txt")
    second.load_state_dict(state)
    resumed = rows_of(second.train_dataloader())
    second.teardown("fit")

    assert resumed == rows_of(rest)
    third = streamed("copy.txt")
    assert rows_of(third.train_dataloader()) == rows_of(begun + rest)
    third.teardown("fit")


def test_a_copy_of_a_large_file_finds_the_same_store(text, tmp_path, monkeypatch):
    monkeypatch.setattr(stores_module, "_WHOLE_BYTES", 10)
    first = store_of(text)
    (tmp_path / "copy.txt").write_bytes(text.read_bytes())
    assert store_of("copy.txt") == first

    text.write_text(TEXT.replace("line 7", "lyne 7"))
    assert store_of(text) != first


def test_processes_that_ask_at_once_build_one_store(text, cache):
    context = multiprocessing.get_context("fork")
    with context.Pool(3) as pool:
        found = pool.map_async(store_of, [text] * 3).get(timeout=120)

    assert len(set(found)) == 1
    assert len(list(cache.glob("stores/*/penstock.json"))) == 1
