"""The commands of the recipe openwebtext-h100, from the download to the loss, on small files."""

import gzip
import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import penstock as ps
from penstock.catalog import entries
from penstock.train import ModelConfig
from penstock.train.model import GPT

RECIPE = Path(__file__).parents[2] / "src/penstock/recipes" / "openwebtext-h100.toml"
# All other settings are those of the recipe.
SMALL = {"training.steps": 3, "training.global_batch_size": 4, "training.batch_size": 2}
SMALL |= {"training.compile": "false", "training.precision": "float32", "training.val_rows": 2}
SMALL |= {"model.layers": 1, "model.width": 16, "model.heads": 2}


def web_pages(count, seed):
    """Pages as in owt_train.txt: paragraphs, with a separator after each page."""
    rng = np.random.default_rng(seed)
    words = ["the", "model", "learns", "don't", "naïve", "2,048", "(maybe)", "from", "text", "—"]
    words += [one + two for one in ("re", "un", "over") for two in ("view", "act", "load", "state")]
    pages = (
        "\n\n".join(" ".join(rng.choice(words, 40)) + "." for _ in range(rng.integers(1, 4)))
        for _ in range(count)
    )
    return "".join(f"{page}\n<|endoftext|>\n" for page in pages).encode()


@pytest.fixture
def texts(server, monkeypatch):
    """The two files of OpenWebText, much shorter, on a Hub that is a server of this machine."""
    texts = {"owt_train.txt": web_pages(60, seed=1), "owt_valid.txt": web_pages(13, seed=2)}
    entry = entries.find_entry("openwebtext")
    remotes = []
    for remote in entry.remotes:
        (file,) = remote.files
        path = remote.urls[0].removeprefix("https://huggingface.co")
        server.files[path] = gzip.compress(texts[file.name])
        remotes.append(replace(remote, files=(replace(file, num_bytes=len(texts[file.name])),)))
    monkeypatch.setattr(entries, "ENTRIES", (replace(entry, remotes=tuple(remotes)),))
    monkeypatch.setenv("HF_ENDPOINT", f"http://{server.address}")
    return texts


def commands():
    """The five commands that the recipe names, with the settings of a small run."""
    lines = [line[1:] for line in RECIPE.read_text().splitlines() if line.startswith("#   ")]
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "penstock"
        words = [word.replace("32000", "320") for word in words]
        more = [("--set", f"{name}={value}") for name, value in SMALL.items()]
        yield [*words, *sum(more, ()), "--device", "cpu"] if words[0] == "train" else words


def independent_loss(text, length):
    """The loss of the last checkpoint on a text, without penstock's stores, rows and loaders."""
    tokenizer = Tokenizer.from_file("stores/owt.json")
    pages = [page for page in text.decode().split("<|endoftext|>") if page.strip()]
    end = tokenizer.token_to_id("<|endoftext|>")
    stream = [token for page in pages for token in (*tokenizer.encode(page).ids, end)]
    (path,) = Path("runs/openwebtext/checkpoints").glob("step-*3.pt")
    saved = torch.load(path, weights_only=True)
    model = GPT(ModelConfig(**saved["model_config"]))
    model.load_state_dict(saved["model"])
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(stream) - 1, length):
        row = torch.tensor(stream[start : start + length + 1])
        with torch.no_grad():
            logits = model(row[None, :-1])[0]
        losses = torch.nn.functional.cross_entropy(logits.double(), row[1:], reduction="none")
        total += float(losses.sum())
        count += len(losses)
    assert count == len(stream) - 1
    return total / count, count


def test_five_commands_lead_from_the_download_to_the_loss(texts, invoke, tmp_path):
    steps = list(commands())
    shown = [invoke(*step).stdout for step in steps]

    assert [step[0] for step in steps] == ["fetch", "tokenizer", "build", "build", "train"]
    result = json.loads(Path("runs/openwebtext/result.json").read_bytes())
    loss, count = independent_loss(texts["owt_valid.txt"], length=512)
    assert result["num_targets"] == count == ps.TokenStore("stores/owt/val").num_tokens - 1
    assert count % 512  # the last row is not full
    assert result["loss"] == pytest.approx(loss, abs=1e-6)
    assert f"final loss {loss:.4f} over {count:,} targets" in shown[-1]

    # What others need to check the loss.
    store = ps.TokenStore("stores/owt/val")
    assert result["val"][0]["digest"] == store.digest
    assert result["val"][0]["tokenizer"] == result["train"][0]["tokenizer"]
    assert result["val"][0]["tokenizer"]["vocab_size"] == result["model"]["vocab_size"] == 320
    assert result["val"][0]["inputs"][0]["bytes"] == len(texts["owt_valid.txt"])
    assert (result["step"], result["length"]) == (3, 512)
    assert result["versions"]["torch"] == torch.__version__
    recorded = json.loads(Path("runs/openwebtext/run.json").read_bytes())
    assert recorded["recipe"]["training"]["final_val"]
