"""A build that stores nothing, or rejects more than allowed, fails; its advice can be followed."""

import gzip
import json

import pytest
import zygote

import penstock
from penstock.errors import SourceError, StoreError
from penstock.sources.settings import Texts

pytestmark = pytest.mark.usefixtures("small_slices")


def bad_lines(path, good, bad):
    path.write_bytes(b"".join([b"good line\n"] * good + [b"bad \xff line\n"] * bad))
    return path


def build(inputs, store, **options):
    return penstock.build(inputs, store, **{"tokenizer": "bytes", "documents": "lines", **options})


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("a.txt", b"", r"1 file \(\S+a\.txt\), 0 bytes, 0 blank records"),
        (
            "a.txt.gz",
            gzip.compress(b"", mtime=0),
            r"1 file \(\S+a\.txt\.gz\), 20 bytes, 0 blank records",
        ),
        ("a.txt", b"\n \n\t\n", r"1 file \(\S+a\.txt\), 5 bytes, 3 blank records"),
    ],
    ids=["empty", "empty gz", "blank"],
)
def test_nothing_built_is_a_failure(name, data, found, tmp_path):
    (tmp_path / name).write_bytes(data)

    with pytest.raises(SourceError, match=rf"hold no document.*{found}\. Name files that"):
        build(tmp_path / name, tmp_path / "store")
    assert not (tmp_path / "store" / "penstock.json").exists()
    with pytest.raises(StoreError, match=r"holds a build that failed\. Change what"):
        penstock.TokenStore(tmp_path / "store")


def test_nothing_built_is_a_failure_on_the_command_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\n\n")
    (tmp_path / "b.jsonl").write_text('{"body": "one"}\n' * 3)
    command = ["-m", "penstock", "build", "-o", "store", "--tokenizer", "bytes"]

    def run(*arguments):
        return zygote.run(
            [*command, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    for name, says in (("a.txt", "hold no document"), ("b.jsonl", "all 3 records were rejected")):
        done = run(name)
        assert (done.returncode, says in done.stderr) == (1, True), done.stderr
    # The advice of the last message, in the same directory.
    assert "--field" in done.stderr
    assert run("b.jsonl", "--field", "body").returncode == 0
    assert len(penstock.verify(tmp_path / "store")) == 3


def test_an_append_of_nothing_is_a_failure_and_the_store_stays(inputs, built, tmp_path, sums):
    (tmp_path / "blank.txt").write_bytes(b"\n\n")
    before = sums(built.path)

    with pytest.raises(SourceError, match="hold no document"):
        build(tmp_path / "blank.txt", built.path, append=True)
    assert build(inputs, built.path, max_bad=10).digest == built.digest
    assert sums(built.path) == before
    assert not list(built.path.glob(".building*"))


def test_ten_rejected_records_are_allowed_where_at_least_1000_were_read(tmp_path):
    for good, bad, allowed in (
        (989, 10, 0),
        (990, 10, 10),
        (1_000, 11, 10),
        (20_000, 19, 20),
        (5, 1, 0),
    ):
        path, store = bad_lines(tmp_path / "a.txt", good, bad), tmp_path / f"{good}-{bad}"
        if bad <= allowed:
            assert len(build(path, store)) == good
        else:
            says = rf"{bad:,} of {good + bad:,} records were rejected, more than the {allowed} that"
            with pytest.raises(SourceError, match=says):
                build(path, store)


def test_few_records_at_the_beginning_do_not_make_a_large_input_small(tmp_path):
    """The first slice has 30 records, one of them bad; whether that is allowed is known later."""
    path = tmp_path / "a.txt"
    long = b"x" * 400 + b"\n"
    path.write_bytes(b"bad \xff line\n" + long * 60 + b"good line\n" * 2_000)

    assert len(build(path, tmp_path / "store", workers=1)) == 2_060


def test_a_limit_of_0_or_from_1_on_is_a_number_of_records(tmp_path):
    path = bad_lines(tmp_path / "a.txt", 2_000, 3)

    assert len(build(path, tmp_path / "1", max_bad=3)) == 2_000
    for limit in (2, 0):
        with pytest.raises(SourceError, match=rf"than the {limit} that max_bad={limit} allows"):
            build(path, tmp_path / str(limit), max_bad=limit)


@pytest.mark.parametrize("threads", [1, 8])
def test_bad_records_are_judged_in_the_order_of_the_input(threads, tmp_path):
    """Eleven among the first hundred are too many, though one in a hundred of all would not be."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"bad \xff line\n" * 11 + b"good line\n" * 20_000)

    with pytest.raises(SourceError, match=r"a\.txt, offset 0: invalid_utf8"):
        build(path, tmp_path / "store", workers=threads)
    with pytest.raises(StoreError, match="holds a build that failed"):
        penstock.TokenStore(tmp_path / "store")


@pytest.mark.parametrize(
    "change", [{"max_bad": 12}, {"errors": "replace"}, {"field": "body", "max_bad": 0.5}]
)
def test_advice_after_a_failed_build_works_when_followed(change, tmp_path, sums):
    path = bad_lines(tmp_path / "a.txt", 200, 12)
    with pytest.raises(SourceError, match=r"(?s)12 of 212.* or raise max_bad= \(--max-bad\)"):
        build(path, tmp_path / "store")
    build(path, tmp_path / "store", **change)
    build(path, tmp_path / "clean", **change)

    assert sums(tmp_path / "store") == sums(tmp_path / "clean")


def test_the_input_of_a_failed_build_can_be_repaired(tmp_path, sums):
    path = bad_lines(tmp_path / "a.txt", 200, 12)
    with pytest.raises(SourceError, match="Repair the input"):
        build(path, tmp_path / "store")
    path.write_bytes(path.read_bytes().replace(b"\xff", b"?"))

    assert len(build(path, tmp_path / "store")) == 212


def test_another_split_may_follow_one_that_left_a_side_empty(tmp_path):
    texts = Texts(["one"])
    with pytest.raises(StoreError, match=r"leaves .* empty"):
        build(texts, tmp_path / "store", split="hash:0.5")

    assert len(build(texts, tmp_path / "store")) == 1
    assert not (tmp_path / "store" / "train").exists()


def test_a_killed_build_is_not_taken_for_a_failed_one(tmp_path):
    def stop(progress):
        raise KeyboardInterrupt

    path = bad_lines(tmp_path / "a.txt", 2_000, 0)
    with pytest.raises(KeyboardInterrupt):
        build(path, tmp_path / "store", progress=stop)
    with pytest.raises(
        StoreError, match=r"unfinished build with other.*build --overwrite` \(in Py"
    ):
        build(path, tmp_path / "store", eos=False)


def test_a_stream_may_follow_a_failed_build(tmp_path):
    path = bad_lines(tmp_path / "a.txt", 200, 12)
    with pytest.raises(SourceError, match="rejected"):
        build(path, tmp_path / "store")

    settings = {"tokenizer": "bytes", "documents": "lines", "errors": "replace"}
    with penstock.stream(path, tmp_path / "store", **settings) as streamed:
        assert sum(1 for _ in streamed) == 212


def test_the_limit_of_few_records_is_that_of_their_number(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x"}\n' * 500)

    with pytest.raises(SourceError, match=r"(\d+) of \1 .* more than the 0 that max_bad=0.001"):
        build(path, tmp_path / "s")


@pytest.mark.parametrize("good", [0, 20])
def test_records_that_look_like_conversations_are_advised_to_be_built_as_chats(tmp_path, good):
    record = {"instruction": "Add 1 and 2.", "input": "", "output": "3"}
    lines = [json.dumps(record)] * 30 + [json.dumps({"text": "words"})] * good
    (tmp_path / "a.jsonl").write_text("\n".join(lines))

    with pytest.raises(SourceError, match=r"look like conversations: .* chat=\"chatml\"\. Repair"):
        penstock.build(tmp_path / "a.jsonl", tmp_path / "store", tokenizer="bytes")


def test_advice_about_rejected_records_reads_as_a_sentence(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')

    with pytest.raises(SourceError, match=r'it has "text"\. Repair the input.* single lines\.$'):
        penstock.build(tmp_path / "a.jsonl", tmp_path / "store", tokenizer="bytes", field="body")
