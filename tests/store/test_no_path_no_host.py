"""A store names no path and no host: its tokenizer is found by a digest among the user's own."""

import json

import pytest

import penstock
from penstock.errors import MissingTokenizerError, StoreError
from penstock.sources.settings import Texts
from penstock.store.manifest import read_manifest, write_manifest
from penstock.store.reader import TokenStore
from penstock.tokenize.tokenizer import _find
from penstock.tokenize.train import train_tokenizer

TEXTS = ["the cat sat on the mat", "a hat for the cat"] * 40
# Runs a command of penstock; prints the files of a store and the forbidden ones that it opens, and
# its uses of the network.
AUDITED = """
import runpy, sys
def audit(event, arguments):
    file = event == "open" and any(each in repr(arguments) for each in ("store/", "forbidden"))
    if file or event.startswith(("socket.connect", "socket.getaddrinfo", "socket.send")):
        print("AUDIT", event, *map(repr, arguments[:2]), file=sys.stderr)
sys.addaudithook(audit)
runpy.run_module("penstock", run_name="__main__", alter_sys=True)
"""


def rewritten(directory, **tokenizer):
    """Change the tokenizer's entry of a manifest, as somebody who ships a store can do."""
    path = directory / "penstock.json"
    contents = json.loads(path.read_text())
    del contents["digest"]
    contents["tokenizer"] |= tokenizer
    write_manifest(directory, contents, read_manifest(directory).parts)
    return TokenStore(directory)


@pytest.fixture
def own(tmp_path):
    """A tokenizer of the user's own, in a file."""
    path = tmp_path / "mine" / "own.json"
    path.parent.mkdir()
    train_tokenizer(Texts(TEXTS), path, vocab_size=270)
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache directory, and nothing in memory."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    _find.cache_clear()
    return tmp_path / "cache" / "tokenizers"


@pytest.fixture
def secret(tmp_path, own):
    """A file that nothing may open, in a directory that looks like a tokenizer's."""
    secret = tmp_path / "forbidden" / "tokenizer.json"
    secret.parent.mkdir()
    secret.write_bytes(own.read_bytes())
    return secret


TINY = ("--set", "model.layers=1", "--set", "model.heads=1", "--set", "model.width=16")
COMMANDS = {
    "decode": ("decode", "store", "-d", "0"),
    "info": ("info", "store"),
    "train": ("train", "store", "--steps", "1", "--max-length", "8", "--device", "cpu", "-o", "r"),
}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("decode", "path"),
        ("decode", "directory"),
        ("decode", "hf:evil/name"),
        ("info", "path"),
        ("train", "evil/name"),
    ],
)
def test_a_hostile_store_opens_no_file_and_asks_no_host(
    command, name, own, secret, tmp_path, monkeypatch, cache, quick_python
):
    monkeypatch.chdir(tmp_path)
    penstock.build(Texts(TEXTS), "store", tokenizer=own)
    names = {"path": str(secret), "directory": str(secret.parent)}
    rewritten(tmp_path / "store", name=names.get(name, name), digest="0" * 64)

    more = TINY if command == "train" else ()
    done = quick_python(
        AUDITED, *COMMANDS[command], *more, check=False, HF_ENDPOINT="http://127.0.0.1:9"
    )

    assert done.returncode == (1 if command == "decode" else 0), done.stderr
    audited = [line for line in done.stderr.splitlines() if line.startswith("AUDIT")]
    assert any("penstock.json" in line for line in audited)  # the hook is in place
    assert not [line for line in audited if "forbidden" in line or "socket" in line]
    if command == "decode":
        assert "--tokenizer" in done.stderr
    if command == "train":  # the run is finished, without a sample
        assert "no sample of text: The store was tokenized with" in done.stdout
        assert (tmp_path / "r" / "curve.svg").exists()
        assert not (tmp_path / "r" / "sample.txt").exists()


@pytest.mark.parametrize("name", ["tiktoken:cl100k_base", "gpt2", "bytes", "own.json", "x/y"])
def test_no_name_is_trusted_without_its_digest(name, own, tmp_path, cache, monkeypatch):
    monkeypatch.chdir(own.parent)
    store = penstock.build(Texts(TEXTS), tmp_path / "store", tokenizer=own)
    store = rewritten(store.path, name=name, digest="1" * 64)

    with pytest.raises(MissingTokenizerError, match=r"tokenizer= \(--tokenizer\), once"):
        store.decode(0)


def test_a_digest_is_no_path(own, tmp_path, cache):
    store = penstock.build(Texts(TEXTS), tmp_path / "store", tokenizer=own)
    (kept,) = cache.iterdir()
    outside = cache.parent / "outside.json"
    kept.rename(outside)

    for digest in ("../outside", str(outside.with_suffix(""))):
        with pytest.raises(MissingTokenizerError):
            rewritten(store.path, digest=digest).decode(0)
    assert outside.exists()


def test_a_tokenizer_that_was_used_once_is_found_without_its_file(own, tmp_path, cache):
    store = penstock.build(
        Texts(TEXTS),
        tmp_path / "store",
        tokenizer=penstock.load_tokenizer(own, add_tokens=["<|x|>"]),
    )
    own.unlink()
    _find.cache_clear()

    assert store.decode(0) == TEXTS[0]


def test_a_store_of_somebody_else_is_decoded_after_its_tokenizer_was_named_once(
    own, tmp_path, monkeypatch, cache
):
    store = penstock.build(Texts(TEXTS), tmp_path / "store", tokenizer=own)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "other"))  # another user

    with pytest.raises(MissingTokenizerError, match=r"'own\.json' \(digest [0-9a-f]{8}\)"):
        store.decode(0)
    with pytest.raises(StoreError, match="The same id would mean other text"):
        store.decode(0, tokenizer="gpt2")
    assert store.decode(0, tokenizer=own) == TEXTS[0]
    own.unlink()
    assert store.decode(0) == TEXTS[0]


def test_a_damaged_file_in_the_cache_is_not_used(own, tmp_path, cache):
    store = penstock.build(Texts(TEXTS), tmp_path / "store", tokenizer=own)
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    assert kept.parent.stat().st_mode & 0o077 == 0

    for damaged in (b"", b"[]", b'{"tokenizer": 1}', whole.replace(b'"cat"', b'"cot"'), whole[:-9]):
        kept.write_bytes(damaged)
        if damaged != whole:
            with pytest.raises(MissingTokenizerError):
                store.decode(0)
        penstock.load_tokenizer(own)  # keeps it again
        assert kept.read_bytes() == whole


def test_a_cache_that_cannot_be_written_changes_nothing_else(own, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))

    store = penstock.build(Texts(TEXTS), tmp_path / "store", tokenizer=own)

    assert store.decode(0, tokenizer=own) == TEXTS[0]


def test_bundled_tokenizers_are_found_by_their_digest_and_not_kept(tmp_path, cache, gpt2):
    for name, more in (("gpt2", []), ("gpt2", ["<|a|>"]), ("bytes", []), ("bytes", ["<|a|>"])):
        where = tmp_path / f"{name}{len(more)}"
        store = penstock.build(
            Texts(["a cat"]), where, tokenizer=penstock.load_tokenizer(name, add_tokens=more)
        )
        store = rewritten(store.path, name="/etc/shadow")
        assert store.decode(0) == "a cat"
    assert not cache.exists()


def test_a_tiktoken_encoding_is_kept_too(tmp_path, cache):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([each]): each for each in range(256)} | {b"at": 256}
    words = r"\w+|\W+"
    made = tiktoken.Encoding("mine", pat_str=words, mergeable_ranks=ranks, special_tokens={})

    store = penstock.build(Texts(["a cat"]), tmp_path / "store", tokenizer=made, eos=False)

    assert store.decode(0) == "a cat"
    assert len(store[0]) == 4


def test_a_manifest_records_the_last_part_of_a_path(own, tmp_path, cache):
    template = tmp_path / "mine" / "my.jinja"
    template.write_text("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}")
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    chat_template = penstock.Chat(
        template, own, add_tokens=["<|user|>", "<|assistant|>", "<|end|>"]
    )
    texts = Texts([json.dumps({"messages": chat})])
    store = penstock.build(texts, tmp_path / "store", chat=chat_template)

    assert store.manifest.contents["tokenizer"]["name"] == "own.json"
    assert store.manifest.contents["chat"]["template"] == "my.jinja"
    assert str(tmp_path) not in (store.path / "penstock.json").read_text()


def test_a_store_of_an_earlier_version_that_records_a_path_can_still_be_used(own, tmp_path, cache):
    one, two = Texts(TEXTS), Texts(TEXTS[:3])
    store = penstock.build(one, tmp_path / "store", tokenizer=own)
    rewritten(store.path, name="/gone/own.json")

    assert penstock.build(one, tmp_path / "store", tokenizer=own).decode(0) == TEXTS[0]
    longer = penstock.build(two, tmp_path / "store", tokenizer=own, append=True)
    assert len(longer) == len(TEXTS) + 3
    assert "/gone" not in (longer.path / "penstock.json").read_text()


def test_a_sample_of_text_uses_the_tokenizer_that_a_recipe_names(
    own, tmp_path, monkeypatch, cache, quick_python
):
    monkeypatch.chdir(tmp_path)
    penstock.build(Texts(TEXTS), "store", tokenizer=own)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "other"))

    quick_python(AUDITED, *COMMANDS["train"], *TINY, "--set", f"data.tokenizer={own}")

    assert (tmp_path / "r" / "sample.txt").exists()
