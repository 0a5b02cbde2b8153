"""A recipe for a file that came without one, and what was guessed for it."""

import glob
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from penstock.errors import SourceError
from penstock.store.manifest import FILE_NAME

__all__ = ["Guess", "guess"]

_DOCUMENTS = "documents: the text between <|endoftext|> where it is found, otherwise whole files"
_TOKENS = {
    ".npy": "data: a file of tokens, GPT-2's; no validation",
    ".bin": "data: a file of tokens, GPT-2's in uint16 as nanoGPT writes them; no validation",
}
_MOST_HELD_OUT = 10_000_000  # bytes of text; a tenth of what is less than 100 MB


class Guess(NamedTuple):
    """A line for people, true as long as none of some settings is changed."""

    line: str
    settings: tuple[str, ...]

    def holds(self, changes: Iterable[str]) -> bool:
        """Whether it is true of a recipe with such changes."""
        return not set(self.settings) & set(changes)


def guess(source: str, device: str | None = None) -> tuple[dict[str, Any], list[Guess]]:
    """The tables of a recipe for a store or a text, and a line for each thing guessed."""
    if "://" in source:
        raise SourceError(
            f"{source} is not a file here. Build a store of it first: penstock build, then train "
            "on that."
        )
    path = Path(source)
    is_pattern = glob.has_magic(source) and not path.exists() and path.suffix not in _TOKENS
    if not is_pattern and not path.exists():
        raise SourceError(
            f"{path} does not exist, seen from {Path.cwd()}. Give a text file, a store or a recipe "
            "(.toml)."
        )
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    data, told = _data(path)
    tables, more = _on_gpu() if kind.startswith("cuda") else _on_cpu()
    tables["data"] |= data
    place = path
    if is_pattern:  # the folder that it looks into
        place = next(each for each in path.parents if not glob.has_magic(str(each)))
    name = place.stem if place.is_file() else place.resolve().name
    tables["output"] = f"runs/{name or 'data'}"
    return tables, [*told, *more, Guess(f"output: {tables['output']}", ("output",))]


def _data(path: Path) -> tuple[dict[str, Any], list[Guess]]:
    if path.suffix in _TOKENS:
        return {"train": str(path)}, [Guess(_TOKENS[path.suffix], ("data.val",))]
    if (path / FILE_NAME).exists():
        line = "data: a finished store; no validation (give --val_file)"
        return {"train": str(path)}, [Guess(line, ("data.val",))]
    if (path / "train" / FILE_NAME).exists():
        line = "data: a finished store and its validation side"
        return {"train": str(path)}, [Guess(line, ("data.val",))]
    size = path.stat().st_size if path.is_file() else 0
    share = 0.1 if size <= 10 * _MOST_HELD_OUT else _MOST_HELD_OUT / size
    data = {"train": str(path), "split": f"tail:{share:.6f}"}
    return data, [
        Guess("tokenizer: gpt2", ("data.tokenizer",)),
        Guess(_DOCUMENTS, ("data.documents",)),
        Guess(f"validation: the last {share:.1%} of it", ("data.split", "data.val", "data.stream")),
    ]


def _on_cpu() -> tuple[dict[str, Any], list[Guess]]:
    tables = {
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
    }
    return tables, [
        Guess(
            "model: nano (4 layers of 128), since there is no GPU",
            ("model.size", "model.layers", "model.width"),
        ),
        Guess("rows: 128 tokens", ("data.length",)),
        Guess("step: 4 rows", ("training.batch_size", "training.global_batch_size")),
        Guess("time: 10 minutes at the most", ("training.max_minutes",)),
    ]


def _on_gpu() -> tuple[dict[str, Any], list[Guess]]:
    tables = {
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
    }
    return tables, [
        Guess("model: 124M", ("model.size", "model.layers", "model.width")),
        Guess("rows: 1,024 tokens", ("data.length",)),
        Guess("step: 256 rows", ("training.global_batch_size",)),
        Guess(
            "computing: bfloat16, compiled (training.compile=false begins sooner)",
            ("training.precision", "training.compile"),
        ),
        Guess("time: 10 minutes at the most", ("training.max_minutes",)),
    ]
