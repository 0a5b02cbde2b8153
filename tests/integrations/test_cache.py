"""Stores that are found again, and never when something has changed."""

import json
import multiprocessing
import os
import shutil
import signal
import stat
import time

import pytest
import tiktoken
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

import penstock
from penstock.disk import cache_directory
from penstock.errors import StoreError
from penstock.integrations.pytorch import TextDataset, TransformerDataset
from penstock.integrations.pytorch import datasets as datasets_module
from penstock.store import build as build_module


def words(*names, **settings):
    """A `tokenizers` tokenizer of a few words."""
    vocab = {name: number for number, name in enumerate(["?", *names])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    return tokenizer


@pytest.fixture
def made(monkeypatch):
    """The stores that were built since the test began."""
    calls = []
    build = datasets_module.build

    def counting(inputs, directory, **settings):
        store = build(inputs, directory, **settings)
        calls.append(directory)
        return store

    monkeypatch.setattr(datasets_module, "build", counting)
    return calls


def stores(cache):
    return sorted(path.parent for path in cache.glob("stores/*/penstock.json"))


def ids(dataset):
    return dataset.tokenized_data.tolist()


def test_the_second_start_tokenizes_nothing(write, made, cache, monkeypatch):
    path = write("a.jsonl", ["one two three", "four"])
    first = ids(TransformerDataset(path, "gpt2"))
    assert len(made) == 1
    monkeypatch.setattr(penstock.tokenize.tokenizer.Tokenizer, "encode_documents", None)

    assert ids(TransformerDataset(path, "gpt2", seq_length=2, stride=2)) == first
    assert len(made) == 1
    assert len(stores(cache)) == 1


def test_a_copy_of_the_file_under_another_name_is_the_same_file(write, made):
    TransformerDataset(write("a.jsonl", ["one two"]), "gpt2")
    TransformerDataset(write("b.jsonl", ["one two"]), "gpt2")

    assert len(made) == 1


def test_the_store_is_a_store(write, cache):
    dataset = TransformerDataset(write("a.jsonl", ["one two", "", "three"]), "gpt2")
    (place,) = stores(cache)
    store = penstock.verify(place)

    assert [store.decode(number) for number in range(2)] == ["one two", "three"]
    assert store.tokens(0, 3).tolist() == ids(dataset)
    assert len(penstock.Windows(place, 2)) == 1


def same_size_and_times(path, contents):
    """Other contents, and nothing that a look at the file's data sheet would show."""
    before = path.stat()
    assert len(contents) == before.st_size
    path.write_bytes(contents)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


OLD = b'{"text": "one two one"}\n{"text": "two one"}\n'
FILE = {
    "a line more": lambda path: path.write_bytes(OLD + b'{"text": "two"}\n'),
    "a line less": lambda path: path.write_bytes(OLD[:24]),
    "another word, same size and times": lambda path: same_size_and_times(
        path, OLD.replace(b"one two one", b"two two two")
    ),
    "lines swapped, same size and times": lambda path: same_size_and_times(
        path, OLD[24:] + OLD[:24]
    ),
    "replaced by another file": lambda path: (
        path.with_suffix(".new").write_bytes(OLD.replace(b"two one", b"one one")),
        path.with_suffix(".new").rename(path),
    ),
    "emptied": lambda path: path.write_bytes(b""),
    "bytes changed, size and times kept": lambda path: same_size_and_times(
        path, OLD.replace(b"w", b"x")
    ),
}


@pytest.mark.parametrize("name", FILE)
def test_a_changed_file_is_read_again(name, write, made):
    path = write("a.jsonl", OLD)
    before = ids(TransformerDataset(path, "bytes"))
    FILE[name](path)
    after = ids(TransformerDataset(path, "bytes"))
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]

    assert after == list("".join(texts).encode()) != before
    assert len(made) == 2
    write("a.jsonl", OLD)
    assert ids(TransformerDataset(path, "bytes")) == before
    assert len(made) == 2


TOKENIZER = {
    "other words": words("two", "one"),
    "a word more": words("one", "two", "three"),
    "no splitting": words("one", "two", pre_tokenizer=None),
    "tokens around the text": words(
        "one",
        "two",
        post_processor=TemplateProcessing(
            single="one $A two", special_tokens=[("one", 1), ("two", 2)]
        ),
    ),
    "special tokens are text": words("one", "two", encode_special_tokens=True),
}


@pytest.mark.parametrize("name", TOKENIZER)
def test_a_changed_tokenizer_is_another(name, write, made):
    path = write("a.jsonl", OLD)
    TransformerDataset(path, words("one", "two"))
    after = ids(TransformerDataset(path, TOKENIZER[name]))

    assert len(made) == 2
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert after == [token for text in texts for token in TOKENIZER[name].encode(text).ids]
    TransformerDataset(path, words("one", "two"))
    assert len(made) == 2


def test_a_changed_tokenizer_file_under_the_same_name_is_another(write, made, tmp_path):
    path, file = write("a.jsonl", OLD), tmp_path / "tokenizer.json"
    words("one", "two").save(str(file))
    before = ids(TransformerDataset(path, file))
    words("two", "one").save(str(file))

    assert ids(TransformerDataset(path, str(file))) != before
    assert len(made) == 2


def test_a_changed_object_is_another(write, made):
    path, tokenizer = write("a.jsonl", OLD), words("one", "two")
    before = ids(TransformerDataset(path, tokenizer))
    tokenizer.enable_truncation(1)

    assert len(ids(TransformerDataset(path, tokenizer))) == 2 < len(before)


def test_a_new_release_of_a_library_is_another(write, made, monkeypatch):
    path = write("a.jsonl", OLD)
    TransformerDataset(path, "bytes")
    monkeypatch.setattr("penstock.integrations.stores.version", lambda package: "99.0")
    TransformerDataset(path, "bytes")

    assert len(made) == 2


SETTINGS = [{"is_jsonl": False}, {"eos": True}, {"eos": 17}]


@pytest.mark.filterwarnings("ignore:.*is read as plain text")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_changed_setting_is_another(settings, write, made):
    path = write("a.jsonl", OLD)
    before = ids(TransformerDataset(path, "bytes"))

    assert ids(TransformerDataset(path, "bytes", **settings)) != before
    assert len(made) == 2
    TransformerDataset(path, "bytes", **settings)
    assert len(made) == 2


def test_a_whole_file_and_its_paragraphs_are_two(write, made):
    path = write("a.txt", "one\n\n\ntwo")
    whole = ids(TextDataset(path, 1))

    assert ids(TransformerDataset(path, "gpt2", is_jsonl=False)) != whole
    assert len(made) == 2


DAMAGE = {
    "a part cut off": lambda place: truncate(place / "part-00000.tokens.npy"),
    "a bit of a part": lambda place: flip(place / "part-00000.tokens.npy"),
    "a bit of the manifest": lambda place: flip(place / "penstock.json"),
    "a part is gone": lambda place: (place / "part-00000.tokens.npy").unlink(),
    "the manifest is gone": lambda place: (place / "penstock.json").unlink(),
    "everything is gone": shutil.rmtree,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_store_is_made_again(name, write, made, cache):
    path = write("a.jsonl", OLD)
    before = ids(TransformerDataset(path, "bytes"))
    (place,) = stores(cache)
    DAMAGE[name](place)

    assert ids(TransformerDataset(path, "bytes")) == before
    assert len(made) == 2
    assert ids(TransformerDataset(path, "bytes")) == before
    assert len(made) == 2


def test_an_object_that_cannot_be_digested_leaves_no_trace(write, letters, cache):
    path = write("a.jsonl", ["abc"])
    first = TransformerDataset(path, letters)
    second = TransformerDataset(path, letters)

    assert letters.calls == 2
    assert ids(first) == ids(second)
    assert not cache.exists()
    assert stat.S_IMODE(first._store.path.parent.stat().st_mode) == 0o700


def test_a_method_put_on_an_object_is_not_in_its_digest(write, cache):
    sly = tiktoken.Encoding(
        "small",
        pat_str=".",
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={},
    )
    sly.encode = lambda text: [7] * len(text)

    assert ids(TransformerDataset(write("a.jsonl", ["abc"]), sly)) == [7, 7, 7]
    assert not cache.exists()


def test_the_cache_is_the_users_own(write, cache, tmp_path, monkeypatch):
    TextDataset(write("a.txt", "one two"), 1)
    for directory in (cache, cache / "stores", *stores(cache)):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700, directory
    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "penstock"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "penstock"


def test_a_call_may_name_the_cache(write, cache, tmp_path):
    TextDataset(write("a.txt", "one two"), 1, cache_dir=tmp_path / "other")

    assert not cache.exists()
    assert len(stores(tmp_path / "other")) == 1


def test_a_cache_that_cannot_be_made_names_the_way_out(write, tmp_path):
    with pytest.raises(StoreError, match="another directory with cache_dir= or the environment"):
        TextDataset(write("a.txt", "one"), 1, cache_dir=write("file", "") / "x")


def test_a_store_holds_the_text_under_whose_digest_it_is_kept(write, monkeypatch):
    """Also if the file is written while it is tokenized: it is read once."""
    path = write("a.txt", "one two")
    build = datasets_module.build

    def written_meantime(*arguments, **settings):
        path.write_text("three")
        return build(*arguments, **settings)

    monkeypatch.setattr(datasets_module, "build", written_meantime)
    assert TextDataset(path, 1).tokens.tolist() == [505, 734]
    assert TextDataset(path, 1).tokens.tolist() == [15542]
    path.write_text("one two")
    assert TextDataset(path, 1).tokens.tolist() == [505, 734]


def _open(path, cache, answer, gate):
    os.environ["PENSTOCK_CACHE"] = str(cache)
    gate.wait(60)
    answer.put(TextDataset(path, 4).tokenized_data.tolist())


def test_several_processes_at_once_make_one_store(write, cache):
    context = multiprocessing.get_context("fork")
    answer, gate = context.Queue(), context.Barrier(4)
    path = write("a.txt", "one two three four five " * 200)
    started = [context.Process(target=_open, args=(path, cache, answer, gate)) for _ in range(4)]
    for process in started:
        process.start()
    found = [answer.get(timeout=120) for _ in started]
    for process in started:
        process.join(60)

    assert len(found[0]) == 1_001
    assert all(each == found[0] for each in found)
    assert len(stores(cache)) == 1


def _hang(path, cache):
    os.environ["PENSTOCK_CACHE"] = str(cache)
    build_module._commit = lambda *_: time.sleep(600)
    TextDataset(path, 1)


def test_a_killed_start_blocks_nobody(write, cache, made):
    path = write("a.txt", "one two three")
    process = multiprocessing.get_context("fork").Process(target=_hang, args=(path, cache))
    process.start()
    deadline = time.monotonic() + 60
    while not list(cache.glob("stores/*/*.npy")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)

    assert TextDataset(path, 1).tokens.tolist() == [505, 734, 1115]
    assert not list(cache.glob("stores/*/.building*"))
