"""Fingerprints written down, so that two runs can be compared step by step."""

import json
from pathlib import Path

__all__ = ["FingerprintLog", "read_log"]


class FingerprintLog:
    """A file with a line for each step: step, position after it, fingerprint."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, step: int, position: int, fingerprint: int) -> None:
        """Add one line; it is in the file when this returns."""
        line = json.dumps(
            {"step": step, "position": position, "fingerprint": f"{fingerprint:016x}"}
        )
        with self._path.open("a", encoding="ascii") as stream:
            stream.write(line + "\n")


def read_log(path: str | Path) -> dict[int, str]:
    """The fingerprint of each step in a log, by the position after the step.

    The last one counts where a step was repeated. By position, because steps are counted
    anew after a resume with another batch size.
    """
    lines = Path(path).read_text(encoding="ascii").splitlines()
    entries = [json.loads(line) for line in lines]
    return {entry["position"]: entry["fingerprint"] for entry in entries}
