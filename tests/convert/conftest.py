"""Sources of exports and imports."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.sources.slices import cut


@pytest.fixture
def tmp_path():
    """In memory where there is such a place: kills need no real disk, and syncs take a while."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def small_parts(monkeypatch):
    """Builds make parts of 2,000 bytes of text."""
    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", 2_000)


@pytest.fixture
def store(small_parts, tmp_path):
    """A store of several parts."""
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"line {number} {'x' * (number % 37)}\n" for number in range(400)))
    made = ps.build(path, tmp_path / "store", tokenizer="bytes", documents="lines")
    assert len(made.manifest.parts) > 3
    return made


@pytest.fixture
def one_document(small_parts, tmp_path):
    """A store of one document that is stored in pieces."""
    path = tmp_path / "one.txt"
    path.write_text("".join(f"line {number}\n" for number in range(900)))
    made = ps.build(path, tmp_path / "one", tokenizer="bytes")
    assert len(made) > 3
    assert made.manifest.num_documents == 1
    return made


@pytest.fixture
def chats(tmp_path):
    """A store with a loss mask."""
    turns = [
        {"role": "user", "content": "Name a color."},
        {"role": "assistant", "content": "Blue."},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(5)))
    return ps.build(path, tmp_path / "chats", chat=ps.Chat("chatml", "gpt2", add_tokens="auto"))


@pytest.fixture
def write_files(tmp_path):
    """Write token files of datatrove, and open them."""

    def write_files(documents, *, wide=False, loss=None, vocab_size=None):
        path = tmp_path / "x.ds"
        flat = np.concatenate([np.zeros(0, "<u4"), *(np.array(each, "<u4") for each in documents)])
        flat.astype("<u4" if wide else "<u2").tofile(path)
        np.cumsum([len(each) for each in documents]).astype("<u8").tofile(f"{path}.index")
        if loss is not None:
            np.array(loss, "u1").tofile(f"{path}.loss")
        return ps.open_tokens(path, format="datatrove", vocab_size=vocab_size)

    return write_files
