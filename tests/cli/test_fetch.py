"""`penstock fetch` from copies on disk: no test asks a server outside this machine."""

import json
import re

import pytest

import penstock as ps
from penstock.catalog.entries import ENTRIES


@pytest.fixture
def copy(data):
    return data / "tinyshakespeare"


def test_help_is_of_eighty_columns(invoke):
    shown = invoke("fetch", "--help").stdout

    assert all(word in shown for word in ("--from", "--split", "--build", "--list", "--output"))
    assert max(map(len, shown.splitlines())) <= 80


def test_tinyshakespeare_is_fetched_split_and_built(invoke, copy):
    command = ("fetch", "tinyshakespeare", "--from", copy, "--split", "0.9", "--build")
    shown = invoke(*command).stdout

    assert shown.startswith("tinyshakespeare is in data/tinyshakespeare (")
    assert re.search(r"raw +tinyshakespeare.txt, 1.12 MB", shown)
    assert re.search(r"train +train.txt, 1.00 MB; store train, 301,966 tokens", shown)
    assert re.search(r"val +val.txt, 112 kB; store val, 36,059 tokens", shown)
    assert shown.endswith("next: penstock info data/tinyshakespeare\n")
    assert ps.TokenStore("data/tinyshakespeare/val").num_tokens == 36_059
    assert invoke(*command).stdout.splitlines()[1:] == shown.splitlines()[1:]


def test_json_has_files_and_stores(run_json, copy):
    answer = run_json("fetch", "tinyshakespeare", "--from", copy, "-o", "here", "--build")

    assert answer["files"]["train"] == {"path": "here/train.txt", "bytes": 1_003_854}
    assert answer["files"]["val"]["bytes"] == 1_115_394 - 1_003_854
    assert answer["stores"]["train"]["num_tokens"] == 301_966
    assert answer["raw"] == "here/tinyshakespeare.txt"
    assert answer["received_bytes"] == 0


def test_without_build_the_next_command_builds_the_same_store(invoke, run_json, copy):
    shown = invoke("fetch", "tinyshakespeare", "--from", copy).stdout
    following = re.search(r"next: penstock (.*)", shown)[1].split()

    assert run_json(*following)["num_tokens"] == 301_966


def test_the_next_command_works_where_stores_are_already(invoke, copy):
    command = ("fetch", "tinyshakespeare", "--from", copy)
    first = re.search(r"next: penstock (.*)", invoke(*command).stdout)[1].split()
    invoke(*command, "--build")
    following = re.search(r"next: penstock (.*)", invoke(*command).stdout)[1].split()

    assert "is already finished" in invoke(*first).stdout
    assert following == ["info", "data/tinyshakespeare/train"]
    assert "301,966" in invoke(*following).stdout


def test_stores_of_another_split_are_reported(invoke, copy):
    command = ("fetch", "tinyshakespeare", "--from", copy, "-o", "ts")
    invoke(*command, "--build", "--tokenizer", "bytes")
    lines = invoke(*command, "--split", "0.5").stdout.splitlines()

    assert (
        lines[-2] == "ts/train and ts/val contain other text than ts/train.txt and ts/val.txt now"
    )
    assert lines[-1].startswith(
        "next: delete ts/train and ts/val, then penstock build ts/train.txt"
    )
    refused = invoke(*command, "--split", "0.5", "--build", "--tokenizer", "bytes", code=1).stderr
    assert "train.txt: 1,003,854 bytes -> 557,697. Replace it with `penstock build --ov" in refused


def test_another_tokenizer_and_another_share(run_json, copy):
    command = ("fetch", "tinyshakespeare", "--from", copy, "--split", "0.5", "--build")
    answer = run_json(*command, "--tokenizer", "bytes")

    assert answer["stores"]["train"]["num_tokens"] == 1_115_394 // 2


def test_the_list_names_every_entry_with_its_licence(invoke, run_json):
    shown = invoke("fetch", "--list").stdout

    for entry in ENTRIES:
        assert entry.name in shown
        assert entry.licence in shown
    listed = run_json("fetch", "--list")["entries"]
    assert [each["name"] for each in listed] == [entry.name for entry in ENTRIES]
    assert listed[0]["remotes"][0]["sha256"].startswith("86c4e6aa")


def test_a_name_is_needed(invoke):
    assert "Give the NAME of a dataset; --list shows them" in invoke("fetch", code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tinyshakespear"], "SourceError: 'tinyshakespear' is not in the catalog"),
        (["wikitext-2", "--split", "0.9"], "SourceError: wikitext-2 comes split"),
        (["wikitext-2", "--from", "nowhere"], "MissingInputError: nowhere does not exist"),
        (["openwebtext", "--from", "."], "FetchError: . does not hold owt_train.txt.gz"),
    ],
)
def test_errors_say_what_to_do(invoke, arguments, words):
    assert words in invoke("fetch", *arguments, code=1).stderr


def test_no_network_is_an_error_with_the_next_step(penstock):
    """A proxy that does not answer is what a machine without a network looks like."""
    dead = "http://127.0.0.1:9"
    proxies = {"https_proxy": dead, "HTTPS_PROXY": dead, "no_proxy": "", "NO_PROXY": ""}
    done = penstock("fetch", "tinyshakespeare", "--json", check=False, **proxies)

    assert done.returncode == 1
    message = json.loads(done.stdout)["error"]["message"]
    assert "the connection failed (Connection refused), 3 times in a row" in message
    assert "penstock fetch tinyshakespeare --from DIRECTORY" in message
