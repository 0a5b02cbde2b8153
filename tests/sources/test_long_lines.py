"""A long line of JSON is parsed in pieces: in little memory, with the result of other parsers."""

import json
import random

import pytest

import penstock
from penstock.sources.long_lines import without_long_strings

WORDS = ["a", " and", "\n", '"', "\\", "\\u0041", "é", "你好。", "😀", "\u2028", "\x1f", "/", "}{"]
LONG = 70_000

# The memory that reading or building one line takes at its peak.
PEAK = """
import json, sys
from pathlib import Path
import penstock, penstock.store.build
from penstock.sources.listing import list_files
from penstock.sources.read import read_slice
from penstock.options import ReadSettings
from penstock.sources.slices import cut

def memory(kind):
    status = Path("/proc/self/status").read_text()
    return int(status.partition(kind)[2].split()[0]) * 1024

def read(path):
    reading = ReadSettings(documents="lines")
    files = list_files(path, reading)
    for piece in cut(files, reading):
        for batch in read_slice(files, piece, reading):
            del batch

place, kind, words, size = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
text = words * (size // len(words.encode()))
record = json.dumps({"id": 1, "text": text}, ensure_ascii=False) if kind == "jsonl" else text
path, short = place / f"a.{kind}", place / f"short.{kind}"
path.write_text(record + "\\n")
short.write_text('{"text": "a"}\\n')
del text, record
is_built = sys.argv[5] == "build"
read(short)  # what every process takes once
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS:")
if is_built:
    penstock.build(path, place / "store", tokenizer="gpt2", documents="lines", workers=1)
else:
    read(path)
print((memory("VmHWM:") - before) / size)
"""
KINDS = [("jsonl", 'It was\n"the best" of times. '), ("jsonl", "你好世界。这是一个测试。")]


def peak(python, *arguments):
    return float(python(PEAK, *arguments, timeout=600).stdout)


@pytest.mark.parametrize(("kind", "words"), KINDS)
def test_a_long_line_is_read_in_at_most_three_times_its_size(tmp_path, python, kind, words):
    assert peak(python, tmp_path, kind, words, 64_000_000, "read") < 2.6


def test_a_long_text_without_spaces_is_tokenized_in_blocks(tmp_path, python):
    """About 200 MB of these are the tokenizer; the whole text at once took 10 times its size."""
    assert peak(python, tmp_path, "jsonl", KINDS[1][1], 64_000_000, "build") < 7.5


@pytest.mark.torture
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "words"), [*KINDS, ("txt", "It was the best of times. ")])
def test_a_line_of_400_megabytes_takes_at_most_three_times_its_size(
    tmp_path, python, figure, kind, words
):
    times = peak(python, tmp_path, kind, words, 400_000_000, "build")

    figure(f"a line of 400 MB ({kind}, {words[:6]!r}…) read in {times:.2f} times its size")
    assert times < 3


@pytest.mark.parametrize("ensure_ascii", [True, False])
@pytest.mark.parametrize("piece_bytes", [300, 5_000])
def test_strings_that_are_cut_anywhere_are_the_strings_of_the_line(ensure_ascii, piece_bytes):
    """Pieces of some hundred bytes are cut near every kind of escape."""
    rng = random.Random(8)
    for _ in range(4):
        texts = ["".join(rng.choices(WORDS, k=LONG)) for _ in range(2)]
        record = {"a": [texts[0], "short", "long"], "text": texts[1], "n": 1.5}
        line = json.dumps(record, ensure_ascii=ensure_ascii).encode()
        short, strings = without_long_strings(line, piece_bytes=piece_bytes)
        found = json.loads(short)

        assert len(short) < 200
        assert [found["a"][0].encode(), found["text"].encode()] == list(strings)
        assert [bytes(each) for each in strings.values()] == [text.encode() for text in texts]
        assert found["a"][1:] == ["short", "long"]


def test_strings_without_a_place_to_cut_are_left_to_other_parsers():
    with pytest.raises(ValueError, match="no place"):
        without_long_strings(b'{"text": "' + rb"\n" * LONG + b'"}', piece_bytes=100)


@pytest.fixture
def build_line(tmp_path):
    """Build a store of a line that is longer than two blocks, between two short ones."""

    def build_line(line, **settings):
        assert len(line) > 8 << 20
        path = tmp_path / "a.jsonl"
        path.write_bytes(b'{"text": "first"}\n' + line + b'\n{"text": "last"}\n')
        return penstock.build(path, tmp_path / "store", tokenizer="bytes", max_bad=10, **settings)

    return build_line


FILLER = b"It was the best of times, \\ud83d\\ude00 it was. " * 200_000


@pytest.mark.parametrize("before", [b'{"text": "', b' {"n": [1, {}], "other": "long-0", "text": "'])
def test_a_long_line_is_the_document_of_its_text(build_line, before):
    store = build_line(before + FILLER + b'", "more": {"a": null}}\r')

    assert len(store) == 3
    assert store.decode(1) == json.loads(b'"' + FILLER + b'"')


REFUSED = {
    "bad_json": [b'{"text": "' + FILLER + b"}", b'{"text": "' + FILLER + b'\t"}'],
    "lone_surrogate": [b'{"text": "' + FILLER + b'\\ud800"}'],
    "missing_field": [b'{"texts": "' + FILLER + b'"}'],
    "not_a_string": [b'{"text": ["' + FILLER + b'"]}'],
    "duplicate_field": [b'{"text": "' + FILLER + b'", "text": "b"}'],
    "invalid_utf8": [b'{"text": "' + FILLER + b'\xff"}'],
}
CASES = [(reason, line) for reason, lines in REFUSED.items() for line in lines]
CASES += [("bad_json", b'{"text": "' + FILLER + b'", "n": NaN}')]


@pytest.mark.parametrize(("reason", "line"), CASES, ids=[reason for reason, _ in CASES])
def test_a_long_line_is_rejected_for_the_reason_of_a_short_one(build_line, reason, line):
    store = build_line(line)

    assert [store.decode(number) for number in range(len(store))] == ["first", "last"]
    assert store.manifest.contents["builds"][0]["rejects"]["reasons"] == {reason: 1}


def test_a_long_string_in_another_field_leaves_the_text_as_it_is(build_line):
    store = build_line(b'{"other": "' + FILLER + b'", "text": "long-0"}')

    assert store.decode(1) == "long-0"
