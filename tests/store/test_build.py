"""What a build gives, whoever does the work and however often it is asked for."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
from penstock.errors import SourceError, StoreError, TokenizerError
from penstock.sources.batch import Tally
from penstock.sources.settings import Texts
from penstock.tokenize.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("small_slices")


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_bytes_do_not_depend_on_the_number_of_threads(threads, inputs, built, tmp_path, sums):
    penstock.build(
        inputs,
        tmp_path / "again",
        tokenizer="bytes",
        workers=threads,
        documents="lines",
        max_bad=10,
    )

    assert sums(tmp_path / "again") == sums(built.path)


@pytest.mark.parametrize("engine", ["gigatoken", "tokenizers"])
def test_bytes_do_not_depend_on_the_engine(engine, inputs, tmp_path, sums, gpt2):
    penstock.build(inputs, tmp_path / "auto", tokenizer=gpt2, documents="lines", max_bad=10)
    chosen = penstock.load_tokenizer("gpt2", engine=engine)
    penstock.build(inputs, tmp_path / engine, tokenizer=chosen, documents="lines", max_bad=10)

    assert sums(tmp_path / engine) == sums(tmp_path / "auto")


def test_bytes_do_not_depend_on_where_and_when(inputs, tmp_path, sums, monkeypatch):
    """Only on what the inputs are called and hold."""
    monkeypatch.chdir(inputs)
    penstock.build(
        ["a.txt", "b.jsonl"], tmp_path / "one", tokenizer="bytes", documents="lines", max_bad=10
    )
    (tmp_path / "moved").mkdir()
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / "moved" / name).write_bytes((inputs / name).read_bytes())
    monkeypatch.chdir(tmp_path / "moved")
    penstock.build(
        ["b.jsonl", "a.txt"], tmp_path / "two", tokenizer="bytes", documents="lines", max_bad=10
    )

    assert sums(tmp_path / "one") == sums(tmp_path / "two")


def test_every_file_of_a_store_is_in_its_manifest(built):
    listed = {
        f"part-{part.number:05d}.{kind}.npy" for part in built.manifest.parts for kind in part.files
    }

    assert {path.name for path in built.path.iterdir()} == listed | {
        "penstock.json",
        built.manifest.table,
        "rejects.jsonl",
    }


def test_a_slice_without_documents_leaves_no_files(tmp_path):
    (tmp_path / "a.txt").write_bytes(b" \n" * 9_000 + b"one document\n" + b"\t\n" * 9_000)
    store = penstock.build(
        tmp_path / "a.txt", tmp_path / "store", tokenizer="bytes", documents="lines"
    )

    assert (len(store), len(store.manifest.parts)) == (1, 1)
    assert len(list(store.path.glob("part-*.npy"))) == 4


def test_the_counts_of_the_manifest_add_up(inputs, built):
    counts = built.manifest.contents["builds"][0]["counts"]
    total = sum(path.stat().st_size for path in inputs.iterdir())

    assert Tally(**counts).total_bytes == total
    assert (counts["documents"], counts["rejected"]) == (len(built), 3) == (500, 3)
    assert built.manifest.contents["counts"] == {"documents": 500, "tokens": built.num_tokens}


def test_the_reject_log_says_what_where_and_why(inputs, built):
    log = [json.loads(line) for line in (built.path / "rejects.jsonl").read_text().splitlines()]
    data = (inputs / "b.jsonl").read_bytes()

    assert [(each["reason"], each["file"]) for each in log] == [
        ("invalid_utf8", "a.txt"),
        ("bad_json", "b.jsonl"),
        ("missing_field", "b.jsonl"),
    ]
    for each in log[1:]:
        place = each["offset"]
        assert data[place : place + each["num_bytes"]] in (b"not json", b'{"no": "text"}')
    reasons = built.manifest.contents["builds"][0]["rejects"]["reasons"]
    assert reasons == {"bad_json": 1, "invalid_utf8": 1, "missing_field": 1}


def test_a_second_build_changes_nothing(inputs, built):
    before = {path: path.stat().st_mtime_ns for path in built.path.glob("[!.]*")}
    again = penstock.build(inputs, built.path, tokenizer="bytes", documents="lines", max_bad=10)

    assert again.digest == built.digest
    assert before == {path: path.stat().st_mtime_ns for path in built.path.glob("[!.]*")}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tokenizer": "gpt2"}, r"tokenizer: bytes"),
        ({"eos": False}, r"eos_id: 256 -> None"),
        ({"documents": "paragraphs"}, r"reading\.documents: 'lines' -> 'paragraphs'"),
        ({"field": "body"}, r"reading\.field: 'text' -> 'body'"),
        ({"errors": "replace"}, r"reading\.errors"),
        ({"inputs": "a.txt"}, r"inputs: .*b\.jsonl is left out"),
    ],
)
def test_a_finished_store_is_not_taken_for_another(change, field, inputs, built):
    inputs = inputs / change.pop("inputs", "")

    settings = {"tokenizer": "bytes", "documents": "lines", "max_bad": 10, **change}
    with pytest.raises(StoreError, match=rf"built differently: .*{field}"):
        penstock.build(inputs, built.path, **settings)


def test_other_texts_are_other_inputs(tmp_path):
    penstock.build(Texts(["one"]), tmp_path / "store", tokenizer="bytes")
    penstock.build(Texts(["one"]), tmp_path / "store", tokenizer="bytes")

    with pytest.raises(StoreError, match="inputs"):
        penstock.build(Texts(["two"]), tmp_path / "store", tokenizer="bytes")
    grown = penstock.build(Texts(["two"]), tmp_path / "store", tokenizer="bytes", append=True)
    assert [grown.decode(number) for number in range(2)] == ["one", "two"]


def test_a_changed_input_is_told_by_its_name_and_is_nothing_to_append(tmp_path):
    path, store = tmp_path / "g.txt", tmp_path / "store"
    path.write_text("one\n")
    penstock.build(path, store, tokenizer="bytes", documents="lines")
    path.write_text("one\ntwo\n")

    with pytest.raises(
        StoreError, match=r"differently: inputs: .*g\.txt: 4 bytes -> 8\."
    ) as caught:
        penstock.build(path, store, tokenizer="bytes", documents="lines")
    assert "append" not in str(caught.value)
    assert str(caught.value).endswith(
        "Replace it with `penstock build --overwrite` (in Python, overwrite=True), or choose "
        "another directory."
    )


def test_a_build_that_was_killed_names_what_changed_since(tmp_path):
    path, store = tmp_path / "g.txt", tmp_path / "store"
    path.write_text("one\n")
    with pytest.raises(KeyboardInterrupt):
        penstock.build(path, store, tokenizer="bytes", progress=_stop, documents="lines")
    path.write_text("two\n")

    with pytest.raises(StoreError, match=r"stamps: \S*g\.txt was changed or replaced\. Repeat"):
        penstock.build(path, store, tokenizer="bytes", documents="lines")
    path.write_text("three\n")
    with pytest.raises(StoreError, match=r"settings: inputs: \S*g\.txt: 4 bytes -> 6\. Repeat"):
        penstock.build(path, store, tokenizer="bytes", documents="lines")


def _stop(now):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("options", "offered"),
    [({}, True), ({"eos": False}, False), ({"documents": "file"}, True)],
)
def test_appending_is_offered_where_it_would_be_taken(options, offered, tmp_path):
    old, new, store = tmp_path / "old.txt", tmp_path / "new.txt", tmp_path / "store"
    old.write_text("one\n")
    new.write_text("two\n")
    penstock.build(old, store, tokenizer="bytes", documents="lines")

    with pytest.raises(StoreError, match=r"new\.txt is new") as caught:
        penstock.build(
            [old, new],
            store,
            **{"tokenizer": "bytes", "documents": "lines", "max_bad": 10, **options},
        )
    assert (
        f"add {new} alone, with append=True (--append) of penstock.build" in str(caught.value)
    ) is offered


@pytest.mark.parametrize("is_copied", [False, True])
def test_only_new_files_are_called_new_if_their_common_root_is_another(
    is_copied, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("a/one.txt", "b/two.txt", "b/one.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(f"text of {name}\n")
    penstock.build("a/one.txt", "s", tokenizer="bytes")
    if is_copied:
        Path(".s.stamps.json").unlink()

    for new in (["b/two.txt"], ["b/one.txt", "b/two.txt"]):
        with pytest.raises(StoreError) as caught:
            penstock.build(["a/one.txt", *new], "s", tokenizer="bytes")
        listed = ", ".join(f"inputs: {each} is new" for each in new)
        assert f"built differently: {listed}. Replace" in str(caught.value)
        assert f"add {', '.join(new)} alone" in str(caught.value)
    with pytest.raises(StoreError, match=r"differently: inputs: b/two.txt is new, inputs: one.txt"):
        penstock.build("b/two.txt", "s", tokenizer="bytes")


def test_a_file_is_not_taken_for_a_directory(inputs):
    with pytest.raises(StoreError, match=r"a\.txt is a file, and a directory is needed there\."):
        penstock.build(
            inputs, inputs / "a.txt" / "sub", tokenizer="bytes", documents="lines", max_bad=10
        )
    with pytest.raises(StoreError, match=r"a\.txt is a file, and a directory is needed there\."):
        penstock.build(inputs, inputs / "a.txt", tokenizer="bytes", documents="lines", max_bad=10)


def test_a_directory_of_something_else_is_not_written_into(inputs, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("all of it")

    with pytest.raises(StoreError, match=r"not empty and not a store; it holds thesis\.tex"):
        penstock.build(inputs, tmp_path / "mine", tokenizer="bytes", documents="lines", max_bad=10)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "all of it"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"workers": 0}, StoreError, "workers=0 .* is not a number of threads"),
        ({"max_bad": -1}, StoreError, r"max_bad=-1 \(--max-bad\) must be at least 0"),
        ({"max_bad": float("nan")}, StoreError, r"max_bad=nan \(--max-bad\) must be at least 0"),
        ({"split": "head:0.1"}, StoreError, "split='head:0.1' must be"),
        ({"split": "tail:1"}, StoreError, "split='tail:1' must be"),
        ({"split": "hash:x"}, StoreError, "split='hash:x' must be"),
        ({"bos": True}, TokenizerError, 'which of its tokens begins a document.*bos="TOKEN"'),
        ({"eos": "<eos>"}, TokenizerError, "has no token '<eos>'"),
        ({"documents": ""}, SourceError, "separates nothing"),
        ({"tokenizer": "nope"}, TokenizerError, "is not a known tokenizer"),
    ],
)
def test_a_request_that_cannot_be_meant_leaves_nothing_behind(
    options, error, message, inputs, tmp_path
):
    with pytest.raises(error, match=message):
        penstock.build(
            inputs,
            tmp_path / "store",
            **{"tokenizer": "bytes", "documents": "lines", "max_bad": 10, **options},
        )
    left = tmp_path / "store"
    assert not left.exists() or not list(left.iterdir())


def test_documents_end_and_begin_as_asked_and_never_twice(tmp_path, gpt2):
    parsed = load_tokenizer("gpt2", special_tokens="parse")
    texts = Texts(["one", "<|endoftext|>two<|endoftext|>", "<|endoftext|>"])

    def documents(**options):
        store = penstock.build(
            texts, tmp_path / str(len(list(tmp_path.iterdir()))), **options, documents="lines"
        )
        return [document.tolist() for document in store]

    end, one, two = 50_256, 505, 11_545
    assert documents(tokenizer=parsed, bos=True) == [[end, one, end], [end, two, end], [end]]
    assert documents(tokenizer=parsed) == [[one, end], [end, two, end], [end]]
    assert documents(tokenizer=parsed, eos=False) == [[one], [end, two, end], [end]]
    assert documents(tokenizer=gpt2, eos=False)[0] == [one]
    assert documents(tokenizer=gpt2, eos="one", bos="two")[0] == [11_545, one]
    assert end not in documents(tokenizer=gpt2, eos=False)[2]


def test_documents_without_a_token_are_skipped_and_counted(tmp_path):
    class Vowels:
        vocab_size = 256
        eos_token_id = 0

        def encode(self, text):
            return [ord(letter) for letter in text if letter in "aeiou"]

    for split in (None, "hash:0.5"):
        place = tmp_path / str(split)
        texts = Texts(["xyz", "apple", "brrr", "ice"] * 10)
        store = penstock.build(texts, place, tokenizer=Vowels(), split=split, documents="lines")
        other = penstock.TokenStore(place / "val") if split else []
        counts = store.manifest.contents["builds"][0]["counts"]

        assert len(store) + len(other) == counts["documents"] == 20
        assert counts["skipped"] == 20
        assert {bytes(document.astype(np.uint8)) for document in store} <= {b"ae\0", b"ie\0"}


def test_an_id_that_does_not_fit_stops_the_build(tmp_path):
    class Wide:
        vocab_size = 65_536
        eos_token_id = 0

        def encode(self, text):
            return [65_536]

    with pytest.raises(TokenizerError, match="returned the id 65,536"):
        penstock.build(Texts(["a"]), tmp_path / "store", tokenizer=Wide())
    assert not (tmp_path / "store" / "penstock.json").exists()


@pytest.mark.parametrize(("size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_the_largest_id_of_either_width_survives(size, dtype, tmp_path):
    class Edge:
        vocab_size = size
        eos_token_id = size - 1

        def encode(self, text):
            return [0, 1, size - 2]

    store = penstock.build(Texts(["a", "b"]), tmp_path / "store", tokenizer=Edge())

    assert store.dtype == dtype
    assert store.document(1).tolist() == [0, 1, size - 2, size - 1]
    penstock.verify(store.path)


def test_progress_is_reported_until_everything_is_done(inputs, tmp_path):
    seen = []
    store = penstock.build(
        inputs,
        tmp_path / "store",
        tokenizer="bytes",
        progress=seen.append,
        documents="lines",
        max_bad=10,
    )

    assert seen[-1].num_documents == len(store)
    assert seen[-1].num_tokens == store.num_tokens
    assert seen[-1].num_rejects == 3
    assert seen[-1].done_bytes == seen[-1].total_bytes == seen[-1].text_bytes
    assert [each.num_tokens for each in seen] == sorted(each.num_tokens for each in seen)


class _EndsBeforeStartReturns(threading.Thread):
    """A worker that ends before the build sees it alive, as on a loaded machine."""

    def start(self):
        super().start()
        self.join()


@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_the_last_progress_before_the_commit_reports_all_bytes(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "Thread", _EndsBeforeStartReturns)
    path, store = tmp_path / f"in.{kind}", tmp_path / "store"
    lines = [f"line {number}" for number in range(999)]
    if kind == "text":
        path.write_text("\n".join(lines))
    else:  # seven row groups, which share the bytes of the file with a remainder
        pq.write_table(pa.table({"text": lines}), path, row_group_size=150)
    seen = []

    def record(now):
        seen.append((now.done_bytes, now.total_bytes, (store / "penstock.json").exists()))

    penstock.build(path, store, tokenizer="bytes", documents="lines", progress=record)

    assert seen[-1] == (path.stat().st_size, path.stat().st_size, False)


def test_a_progress_callback_that_raises_stops_the_build_and_it_goes_on_later(
    inputs, tmp_path, built, sums
):
    def interrupt(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        penstock.build(
            inputs,
            tmp_path / "late",
            tokenizer="bytes",
            progress=interrupt,
            documents="lines",
            max_bad=10,
        )
    penstock.build(inputs, tmp_path / "late", tokenizer="bytes", documents="lines", max_bad=10)

    assert sums(tmp_path / "late") == sums(built.path)


def test_a_finished_store_whose_input_was_changed_since_is_not_taken_for_the_new_one(tmp_path):
    text = tmp_path / "a.txt"
    text.write_bytes(b"first words\n")
    penstock.build(text, tmp_path / "store", tokenizer="bytes", documents="lines")
    before = text.stat().st_mtime_ns
    text.write_bytes(b"other words\n")
    os.utime(text, ns=(before, before + 1))

    with pytest.raises(StoreError, match=r"a\.txt was changed or replaced after it was built"):
        penstock.build(text, tmp_path / "store", tokenizer="bytes", documents="lines")
    text.write_bytes(b"first words\n")
    assert len(penstock.build(text, tmp_path / "store", tokenizer="bytes", documents="lines")) == 1


def test_a_build_lets_arrow_use_malloc_and_gives_back_its_own_allocator(tmp_path, monkeypatch):
    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL", raising=False)
    (tmp_path / "a.txt").write_text("one two three\n" * 1_000)
    before, during = pa.default_memory_pool().backend_name, set()

    penstock.build(
        tmp_path / "a.txt",
        tmp_path / "store",
        tokenizer="bytes",
        progress=lambda _: during.add(pa.default_memory_pool().backend_name),
    )

    assert during == {"system"}
    assert pa.default_memory_pool().backend_name == before
