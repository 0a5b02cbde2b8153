"""Windows line ends: kept by default, turned into line feeds on request, reported by check."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.check import CheckSettings, check
from penstock.errors import SourceError
from penstock.sources.settings import ReadSettings


@given(
    data=st.lists(st.sampled_from(["a", " ", "\r", "\n", "\r\n", "é", "<|endoftext|>"])).map(
        "".join
    ),
    documents=st.sampled_from(["lines", "paragraphs", "file", "<|endoftext|>", "auto"]),
    block=st.sampled_from([1, 7, 4 << 20]),
    slice_bytes=st.integers(1, 60),
)
def test_crlf_is_normalised_on_request_as_if_the_file_had_line_feeds(
    data, documents, block, slice_bytes, read, scratch
):
    (scratch / "crlf.txt").write_bytes(data.encode())
    (scratch / "lf.txt").write_bytes(data.replace("\r\n", "\n").encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.sources.read.BLOCK_BYTES", block)
        size = 1 << 20 if documents == "auto" else slice_bytes  # without a tokenizer, no pieces
        found = read(scratch / "crlf.txt", documents=documents, newlines="lf", slice_bytes=size)

    assert found.texts == read(scratch / "lf.txt", documents=documents).texts
    assert found.tally.total_bytes == len(data.encode())
    # Offsets are those of the file that was read.
    for text, (_, place) in zip(found.texts, found.places, strict=True):
        assert data.encode()[place:].replace(b"\r\n", b"\n").startswith(text.rstrip(b"\r"))


def test_crlf_is_kept_by_default_and_the_store_says_if_it_was_not(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\r\n")
    kept = penstock.build(tmp_path / "a.txt", tmp_path / "kept", tokenizer="bytes")
    made = penstock.build(tmp_path / "a.txt", tmp_path / "lf", tokenizer="bytes", newlines="lf")

    assert (kept.decode(0), made.decode(0)) == ("one\r\ntwo\rthree\r\n", "one\ntwo\rthree\n")
    reading = [store.manifest.contents["builds"][0]["reading"] for store in (kept, made)]
    assert "newlines" not in reading[0]
    assert reading[1]["newlines"] == "lf"


def test_crlf_in_the_texts_of_records_is_normalised_too(read, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json.dumps({"text": "a\r\nb"}).encode() + b"\r\n")
    (tmp_path / "b.csv").write_bytes(b'text\r\n"a\r\nb"\r\nc\r\n')

    assert read(tmp_path / "a.jsonl", newlines="lf").texts == [b"a\nb"]
    assert read(tmp_path / "b.csv", newlines="lf").texts == [b"a\nb", b"c"]
    assert read(tmp_path / "b.csv").texts == [b"a\r\nb", b"c"]


def test_a_long_document_with_crlf_has_the_ids_of_one_with_line_feeds(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "penstock.sources.slices.cut.__kwdefaults__",
        dict(penstock.sources.slices.cut.__kwdefaults__, slice_bytes=20_000),
    )
    lines = "".join(f"line {number} of a text\n\n" * 2 for number in range(3_000))
    (tmp_path / "a.txt").write_bytes(lines.replace("\n", "\r\n").encode())
    (tmp_path / "b.txt").write_bytes(lines.encode())
    one = penstock.build(tmp_path / "a.txt", tmp_path / "one", newlines="lf")
    two = penstock.build(tmp_path / "b.txt", tmp_path / "two")

    assert len(one) > 3  # pieces
    assert one.num_tokens == two.num_tokens
    assert "".join(one.decode(number) for number in range(len(one))) == lines


@pytest.mark.parametrize(("documents", "number"), [("lines", "2 of the first 2"), ("file", "1 of")])
def test_check_reports_crlf_and_the_option_that_normalises_it(documents, number, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    reading = ReadSettings(documents=documents)
    (file,) = check([tmp_path / "a.txt"], CheckSettings(reading=reading, tokenizer="bytes")).files

    (hint,) = [each for each in file.hints if "CRLF" in each]
    assert hint.startswith(number)
    assert "--newlines lf" in hint
    reading = ReadSettings(documents=documents, newlines="lf")
    (file,) = check([tmp_path / "a.txt"], CheckSettings(reading=reading, tokenizer="bytes")).files
    assert not [each for each in file.hints if "CRLF" in each]


def test_another_word_for_newlines_is_refused():
    with pytest.raises(SourceError, match=r'newlines=.unix. is not "keep" or "lf"'):
        ReadSettings(newlines="unix")
