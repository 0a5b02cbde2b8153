"""Checkpoints: everything about a run that cannot be computed again.

    run/checkpoints/step-00000500.pt     model, optimizers, the loader's state, progress

A checkpoint file is complete or absent (see `penstock.store.files`), and ends with the SHA-256 of
its contents, which is compared before anything is loaded. A run that is killed while
it saves resumes from the previous checkpoint. There is no random state to save: the dropout of a
step is drawn from a key derived from the step. Loading runs no code (`weights_only`).

`to_gpt2` and `from_gpt2` exchange weights with the GPT2LMHeadModel of transformers:

    here                           in transformers                     stored there
    token_embedding                transformer.wte, lm_head            without the padding rows
    position_embedding             transformer.wpe
    layers.3.attention.qkv         transformer.h.3.attn.c_attn         (in, out): transposed
    layers.3.attention.project     transformer.h.3.attn.c_proj         transposed
    layers.3.expand, contract      transformer.h.3.mlp.c_fc, c_proj    transposed
    layers.3.attention_norm        transformer.h.3.ln_1

Both sides are plain dicts of tensors, so transformers is not needed here:

    from transformers import GPT2Config, GPT2LMHeadModel
    exported = GPT2LMHeadModel(GPT2Config(**gpt2_config(model.config)))
    exported.load_state_dict(to_gpt2(model))
"""

import errno
import hashlib
import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PenstockError, PlanError, StoreBusyError, TrainError
from penstock.store.files import (
    make_directory,
    remove_file,
    remove_temporary,
    sync_directory,
    write_file,
)
from penstock.store.folders import open_regular
from penstock.store.lock import lock_path, locked
from penstock.train.config import ModelConfig
from penstock.train.distributed import World
from penstock.train.model import GPT
from penstock.train.record import checkpoint_paths

_FORMAT = 3
_FORMATS = (2, _FORMAT)
"""Format 3 has a digest after the tensors; 2 has none, and can still be read."""
_TRAILER = re.compile(rb"\npenstock-sha256 ([0-9a-f]{64})\n")
_TRAILER_BYTES = 82
_KEYS = {"format", "progress", "model_config", "data", "model", "optimizers"}
_DICTS = _KEYS - {"format", "optimizers"}
# Errors of file systems that are read-only or have no locks, as on some clusters. A finished run
# can still be opened there, without a lock.
_NO_LOCKS = {errno.EACCES, errno.EROFS, errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}

# The id of <|endoftext|> in GPT-2's vocabulary.
_END_OF_TEXT = 50_256
_NAMES = {
    "token_embedding.weight": "wte.weight",
    "position_embedding.weight": "wpe.weight",
    "norm.weight": "ln_f.weight",
    "norm.bias": "ln_f.bias",
}
_LAYER_NAMES = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.project": "attn.c_proj",
    "mlp_norm": "ln_2",
    "expand": "mlp.c_fc",
    "contract": "mlp.c_proj",
}

Contents = dict[str, Any]
"""Values by name. Tensors, numbers and texts, which torch loads without running code."""


class Checkpoints:
    """The newest checkpoints of a run, in one directory."""

    def __init__(self, directory: Path, *, keep_last: int) -> None:
        self.directory = directory
        self._keep_last = keep_last

    def paths(self) -> dict[int, Path]:
        """The checkpoint files by their step, oldest first."""
        return checkpoint_paths(self.directory)

    def last_saved(self) -> str:
        """A sentence that names the last checkpoint, for messages."""
        steps = list(self.paths())
        return f"The last checkpoint is step {steps[-1]:,}." if steps else "Nothing is saved yet."

    def save(self, step: int, contents: Contents) -> None:
        """Write the checkpoint of a step, then remove the oldest ones beyond `keep_last`."""
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        make_directory(self.directory)
        remove_temporary(self.directory)  # left by a run that was killed while it saved
        # torch.save writes to memory first: its own file could be cut short by a full disk, and
        # the name of a checkpoint must never belong to half a file.
        buffer = io.BytesIO()
        torch.save({"format": _FORMAT, "step": step, **contents}, buffer)
        # An older checkpoint is removed only after the new one is on disk under its name.
        data = buffer.getbuffer()
        # torch ignores bytes after the end of its archive, so any program can still load the file.
        trailer = f"\npenstock-sha256 {hashlib.sha256(data).hexdigest()}\n".encode()
        write_file(self.directory / f"step-{step:08d}.pt", [data, trailer])
        sync_directory(self.directory)
        for old in list(self.paths().values())[: -self._keep_last]:
            remove_file(old)

    def load(self, model: ModelConfig) -> Contents | None:
        """The newest checkpoint, on the CPU; None if there is none.

        Raises:
            TrainError: it cannot be read, or it is of another model.
        """
        paths = self.paths()
        if not paths:
            return None
        # An older checkpoint is never loaded silently: steps would be lost without a message.
        *before, step = paths
        path = paths[step]
        instead = f"resume after step {before[-1]:,}" if before else "start from the beginning"
        advice = f"Remove it to {instead}."
        try:
            has_digest = _check_digest(path, advice)
            with os.fdopen(open_regular(path), "rb") as stream:
                loaded: Contents = torch.load(stream, map_location="cpu", weights_only=True)
        except TrainError:
            raise
        except Exception as error:  # torch raises many classes for damaged files
            first = (str(error).splitlines() or [type(error).__name__])[0]
            why = first.split(". ")[0].rstrip(".")
            raise TrainError(f"{path} cannot be read as a checkpoint: {why}. {advice}") from error
        with self.refuse_odd_fields():
            self._refuse_other(loaded, path, model, has_digest, advice)
        return loaded

    def _refuse_other(
        self, loaded: Contents, path: Path, model: ModelConfig, has_digest: bool, advice: str
    ) -> None:
        """Raise if `loaded` is no checkpoint, or of another model."""
        version = loaded.get("format") if isinstance(loaded, dict) else None
        if version is not None and version not in _FORMATS:
            raise TrainError(
                f"{path} has format {version!r}, but penstock reads {_FORMAT}. Use another output."
            )
        if version == _FORMAT and not has_digest:
            raise TrainError(f"{path} is damaged: it has no digest at its end. {advice}")
        if version is None or not loaded.keys() >= _KEYS:
            raise TrainError(f"{path} is not a checkpoint of penstock. {advice}")
        # Fields that a newer version of penstock has added are not in an old checkpoint.
        odd = [each for each in sorted(_DICTS) if not isinstance(loaded[each], Mapping)]
        if odd:
            raise TrainError(f"{path}: {odd[0]} is {loaded[odd[0]]!r:.60}, not a dict. {advice}")
        current, saved = asdict(model), loaded["model_config"]
        changed = [name for name, value in saved.items() if current.get(name) != value]
        if changed:
            listed = ", ".join(
                f"{each} {saved[each]!r} -> {current.get(each)!r}" for each in changed
            )
            raise TrainError(
                f"{self.directory.parent} contains a run of another model: {listed}. Resume with "
                "the original model, or use another output."
            )

    @contextmanager
    def refuse_odd_fields(self) -> Iterator[None]:
        """Name the newest checkpoint if code that uses its contents finds an odd value."""
        try:
            yield
        except PenstockError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            first = (str(error).splitlines() or [""])[0]
            raise TrainError(
                f"{list(self.paths().values())[-1]} has a missing or odd field "
                f"({type(error).__name__}: {first:.200}). Remove it to resume from the checkpoint "
                "before it."
            ) from error


def _check_digest(path: Path, advice: str) -> bool:
    """Whether a checkpoint has a digest; raises if its contents have another one."""
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as stream:
        left = max(0, os.fstat(stream.fileno()).st_size - _TRAILER_BYTES)
        while left and (block := stream.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
        found = _TRAILER.fullmatch(stream.read(_TRAILER_BYTES))
    if found and found[1].decode() != digest.hexdigest():
        raise TrainError(
            f"{path} is damaged: the digest of its contents is {digest.hexdigest()[:8]}, but the "
            f"digest at its end is {found[1].decode()[:8]}. {advice}"
        )
    return found is not None


@contextmanager
def locked_output(output: Path, world: World) -> Iterator[None]:
    """Lock the output directory, on the main process, for as long as the run takes.

    Raises:
        TrainError: another run holds the lock; the two would overwrite each other's files.
    """
    # Only the main process writes, and only it can hold the lock: the others would find it taken.
    with ExitStack() as stack:
        if world.is_main:
            try:
                output.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(output))
            except StoreBusyError as error:
                raise TrainError(
                    f"Another process is training into {output}; its process id is in "
                    f"{lock_path(output)}. Wait for it, stop it, or use another output."
                ) from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
        yield


def gpt2_config(config: ModelConfig) -> dict[str, int | float | None]:
    """The arguments of transformers' GPT2Config for the same model.

    Raises:
        PlanError: the model has an option that GPT-2 does not have.
    """
    plain = ModelConfig()
    names = ("positions", "qk_norm", "activation", "norm", "bias", "tied")
    gpt2 = {name: asdict(plain)[name] for name in names}
    settings = asdict(config)
    changed = [f"{name}={settings[name]!r}" for name in gpt2 if settings[name] != gpt2[name]]
    if changed:
        raise PlanError(
            f"GPT-2 has no {', '.join(changed)}, so this model cannot become a GPT2LMHeadModel."
        )
    # transformers warns about special tokens outside of the vocabulary.
    end = _END_OF_TEXT if config.vocab_size > _END_OF_TEXT else None
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.length,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "bos_token_id": end,
        "eos_token_id": end,
    }


def to_gpt2(model: GPT) -> dict[str, Tensor]:
    """Copies of the weights of `model`, under their names in GPT2LMHeadModel."""
    gpt2_config(model.config)  # raises if GPT-2 has no such model
    exported: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        gpt2_name, transposed = _gpt2_name(name)
        # A transposed view shares memory with the weight, and safetensors refuses such views.
        exported[gpt2_name] = (weight.t() if transposed else weight).clone().contiguous()
    embedding = exported["transformer.wte.weight"][: model.config.vocab_size]
    return {**exported, "transformer.wte.weight": embedding, "lm_head.weight": embedding}


def from_gpt2(weights: Mapping[str, Tensor], *, heads: int = 12) -> GPT:
    """A model with the weights of a GPT2LMHeadModel, or of the GPT2Model inside one.

    The weights do not say how many attention heads there are: pass `heads`.
    """
    # A GPT2Model has the same names as a GPT2LMHeadModel, but without the prefix.
    prefix = "transformer."
    weights = {f"{prefix}{name.removeprefix(prefix)}": each for name, each in weights.items()}
    vocab_size, width = weights["transformer.wte.weight"].shape
    # "transformer.h.3.attn.c_attn.weight" belongs to layer 3.
    numbers = [int(name.split(".")[2]) for name in weights if name.startswith("transformer.h.")]
    model = GPT(
        ModelConfig(
            layers=1 + max(numbers),
            heads=heads,
            width=width,
            length=len(weights["transformer.wpe.weight"]),
            vocab_size=vocab_size,
        )
    )
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            gpt2_name, transposed = _gpt2_name(name)
            value = weights[gpt2_name].t() if transposed else weights[gpt2_name]
            weight[: len(value)].copy_(value)
            weight[len(value) :].zero_()  # the padding rows of the embedding
    return model


def _gpt2_name(name: str) -> tuple[str, bool]:
    """The name of a weight in transformers, and whether it is stored transposed there."""
    if name in _NAMES:
        return f"transformer.{_NAMES[name]}", False
    _, number, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    gpt2_module = _LAYER_NAMES[module]
    # GPT-2 stores its projections, all named "c_…", as Conv1D: (in, out) instead of (out, in).
    transposed = "c_" in gpt2_module and kind == "weight"
    return f"transformer.h.{number}.{gpt2_module}.{kind}", transposed
