"""The ledger of a recipe: a file beside it with the amendments of its runs, one on each line.

    mix.toml
    mix.ledger.jsonl    {"amendment":{"position":800,"weights":{…}},"before":"5f0c…","plan":"…",…}

Lines are only added. Each is canonical JSON with the digest of the line before it, the digest of
the plan that it amends, and a digest of itself. So a line that was changed or moved is an error,
and so is a ledger beside another recipe. If the last line was removed, states of loaders that know
it are refused. A line is appended in one write and forced to disk. If a crash cuts it short, the
next reader reports that, and the amendment was never in force.

Positions, and not steps, decide from where an amendment is valid, so a run can continue on another
number of ranks and with another batch size. The number of the step is recorded for readers.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from penstock.digest import checked_json, parse_checked
from penstock.disk import read_file, sync_directory, write_file
from penstock.errors import LedgerError
from penstock.order.amend import weights_from_json
from penstock.order.plan import Plan
from penstock.rows.protocol import Rows

if sys.platform != "win32":
    import fcntl

_KINDS = {None, "windows", "packs"}
RUN_FILE = "ledger.jsonl"
"""The name of the copy in the directory of a run."""


class AddedStore(NamedTuple):
    """A store that an amendment adds as a source."""

    train: str
    """Its path or URL, as in a recipe."""
    rows: str | None = None
    """"windows" or "packs"; None means as the recipe says."""


class LedgerLine(NamedTuple):
    """One amendment of a recipe."""

    plan: str
    """The digest of the plan that is amended."""
    step: int
    """The first step of the amendment, when it was made; the first step of a run is 1."""
    amendment: dict[str, Any]
    """As `Amendment.to_json` returns it."""
    stores: Mapping[str, AddedStore]
    """The stores of added sources, by name."""
    documents: Sequence[str] = ()
    """Excluded documents, as they were named."""

    def to_json(self, before: str) -> dict[str, Any]:
        """Return the line as JSON; `before` is the digest of the line before it."""
        stores = {name: list(each) for name, each in self.stores.items()}
        return {
            **self._asdict(),
            "stores": stores,
            "documents": [*self.documents],
            "before": before,
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        """Return the line that `to_json` wrote.

        Raises:
            ValueError: it is not such a line.
        """
        stores = {name: AddedStore(*each) for name, each in found["stores"].items()}
        line = cls(found["plan"], found["step"], found["amendment"], stores, found["documents"])
        typed = isinstance(line.amendment, dict) and type(line.step) is int
        # Somebody may have sent this file, with a digest that fits.
        known = all(isinstance(each.train, str) for each in stores.values())
        if not typed or not known or not {each.rows for each in stores.values()} <= _KINDS:
            raise ValueError("a value has another type")
        return line


def ledger_path(recipe: Path) -> Path:
    """Return the path of the ledger of a recipe.

    >>> ledger_path(Path("recipes/mix.toml")).as_posix()
    'recipes/mix.ledger.jsonl'
    """
    return recipe.with_suffix(".ledger.jsonl")


def read_ledger(path: Path) -> tuple[LedgerLine, ...]:
    """Return the lines of a ledger; none if there is no such file.

    Raises:
        LedgerError: a line was changed, removed or cut short.
    """
    return _parse(path, read_file(path) if path.exists() else b"")


def _parse(path: Path, data: bytes) -> tuple[LedgerLine, ...]:
    *complete, rest = data.split(b"\n")
    if rest:
        raise LedgerError(
            f"The last line of {path} is cut short ({len(rest):,} bytes at byte "
            f"{len(data) - len(rest):,}): the command that wrote it was interrupted, so this "
            "amendment is not in force. Delete the line, and run penstock amend again."
        )
    lines: list[LedgerLine] = []
    before = ""
    for number, line in enumerate(complete, 1):
        try:
            found = parse_checked(line)
            if found["before"] != before:
                raise ValueError("it does not follow the line before it")
            lines.append(LedgerLine.from_json(found))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LedgerError(
                f"Line {number:,} of {path} is not as penstock amend wrote it: {error}. Lines are "
                "only added, because checkpoints depend on all of them. Restore the file."
            ) from error
        before = _digest_of(line)
    return tuple(lines)


def _digest_of(line: bytes) -> str:
    """Return the digest that a valid line contains."""
    return str(json.loads(line)["sha256"])


def _to_bytes(lines: Sequence[LedgerLine]) -> bytes:
    data, before = b"", ""
    for line in lines:
        written = checked_json(line.to_json(before))
        data, before = data + written + b"\n", _digest_of(written)
    return data


def write_copy(path: Path, lines: Sequence[LedgerLine]) -> None:
    """Write the lines of a ledger to another file; equal lines give equal bytes."""
    write_file(path, [_to_bytes(lines)])


def append_line(path: Path, known: Sequence[LedgerLine], line: LedgerLine) -> None:
    """Append a line to a ledger that has the lines `known`.

    Raises:
        LedgerError: another process has added a line, or the file was changed.
    """
    before, after = _to_bytes(known), _to_bytes([*known, line])
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        if read_file(path) != before:
            raise LedgerError(f"{path} was changed by another process. Run this again.")
        try:
            if os.write(file, after[len(before) :]) < len(after) - len(before):
                raise OSError(f"{path} could not be written completely; the disk may be full.")
            os.fsync(file)
        except OSError:
            # Without half a line, the ledger is as it was.
            os.ftruncate(file, len(before))
            raise
    finally:
        os.close(file)
    sync_directory(path.parent)


def amended(
    plan: Plan, lines: Sequence[LedgerLine], open_rows: Callable[[AddedStore], Rows]
) -> Plan:
    """Return a plan with the amendments of a ledger.

    Args:
        plan: The plan of the recipe.
        lines: The lines of its ledger.
        open_rows: Opens the store of an added source.

    Raises:
        LedgerError: the ledger belongs to another plan, or a store has changed.
    """
    for number, line in enumerate(lines, 1):
        if plan.digest != line.plan:
            raise LedgerError(
                f"Amendment {number:,} (from step {line.step:,} on) belongs to a plan with the "
                f"digest {str(line.plan)[:8]}, but this one has {plan.digest[:8]}: the recipe or a "
                "store was changed after it. Restore the settings of [data] and the stores. For a "
                "new run, move the ledger away."
            )
        rows = {name: open_rows(each) for name, each in line.stores.items()}
        plan = amend_as(plan, line.amendment, rows)
        if plan.amendments[-1].to_json() != line.amendment:
            names = ", ".join(line.stores) or "its sources"
            raise LedgerError(
                f"Amendment {number:,} (from step {line.step:,} on) does not fit {names}: a store "
                "was changed after it. Restore the store."
            )
    return plan


def amend_as(plan: Plan, found: Mapping[str, Any], rows: Mapping[str, Rows]) -> Plan:
    """Return a plan with an amendment that is given as JSON.

    Args:
        plan: The plan.
        found: As `Amendment.to_json` returns it.
        rows: The rows of sources that are added.
    """
    try:
        weights = weights_from_json(found["weights"]) if "weights" in found else None
        exclude = {
            name: [(int(start), int(stop)) for start, stop in spans]
            for name, spans in found.get("exclude", {}).items()
        }
        add = {str(name): rows.get(name) for name in found.get("add", ())}
        drop = [str(name) for name in found.get("drop", ())]
        skip, position = found.get("skip", 0), found["position"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerError(f"An amendment cannot be read: {error}. Restore the ledger.") from error
    return plan.amend(position, weights=weights, add=add, drop=drop, skip=skip, exclude=exclude)
