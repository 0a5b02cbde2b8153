"""`penstock check`: the six lines of the seed, with figures, and an exit code."""

import gzip
import json
import shutil
from importlib import import_module
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

import penstock as ps
from penstock.check import CHECKS, CheckSettings, check
from penstock.options import ReadSettings
from penstock.store.journal import Journal

# Not `import penstock.check.check as module`: that is the function.
module = import_module("penstock.check.check")

LINES = [
    "✅ File Existence PASSED",
    "✅ Single Dataset PASSED",
    "✅ DataLoader PASSED",
    "✅ Tokenization Quality PASSED",
    "✅ Performance PASSED (>100K tokens/sec)",
    "✅ Preprocessing PASSED",
]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(module, "_MEASURED_SECONDS", 0.1)


@pytest.fixture
def pair(tmp_path):
    """A training and a validation file."""
    line = "The quick brown fox jumps over the lazy dog, number {}.\n"
    for name, count in (("train.txt", 4_000), ("val.txt", 500)):
        (tmp_path / name).write_text("".join(line.format(number) for number in range(count)))
    return "train.txt", "val.txt"


def marked(shown):
    return [line for line in shown.splitlines() if line[0] in "✅❌"]


def test_help_is_of_eighty_columns(invoke):
    assert max(map(len, invoke("check", "--help").stdout.splitlines())) <= 80


def test_two_good_files_give_the_six_lines_with_figures(invoke, pair):
    shown = invoke("check", *pair, "--documents", "lines").stdout
    lines = marked(shown)

    assert [line.partition(":")[0] for line in lines] == LINES
    assert "2 files" in lines[0]
    assert "4,500 documents" in lines[1]
    assert "(32, 1024) int64, labels shifted by the loader" in lines[2]
    assert "bytes a token" in lines[3]
    assert "tokens/s loaded" in lines[4]
    assert "bytes of disk" in lines[5]
    assert "6 of 6 passed (" in shown
    assert "number 0." in shown


def test_json_is_one_object(run_json, pair):
    answer = run_json("check", *pair, "--tokenizer", "bytes")

    assert answer["passed"]
    assert [each["name"] for each in answer["checks"]] == list(CHECKS)
    assert [each["num_documents"] for each in answer["files"]] == [1, 1]  # as build reads them
    assert all(each["whole"] for each in answer["files"])


def test_without_arguments_it_looks_for_files_of_the_usual_names(invoke, pair, tmp_path):
    shown = invoke("check", code=1).stdout
    assert marked(shown)[0].startswith(
        "❌ File Existence FAILED: training_data/owt_train.txt does not exist (working directory: "
    )
    assert "❔ Single Dataset: not tried, because File Existence failed" in shown
    assert "next: penstock fetch openwebtext --output training_data" in shown

    (tmp_path / "training_data").mkdir()
    shutil.copy("train.txt", "training_data/owt_train.txt")
    shutil.copy("val.txt", "training_data/owt_valid.txt")
    assert len(marked(invoke("check").stdout)) == 6


def test_exit_code_one_as_json_too(run_json):
    answer = run_json("check", "nowhere.txt", code=1)

    assert not answer["passed"]
    assert not any(each["passed"] for each in answer["checks"])


@pytest.mark.parametrize(
    ("contents", "number", "words"),
    [
        (b"", 0, "is empty"),
        (b"\n \n\t\n", 1, "holds no document"),
        (b"good\n\xff\xfebad\n", 1, "is not UTF-8 at byte 5; errors="),
        ("one\ntwo\n".encode("utf-16"), 1, "begins with the byte order mark of UTF-16"),
        ("café\n".encode("latin-1"), 1, "is not UTF-8 at byte 3"),
    ],
)
def test_what_is_wrong_with_a_file_is_the_reason(invoke, tmp_path, contents, number, words):
    (tmp_path / "bad.txt").write_bytes(contents)
    line = marked(invoke("check", "bad.txt", "--tokenizer", "bytes", code=1).stdout)[number]

    assert line.startswith(f"❌ {CHECKS[number]} FAILED: ")
    assert words in line


def test_a_bad_line_is_counted_among_the_lines(invoke, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"good\n\xff\xfebad\n")
    options = ["--tokenizer", "bytes", "--documents", "lines"]
    shown = invoke("check", "bad.txt", *options, code=1).stdout

    assert "1 of 2 records are bad; the first, invalid_utf8" in shown


def test_a_missing_field_says_how_to_name_another(invoke, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "one"}\n')
    shown = invoke("check", "a.jsonl", "--tokenizer", "bytes", code=1).stdout

    assert "name the field that holds the text with field= (--field)" in " ".join(shown.split())


def test_a_directory_without_files_is_refused(invoke, tmp_path):
    assert "is a directory without files" in invoke("check", ".", code=1).stdout


def test_bad_bytes_can_be_replaced(invoke, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"good\n\xffbad\n")

    invoke("check", "bad.txt", "--tokenizer", "bytes", "--errors", "replace")


def test_documents_are_shown_inert(invoke, tmp_path):
    (tmp_path / "evil.txt").write_text("\x1b[31mred \u202e reversed\n" * 50)
    shown = invoke("check", "evil.txt", "--tokenizer", "bytes").stdout

    assert "\x1b" not in shown
    assert r"\x1b[31mred \u202e reversed" in shown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a story\n<|endoftext|>\nanother\n", "--documents '<|endoftext|>'"),
        ('{"text": "one"}\n{"text": "two"}\n', "--format jsonl"),
        ("日本語の文章です。これはテストです。漢字が多い。\n" * 9, "bytes a token are few"),
    ],
)
def test_hints_name_the_option(invoke, tmp_path, text, words):
    (tmp_path / "a.txt").write_text(text * 20)

    assert words in " ".join(invoke("check", "a.txt", "--documents", "lines").stdout.split())


def test_a_separator_is_used(run_json, tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo<|endoftext|>three\n" * 5)
    answer = run_json("check", "a.txt", "--documents", "<|endoftext|>", "--tokenizer", "bytes")

    assert answer["files"][0]["num_documents"] == 6
    assert not answer["files"][0]["hints"]


def test_a_file_may_be_one_document(run_json, tmp_path):
    (tmp_path / "a.txt").write_text("é" * 2_000)
    answer = run_json("check", "a.txt", "--documents", "file", "--tokenizer", "bytes")
    assert answer["files"][0]["num_documents"] == 1

    options = ("--documents", "file", "--tokenizer", "bytes", "--sample", "0.001")
    part = run_json("check", "a.txt", *options)
    assert not part["files"][0]["whole"]
    assert 996 <= part["files"][0]["sample_bytes"] <= 1_000
    (tmp_path / "a.txt").write_bytes(b"\xff" * 50)
    assert not run_json("check", "a.txt", *options, code=1)["passed"]


def test_other_formats_are_read_too(run_json, tmp_path):
    texts = [f"document number {number}" for number in range(200)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pyarrow.parquet.write_table(pa.table({"text": texts}), tmp_path / "b.parquet")
    answer = run_json("check", "a.jsonl.gz", "b.parquet", "--tokenizer", "bytes")

    assert answer["passed"]
    assert [each["num_documents"] for each in answer["files"]] == [200, 200]
    assert [each["format"] for each in answer["files"]] == ["jsonl", "parquet"]


def test_rejected_json_is_reported(invoke, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\nnot json\n')

    assert "bad_json" in invoke("check", "a.jsonl", "--tokenizer", "bytes", code=1).stdout


def test_of_a_big_file_the_beginning_the_middle_and_the_end_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "big.txt").open("w") as stream:
        for number in range(400_000):
            stream.write(f"line {number:09d} of a long file that is not read in full\n")
    reading = ReadSettings(documents="lines")
    report = check(
        ["big.txt"], CheckSettings(reading=reading, tokenizer="bytes", sample_bytes=300_000)
    )
    file = report.files[0]

    assert report.passed
    assert not file.whole
    assert file.sample_bytes <= 3 * (4 << 20) < file.num_bytes  # a block of each of three parts
    numbers = sorted(int(text.split()[1]) for text in file.texts)
    assert numbers[0] == 0
    assert any(abs(number - 133_333) < 1_000 for number in numbers)
    assert any(abs(number - 266_666) < 1_000 for number in numbers)


def test_bad_bytes_in_the_middle_of_a_big_file_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [b"a line of text that is fine\n"] * 600_000
    lines[300_000] = b"caf\xe9\n"
    (tmp_path / "big.txt").write_bytes(b"".join(lines))
    for documents, words in (("lines", "invalid_utf8"), ("auto", "is not UTF-8 at byte 8,400,003")):
        reading = ReadSettings(documents=documents)
        trial = CheckSettings(reading=reading, tokenizer="bytes", sample_bytes=9_000_000)
        assert words in check(["big.txt"], trial).findings[1].message


def test_a_disk_that_is_too_small_fails(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Usage:
        free = 10_000

    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: Usage)
    report = check(pair, CheckSettings(tokenizer="bytes", directory=tmp_path / "not" / "there"))

    assert [finding.passed for finding in report.findings] == [True] * 5 + [False]
    assert report.findings[5].message.endswith("10,000 are free")


@pytest.fixture
def tried(run_json, tmp_path):
    """Runs `penstock check -o DIRECTORY`; returns the last finding."""
    (tmp_path / "a.txt").write_text("some words\n" * 1_000)

    def tried(directory, *, code):
        words = ("check", "a.txt", "--tokenizer", "bytes", "-o", directory)
        return run_json(*words, code=code)["checks"][-1]["message"]

    return tried


def test_check_o_passes_a_directory_that_a_build_can_use(tried, tmp_path):
    (tmp_path / "empty").mkdir()
    ps.build(tmp_path / "a.txt", tmp_path / "same", tokenizer="bytes")
    ps.build(tmp_path / "a.txt", tmp_path / "split", tokenizer="bytes", split="tail:0.1")
    before = sorted(tmp_path.rglob("*"))

    for name in ("new/store", "empty", "same", "split"):
        tried(name, code=0)
    assert sorted(tmp_path.rglob("*")) == before


def test_check_o_tries_the_directory(tried, tmp_path):
    (tmp_path / "b.txt").write_text("other\n" * 10)
    ps.build(tmp_path / "b.txt", tmp_path / "finished", tokenizer="bytes", documents="lines")
    ps.build(tmp_path / "b.txt", tmp_path / "split", tokenizer="bytes", split="tail:0.1")
    (tmp_path / "begun").mkdir()
    begun = {"inputs": [{"name": "b.txt", "bytes": 60}]}
    Journal(tmp_path / "begun").record(begun, 0)

    for directory, words in {
        "finished": "finished is a finished store that was built differently: inputs: a.txt is new",
        "split": "split is a finished store that was built differently: inputs: a.txt is new",
        "begun": "begun is an unfinished build of other files",
        "b.txt/store": "b.txt is a file, and a store is a directory",
        ".": ". is not empty and not a store; it holds .finished.stamps.json, ",
    }.items():
        assert words in tried(directory, code=1)


@pytest.mark.parametrize("words", [["b.txt"], ["a.txt", "c"], ["a.txt", "--tokenizer=bytes"]])
def test_check_o_refuses_a_finished_store_as_a_build_does(words, invoke, run_json, tmp_path):
    (tmp_path / "c").mkdir()
    for number in range(20):  # more than a check reads of a directory
        (tmp_path / "c" / f"{number}.txt").write_text("some words\n" * 10)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("some words\n" * 100)
    unchecked = ("--no-eos", "--special-tokens=parse")  # options that only a build has
    invoke("build", "a.txt", "-o", "s", *unchecked)
    invoke("build", "c", "-o", "d", "--tokenizer=bytes")

    run_json("check", "c", "-o", "d", "--tokenizer=bytes")
    run_json("check", "a.txt", "-o", "s")
    message = run_json("check", *words, "-o", "s", code=1)["checks"][-1]["message"]
    only = unchecked[: 1 if "--tokenizer=bytes" in words else 2]  # bytes has no special tokens
    refused = invoke("build", *words, "-o", "s", *only, code=1).stderr
    assert "s is a finished store that was built differently: " in message
    assert message in " ".join(refused.split())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc here")
def test_check_o_finds_that_a_directory_is_not_writable(tried):
    """Nobody can write in /proc, not even root."""
    message = tried("/proc/stores/a", code=1)

    assert message.startswith("/proc cannot be written to (")
    assert "so no store can be built in /proc/stores/a; choose another" in message


def test_a_loader_that_is_too_slow_fails(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "MIN_TOKENS_PER_SECOND", 10**15)
    report = check(pair, CheckSettings(tokenizer="bytes"))

    assert "training needs at least" in report.findings[4].message


class Lossy:
    """A tokenizer that forgets case, as old ones did."""

    vocab_size = 256
    eos_token_id = 0

    def encode(self, text):
        return list(text.lower().encode())

    def decode(self, ids):
        return bytes(ids).decode()


def test_a_tokenizer_that_loses_text_fails_the_round_trip(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = check(pair, CheckSettings(tokenizer=Lossy()))

    assert not report.findings[3].passed
    assert "is not the same after encoding and decoding" in report.findings[3].message


def test_no_file_at_all_is_a_finding():
    assert check([]).findings[0].message == "no file was named"


def test_a_tiny_file_passes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.txt").write_text("hello world\n")
    report = check(["tiny.txt"], CheckSettings(tokenizer="bytes", reading=ReadSettings()))

    assert "rows cut to 12 tokens" in report.findings[2].message
    assert [finding.passed for finding in report.findings[:4]] == [True] * 4
