"""A recipe for a file that came without one, and what was guessed for it."""

from pathlib import Path
from typing import Any

import torch

from penstock.errors import SourceError
from penstock.store.manifest import FILE_NAME

__all__ = ["guess"]

_LOOKED_AT = 1 << 20
_TOKENS = {
    ".npy": "data: a file of tokens, GPT-2's; no validation",
    ".bin": "data: a file of tokens, GPT-2's in uint16 as nanoGPT writes them; no validation",
}
_MOST_HELD_OUT = 10_000_000  # bytes of text; a tenth of what is less than 100 MB


def guess(path: Path, device: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """The tables of a recipe for a store or a text, and a line for each thing guessed."""
    if not path.exists():
        raise SourceError(
            f"{path} does not exist, seen from {Path.cwd()}. Give a text file, a store or a recipe "
            "(.toml)."
        )
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    data, told = _data(path)
    tables = _on_gpu() if kind.startswith("cuda") else _on_cpu()
    told.append(tables.pop("told"))
    tables["data"] |= data
    name = path.stem if path.is_file() else path.name
    tables["output"] = f"runs/{name}"
    return tables, [*told, f"output: {tables['output']}"]


def _data(path: Path) -> tuple[dict[str, Any], list[str]]:
    if path.suffix in _TOKENS:
        return {"train": str(path)}, [_TOKENS[path.suffix]]
    if (path / FILE_NAME).exists():
        return {"train": str(path)}, ["data: a finished store; no validation (give --val_file)"]
    if (path / "train" / FILE_NAME).exists():
        return {"train": str(path)}, ["data: a finished store and its validation side"]
    size = path.stat().st_size if path.is_file() else 0
    share = 0.1 if size <= 10 * _MOST_HELD_OUT else _MOST_HELD_OUT / size
    data = {"train": str(path), "split": f"tail:{share:.6f}", "documents": _documents(path)}
    told = {
        "paragraphs": "documents: paragraphs, since there are blank lines between them",
        "lines": "documents: one a line (or a record), since no blank lines were seen",
    }
    held_out = f"validation: the last {share:.1%} of it"
    return data, ["tokenizer: gpt2", told[data["documents"]], held_out]


def _documents(path: Path) -> str:
    if path.suffix != ".txt":
        return "lines"
    with path.open("rb") as stream:
        return "paragraphs" if b"\n\n" in stream.read(_LOOKED_AT) else "lines"


def _on_cpu() -> dict[str, Any]:
    return {
        "data": {"length": 128},
        "model": {"size": "nano", "positions": "rotary"},
        "optimization": {"learning_rate": 3e-3, "warmup_steps": 50, "betas": [0.9, 0.99]},
        "training": {
            "max_minutes": 10,
            "batch_size": 4,
            "val_every": 100,
            "val_rows": 128,
            "save_every": 100,
        },
        "told": "model: nano (4 layers of 128), rows of 128 tokens, 4 a step, 10 minutes; no GPU",
    }


def _on_gpu() -> dict[str, Any]:
    return {
        "data": {"length": 1024},
        "model": {"size": "124M"},
        "optimization": {"learning_rate": 6e-4, "warmup_steps": 100},
        "training": {
            "max_minutes": 10,
            "global_batch_size": 256,
            "precision": "bfloat16",
            "compile": True,
            "val_every": 100,
            "val_rows": 512,
            "save_every": 500,
        },
        "told": "model: 124M, rows of 1,024 tokens, 256 a step, bfloat16, compiled, 10 minutes",
    }
