"""A trained tokenizer is exact, reproducible, and as large as asked."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import SourceError
from penstock.options import ReadSettings
from penstock.sources.slices import cut
from penstock.tokenize.gigatoken import GigatokenEngine
from penstock.tokenize.train import train_tokenizer


@pytest.fixture(scope="module")
def languages(data):
    """Texts of many scripts, and the naughty strings."""
    files = sorted((data / "unicode" / "udhr2").iterdir())
    return [*map(str, files), str(data / "unicode" / "blns.txt")]


@pytest.fixture(scope="module")
def own(tmp_path_factory, languages):
    path = tmp_path_factory.mktemp("own") / "tokenizer.json"
    train_tokenizer(languages, path, vocab_size=2_000, reading=ReadSettings(format="text"))
    return ps.load_tokenizer(path)


def encoded(engine, texts):
    ids, offsets = engine.encode(pa.array([text.encode() for text in texts], pa.large_binary()))
    return ids.tolist(), offsets.tolist()


def test_it_loads_with_the_fast_engine_and_its_end_is_found(own):
    assert isinstance(own.engine, GigatokenEngine)
    assert own.vocab_size == 2_000
    assert own.eos_id == own.token_id("<|endoftext|>") == 0


@given(text=st.text())
def test_any_text_comes_back_and_both_engines_agree(own, text):
    assert own.decode(own.encode(text)) == text
    assert encoded(own.engine, [text]) == encoded(own.reference, [text])


def test_the_same_text_gives_the_same_bytes_in_any_order_of_documents(tmp_path):
    lines = [f"the {number} of the many words, thesis {number % 7}" for number in range(500)]
    train_tokenizer(ps.Texts(lines), tmp_path / "a.json", vocab_size=320)
    train_tokenizer(ps.Texts(lines), tmp_path / "b.json", vocab_size=320)
    train_tokenizer(ps.Texts(lines[::-1]), tmp_path / "c.json", vocab_size=320)

    first = (tmp_path / "a.json").read_bytes()
    assert (tmp_path / "b.json").read_bytes() == first
    assert (tmp_path / "c.json").read_bytes() == first


@pytest.fixture
def many_slices(tmp_path, monkeypatch):
    """A file of 300 documents in about 20 slices."""
    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", 1_000)
    texts = [f"the {number} of many {'words ' * (number % 9)}\n\n" for number in range(300)]
    path = tmp_path / "a.txt"
    path.write_text("<|endoftext|>".join(texts))
    return path


def test_the_number_of_threads_changes_nothing(many_slices, tmp_path):
    results = set()
    for threads in (1, 3, 8):
        path = tmp_path / "t.json"
        trained = train_tokenizer(str(many_slices), path, vocab_size=300, threads=threads)
        assert (trained.num_documents, trained.num_bytes) == (
            300,
            many_slices.stat().st_size - 3887,
        )
        results.add(path.read_bytes())

    assert len(results) == 1


@pytest.mark.parametrize("threads", [1, 4])
def test_a_limit_counts_documents_in_order_across_slices(many_slices, tmp_path, threads):
    texts = many_slices.read_text().split("<|endoftext|>")
    num_texts = 1 + next(n for n in range(300) if sum(map(len, texts[: n + 1])) >= 5_000)
    train_tokenizer(ps.Texts(texts[:num_texts]), tmp_path / "some.json", vocab_size=280)

    path = tmp_path / "t.json"
    trained = train_tokenizer(
        str(many_slices), path, vocab_size=280, max_bytes=5_000, threads=threads
    )

    assert trained.num_documents == num_texts
    assert path.read_bytes() == (tmp_path / "some.json").read_bytes()


def test_every_format_trains_the_same_tokenizer(tmp_path):
    lines = [f"line {number} of so many lines" for number in range(200)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    pq.write_table(pa.table({"text": lines}), tmp_path / "d.parquet")
    names = ["a.txt", "b.jsonl", "c.txt.gz", "d.parquet"]
    for name in names:
        train_tokenizer(str(tmp_path / name), tmp_path / f"{name}.json", vocab_size=280)

    assert len({(tmp_path / f"{name}.json").read_bytes() for name in names}) == 1


def test_what_went_in_is_told(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good good"}\nbad\n' * 5)
    calls = []

    trained = train_tokenizer(
        str(path),
        tmp_path / "t.json",
        vocab_size=260,
        max_bad=5,
        progress=lambda *call: calls.append(call),
    )

    assert (trained.num_documents, trained.num_bytes, trained.num_rejects) == (5, 45, 5)
    assert calls == [
        ("reading", 45, path.stat().st_size),
        *(("learning", size, 260) for size in (258, 259, 260)),
    ]


def test_too_many_rejects_are_refused_and_shown(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good good"}\nbad\n' * 20)

    with pytest.raises(
        SourceError, match=r"20 of 40 records were rejected.*\n.*offset 22: bad_json"
    ):
        train_tokenizer(str(tmp_path / "a.jsonl"), tmp_path / "t.json", vocab_size=260)
    trained = train_tokenizer(
        str(tmp_path / "a.jsonl"), tmp_path / "t.json", vocab_size=260, max_bad=20
    )
    assert trained.num_rejects == 20


def test_the_file_is_replaced_in_full_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "t.json"
    train_tokenizer(ps.Texts(["abab abab"]), path, vocab_size=258)
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space")))

    with pytest.raises(OSError, match="No space"):
        train_tokenizer(ps.Texts(["cdcd cdcd"]), path, vocab_size=258, overwrite=True)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == ["t.json"]
