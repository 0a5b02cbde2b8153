"""What a run writes down as it goes: metrics.jsonl, one object a line.

    {"kind": "step", "step": 40, "loss": 6.31, "rate": 0.4, "norm": 0.8, "tokens": 20480, …}
    {"kind": "val", "step": 40, "val_loss": 6.52, …}
    {"kind": "target", "step": 900, "val_loss": 5.49, …}

Losses are written so that they read back to the same number. A run that resumes cuts off what
was written after its checkpoint and writes it again, the same.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.store.files import write_file

__all__ = ["Metrics", "peak_flops", "read_metrics", "spelled"]

# Dense, without sparsity, in bfloat16; from the makers' data sheets.
_PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_flops(device: torch.device) -> float | None:
    """The most operations a second that a device claims in bfloat16, where we know."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _PEAKS.items() if known in name), None)


class Metrics:
    """The file of a run; at first, what its last checkpoint does not know of is cut off.

    Args:
        path: The file.
        step: The last step that was saved.
        validated: The last validation that was saved.
        tensorboard: Whether the same is written for TensorBoard.
    """

    def __init__(
        self, path: Path, *, step: int, validated: int | None = None, tensorboard: bool = False
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._board = _board(path.parent, step) if tensorboard else None
        # A step may be saved, and its validation come after.
        last = ("step", "val", "target") if validated == step else ("step",)
        kept = [
            each
            for each in read_metrics(path)
            if each["step"] < step or (each["step"] == step and each["kind"] in last)
        ]
        write_file(path, [_line(each) for each in kept])
        self._stream = path.open("a", encoding="utf-8")

    def add(self, kind: str, step: int, **values: Any) -> None:
        """Write one line; it is the system's before this returns."""
        self._stream.write(_line({"kind": kind, "step": step, **values}).decode())
        self._stream.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and name != "fingerprint":
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def sync(self) -> None:
        """Force all that was written to disk."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, if it is there; what a kill cut short, or is not ours, is left out."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and "step" in found and "kind" in found:
            yield found


def spelled(values: dict[str, Any]) -> dict[str, Any]:
    """Values as JSON can write them: it has no word for what is not a number, so that is None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(spelled(values)).encode() + b"\n"


def _board(directory: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        from penstock.errors import MissingExtraError

        raise MissingExtraError(
            "tensorboard=true needs tensorboard, which is not installed. Install it with: "
            'pip install "penstock[tensorboard]"'
        ) from error
    return SummaryWriter(directory / "tensorboard", purge_step=step + 1 if step else 0)
