"""`penstock repair`: damaged files are listed and made again, or the reason is shown."""

import pytest

import penstock as ps


@pytest.fixture
def damaged(corpus, invoke):
    """A store with a damaged part."""
    store = ps.build(str(corpus), "store", tokenizer="bytes", documents="lines")
    path = store.path / "part-00000.tokens.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    return path


def test_damaged_files_are_listed_and_made_again(damaged, invoke, run_json):
    assert "penstock repair" in invoke("verify", "store", code=1).stderr
    done = invoke("repair", "store")
    assert str(damaged) in done.stdout
    assert "1 file made again, as recorded" in done.stdout
    assert "is intact" in invoke("verify", "store").stdout
    assert "nothing had to be repaired" in invoke("repair", "store").stdout
    assert run_json("repair", "store") == {"store": "store", "repaired": []}


def test_inputs_that_were_moved_are_named(damaged, corpus, invoke, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    corpus.rename(moved / corpus.name)
    failed = invoke("repair", "store", code=1).stderr
    assert f"{corpus.name} is missing; it had" in failed
    assert "--inputs" in failed
    assert "made again" in invoke("repair", "store", "--inputs", str(moved)).stdout


def test_a_tokenizer_can_be_given(damaged, invoke):
    failed = invoke("repair", "store", "--tokenizer", "gpt2", code=1).stderr
    assert "gpt2 has the digest" in failed
    assert "made again" in invoke("repair", "store", "--tokenizer", "bytes").stdout


def test_read_back_builds_the_same_store(corpus, run_json):
    settings = ("--tokenizer", "bytes", "--json")
    one = run_json("build", str(corpus), "-o", "one", *settings[:-1])
    two = run_json("build", str(corpus), "-o", "two", "--read-back", *settings[:-1])
    assert one["stores"][0]["digest"] == two["stores"][0]["digest"]
