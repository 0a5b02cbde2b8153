"""`penstock info`: the table and the object."""

import json
import re
import subprocess
import time
from dataclasses import asdict
from itertools import pairwise

import made_store
import pytest
import zygote

import penstock as ps
from penstock.cli.info import histogram_lines
from penstock.errors import StoreError
from penstock.store.journal import Journal
from penstock.store.summary import Bin, summarize


def rows(shown):
    """The table as a dictionary of its one-line rows."""
    found = (
        re.fullmatch(r"  ([a-z/]+(?: [a-z]+)?)  +(.*?) *", line) for line in shown.splitlines()
    )
    return {match[1]: match[2] for match in found if match}


def test_hostile_names_in_a_manifest_are_escaped(invoke, corpus):
    store = ps.build(corpus.name, "store", tokenizer="bytes", documents="lines")
    contents = {key: value for key, value in store.manifest.contents.items() if key != "digest"}
    hostile, build = "\x1b]0;title\x07\u202e\n", contents["builds"][0]
    contents["tokenizer"]["name"] = build["inputs"][0]["name"] = hostile
    build["rejects"]["reasons"] = build["skipped_files"] = {hostile: 2}
    made_store.write(store.path, contents, list(store.manifest.parts))

    shown = invoke("info", "store").stdout
    assert r"\x1b]0;title\x07\u202e\n" in shown
    assert not {"\x1b", "\x07", "\u202e"} & {*shown, *invoke("info", "store", "--json").stdout}


def test_the_table_has_all_that_is_known(invoke, corpus):
    store = ps.build(corpus.name, "store", tokenizer="bytes", documents="lines")

    table = rows(invoke("info", "store").stdout)

    assert table["documents"] == "4"
    assert table["tokens"] == "75"
    assert table["bytes/token"] == "0.95"
    assert table["lengths"].split() == ["min", "p1", "p10", "median", "mean", "p90", "p99", "max"]
    assert table["tokenizer"].startswith("bytes, 257 tokens, digest ")
    assert table["edges"] == "eos 256, bos none"
    assert table["on disk"].endswith("uint16, 1 part")
    assert table["inputs"] == "corpus.txt, 76 bytes"
    assert table["skipped"] == "1 blank record"
    assert table["rejected"] == "none"
    assert store.digest.startswith(table["digest"])


def test_the_table_fits_eighty_columns(invoke, tmp_path):
    for number in range(5):
        (tmp_path / f"{number}-{'long' * 20}.txt").write_text("a\nb c\n" + "d " * 10**number)
    ps.build(str(tmp_path / "*.txt"), "store", tokenizer="bytes", documents="lines")

    shown = invoke("info", "store").stdout

    assert max(map(len, shown.splitlines())) <= 80
    assert "and 3 more" in shown


def test_json_is_the_summary(run_json, corpus):
    store = ps.build(str(corpus), "store", tokenizer="bytes", documents="lines")

    assert run_json("info", "store") == json.loads(json.dumps(asdict(summarize(store))))


def test_rejects_and_repaired_documents_are_shown(invoke, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\n\xff bad\n\xfe bad\n")
    ps.build("a.txt", "strict", tokenizer="bytes", documents="lines", max_bad=2)
    ps.build("a.txt", "mended", tokenizer="bytes", errors="replace", documents="lines")

    assert rows(invoke("info", "strict").stdout)["rejected"] == "2: invalid_utf8 2"
    assert rows(invoke("info", "mended").stdout)["repaired"].startswith("2 documents")


def test_both_sides_of_a_split_are_shown(invoke, run_json, corpus):
    ps.build(str(corpus), "store", tokenizer="bytes", split="tail:0.4", documents="lines")

    assert invoke("info", "store").stdout.count("tail:0.4, this is ") == 2
    assert run_json("info", "store")["val"]["side"] == "val"
    assert run_json("info", "store/train")["side"] == "train"


def test_an_unfinished_store_says_what_to_do(invoke, tmp_path):
    (tmp_path / "store").mkdir()
    Journal(tmp_path / "store").record({}, 0)

    assert "Run the same `penstock build`" in invoke("info", "store", code=1).stderr


@pytest.fixture
def running(tmp_path):
    """A build that has sealed all parts and then waits for a line on its stdin."""
    (tmp_path / "a.txt").write_text("some words\n" * 1_000)

    def running(**settings):
        code = (
            "import sys, penstock; penstock.build('a.txt', 'store', tokenizer='bytes', "
            f"documents='lines', progress=lambda now: sys.stdin.readline(), **{settings})"
        )
        process = zygote.Popen(["-c", code], cwd=tmp_path, stdin=subprocess.PIPE, text=True)
        while not (tmp_path / "store" / ".slice-000000.json").exists():
            assert process.poll() is None
            time.sleep(0.01)
        started.append(process)
        return process

    started = []
    yield running
    for process in started:
        process.kill()
        process.communicate()


def test_info_on_a_store_being_built_says_so_and_how_far(invoke, running):
    process = running()

    shown = invoke("info", "store").stdout
    assert shown.startswith(f"store is being built by process {process.pid}\n")
    assert rows(shown)["done"] == "100% of the text: 11.0 kB in 1 finished part"
    assert rows(shown)["documents"] == "1,000 so far"
    values = json.loads(invoke("info", "store", "--json").stdout)
    assert (values["finished"], values["process"]) == (False, str(process.pid))
    assert (values["share"], values["num_documents"]) == (1.0, 1_000)

    process.communicate("\n" * 100, timeout=60)
    assert rows(invoke("info", "store").stdout)["documents"] == "1,000"


def test_info_on_a_build_that_was_killed_says_how_to_finish_it(invoke, running):
    process = running(split="hash:0.5")
    process.kill()
    process.communicate()

    for name in ("store", "store/train"):
        shown = invoke("info", name).stdout
        assert shown.startswith(f"{name} holds an unfinished build; no process continues it\n")
        assert shown.endswith("next: run the same penstock build command again to resume it\n")
    assert json.loads(invoke("info", "store", "--json").stdout)["process"] is None


def test_info_on_a_store_that_grows_shows_the_store_and_the_append(invoke, running, tmp_path):
    (tmp_path / "b.txt").write_text("more\n")
    ps.build(tmp_path / "b.txt", tmp_path / "store", tokenizer="bytes", documents="lines")
    process = running(append=True)

    shown = invoke("info", "store").stdout

    assert rows(shown)["inputs"] == "11.0 kB on disk"
    assert f"store is being built by process {process.pid}\n" in shown
    assert shown.startswith("store\n  documents    1 ")


def test_names_of_inputs_cannot_act_on_the_terminal(invoke, tmp_path):
    (tmp_path / "evil\x1b[2J\n.txt").write_text("a\n")
    ps.build([str(tmp_path / "evil\x1b[2J\n.txt")], "store", tokenizer="bytes", documents="lines")

    shown = invoke("info", "store").stdout

    assert r"evil\x1b[2J\n.txt" in re.sub(r"\s+", "", shown)
    assert "\x1b" not in shown


def test_a_histogram_is_as_high_as_its_tallest_bin_and_hides_none():
    lines = histogram_lines([Bin(4, 5, 1), Bin(6, 7, 10_000), Bin(8, 11, 0), Bin(12, 15, 5_000)])

    assert lines == [
        "   ███",
        "   ███   ▄▄▄",
        "▁▁▁███   ███",
        "4     8",
    ]


def test_sixty_bins_fit_and_are_labelled_where_there_is_room():
    edges = [1, 2, 3]
    while len(edges) < 61:
        edges.append(edges[-2] * 2)
    bins = [Bin(a, b - 1, 1) for a, b in pairwise(edges)]

    *_, bars, scale = histogram_lines(bins)

    assert len(bars) == 60
    assert len(scale) <= 62
    assert scale.startswith("1  4   16  64")


class Reversed:
    """A tokenizer of the user's own."""

    vocab_size, eos_token_id = 257, 256

    def encode(self, text):
        return [255 - byte for byte in text.encode()]

    def decode(self, ids):
        return bytes(255 - id_ for id_ in ids if id_ < 256).decode()


def test_a_store_of_an_own_tokenizer_shows_the_digest_of_errors_and_says_to_pass_it_again(
    invoke, corpus
):
    store = ps.build(corpus.name, "store", tokenizer=Reversed(), documents="lines")
    shown = invoke("info", "store").stdout
    digest = re.search(r"digest ([0-9a-f]{12})\b", shown)[1]
    assert "an object: pass it again each time" in shown

    assert store.decode(0, tokenizer=Reversed()) == "To be, or not to be:"
    for command in (["decode", "store", "-d", "0"], ["decode", "store", "-d", "1"]):
        error = invoke(*command, code=1).stderr
        assert "again each time, with tokenizer= in Python" in error
        assert digest[:8] in error
        assert "once" not in error
    with pytest.raises(StoreError, match=digest[:8]):
        store.decode(0, tokenizer="bytes")
    with pytest.raises(StoreError, match=digest[:8]):
        ps.build(corpus.name, "store", tokenizer="bytes", documents="lines")
